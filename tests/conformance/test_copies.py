"""Large values on their way from and to the client, on real executors: beside ops, and in the order of the program.

A copy is stopped by a gate in its middle. Nothing is timed. The race detector looks on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.node.executor import Replied, ValueMissing, ValueReady
from dtorch_runtime.settings import Settings
from dtorch_runtime.tape import FETCH, UPLOAD
from dtorch_runtime.wire.records import (
    AskMemory,
    FailureRecord,
    ListArg,
    MemoryReply,
    Slot,
    StartTrace,
    StopTrace,
    TraceReply,
)
from dtorch_runtime.worker import executor as executor_module, uploads
from dtorch_runtime.worker.transfers import Transfers
from tests.conformance.test_beside import SHARDED, WHOLE, spans
from tests.support.executors import SESSION, Rig, tensor_of

_WAIT_S = 20.0
ONLY = DeviceMesh("cpu", [0])
VALUE = torch.arange(64.0)


class Gate:
    """Stops whoever comes, until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def stop(self) -> None:
        self.reached.set()
        assert self.opened.wait(_WAIT_S)


@pytest.fixture
def rig() -> Iterator[Rig]:
    settings = Settings(collective_timeout_s=10.0, num_threads=1, beside_bytes=1, check=True)
    with Rig([[0, 1]], settings=settings) as started:
        yield started


@pytest.fixture
def fetching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """In front of the copy of a value that is fetched."""
    gate, bytes_of = Gate(), executor_module.bytes_of

    def stopped(tensor: torch.Tensor) -> memoryview:
        if tensor.numel() > 1:  # small ones are no copies
            gate.stop()
        return bytes_of(tensor)

    monkeypatch.setattr(executor_module, "bytes_of", stopped)
    yield gate
    gate.opened.set()


@pytest.fixture
def uploading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """In front of the copy of a value that is uploaded."""
    gate, take = Gate(), uploads.SharedUpload.take

    def stopped(shared: uploads.SharedUpload) -> torch.Tensor:
        gate.stop()
        return take(shared)

    monkeypatch.setattr(uploads.SharedUpload, "take", stopped)
    yield gate
    gate.opened.set()


def op(rig: Rig, name: str, *args: Any, mutates: tuple[int, ...] = (), outputs: int = 1) -> int:
    inputs = sum(isinstance(arg, Slot) for arg in args)
    return rig.template(name, *args, inputs=inputs, outputs=outputs, meshes=[ONLY], mutates=mutates)


def begin_fetch(rig: Rig, value: int, request_id: int = 500) -> Callable[[], torch.Tensor | FailureRecord]:
    """Ask for a value; what waits for it."""
    node = rig.node_of(0)
    node.executor.fetch(SESSION, request_id, value, 0)

    def wait() -> torch.Tensor | FailureRecord:
        while (request_id, 0) not in node.values:
            node.pump()
        event = node.values.pop((request_id, 0))
        assert isinstance(event, ValueReady | ValueMissing)
        return tensor_of(event) if isinstance(event, ValueReady) else event.failure

    return wait


def test_ops_go_on_while_a_fetch_copies(rig, fetching):
    value, neg = rig.put({0: VALUE}), op(rig, "aten::neg", Slot(0))
    wait = begin_fetch(rig, value)
    assert fetching.reached.wait(_WAIT_S)
    for _ in range(3):
        value = rig.op(neg, value)
    total = rig.op(op(rig, "aten::sum", Slot(0)), value)
    assert torch.equal(begin_fetch(rig, total, 501)(), -VALUE.sum())
    fetching.opened.set()
    assert torch.equal(wait(), VALUE)
    assert torch.equal(rig.get(value, [0])[0], -VALUE)


def test_a_fetch_gives_what_was_there_when_the_program_asked(rig, fetching):
    value = rig.put({0: VALUE})
    view = rig.op(op(rig, "aten::slice.Tensor", Slot(0), 0, 32, 64), value)
    fill = op(rig, "aten::fill_.Scalar", Slot(0), -1.0, mutates=(0,), outputs=0)
    wait = begin_fetch(rig, value)
    assert fetching.reached.wait(_WAIT_S)
    rig.run(fill, 0, view)
    fetching.opened.set()
    assert torch.equal(wait(), VALUE)
    assert torch.equal(rig.get(view, [0])[0], torch.full((32,), -1.0))
    rig.sync()
    assert not rig.failures


def test_a_write_that_does_not_wait_for_a_fetch_is_found(rig, fetching, monkeypatch):
    monkeypatch.setattr(Transfers, "before_write", lambda transfers, blobs: None)
    value = rig.put({0: VALUE})
    fill = op(rig, "aten::fill_.Scalar", Slot(0), -1.0, mutates=(0,), outputs=0)
    wait = begin_fetch(rig, value)
    rig.run(fill, 8, value)
    fetching.opened.set()
    wait()
    rig.sync()
    found = [failure for failure in rig.failures if failure.error_type == "DataRace"]
    assert [(failure.op, failure.location_id) for failure in found] == [("aten::fill_.Scalar", 8)]


def test_a_message_is_done_when_its_upload_is_and_ops_wait_only_for_what_they_read(rig, uploading):
    node, neg = rig.node_of(0), op(rig, "aten::neg", Slot(0))
    ones = op(rig, "aten::ones", ListArg([64]))
    other = rig.op(ones)
    value = rig.put({0: VALUE})
    upload_seq = rig._seq
    total = rig.op(op(rig, "aten::sum", Slot(0)), other)
    assert uploading.reached.wait(_WAIT_S)
    assert torch.equal(begin_fetch(rig, total)(), torch.tensor(64.0))
    assert upload_seq not in node.completed
    waiting = rig.op(neg, value)
    uploading.opened.set()
    assert torch.equal(rig.get(waiting, [0])[0], -VALUE)
    rig.sync()
    assert node.completed == sorted(node.completed)
    assert upload_seq in node.completed


def test_what_is_uploaded_is_redistributed_and_fetched_in_order(rig, uploading):
    """The communication worker waits for the copy worker, and that one for it."""
    rows = torch.arange(8.0).reshape(4, 2)
    value = rig.put({0: rows[:2], 1: rows[2:]})
    whole = rig.op(rig.transfer((4, 2), torch.float32, SHARDED, WHOLE), value)
    wait = begin_fetch(rig, whole)
    uploading.opened.set()
    assert torch.equal(wait(), rows)
    assert torch.equal(rig.get(whole, [1])[1], rows)


def test_an_upload_that_fails_is_the_failure_of_who_uses_it(rig, monkeypatch):
    def fail(shared: uploads.SharedUpload) -> torch.Tensor:
        raise RuntimeError("no room")

    monkeypatch.setattr(uploads.SharedUpload, "take", fail)
    value = rig.put({0: VALUE})
    failure = rig.fetch(rig.op(op(rig, "aten::neg", Slot(0)), value), 0)
    assert isinstance(failure, FailureRecord)
    assert (failure.op, failure.message) == ("upload", "no room")
    assert isinstance(rig.fetch(value, 0), FailureRecord)


def test_a_fetch_that_fails_is_answered(rig, monkeypatch):
    def fail(tensor: torch.Tensor) -> memoryview:
        raise RuntimeError("no room")

    value = rig.put({0: VALUE})
    rig.sync()
    monkeypatch.setattr(executor_module, "bytes_of", fail)
    failure = rig.fetch(value, 0)
    assert isinstance(failure, FailureRecord)
    assert (failure.op, failure.message) == ("fetch", "no room")


def test_memory_counts_what_is_on_its_way(rig, uploading):
    node = rig.node_of(0)
    node.executor.ask(SESSION, 1, AskMemory(0, "reset"))
    rig.put({0: VALUE})
    assert uploading.reached.wait(_WAIT_S)
    node.executor.ask(SESSION, 2, AskMemory(0, "keep"))
    reply = next_reply(rig, 2)
    assert isinstance(reply, MemoryReply)
    assert reply.devices[0].current_bytes == VALUE.nbytes
    uploading.opened.set()


def next_reply(rig: Rig, request_id: int) -> object:
    while True:
        event = rig.node_of(0).events.get(timeout=_WAIT_S)
        if isinstance(event, Replied) and event.request_id == request_id:
            return event.reply


def test_a_profile_has_a_lane_for_copies(rig):
    node = rig.node_of(0)
    node.executor.ask(SESSION, 1, StartTrace(100))
    value = rig.put({0: VALUE})
    rig.fetch(value, 0)
    node.executor.ask(SESSION, 2, StopTrace())
    reply = next_reply(rig, 2)
    assert isinstance(reply, TraceReply)
    [copies] = [lane for lane in reply.lanes if lane.kind == "copy"]
    assert [span[0] for span in spans(copies)] == [UPLOAD, FETCH]


@pytest.mark.parametrize("when", ["upload", "fetch"])
def test_an_ended_session_ends_its_copies(rig, uploading, fetching, when):
    (uploading if when == "fetch" else fetching).opened.set()
    value = rig.put({0: VALUE})
    begin_fetch(rig, value)
    gate = uploading if when == "upload" else fetching
    assert gate.reached.wait(_WAIT_S)
    node = rig.node_of(0)
    node.executor.end_session(SESSION)
    node.executor.open_session(SESSION)
    gate.opened.set()
    rig._mesh_ids.clear()
    again = rig.put({0: VALUE})
    assert torch.equal(rig.get(again, [0])[0], VALUE)
