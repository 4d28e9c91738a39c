"""What the link of a plain thread promises, checked over every transport."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from dtorch_runtime.errors import TransportError
from dtorch_runtime.testing.wait import wait_until, wait_until_async
from dtorch_runtime.transport.base import LinkLimits, Message
from tests.support.transports import Inbox, Transport, echo

MIB = 1 << 20


class Receiver:
    """Runs ``receive`` of a thread link on a thread until the link is closed."""

    def __init__(self, link) -> None:
        self._link = link
        self.inbox = Inbox()
        self.num_returns = 0
        self.error: TransportError | None = None
        self._thread = threading.Thread(target=self._run, name="test-receiver")
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                for frames in self._link.receive(30.0):
                    self.inbox.from_server(frames)
                self.num_returns += 1
        except TransportError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(10.0)
        assert not self._thread.is_alive()


async def test_four_threads_send_at_once_while_one_receives(transport: Transport) -> None:
    num_threads, num_messages = 4, 500
    server, inbox = transport.serve(), Inbox()

    def answer(peer: bytes, frames: Message) -> None:
        inbox.from_peer(peer, frames)
        server.send(peer, frames)

    server.start(answer)
    link = await transport.connect_thread()
    receiver = Receiver(link)

    def send_all(name: bytes) -> None:
        for number in range(num_messages):
            link.send([name, b"%d" % number, name])

    names = [b"a", b"b", b"c", b"d"][:num_threads]
    await asyncio.gather(*(asyncio.to_thread(send_all, name) for name in names))
    await receiver.inbox.wait_for(num_threads * num_messages)
    for box in (inbox, receiver.inbox):
        for name in names:
            of_thread = [frames for frames in box.contents if frames[0] == name]
            assert of_thread == [[name, b"%d" % number, name] for number in range(num_messages)]
    link.close()
    receiver.join()


async def test_an_answer_reaches_the_receiver_although_others_send_meanwhile(transport: Transport) -> None:
    """A send may consume the socket's one notice of an arrival; then the receiver would wait for ever."""
    server = transport.serve()
    server.start(echo(server))
    link = await transport.connect_thread()
    receiver = Receiver(link)

    def ask_one_by_one() -> None:
        for number in range(300):
            link.send([b"%d" % number])
            wait_until(lambda n=number: len(receiver.inbox.messages) > n, "the answer", 20.0)

    await asyncio.to_thread(ask_one_by_one)
    assert receiver.inbox.contents == [[b"%d" % number] for number in range(300)]
    link.close()
    receiver.join()


async def test_receive_returns_nothing_at_its_deadline(transport: Transport) -> None:
    transport.serve()
    link = await transport.connect_thread()
    assert await asyncio.to_thread(link.receive, 0.01) == []


async def test_wake_ends_the_running_receive_or_the_next_one(transport: Transport) -> None:
    server = transport.serve()
    server.start(echo(server))
    link = await transport.connect_thread()
    link.wake()
    link.wake()
    assert await asyncio.to_thread(link.receive, 30.0) == []
    receiver = Receiver(link)
    for number in range(1, 6):
        link.wake()
        await wait_until_async(lambda n=number: receiver.num_returns >= n, "receive to return")
    link.send([b"still usable"])
    await receiver.inbox.wait_for(1)
    assert receiver.inbox.contents == [[b"still usable"]]
    link.close()
    receiver.join()


async def test_close_ends_a_running_receive_and_later_calls(transport: Transport) -> None:
    transport.serve()
    link = await transport.connect_thread()
    receiver = Receiver(link)
    link.wake()
    await wait_until_async(lambda: receiver.num_returns >= 1, "the receiver to run")
    await asyncio.to_thread(link.close)
    receiver.join()
    assert "closed" in str(receiver.error)
    link.close()
    link.wake()
    for call in (lambda: link.receive(1.0), lambda: link.send([b"late"])):
        with pytest.raises(TransportError, match="closed"):
            call()


async def test_a_thread_link_takes_large_frames_in_bounded_memory(transport: Transport) -> None:
    limits = LinkLimits(max_unsent_bytes=2 * MIB)
    server, inbox = transport.serve(), Inbox()
    server.start(inbox.from_peer)
    link = await transport.connect_thread(limits)
    block = memoryview(os.urandom(MIB))
    peaks = []

    def send_all() -> None:
        for number in range(32):
            link.send([b"%d" % number, block])
            peaks.append(link.unsent_bytes)

    await asyncio.to_thread(send_all)
    await inbox.wait_for(32)
    assert all(frames == [b"%d" % number, block] for number, (_, frames) in enumerate(inbox.messages))
    assert max(peaks) <= 3 * MIB
