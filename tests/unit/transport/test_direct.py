"""Two ends in one loop: at once, in order, and a receiver that raises is nobody else's trouble."""

from __future__ import annotations

import logging

import pytest

from dtorch_runtime.errors import TransportError
from dtorch_runtime.transport.base import Message
from dtorch_runtime.transport.direct import direct_links


def test_what_was_sent_before_anybody_listens_arrives_first_and_later_messages_at_once() -> None:
    server, client = direct_links()
    received: list[Message] = []
    client.send([b"1"])
    client.send([b"2", b"payload"])
    server.start(lambda peer, frames: received.append(frames))
    assert received == [[b"1"], [b"2", b"payload"]]
    client.send([b"3"])
    assert received[-1] == [b"3"]
    assert server.unsent_bytes == client.unsent_bytes == 0


def test_answers_inside_an_answer_keep_their_order() -> None:
    server, client = direct_links()
    at_server: list[bytes] = []
    at_client: list[bytes] = []

    def answer(peer: bytes, frames: Message) -> None:
        at_server.append(bytes(frames[0]))
        if len(at_server) < 4:
            assert server.send(peer, [b"a%d" % len(at_server)])
            assert server.send(peer, [b"b%d" % len(at_server)])

    def ask_again(frames: Message) -> None:
        at_client.append(bytes(frames[0]))
        if frames[0][:1] == b"a":
            client.send([b"again"])

    server.start(answer)
    client.start(ask_again)
    client.send([b"first"])
    assert at_server == [b"first", b"again", b"again", b"again"]
    assert at_client == [b"a1", b"b1", b"a2", b"b2", b"a3", b"b3"]


def test_small_frame_may_be_reused_after_send() -> None:
    server, client = direct_links()
    received: list[Message] = []
    buffer = bytearray(b"before")
    client.send([memoryview(buffer)])
    buffer[:] = b"after!"
    server.start(lambda peer, frames: received.append(frames))
    assert received == [[b"before"]]


def test_receiver_that_raises_is_logged_and_the_next_message_delivered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, client = direct_links()
    received: list[bytes] = []

    def receive(peer: bytes, frames: Message) -> None:
        received.append(bytes(frames[0]))
        if frames[0] == b"1":
            raise ZeroDivisionError("a bug")

    server.start(receive)
    with caplog.at_level(logging.ERROR):
        client.send([b"1"])
    client.send([b"2"])
    assert received == [b"1", b"2"]
    assert "a bug" in caplog.text


def test_closed() -> None:
    server, client = direct_links()
    assert not server.send(b"somebody else", [b"x"])
    client.close()
    assert not server.send(b"direct", [b"x"])
    server.close()
    with pytest.raises(TransportError, match="closed"):
        client.send([b"x"])
    client.close()
    server.close()
