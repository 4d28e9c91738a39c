"""Transfers beside ops: who waits for whom. Gates in the place of peers; nothing is timed."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from dtorch_runtime.errors import ClusterTimeout
from dtorch_runtime.testing.wait import wait_until
from dtorch_runtime.wire.records import FailureRecord
from dtorch_runtime.worker import transfers as transfers_module
from dtorch_runtime.worker.blobs import Blob, Blobs, Pending, Poison, UnderWay, poison_with_aliases
from dtorch_runtime.worker.collectives.run_ahead import RunAhead
from dtorch_runtime.worker.failures import SessionEnded
from dtorch_runtime.worker.ledger import CountedBlobs, DeviceTotal, Ledger
from dtorch_runtime.worker.streams.cpu import CpuEvent, CpuStream
from dtorch_runtime.worker.thread import LazyWorker, ThreadShare, Worker
from dtorch_runtime.worker.transfers import COMMUNICATION, COPY, Side, Transfers

_WAIT_S = 10.0
FAILURE = FailureRecord("op", "1:1:1", "aten::neg", 0, 0, "n0", "ValueError", "no", "")


class GateEvent(CpuEvent):
    """Opens a gate as soon as somebody waits for it: what the waiter waits for cannot have happened before."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(is_done=False)
        self._gate = gate

    def wait(self, timeout_s: float, what: str) -> None:
        self._gate.set()
        super().wait(timeout_s, what)


def new_pending(value: torch.Tensor, name: str) -> Pending:
    return Pending(UnderWay(value, 8, name, CpuEvent(is_done=False)), 4, ("move", 7))


class Device:
    """The two workers of a device, and a log of what they did, in order."""

    def __init__(self, timeout_s: float = 1.0) -> None:
        share = ThreadShare(1, 1)
        self.compute = Worker("compute", lambda: CpuStream(timeout_s), share)
        self.beside = LazyWorker(
            "beside", lambda: Worker("beside", lambda: CpuStream(timeout_s), share, divides=False)
        )
        self.copying = LazyWorker(
            "copying", lambda: Worker("copying", lambda: CpuStream(timeout_s), share, divides=False)
        )
        sides = Side(COMMUNICATION, self.beside), Side(COPY, self.copying)
        self.transfers = Transfers(self.compute, *sides, timeout_s)
        self.log: list[str] = []
        self.gates: list[threading.Event] = []

    def ask(self, question: Callable[[], object]) -> object:
        """What a job of the compute worker finds out."""
        answers: queue.SimpleQueue[object] = queue.SimpleQueue()

        def job() -> None:
            try:
                answers.put(question())
            except Exception as error:  # noqa: BLE001  for the test to see
                answers.put(error)

        self.compute.submit(job)
        return answers.get(timeout=_WAIT_S)

    def start(self, value: Blob | Pending, name: str = "transfer", num_bytes: int = 8) -> Pending:
        """A transfer that doubles its input once its gate is open, which the first wait for it opens."""
        gate = threading.Event()
        self.gates.append(gate)
        pending = Pending(UnderWay(value, num_bytes, name, GateEvent(gate)), num_bytes // 2, ("move", 7))

        def move(value: Blob | None) -> Blob | None:
            assert gate.wait(_WAIT_S)
            self.log.append(name)
            return value * 2 if isinstance(value, torch.Tensor) else value

        self.ask(lambda: self.transfers.start(pending, 1, move, lambda error: Poison(FAILURE)))
        return pending

    def close(self) -> None:
        for gate in self.gates:
            gate.set()
        self.compute.stop()
        assert self.compute.join(_WAIT_S)
        self.beside.stop()
        assert self.beside.join(_WAIT_S)
        self.copying.stop()
        assert self.copying.join(_WAIT_S)


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.close()


def test_ops_go_on_while_a_transfer_is_under_way(device):
    pending = device.start(torch.ones(2))
    assert device.ask(lambda: device.log.append("op")) is None
    assert (device.log, pending.transfer.done.is_done()) == (["op"], False)
    result = device.ask(lambda: device.transfers.wait(pending))
    assert torch.equal(result, torch.full((2,), 2.0))
    assert device.log == ["op", "transfer"]


def test_a_value_takes_its_place_when_it_is_needed(device):
    blobs: Blobs = {1: torch.ones(2), 2: Poison(FAILURE)}
    blobs[3] = device.start(torch.ones(2))
    device.transfers.unresolved[3] = blobs[3]
    assert device.ask(lambda: device.transfers.resolve(blobs, (1, 2, 99))) is False
    assert not device.log
    assert device.ask(lambda: device.transfers.resolve(blobs, (1, 3))) is True
    assert torch.equal(blobs[3], torch.full((2,), 2.0))
    assert not device.transfers.unresolved


def test_a_transfer_of_what_is_pending_waits_on_its_own_worker(device):
    first = device.start(torch.ones(2), "first")
    second = device.start(first, "second")
    assert not device.log
    device.gates[1].set()
    assert torch.equal(device.ask(lambda: device.transfers.wait(first)), torch.full((2,), 2.0))
    assert torch.equal(device.ask(lambda: device.transfers.wait(second)), torch.full((2,), 4.0))
    assert device.log == ["first", "second"]


@pytest.mark.parametrize("write_to", ["itself", "a view"])
def test_a_write_waits_for_who_reads_the_memory(device, write_to):
    value = torch.arange(4.0)
    written = value if write_to == "itself" else value[2:]
    pending = device.start(value)

    def write() -> None:
        device.transfers.before_write([written])
        device.log.append("write")
        written.fill_(-1.0)

    device.ask(write)
    assert device.log == ["transfer", "write"]
    assert torch.equal(device.ask(lambda: device.transfers.wait(pending)), torch.arange(4.0) * 2)


def test_a_write_elsewhere_does_not_wait(device):
    device.start(torch.ones(2))
    assert device.ask(lambda: device.transfers.before_write([torch.ones(2), None, Poison(FAILURE)])) is None
    assert not device.log


def test_a_write_to_a_result_waits_for_the_transfer_that_reads_it_on(device):
    first = device.start(torch.ones(2), "first")
    second = device.start(first, "second")

    def write() -> None:
        result = device.transfers.wait(first)
        device.transfers.before_write([result])
        device.log.append("write")
        result.fill_(-1.0)

    device.ask(write)
    assert device.log == ["first", "second", "write"]
    assert torch.equal(device.ask(lambda: device.transfers.wait(second)), torch.full((2,), 4.0))


def test_an_ordered_runner_waits_for_both(device):
    value = torch.ones(2)
    blobs: Blobs = {1: value}
    blobs[2] = device.start(value)
    device.transfers.unresolved[2] = blobs[2]

    def run(words: list[int], i: int) -> int:
        device.log.append("op")
        blobs[words[i + 2]].add_(blobs[words[i + 3]])
        return i + 4

    runner = device.transfers.ordered(run, blobs, 2, [0])
    assert device.ask(lambda: runner([9, 0, 1, 2], 0)) == 4
    assert device.log == ["transfer", "op"]
    assert torch.equal(blobs[1], torch.full((2,), 3.0))
    assert device.ask(lambda: runner([9, 0, 1, 2], 0)) == 4
    assert torch.equal(blobs[1], torch.full((2,), 5.0))


def test_poison_goes_through_and_what_breaks_becomes_poison(device):
    poison = Poison(FAILURE)
    gone = device.start(poison)
    assert device.ask(lambda: device.transfers.wait(gone)) is poison
    broken = new_pending(torch.ones(2), "broken")

    def break_down(value: Blob | None) -> Blob | None:
        raise RuntimeError("broken")

    failed: list[Exception] = []

    def fail(error: Exception) -> Poison:
        failed.append(error)
        return poison

    device.ask(lambda: device.transfers.start(broken, 1, break_down, fail))
    assert device.ask(lambda: device.transfers.wait(broken)) is poison
    assert [str(error) for error in failed] == ["broken"]


@pytest.mark.parametrize("kind", [COMMUNICATION, COPY])
def test_a_worker_that_cannot_wait_for_what_it_reads_tells_so(device, monkeypatch, kind):
    pending, poison, failed = new_pending(torch.ones(2), "broken"), Poison(FAILURE), []

    def fail(error: Exception) -> Poison:
        failed.append(str(error))
        return poison

    def broken(stream: CpuStream, event: object) -> None:
        raise RuntimeError("no such event")

    with monkeypatch.context() as patch:
        patch.setattr(CpuStream, "wait_for", broken)
        if kind == COPY:
            device.ask(lambda: device.transfers.copy_in(pending, lambda: torch.ones(2), fail))
        else:
            device.ask(lambda: device.transfers.start(pending, 1, lambda value: value, fail))
        pending.transfer.done.wait(_WAIT_S, "the transfer")
    assert device.ask(lambda: device.transfers.wait(pending)) is poison
    assert failed == ["no such event"]


def test_an_ended_session_ends_the_waits_for_its_transfers(device):
    ended = new_pending(torch.ones(2), "ended")

    def end(value: Blob | None) -> Blob | None:
        raise SessionEnded

    device.ask(lambda: device.transfers.start(ended, 1, end, lambda error: Poison(FAILURE)))
    behind = device.start(ended)
    for pending in (ended, behind):
        assert isinstance(device.ask(lambda pending=pending: device.transfers.wait(pending)), SessionEnded)
    assert not device.log


def test_what_comes_behind_transfers_is_called_when_they_have_ended(device):
    device.ask(lambda: device.transfers.call_behind(lambda: device.log.append("at once")))
    pending = device.start(torch.ones(2))
    device.ask(lambda: device.transfers.call_behind(lambda: device.log.append("behind")))
    device.ask(lambda: device.transfers.call_behind(lambda: device.log.append("behind that")))
    assert device.log == ["at once"]
    device.ask(lambda: device.transfers.wait(pending))
    device.ask(lambda: device.transfers.settle())
    done = threading.Event()
    device.ask(lambda: device.transfers.call_behind(done.set))
    assert done.wait(_WAIT_S)
    assert device.log == ["at once", "transfer", "behind", "behind that"]


def test_bytes_under_way_are_bounded(device, monkeypatch):
    monkeypatch.setattr(transfers_module, "MAX_BYTES", 20)
    first = device.start(torch.ones(2), "first")
    device.start(torch.ones(2), "second")
    assert not first.transfer.done.is_done()
    device.start(torch.ones(2), "third")
    assert first.transfer.done.is_done()
    assert device.log == ["first"]


def test_a_transfer_that_does_not_end_is_named(monkeypatch):
    monkeypatch.setattr(transfers_module, "_PATIENCE", 1)
    device = Device(timeout_s=0.01)
    gate = threading.Event()
    device.gates.append(gate)
    stuck = new_pending(torch.ones(2), "what never ends")
    device.ask(
        lambda: device.transfers.start(stuck, 1, lambda _: gate.wait(_WAIT_S), lambda _: Poison(FAILURE))
    )
    blobs: Blobs = {1: stuck}
    error = device.ask(lambda: device.transfers.resolve(blobs, (1,)))
    assert isinstance(error, ClusterTimeout)
    assert "what never ends" in str(error)
    assert blobs[1] is stuck
    device.close()


def test_results_that_nobody_wants_are_dropped_at_once(device):
    value = torch.ones(2)
    blobs: Blobs = {1: device.start(value)}
    device.transfers.unresolved[1] = blobs[1]
    device.gates[0].set()
    blobs[1].transfer.done.wait(_WAIT_S, "the transfer")
    gone, freed = weakref.ref(blobs[1].result), weakref.ref(value)
    del value
    wait_until(lambda: freed() is None, "what was read to be dropped")
    del blobs[1]
    assert gone() is None
    assert not device.transfers.unresolved


def test_pending_values_are_counted_from_the_start(device):
    ledger = Ledger(DeviceTotal(limit_bytes=20))
    blobs = CountedBlobs(ledger, {1: torch.ones(2)})
    pending = device.start(torch.ones(2), num_bytes=16)
    blobs[2] = pending
    assert ledger.held_bytes == 16
    ledger.validate()
    device.ask(lambda: device.transfers.resolve(blobs, (2,)))
    assert ledger.held_bytes == 16
    assert ledger.groups()[-1] == [8, 1, 2, ("move", 7)]
    ledger.validate()
    blobs.pop(2)
    assert ledger.held_bytes == 8


def test_poison_reaches_results_that_nobody_has_looked_at(device):
    shared = torch.ones(2)
    pending = new_pending(shared, "a transfer")
    pending.result = shared
    blobs: Blobs = {1: shared, 2: pending}
    poison = Poison(FAILURE)
    poison_with_aliases(blobs, [1], poison)
    assert blobs == {1: poison, 2: poison}


def test_no_worker_waits_until_what_the_other_gave_is_read(device):
    """Else the communication worker would wait for readers of later gifts, which wait for what it is to give first."""
    run_ahead = RunAhead(max_bytes=10, timeout_s=0.01)
    release = device.ask(lambda: run_ahead.lend(0, 1000))
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    device.beside.submit(lambda: answers.put(run_ahead.wait_for_room(0, "the other worker's gift")))
    assert answers.get(timeout=_WAIT_S) is None
    assert run_ahead.num_unread(0) == 1000
    assert isinstance(device.ask(lambda: run_ahead.wait_for_room(0, "its own gift")), ClusterTimeout)
    release()
    assert device.ask(lambda: run_ahead.wait_for_room(0, "its own gift")) is None
