"""What every transport promises (``transport/base.py``), checked over all of them."""

from __future__ import annotations

import asyncio
import os
import threading
import zlib
from pathlib import Path

import pytest

from dtorch_runtime.errors import ClusterTimeout, TransportError
from dtorch_runtime.testing.wait import wait_until_async
from dtorch_runtime.transport.base import LARGE_FRAME_BYTES, LinkLimits, Message
from dtorch_runtime.transport.sockets import num_open_sockets
from tests.support.transports import KINDS, Inbox, Transport, echo, make_transport

MIB = 1 << 20


def message(number: int) -> list[bytes]:
    """Messages of one to four frames, some of them empty."""
    return [b"%d" % number, b"", b"x" * (number % 300), b"end"][: 1 + number % 4]


async def test_messages_arrive_whole_and_in_order_both_ways(transport: Transport) -> None:
    server, inbox, replies = transport.serve(), Inbox(), Inbox()

    def answer(peer: bytes, frames: Message) -> None:
        inbox.from_peer(peer, frames)
        assert server.send(peer, frames)

    server.start(answer)
    client = await transport.connect()
    client.start(replies.from_server)
    expected = [message(number) for number in range(1000)]
    for frames in expected:
        client.send(frames)
    await replies.wait_for(len(expected))
    assert inbox.contents == expected
    assert replies.contents == expected


async def test_messages_sent_before_start_are_delivered_after_it(transport: Transport) -> None:
    server, inbox = transport.serve(), Inbox()
    client = await transport.connect()
    client.send([b"early"])
    server.start(inbox.from_peer)
    await inbox.wait_for(1)
    assert inbox.contents == [[b"early"]]


async def test_many_peers_each_get_their_own_replies(transport: Transport) -> None:
    server = transport.serve()
    peers = set()

    def answer(peer: bytes, frames: Message) -> None:
        peers.add(peer)
        server.send(peer, frames)

    server.start(answer)
    inboxes = [Inbox() for _ in range(25)]
    for number, inbox in enumerate(inboxes):
        client = await transport.connect()
        client.start(inbox.from_server)
        for index in range(10):
            client.send([b"%d" % number, b"%d" % index])
    for inbox in inboxes:
        await inbox.wait_for(10)
    assert len(peers) == len(inboxes)
    for number, inbox in enumerate(inboxes):
        assert inbox.contents == [[b"%d" % number, b"%d" % index] for index in range(10)]


@pytest.mark.parametrize("direction", ["to server", "to client"])
async def test_large_frames_arrive_intact_in_bounded_memory(transport: Transport, direction: str) -> None:
    num_frames, window_bytes = 64, 4 * MIB
    source = memoryview(bytes(range(256)) * (num_frames * MIB // 256))
    chunks = [source[start : start + MIB] for start in range(0, num_frames * MIB, MIB)]
    server, hello, sums = transport.serve(), Inbox(), []

    def check(_: bytes, frames: Message) -> None:
        sums.append((bytes(frames[0]), zlib.crc32(frames[1])))

    server.start(check if direction == "to server" else hello.from_peer)
    client = await transport.connect()
    client.start(lambda frames: check(b"", frames))
    sender = client if direction == "to server" else server
    if direction == "to client":
        client.send([b"hello"])
        await hello.wait_for(1)
    peak_bytes = 0
    for number, chunk in enumerate(chunks):
        frames = [b"%d" % number, chunk]
        if direction == "to server":
            client.send(frames)
        else:
            assert server.send(hello.messages[0][0], frames)
        peak_bytes = max(peak_bytes, sender.unsent_bytes)
        await sender.drain(window_bytes, 20.0)
    await wait_until_async(lambda: len(sums) == num_frames, "all large frames", 20.0)
    await sender.drain(0, 10.0)
    assert sums == [(b"%d" % number, zlib.crc32(chunk)) for number, chunk in enumerate(chunks)]
    assert peak_bytes <= window_bytes + MIB


async def test_drain_has_a_deadline(transport: Transport) -> None:
    limits = LinkLimits(max_unread_messages=1)
    transport.serve(limits)  # it never reads
    client = await transport.connect(limits)
    block = bytes(MIB)
    for _ in range(64):
        client.send([block])
    with pytest.raises(ClusterTimeout, match="read"):
        await client.drain(0, 0.01)


async def test_small_frames_may_be_overwritten_once_sent(transport: Transport) -> None:
    server, inbox = transport.serve(), Inbox()
    server.start(inbox.from_peer)
    client = await transport.connect()
    buffer = bytearray(b"before")
    client.send([memoryview(buffer)])
    buffer[:] = b"after!"
    await inbox.wait_for(1)
    assert inbox.contents == [[b"before"]]


@pytest.mark.parametrize("num_bytes", [0, 1, LARGE_FRAME_BYTES - 1, LARGE_FRAME_BYTES, LARGE_FRAME_BYTES + 1])
async def test_frames_around_the_large_size_arrive_wherever_they_stand(
    transport: Transport, num_bytes: int
) -> None:
    server, inbox = transport.serve(), Inbox()
    server.start(echo(server))
    client = await transport.connect()
    client.start(inbox.from_server)
    frame = os.urandom(num_bytes)
    sent = [[frame], [b"head", frame], [frame, b"tail"], [b"head", frame, frame]]
    for frames in sent:
        client.send(frames)
    await inbox.wait_for(len(sent))
    assert inbox.contents == sent


async def test_sending_to_a_peer_that_never_was_or_has_gone_says_so(transport: Transport) -> None:
    server, inbox = transport.serve(), Inbox()
    server.start(inbox.from_peer)
    assert server.send(b"nobody", [b"hello"]) is False
    client = await transport.connect()
    client.send([b"hello"])
    await inbox.wait_for(1)
    peer = inbox.messages[0][0]
    assert server.send(peer, [b"welcome"]) is True
    client.close()
    await wait_until_async(lambda: not server.send(peer, [b"still there?"]), "the peer's absence to show")


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([], id="no frames"),
        pytest.param([b"head", "text"], id="text"),
        pytest.param([b"head", None], id="none"),
        pytest.param([b"head", memoryview(b"x" * 100)[::2]], id="not contiguous"),
    ],
)
async def test_a_message_that_cannot_be_sent_leaves_the_link_intact(
    transport: Transport, frames: list[bytes]
) -> None:
    server, inbox, replies = transport.serve(), Inbox(), Inbox()
    server.start(inbox.from_peer)
    client, thread = await transport.connect(), await transport.connect_thread()
    client.start(replies.from_server)
    client.send([b"first"])
    await inbox.wait_for(1)
    peer = inbox.messages[0][0]
    for send in (client.send, thread.send, lambda frames: server.send(peer, frames)):
        with pytest.raises(TransportError, match="frame"):
            send(frames)
    client.send([b"second"])
    server.send(peer, [b"third"])
    await inbox.wait_for(2)
    await replies.wait_for(1)
    assert inbox.contents[1] == [b"second"]
    assert replies.contents == [[b"third"]]


async def test_a_full_queue_raises_instead_of_growing(transport: Transport) -> None:
    limits = LinkLimits(max_queued_messages=10, max_unread_messages=10)
    server, inbox = transport.serve(limits), Inbox()
    client, reader = await transport.connect(limits), await transport.connect(limits)
    thread = await transport.connect_thread(limits)
    block = b"x" * (LARGE_FRAME_BYTES - 1)

    async def overfill(send: object, max_messages: int = 5000) -> None:
        for _ in range(max_messages):
            send([block])  # type: ignore[operator]
            await asyncio.sleep(0)

    for send in (client.send, thread.send):
        with pytest.raises(TransportError, match="queue is full"):
            await overfill(send)
    server.start(inbox.from_peer)
    reader.send([b"who am I"])
    await wait_until_async(lambda: [b"who am I"] in inbox.contents, "the reader's message")
    peer = next(peer for peer, frames in inbox.messages if frames == [b"who am I"])
    with pytest.raises(TransportError, match="queue is full"):
        await overfill(lambda frames: server.send(peer, frames))


async def test_what_a_callback_raises_is_reported_and_loses_no_other_message(transport: Transport) -> None:
    server, inbox, reported = transport.serve(), Inbox(), []

    def failing(peer: bytes, frames: Message) -> None:
        if frames == [b"bad"]:
            raise ValueError("the callback failed")
        inbox.from_peer(peer, frames)

    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    server.start(failing)
    client = await transport.connect()
    for frames in ([b"1"], [b"bad"], [b"2"], [b"bad"], [b"3"]):
        client.send(frames)
    await inbox.wait_for(3)
    assert inbox.contents == [[b"1"], [b"2"], [b"3"]]
    assert [str(error) for error in reported] == ["the callback failed"] * 2


async def test_a_flood_leaves_turns_to_others(transport: Transport) -> None:
    limits = LinkLimits(max_messages_per_turn=10)
    server, loop = transport.serve(limits), asyncio.get_running_loop()
    runs_of_messages = [0]

    def mark_turn() -> None:
        if sum(runs_of_messages) < 1000:
            runs_of_messages.append(0)
            loop.call_soon(mark_turn)

    def count(_: bytes, frames: Message) -> None:
        runs_of_messages[-1] += 1

    client = await transport.connect()
    for number in range(1000):
        client.send([b"%d" % number])
    server.start(count)
    mark_turn()
    await wait_until_async(lambda: sum(runs_of_messages) == 1000, "the flood to end", 20.0)
    # The reader and another callback that come up in the same turn make two portions between two marks.
    assert max(runs_of_messages) <= 20


async def test_closing_while_messages_are_on_their_way(transport: Transport) -> None:
    server, client = transport.serve(), await transport.connect()
    received = []

    def close_at_the_third(peer: bytes, frames: Message) -> None:
        received.append(frames)
        server.send(peer, [b"x"])
        if len(received) == 3:
            server.close()

    server.start(close_at_the_third)
    client.start(lambda frames: client.close())
    for number in range(100):
        client.send([b"%d" % number])
    await wait_until_async(lambda: len(received) >= 1, "the first message")
    for link, send in ((client, client.send), (server, lambda frames: server.send(b"peer", frames))):
        link.close()
        link.close()
        with pytest.raises(TransportError, match="closed"):
            send([b"late"])
    num_received = len(received)
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(received) == num_received <= 3


async def test_closing_with_time_to_flush_delivers_what_was_sent(transport: Transport) -> None:
    server, inbox = transport.serve(), Inbox()
    client = await transport.connect()
    block = b"x" * LARGE_FRAME_BYTES
    for number in range(200):
        client.send([b"%d" % number, block])
    client.close(flush_s=10.0)
    server.start(inbox.from_peer)
    await inbox.wait_for(200)
    assert [frames[0] for frames in inbox.contents] == [b"%d" % number for number in range(200)]


async def test_a_client_reaches_a_server_that_was_bound_again(transport: Transport) -> None:
    first, inbox, replies = transport.serve(), Inbox(), Inbox()
    first.start(inbox.from_peer)
    client = await transport.connect()
    client.start(replies.from_server)
    client.send([b"one"])
    await inbox.wait_for(1)
    first.close()
    second = await wait_until_async(lambda: try_to_serve(transport), "the address to be free")
    second.start(echo(second))

    def is_answered() -> bool:
        client.send([b"two"])  # what is sent before the loss shows may be lost with it
        return bool(replies.messages)

    await wait_until_async(is_answered, "an answer of the second server", 20.0)
    assert replies.contents[0] == [b"two"]
    assert second.endpoint == first.endpoint


def try_to_serve(transport: Transport):
    try:
        return transport.serve()
    except TransportError:
        return None  # the old socket is still being closed


async def test_an_address_is_bound_once(transport: Transport) -> None:
    transport.serve()
    with pytest.raises(TransportError, match="cannot bind"):
        transport.serve()


# --------------------------------------------------------------------------------------------------- nothing is left


def num_own_threads() -> int:
    """Threads, without those of the event loop's executor, which starts another when it likes."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


async def test_nothing_is_left_after_everything_was_closed(
    request: pytest.FixtureRequest, folder: Path
) -> None:
    async def use_everything(kind: str) -> None:
        transport = make_transport(kind, folder / kind)
        (folder / kind).mkdir(mode=0o700, exist_ok=True)
        server, inbox = transport.serve(), Inbox()
        server.start(echo(server))
        client, link = await transport.connect(), await transport.connect_thread()
        client.start(inbox.from_server)
        client.send([b"x" * LARGE_FRAME_BYTES])
        link.send([b"y"])
        await inbox.wait_for(1)
        await asyncio.to_thread(link.receive, 10.0)
        await transport.close()
        for path in (folder / kind).glob("*.json"):
            path.unlink()

    for kind in KINDS:
        await use_everything(kind)
    await wait_until_async(lambda: num_open_sockets() == 0, "the sockets to close")
    num_threads, num_files = num_own_threads(), len(os.listdir("/proc/self/fd"))
    for kind in KINDS * 3:
        await use_everything(kind)
    assert num_open_sockets() == 0
    assert num_own_threads() == num_threads
    await wait_until_async(
        lambda: len(os.listdir("/proc/self/fd")) <= num_files,
        "the descriptors of closed sockets to go",
        state=lambda: f"{len(os.listdir('/proc/self/fd'))} are open, {num_files} before",
    )
