"""Whatever arrives at a listening socket: no crash, and the good peer beside it is not disturbed."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq

from dtorch_runtime.testing.wait import wait_until_async
from dtorch_runtime.transport.base import LARGE_FRAME_BYTES, LinkLimits, Message
from dtorch_runtime.transport.endpoint import parse_endpoint
from dtorch_runtime.transport.heartbeat import HeartbeatClient, HeartbeatServer, seal
from dtorch_runtime.transport.security import CurveKeys
from tests.support.transports import (
    ZMQ_KINDS,
    Inbox,
    PrivateFolder,
    Transport,
    ZmqTransport,
    make_transport,
)

NUM_MESSAGES = 10_000
NUM_RAW_CONNECTIONS = 150
SESSION_KEY = bytes(range(32))


@pytest.fixture
def folder() -> Iterator[Path]:
    with PrivateFolder() as path:
        yield path


# ------------------------------------------------------------------------------------------------------- the attacks


def random_messages(rng: random.Random) -> Iterator[list[bytes]]:
    """Messages that no codec expects, some made to look like heartbeats."""
    genuine = seal(b"dtorch-beat-1", "peer", 1, b"", SESSION_KEY)
    for _ in range(NUM_MESSAGES):
        kind = rng.randrange(10)
        if kind == 0:
            yield [b""] * rng.randrange(1, 40)
        elif kind == 1:
            yield [*genuine[:4], rng.randbytes(32)]
        elif kind == 2:
            frames = list(genuine)
            frames[rng.randrange(5)] = rng.randbytes(rng.randrange(1, 40))
            yield frames
        elif kind == 3:
            yield genuine[: rng.randrange(1, 5)] + [b"x"] * rng.randrange(2)
        else:
            yield [rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 9))]


def send_random_messages(
    endpoint: str, keys: CurveKeys | None, rng: random.Random, have_arrived: threading.Event
) -> None:
    """As a peer that ZeroMQ lets in, under the longest name that it allows; stays until they have arrived."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as attacker:
        attacker.setsockopt(zmq.IDENTITY, rng.randbytes(255))
        attacker.sndhwm = 0
        if keys is not None:
            keys.protect_client(attacker)
        attacker.connect(endpoint)
        for frames in random_messages(rng):
            attacker.send_multipart(frames)
        have_arrived.wait(30.0)
        attacker.linger = 0
    context.term()


def greeting(*, major: int = 3, mechanism: bytes = b"NULL") -> bytes:
    """The first 64 bytes of ZMTP 3, https://rfc.zeromq.org/spec/23/."""
    return b"\xff" + bytes(8) + b"\x7f" + bytes([major, 0]) + mechanism.ljust(20, b"\0") + bytes(32)


def command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return b"\x06" + struct.pack(">Q", len(content)) + content


def ready(identity: bytes) -> bytes:
    properties = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    body = b"".join(bytes([len(k)]) + k + struct.pack(">I", len(v)) + v for k, v in properties)
    return command(b"READY", body)


def raw_streams(rng: random.Random) -> list[bytes]:
    """What does not even keep to ZeroMQ's protocol."""
    connected = greeting() + ready(b"")
    fixed = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        greeting()[:10],
        greeting(),
        greeting(major=0),
        greeting(major=255),
        greeting(mechanism=b"\xff" * 20),
        greeting(mechanism=b"CURVE") + command(b"HELLO", bytes(194)),
        greeting(mechanism=b"CURVE") + command(b"HELLO", bytes(3)),
        greeting(mechanism=b"PLAIN") + command(b"HELLO", b"\xff\xff"),
        b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x00",  # ZMTP 2
        b"\x01\x00" + b"\x06\x00hello",  # ZMTP 1
        connected + b"\x02" + struct.pack(">Q", 1 << 62),
        connected + b"\x02" + struct.pack(">Q", (1 << 64) - 1),
        connected + b"\x00\x05abc",
        connected + b"\xff\xff\xff",
        connected + command(b"PING", b"") + command(b"SUBSCRIBE", bytes(100)) + command(b"ERROR", b"\xff"),
        greeting() + ready(bytes(256)),
        greeting() + ready(bytes(100_000)),
        greeting() + command(b"READY", b"\xff" + bytes(10)),
        greeting() + command(b"READY", b"\x04name\xff\xff\xff\xff"),
    ]
    garbage = [rng.randbytes(rng.randrange(1, 400)) for _ in range(NUM_RAW_CONNECTIONS)]
    return (
        fixed
        + garbage
        + [greeting() + text for text in garbage[:50]]
        + [connected + text for text in garbage[:50]]
    )


def send_raw_streams(endpoint: str, rng: random.Random) -> None:
    address = parse_endpoint(endpoint)
    for stream in raw_streams(rng):
        if address.scheme == "ipc":
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(address.path)
        else:
            connection = socket.create_connection((address.host, int(address.port)))
        with connection:
            try:
                connection.sendall(stream)
            except (BrokenPipeError, ConnectionResetError):
                continue  # it hung up while we were still talking


def attack(endpoint: str, keys: CurveKeys | None, rng: random.Random, have_arrived: threading.Event) -> None:
    send_raw_streams(endpoint, rng)
    send_random_messages(endpoint, keys, rng, have_arrived)
    send_raw_streams(endpoint, rng)


# ---------------------------------------------------------------------------------------------------- the listeners


@pytest.fixture(params=ZMQ_KINDS)
async def transport(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[ZmqTransport]:
    made = make_transport(request.param, folder)
    assert isinstance(made, ZmqTransport)
    yield made
    await made.close()


@pytest.fixture
async def curve(folder: Path) -> AsyncIterator[Transport]:
    made = make_transport("zeromq-tcp-curve", folder)
    yield made
    await made.close()


async def test_a_server_link_survives_and_its_good_peer_goes_on(
    transport: ZmqTransport, rng: random.Random
) -> None:
    server, answers, reported = transport.serve(), Inbox(), []
    senders: Counter[tuple[bytes | int, bool]] = Counter()
    have_arrived = threading.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def answer(peer: bytes, frames: Message) -> None:
        senders[peer, frames[0] == b"good"] += 1
        if sum(senders.values()) - len(answers.messages) > NUM_MESSAGES:
            have_arrived.set()
        server.send(peer, frames)

    server.start(answer)
    good = await transport.connect()
    good.start(answers.from_server)
    attackers = asyncio.create_task(
        asyncio.to_thread(attack, server.endpoint, transport.client_keys, rng, have_arrived)
    )
    num_sent = 0
    while not attackers.done() or num_sent < 100:
        good.send([b"good", b"%d" % num_sent, b"x" * (num_sent % 3 * LARGE_FRAME_BYTES)])
        num_sent += 1
        await answers.wait_for(num_sent)
    await attackers
    assert have_arrived.is_set()
    assert [frames[1] for frames in answers.contents] == [b"%d" % number for number in range(num_sent)]
    good_names = [peer for peer, is_good in senders if is_good]
    assert len(good_names) == 1
    assert senders[good_names[0], False] == 0, "somebody spoke under the good peer's name"
    assert reported == []


async def test_a_heartbeat_server_survives_and_its_good_peer_goes_on(
    transport: ZmqTransport, rng: random.Random
) -> None:
    lost: list[str] = []
    have_arrived = threading.Event()
    times = {"session_key": SESSION_KEY, "interval_s": 0.02, "timeout_s": 20.0}
    server = HeartbeatServer(transport.address, on_lost=lost.append, keys=transport.server_keys, **times)
    client = HeartbeatClient(
        server.endpoint, "good", on_lost=lambda: lost.append("server"), keys=transport.client_keys, **times
    )
    server.watch("good")
    attackers = asyncio.create_task(
        asyncio.to_thread(attack, server.endpoint, transport.client_keys, rng, have_arrived)
    )
    await wait_until_async(lambda: server.num_malformed >= NUM_MESSAGES, "the attacker's messages", 20.0)
    have_arrived.set()
    await attackers
    num_answers = client.num_answers
    await wait_until_async(lambda: client.num_answers > num_answers + 2, "answers after the attack")
    assert lost == []
    assert client.num_malformed == 0
    client.close()
    server.close()


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(greeting() + ready(b"") + b"\x00\x05hello", id="ZMTP 3 without keys"),
        pytest.param(b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x00" + b"\x00\x05hello", id="ZMTP 2"),
        pytest.param(b"\x01\x00" + b"\x06\x00hello", id="ZMTP 1"),
    ],
)
async def test_an_older_protocol_is_no_way_around_the_keys(curve: Transport, stream: bytes) -> None:
    server, inbox = curve.serve(), Inbox()
    server.start(inbox.from_peer)
    address = parse_endpoint(server.endpoint)
    with socket.create_connection((address.host, int(address.port)), timeout=10.0) as connection:
        connection.sendall(stream)

        def read_to_the_end() -> None:
            try:
                while connection.recv(4096):
                    continue
            except ConnectionResetError:
                return

        await asyncio.to_thread(read_to_the_end)  # the server hangs up
    honest = await curve.connect()
    honest.send([b"hello"])
    await inbox.wait_for(1)
    assert inbox.contents == [[b"hello"]]


async def test_a_frame_above_the_limit_ends_that_connection_only(transport: ZmqTransport) -> None:
    server, inbox = transport.serve(LinkLimits(max_frame_bytes=1000)), Inbox()
    server.start(inbox.from_peer)
    good, greedy = await transport.connect(), await transport.connect()
    good.send([b"good"])
    await inbox.wait_for(1)
    peer = inbox.messages[0][0]
    greedy.send([b"x" * 1001])
    greedy.send([b"after"])
    await wait_until_async(lambda: (good.send([b"good"]), len(inbox.messages) > 20)[1], "more good messages")
    assert server.send(peer, [b"still there"])
    assert all(max(map(len, frames)) <= 1000 for _, frames in inbox.messages)
