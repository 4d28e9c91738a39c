"""The race detector on real executors: it finds a wait that somebody has left out, and names both lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from dtorch_runtime.settings import Settings
from dtorch_runtime.wire.records import FailureRecord, Slot
from dtorch_runtime.worker import redistribute
from dtorch_runtime.worker.transfers import Transfers
from tests.conformance.test_beside import BOTH, ROWS, both, close_the_gate, gate, gather, put_rows
from tests.support.executors import Rig

__all__ = ["gate"]  # a fixture


@pytest.fixture
def rig() -> Iterator[Rig]:
    settings = Settings(collective_timeout_s=10.0, num_threads=1, beside_bytes=1, check=True)
    with Rig([[0], [1]], settings=settings) as started:
        yield started


def write_behind_a_transfer(rig: Rig, gate) -> int:
    """A transfer at location 7, and at 8 a write to what it reads."""
    rows, move = put_rows(rig), gather(rig)
    fill = both(rig, "aten::fill_.Scalar", Slot(0), -1.0, mutates=(0,), outputs=0)
    close_the_gate(rig)
    whole = rig.op(move, rows, location=7)
    rig.run(fill, 8, rows)
    gate.set()
    return whole


def test_a_write_that_does_not_wait_is_found(rig, gate, monkeypatch):
    monkeypatch.setattr(Transfers, "before_write", lambda transfers, blobs: None)
    whole = write_behind_a_transfer(rig, gate)
    rig.fetch(whole, 0)
    rig.sync()
    races = [failure for failure in rig.failures if failure.error_type == "DataRace"]
    assert {frozenset((race.location_id, race.other_location_id)) for race in races} == {frozenset((7, 8))}
    assert all("aten::fill_.Scalar on" in race.message for race in races)
    assert all("dtorch::redistribute on" in race.message for race in races)


def test_a_write_in_a_captured_call_that_does_not_wait_is_found(rig, gate, monkeypatch):
    monkeypatch.setattr(Transfers, "before_write", lambda transfers, blobs: None)
    rows, move, neg = put_rows(rig), gather(rig), both(rig, "aten::neg", Slot(0))
    fill = both(rig, "aten::fill_.Scalar", Slot(0), -1.0, mutates=(0,), outputs=0)
    words = [move, 7, rows, 1001, fill, 8, rows, neg, 9, 1001, 1002]
    captured = rig.captured(words, [rows], [1002], [BOTH])
    close_the_gate(rig)
    rig.call(captured, [rows], 1)
    gate.set()
    rig.sync()
    races = {
        frozenset((failure.location_id, failure.other_location_id))
        for failure in rig.failures
        if failure.error_type == "DataRace"
    }
    assert races == {frozenset((7, 8))}


def test_a_read_that_does_not_wait_is_found(rig, gate, monkeypatch):
    """On a CPU the value is there; on a GPU the kernels that make it may still run."""
    rows, move, neg = put_rows(rig), gather(rig), both(rig, "aten::neg", Slot(0))

    def wait(transfers, pending):
        pending.transfer.done.wait(10.0, "the transfer")
        return pending.result

    monkeypatch.setattr(Transfers, "wait", wait)
    monkeypatch.setattr(Transfers, "_forget_ended", lambda transfers: None)
    close_the_gate(rig)
    whole = rig.op(move, rows, location=3)
    result = rig.op(neg, whole, location=4)
    gate.set()
    failure = rig.fetch(result, 0)
    assert isinstance(failure, FailureRecord)
    assert (failure.op, failure.error_type) == ("aten::neg", "DataRace")
    assert (failure.location_id, failure.other_location_id) == (4, 3)


def test_the_same_with_its_waits_is_clean(rig, gate):
    whole = write_behind_a_transfer(rig, gate)
    assert all(torch.equal(piece, ROWS) for piece in rig.get(whole, [0, 1]).values())
    rig.sync()
    assert not rig.failures


@pytest.fixture(params=["the last builds", "each builds"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Two devices of one agent, whose redistributions are done at once, among their threads."""
    if request.param == "each builds":
        monkeypatch.setattr(redistribute, "PARALLEL_BYTES", 1)
    settings = Settings(collective_timeout_s=10.0, num_threads=1, beside_bytes=0, check=True)
    with Rig([[0, 1]], settings=settings) as started:
        yield started


def gather_and_write(rig: Rig) -> tuple[set[int], list[FailureRecord]]:
    """A gather at location 7, and at 8 a write to what it read; the locations of races, and all failures."""
    rows, move = put_rows(rig), gather(rig)
    fill = both(rig, "aten::fill_.Scalar", Slot(0), -1.0, mutates=(0,), outputs=0)
    whole = rig.op(move, rows, location=7)
    rig.run(fill, 8, rows)
    for device in (0, 1):
        rig.fetch(whole, device)
    rig.sync()
    races = [failure for failure in rig.failures if failure.error_type == "DataRace"]
    return {
        location for race in races for location in (race.location_id, race.other_location_id)
    }, rig.failures


def test_threads_of_one_agent_are_in_order(threads):
    assert gather_and_write(threads) == (set(), [])


def test_a_device_that_does_not_wait_until_its_memory_is_read_is_found(monkeypatch):
    """It is not luck: the write may come before the read, or after."""
    monkeypatch.setattr(redistribute, "PARALLEL_BYTES", 1)
    group = redistribute._StepPlanner._group
    monkeypatch.setattr(
        redistribute._StepPlanner,
        "_group",
        lambda planner, *args: replace(group(planner, *args), read_by_others=frozenset()),
    )
    settings = Settings(collective_timeout_s=10.0, num_threads=1, beside_bytes=0, check=True)
    with Rig([[0, 1]], settings=settings) as rig:
        locations, _ = gather_and_write(rig)
    assert locations == {7, 8}


def test_a_captured_call_tells_what_its_threads_read_of_one_another(threads):
    rows, move, neg = put_rows(threads), gather(threads), both(threads, "aten::neg", Slot(0))
    fill = both(threads, "aten::fill_.Scalar", Slot(0), -1.0, mutates=(0,), outputs=0)
    words = [move, 7, rows, 1001, fill, 8, rows, neg, 9, 1001, 1002]
    captured = threads.captured(words, [rows], [1002], [BOTH])
    for _ in range(3):
        [out] = threads.call(captured, [rows], 1)
        threads.get(out, [0, 1])
    threads.sync()
    assert not threads.failures
