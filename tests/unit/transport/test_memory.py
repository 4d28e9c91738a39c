"""What the memory transport has beyond the others: gates, and faults by script."""

from __future__ import annotations

import asyncio

import pytest

from dtorch_runtime.errors import ClusterTimeout, TransportError
from dtorch_runtime.transport.base import LARGE_FRAME_BYTES
from dtorch_runtime.transport.memory import MemoryClientLink, MemoryHub


class Pair:
    """A server and a client; ``up`` and ``down`` are what arrived."""

    def __init__(self, hub: MemoryHub, client: MemoryClientLink) -> None:
        self.hub = hub
        self.client = client
        self.up: list[bytes] = []
        self.down: list[bytes] = []

    def send(self, *texts: bytes) -> None:
        for text in texts:
            self.client.send([text])


async def settle() -> None:
    """Let everything that is due be delivered."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def pair() -> Pair:
    hub = MemoryHub()
    server = hub.serve()
    client = await hub.connect(timeout_s=1.0)
    made = Pair(hub, client)

    def answer(peer: bytes, frames: list[bytes]) -> None:
        made.up.append(frames[0])
        server.send(peer, [b"re:" + frames[0]])

    server.start(answer)
    client.start(lambda frames: made.down.append(bytes(frames[0])))
    return made


async def test_a_held_lane_delivers_in_order_when_released(pair: Pair) -> None:
    pair.client.uplink.hold()
    pair.send(b"1", b"2")
    await settle()
    assert pair.up == []
    assert pair.client.uplink.num_queued == 2
    pair.client.uplink.release()
    pair.send(b"3")
    await settle()
    assert pair.up == [b"1", b"2", b"3"]


async def test_each_direction_is_held_by_itself(pair: Pair) -> None:
    pair.client.downlink.hold()
    pair.send(b"1", b"2")
    await settle()
    assert (pair.up, pair.down) == ([b"1", b"2"], [])
    pair.client.downlink.step()
    assert pair.down == [b"re:1"]
    pair.client.downlink.release()
    await settle()
    assert pair.down == [b"re:1", b"re:2"]


async def test_holding_inside_a_callback_stops_at_once(pair: Pair) -> None:
    pair.client.start(lambda frames: (pair.down.append(frames[0]), pair.client.downlink.hold()))
    pair.send(b"1", b"2", b"3")
    await settle()
    assert pair.down == [b"re:1"]


async def test_stepping_an_empty_lane_says_so(pair: Pair) -> None:
    with pytest.raises(TransportError, match="no message to deliver"):
        pair.client.uplink.step()


async def test_scripted_faults_fire_at_their_message(pair: Pair) -> None:
    uplink = pair.client.uplink
    pair.send(b"0")
    uplink.drop(1)
    uplink.duplicate(3)
    uplink.delay(4, behind=6)
    pair.send(b"1", b"2", b"3", b"4", b"5", b"6", b"7")
    await settle()
    assert pair.up == [b"0", b"2", b"3", b"3", b"5", b"6", b"4", b"7"]
    pair.hub.check_faults_fired()


async def test_a_receiver_that_takes_a_duplicate_apart_gets_it_whole_again(pair: Pair) -> None:
    pair.client.downlink.duplicate(0)
    pair.client.start(lambda frames: pair.down.append(frames.pop()))
    pair.send(b"1")
    await settle()
    assert pair.down == [b"re:1", b"re:1"]


@pytest.mark.parametrize("kind", ["drop", "duplicate", "delay", "delay that does not end"])
async def test_faults_that_did_not_fire_fail_the_test(pair: Pair, kind: str) -> None:
    uplink = pair.client.uplink
    if kind == "drop":
        uplink.drop(1)
    elif kind == "duplicate":
        uplink.duplicate(1)
    elif kind == "delay":
        uplink.delay(1, behind=2)
    else:
        uplink.delay(0, behind=1)
    pair.send(b"0")
    await settle()
    pair.client.close()
    await pair.hub.connect(timeout_s=1.0)  # also after the hub has tidied up
    with pytest.raises(AssertionError, match="did not fire: uplink"):
        pair.hub.check_faults_fired()


async def test_scripts_that_cannot_fire_are_refused(pair: Pair) -> None:
    pair.send(b"0")
    pair.client.uplink.drop(1)
    with pytest.raises(TransportError, match="sent already"):
        pair.client.uplink.drop(0)
    with pytest.raises(TransportError, match="has a fault already"):
        pair.client.uplink.duplicate(1)
    with pytest.raises(TransportError, match="an earlier one"):
        pair.client.uplink.delay(3, behind=3)


async def test_large_frames_are_passed_on_without_copying(pair: Pair) -> None:
    block = bytes(LARGE_FRAME_BYTES)
    received: list[object] = []
    server = pair.hub.serve("memory://other")
    server.start(lambda _, frames: received.extend(frames))
    client = await pair.hub.connect("memory://other", timeout_s=1.0)
    client.uplink.hold()
    client.send([block])
    assert client.unsent_bytes == len(block)
    client.uplink.release()
    await client.drain(0, 1.0)
    assert received[0] is block


async def test_connecting_waits_for_the_server_until_its_deadline() -> None:
    hub = MemoryHub()
    with pytest.raises(ClusterTimeout, match="connection to memory://server"):
        await hub.connect(timeout_s=0.01)
    waiting = asyncio.create_task(hub.connect(timeout_s=10.0))
    await settle()
    assert not waiting.done()
    hub.serve()
    assert (await waiting).endpoint == "memory://server"


async def test_a_closed_connection_is_forgotten_by_the_hub(pair: Pair) -> None:
    for _ in range(5):
        (await pair.hub.connect(timeout_s=1.0)).close()
    await pair.hub.connect(timeout_s=1.0)
    assert len(pair.hub._connections) == 2
