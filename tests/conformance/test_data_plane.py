"""The sockets and mailboxes between agents: what they carry, what they refuse, and what they leave behind."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from dtorch_runtime.errors import ClusterTimeout, SecurityError, TransportError
from dtorch_runtime.testing.wait import wait_until
from dtorch_runtime.transport.endpoint import make_ipc_folder
from dtorch_runtime.transport.security import load_keys, write_keys
from dtorch_runtime.transport.segments import SegmentPool, SegmentReader, unlink_segments_of
from dtorch_runtime.transport.sockets import close_socket, new_socket
from dtorch_runtime.wire.data import BoxOffer, BoxTaken, ParcelChunk, ParcelInSegment, Place, encode_data
from dtorch_runtime.wire.records import FailureRecord, NodeRecord
from dtorch_runtime.worker.blobs import Blob, Poison
from dtorch_runtime.worker.collectives import run_ahead as run_ahead_module
from dtorch_runtime.worker.collectives.base import ParcelKey
from dtorch_runtime.worker.collectives.run_ahead import RunAhead
from dtorch_runtime.worker.collectives.zeromq import ZmqNetwork

KEY = ParcelKey(1, 2, 0, 3, 0)
PLACE = Place(*KEY)
FAILURE = FailureRecord("op", "1", "aten::add", 0, 3, "a", "RuntimeError", "no", "")


class End:
    """One agent's network, and the parcels that have come to it."""

    def __init__(self, name: str, endpoint: str, **options: object) -> None:
        self.came: dict[ParcelKey, Blob] = {}
        self.name = name
        self.run_ahead = RunAhead(1 << 30, 5.0)
        defaults: dict[str, object] = {
            "chunk_bytes": 1000,
            "timeout_s": 5.0,
            "pool": None,
            "session_key": b"key",
            "run_ahead": self.run_ahead,
        }
        self.network = ZmqNetwork(name, "here", endpoint, self.came.__setitem__, **(defaults | options))  # type: ignore[arg-type]

    def record(self) -> NodeRecord:
        return NodeRecord(self.name, "here", os.getpid(), "cpu", [3], self.network.endpoint)

    def has(self, key: ParcelKey) -> bool:
        """Whether it has come, by whatever way: what lies in a mailbox is there for whoever looks."""
        if self.network.mail is not None:
            self.network.mail.collect()
        return key in self.came

    def get(self, key: ParcelKey = KEY) -> Blob:
        wait_until(lambda: self.has(key), f"parcel {key}")
        return self.came.pop(key)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = make_ipc_folder()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def end(folder: Path) -> Iterator[Callable[..., End]]:
    """``end(name, **options)`` makes one that is closed after the test."""
    with ExitStack() as stack:

        def make(name: str, endpoint: str | None = None, **options: object) -> End:
            made = End(name, endpoint or f"ipc://{folder}/{name}", **options)
            stack.callback(made.network.close, 5.0)
            return made

        yield make


def pool() -> SegmentPool:
    return SegmentPool(1 << 24)


TENSORS = {
    "small": torch.arange(10),
    "several chunks": torch.arange(3000, dtype=torch.float64).reshape(3, 1000),
    "large": torch.randn(300, 300),
    "strided": torch.randn(300, 400).t()[::2],
    "0-dim": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "bool": torch.rand(70_000) > 0.5,
    "bfloat16": torch.randn(50_000).to(torch.bfloat16),
}


def lent(end: End) -> set[str]:
    """Segments that hold parcels: neither the bell nor mailboxes."""
    network = end.network
    network._look_at_receipts()
    boxes = {peer.box_segment.name for peer in network._peers.values() if peer.box_segment is not None}
    return set(network._pool._lent) - boxes - {network.mail and network.mail.bell_name}


def connected(end: Callable[..., End], way: str) -> tuple[End, End]:
    """Two agents, a and b; "mailboxes": a's box at b is in use."""
    a, b = (end(name, pool=None if way == "sockets" else pool()) for name in "ab")
    a.network.connect(b.record())
    b.network.connect(a.record())
    if way == "mailboxes":
        a.network.send("b", KEY, torch.ones(1))
        b.get()
        wait_until(lambda: a.network._peers["b"]._box is not None, "the mailbox to be taken")
    return a, b


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
@pytest.mark.parametrize("way", ["sockets", "segments", "mailboxes"])
def test_a_tensor_arrives_as_it_was_when_it_was_sent(end, tensor, way):
    a, b = connected(end, way)
    source = tensor.clone()
    a.network.send("b", KEY, source)
    source.zero_()
    got = b.get()
    assert got.dtype == tensor.dtype
    assert torch.equal(got, tensor)


@pytest.mark.parametrize("way", ["sockets", "mailboxes"])
def test_a_view_that_conjugates_or_negates_is_sent_as_what_it_stands_for(end, way):
    a, b = connected(end, way)
    conjugate = torch.randn(4, dtype=torch.complex64).conj()
    for view in (conjugate, conjugate.imag):
        a.network.send("b", KEY, view)
        assert torch.equal(b.get(), view.clone())


def test_parcels_arrive_apart(end):
    a, b = end("a"), end("b")
    a.network.connect(b.record())
    keys = [KEY._replace(value_id=number) for number in range(50)]
    for number, key in enumerate(keys):
        a.network.send("b", key, torch.full((number * 10,), number))
    for number, key in enumerate(keys):
        assert torch.equal(b.get(key), torch.full((number * 10,), number))


def test_short_parcels_need_no_socket(end):
    a, b = connected(end, "mailboxes")
    before = b.network.mail.num_collected
    a.network.send("b", KEY, torch.ones(3))
    a.network.send("b", KEY._replace(value_id=7), torch.ones(50_000))
    a.network.send("b", KEY._replace(value_id=8), Poison(FAILURE))
    b.network.mail.collect()
    assert b.came.keys() == {KEY, KEY._replace(value_id=7), KEY._replace(value_id=8)}
    assert b.network.mail.num_collected == before + 3
    assert a.network.sent_bytes() == {"b": 4 + 12 + 200_000}


def test_a_full_mailbox_is_gone_round(end):
    a, b = connected(end, "mailboxes")
    keys = [KEY._replace(value_id=number) for number in range(40)]
    for number, key in enumerate(keys):
        a.network.send("b", key, torch.full((10,), number))
    wait_until(lambda: len(b.came) == 25, "what found no room in the box")
    for number, key in enumerate(keys):
        assert torch.equal(b.get(key), torch.full((10,), number))


def test_what_is_cut_into_chunks_keeps_their_order(end):
    """A box beside the socket would else let a chunk overtake another."""
    a, b = connected(end, "mailboxes")
    sent = torch.randn(3000)
    before = b.network.mail.num_collected
    a.network.send("b", KEY, sent)
    assert torch.equal(b.get(), sent)
    assert b.network.mail.num_collected == before


def test_a_mailbox_leaves_no_name_behind_once_it_is_in_use(end):
    a, _ = connected(end, "mailboxes")
    segment = a.network._peers["b"].box_segment
    wait_until(lambda: not Path("/dev/shm", segment.name).exists(), "the name to be removed")
    a.network.disconnect("b")
    assert segment.name not in a.network._pool._lent


def test_an_agent_that_joins_late_takes_what_it_was_offered(end):
    a, b = end("a", pool=pool()), end("b", pool=pool())
    a.network.connect(b.record())
    a.network.send("b", KEY, torch.ones(1))
    b.get()
    assert a.network._peers["b"]._box is None
    b.network.connect(a.record())
    wait_until(lambda: a.network._peers["b"]._box is not None, "the mailbox to be taken")


@pytest.mark.parametrize("way", ["sockets", "mailboxes"])
def test_poison_arrives_as_poison(end, way):
    a, b = connected(end, way)
    a.network.send("b", KEY, Poison(FAILURE))
    got = b.get()
    assert isinstance(got, Poison)
    assert got.failure == FAILURE


def _first(blob: Blob) -> float:
    assert isinstance(blob, torch.Tensor)
    return blob[0].item()


def test_a_segment_is_used_again_when_it_has_been_read(end):
    a, b = connected(end, "mailboxes")
    num_before = a.network._pool._num_made
    for number in range(5):
        a.network.send("b", KEY, torch.full((20_000,), number, dtype=torch.float32))
        assert _first(b.get()) == number  # and nobody keeps it: it lies in the segment
        wait_until(lambda: not lent(a), "the segment to come back")
    assert a.network._pool._num_made == num_before + 1


def test_a_full_pool_falls_back_to_sockets(end):
    a, b = end("a", pool=SegmentPool(1 << 16)), end("b", pool=pool())
    a.network.connect(b.record())
    b.network.connect(a.record())
    big = torch.randn(50_000)
    a.network.send("b", KEY, big)
    assert torch.equal(b.get(), big)
    assert not lent(a)


@pytest.mark.parametrize("make_pool", [lambda: None, pool], ids=["sockets", "segments"])
def test_what_a_device_has_sent_is_counted_until_it_is_read(end, make_pool):
    a, b = end("a", pool=make_pool(), run_ahead=RunAhead(300_000, timeout_s=0.05)), end("b", pool=make_pool())
    a.network.connect(b.record())
    b.network.connect(a.record())
    run_ahead = a.network._run_ahead
    keys = [KEY._replace(value_id=number) for number in range(2)]
    for key in keys:
        run_ahead.wait_for_room(3, "the transfer")
        a.network.send("b", key, torch.ones(50_000))
    read = [b.get(key) for key in keys]
    with pytest.raises(ClusterTimeout, match="what device 3 gave before to be read, ahead of the transfer"):
        run_ahead.wait_for_room(3, "the transfer")
    read.clear()
    wait_until(lambda: run_ahead.look() or run_ahead.num_unread(3) == 0, "the reader's answers")
    run_ahead.wait_for_room(3, "the transfer")


def test_a_sender_that_waits_for_its_readers_is_told_by_a_message(end, monkeypatch):
    monkeypatch.setattr(run_ahead_module, "_LOOK_AGAIN_S", 60.0)
    run_ahead = RunAhead(100_000, timeout_s=20.0)
    a, b = end("a", pool=pool(), run_ahead=run_ahead), end("b", pool=pool())
    a.network.connect(b.record())
    b.network.connect(a.record())
    looks: list[bool] = []
    look = run_ahead.look
    run_ahead.look = lambda: looks.append(look())

    def give() -> None:
        a.network.send("b", KEY, torch.ones(50_000))
        run_ahead.wait_for_room(3, "the transfer")

    waiting = threading.Thread(target=give)
    waiting.start()
    read = [b.get()]
    wait_until(lambda: looks, "the sender to find nothing read")
    read.clear()
    waiting.join()
    assert len(looks) == 1
    assert run_ahead.num_unread(3) == 0


def test_a_device_that_is_not_ahead_costs_its_readers_no_message(end):
    a, b = connected(end, "mailboxes")
    sent = []
    b.network._send_to = lambda *message: sent.append(message)
    for number in range(3):
        key = KEY._replace(value_id=number)
        a.network.send("b", key, torch.ones(50_000))
        b.get(key)
    a.network._look_at_receipts()
    assert a.run_ahead.num_unread(3) == 0
    assert not sent


def test_what_is_sent_to_nobody_is_dropped(end):
    a = end("a")
    a.network.send("nobody", KEY, torch.ones(3))


def test_a_lost_agent_gives_its_segments_back(end):
    a, b = end("a", pool=pool()), end("b", pool=pool())
    a.network.connect(b.record())
    a.network.send("b", KEY, torch.ones(100_000))
    b.get()  # kept mapped by nobody, but b cannot answer: it does not know a
    assert a.run_ahead.num_unread(3) == 400_000
    a.network.disconnect("b")
    wait_until(lambda: not lent(a), "the segments to be reclaimed")
    wait_until(lambda: a.run_ahead.num_unread(3) == 0, "the bytes to be counted out")


def stranger(endpoint: str) -> zmq.Socket[bytes]:
    socket = new_socket(zmq.DEALER)
    socket.connect(endpoint)
    return socket


CHUNK = ParcelChunk(
    key=b"key",
    place=PLACE,
    dtype="uint8",
    shape=[4],
    offset_bytes=0,
    num_bytes=4,
    total_bytes=4,
    node="a",
)
IN_SEGMENT = ParcelInSegment(
    key=b"key",
    place=PLACE,
    dtype="uint8",
    shape=[4],
    total_bytes=4,
    segment="dtorch-1-00000000-1",
    node="a",
    has_receipt=True,
)


def changed(message: msgspec.Struct, **changes: object) -> bytes:
    return encode_data(msgspec.structs.replace(message, **changes))


MALFORMED = {
    "empty": [b""],
    "noise": [b"\x93\xff\x00"],
    "not our tag": [msgspec.msgpack.encode(["hello", 1])],
    "wrong types": [msgspec.msgpack.encode(["chunk", 1, 2, 3, 4, 5, 6, 7])],
    "nested too deep": [b"\x91" * 100_000],
    "another cluster's key": [changed(CHUNK, key=b"other"), b"data"],
    "no payload": [changed(CHUNK)],
    "payload too long": [changed(CHUNK), b"data and more"],
    "payload too short": [changed(CHUNK), b"da"],
    "not from the start": [changed(CHUNK, offset_bytes=2, num_bytes=2), b"ta"],
    "longer than the whole": [changed(CHUNK, num_bytes=9), b"data,data"],
    "negative": [changed(CHUNK, offset_bytes=-4), b"data"],
    "negative length": [changed(CHUNK, num_bytes=-1), b""],
    "a size that does not fit": [changed(CHUNK, total_bytes=5), b"data"],
    "negative shape": [changed(CHUNK, shape=[-2, -2]), b"data"],
    "a quantized dtype": [changed(CHUNK, dtype="quint8"), b"data"],
    "no such dtype": [changed(CHUNK, dtype="load"), b"data"],
    "a path as segment": [changed(IN_SEGMENT, segment="../../etc/passwd")],
    "no such segment": [changed(IN_SEGMENT)],
    "a mailbox that is none": [encode_data(BoxOffer(key=b"key", node="a", segment="dtorch-1-00000000-1"))],
    "a path as mailbox": [encode_data(BoxOffer(key=b"key", node="a", segment="../../etc/passwd"))],
}


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_is_dropped_and_counted(end, frames):
    b = end("b", pool=pool())
    socket = stranger(b.network.endpoint)
    socket.send_multipart(frames)
    socket.send_multipart([encode_data(CHUNK), b"data"])
    assert bytes(b.get().tolist()) == b"data"
    assert b.network.num_malformed == 1
    close_socket(socket)


MALFORMED_MAIL = {
    "empty": (b"", b""),
    "noise": (b"\x93\xff\x00", b"data"),
    "another cluster's key": (changed(CHUNK, key=b"other"), b"data"),
    "no payload": (changed(CHUNK), b""),
    "payload too long": (changed(CHUNK), b"data and more"),
    "a part of a parcel": (changed(CHUNK, total_bytes=8, shape=[8]), b"data"),
    "not from the start": (changed(CHUNK, offset_bytes=4), b"data"),
    "a size that does not fit": (changed(CHUNK, shape=[5]), b"data"),
    "no such dtype": (changed(CHUNK, dtype="load"), b"data"),
    "a path as segment": (changed(IN_SEGMENT, segment="../../etc/passwd"), b""),
    "an offer in a box": (encode_data(BoxOffer(key=b"key", node="c", segment="dtorch-1-00000000-1")), b""),
}


@pytest.mark.parametrize("mail", MALFORMED_MAIL.values(), ids=MALFORMED_MAIL.keys())
def test_malformed_mail_is_dropped_and_counted(end, mail):
    a, b = connected(end, "mailboxes")
    box = a.network._peers["b"]._box
    assert box.put(mail[0], memoryview(mail[1]))
    assert box.put(encode_data(CHUNK), memoryview(b"data"))
    assert bytes(b.get().tolist()) == b"data"
    assert b.network.num_malformed == 1


def test_a_mailbox_is_taken_once(end):
    a, b = connected(end, "mailboxes")
    box = a.network._peers["b"]._box
    answer = encode_data(BoxTaken(key=b"key", node="b", bell=b.network.mail.bell_name))
    b.network._send_to("a", answer)
    wait_until(lambda: a.network.num_malformed == 1, "the second answer to be refused")
    assert a.network._peers["b"]._box is box


def test_ten_thousand_malformed_frames_do_no_harm(end, rng):
    a, b = end("a"), end("b")
    a.network.connect(b.record())
    socket = stranger(b.network.endpoint)
    valid = encode_data(CHUNK)
    for _ in range(10_000):
        socket.send_multipart([_noise(rng, valid) for _ in range(rng.randrange(1, 4))])
    sent = torch.randn(400)
    a.network.send("b", KEY._replace(value_id=77), sent)
    assert torch.equal(b.get(KEY._replace(value_id=77)), sent)
    socket.send_multipart([encode_data(CHUNK), b"last"])
    wait_until(
        lambda: b.came.get(KEY) is not None and b.came[KEY].tolist() == list(b"last"), "the last message"
    )
    assert b.network.num_malformed > 9_000
    close_socket(socket)


def _noise(rng: random.Random, valid: bytes) -> bytes:
    if rng.random() < 0.5:
        return rng.randbytes(rng.randrange(0, 40))
    spoilt = bytearray(valid)
    spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


def test_strangers_cannot_reach_it_without_keys():
    with pytest.raises(SecurityError, match="without keys"):
        End("a", "tcp://0.0.0.0:7999", pool=pool())


def test_agents_with_the_cluster_s_keys_reach_one_another_and_others_do_not(end, tmp_path):
    write_keys(tmp_path / "ours", ["agent"])
    write_keys(tmp_path / "theirs", ["agent"])
    ours, theirs = (load_keys(tmp_path / name, "agent") for name in ("ours", "theirs"))
    a = end("a", "tcp://127.0.0.1:*", keys=ours)
    b = end("b", "tcp://127.0.0.1:*", keys=ours)
    c = end("c", "tcp://127.0.0.1:*", keys=theirs)
    c.network.connect(b.record())
    c.network.send("b", KEY._replace(value_id=66), torch.ones(1))
    a.network.connect(b.record())
    a.network.send("b", KEY, torch.ones(3))
    assert torch.equal(b.get(), torch.ones(3))
    assert not b.came


# ------------------------------------------------------------------------------------------- segments


def test_a_segment_is_the_same_memory_on_both_sides():
    lender = pool()
    segment = lender.lend(100)
    segment.memory[:5] = b"hello"
    reader = SegmentReader()
    assert reader.map(segment.name).memory[:5] == b"hello"
    lender.close()
    assert not Path("/dev/shm", segment.name).exists()


def test_a_closed_pool_lends_nothing():
    lender = pool()
    lender.close()
    assert lender.lend(10) is None


@pytest.mark.parametrize("name", ["passwd", "../x", "dtorch-1", "dtorch-1-zz-1", "dtorch-1-00000000-1"])
def test_what_is_no_segment_is_not_mapped(name):
    with pytest.raises(TransportError):
        SegmentReader().map(name)


def test_segments_of_a_killed_process_are_removed():
    script = (
        "from dtorch_runtime.transport.segments import SegmentPool\n"
        "import os\nprint(SegmentPool(1 << 20).lend(10).name, flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False
    )
    name = done.stdout.strip()
    assert Path("/dev/shm", name).exists()
    assert unlink_segments_of(int(name.split("-")[1])) == [name]
    assert not Path("/dev/shm", name).exists()
