"""The race detector on real executors: it finds a wait that somebody has left out, and names both lines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dtorch_runtime.settings import Settings
from dtorch_runtime.wire.records import FailureRecord, Slot
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
