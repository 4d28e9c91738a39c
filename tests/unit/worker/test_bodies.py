"""Captured calls on one device: the same values, failures and effects as the same ops one by one."""

from __future__ import annotations

import pytest
import torch

from dtorch_runtime.ir.body import expand, parse_body
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Replicate
from dtorch_runtime.ir.records import layout_to_record
from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.wire.records import BodyRecord, Slot, TemplateRecord, TransferArg
from dtorch_runtime.worker.blobs import Poison
from dtorch_runtime.worker.ledger import DeviceTotal
from dtorch_runtime.worker.watch import StreamWatch, Watch
from tests.support.device_bench import (
    ADD,
    ADD_IN_PLACE,
    BAD,
    BAD_IN_PLACE,
    ELSEWHERE,
    NEG,
    SPLIT,
    VIEW,
    Bench,
)

MOVE, CAPTURED = 20, 21
#: Inputs 1 and 2 (values 10 and 11), outputs 3 and 4 (values 30 and 31), inner values from 5 (ids from 1000).
STREAM = [CAPTURED, 0, 10, 11, 30, 31, 1000]

BODIES = {
    "values": [NEG, 0, 1, 5, ADD, 0, 5, 2, 3, FREE, 1, 5, NEG, 0, 3, 4],
    "several outputs": [SPLIT, 0, 1, 5, 3, ADD, 0, 5, 3, 4],
    "an output that nobody wants": [SPLIT, 0, 1, 0, 3, NEG, 0, 3, 4],
    "a write": [ADD_IN_PLACE, 0, 1, 2, NEG, 0, 1, 3, NEG, 0, 2, 4],
    "a write through a view": [VIEW, 0, 1, 5, ADD_IN_PLACE, 0, 5, 5, NEG, 0, 1, 3, NEG, 0, 5, 4],
    "another device": [ELSEWHERE, 0, 1, 5, NEG, 0, 1, 3, FREE, 1, 5, NEG, 0, 2, 4],
    "an output of another device": [ELSEWHERE, 0, 1, 3, NEG, 0, 1, 4],
    "a move": [NEG, 0, 1, 5, MOVE, 0, 5, 3, NEG, 0, 3, 4],
    "a move of an input": [MOVE, 0, 1, 3, NEG, 0, 3, 4],
    "a failure": [NEG, 0, 1, 5, BAD, 7, 5, 3, NEG, 0, 5, 4],
    "a failure at first": [BAD, 7, 1, 3, NEG, 0, 1, 4],
    "a failure and what depends on it": [BAD, 7, 1, 5, NEG, 0, 5, 3, MOVE, 0, 5, 6, ADD, 0, 6, 2, 4],
    "two failures": [BAD, 7, 1, 3, BAD, 8, 2, 4],
    "a write that fails": [VIEW, 0, 1, 5, BAD_IN_PLACE, 0, 1, NEG, 0, 5, 3, NEG, 0, 2, 4],
    "a failure of a view of an inner value": [NEG, 0, 1, 5, VIEW, 0, 5, 3, BAD_IN_PLACE, 0, 5, NEG, 0, 2, 4],
}


def new_bench(
    words: list[int], total: DeviceTotal | None = None, watch: StreamWatch | None = None
) -> tuple[Bench, TemplateRecord]:
    bench = Bench(total, watch)
    session = bench.values.session
    layout = layout_to_record(Layout(DeviceMesh("cpu", [0]), (Replicate(),)), 1)
    transfer = TransferArg([2], "float32", layout, layout)
    session.templates[MOVE] = TemplateRecord(
        MOVE, "dtorch::redistribute", [Slot(0), transfer], {}, 1, 1, 0, [1]
    )
    num_inner = max((value for value in words if value in (5, 6)), default=4) - 4
    record = TemplateRecord(
        CAPTURED, "dtorch::captured", [], {}, 2, 2, 1, [1, 2], [0], body=BodyRecord(words, num_inner)
    )
    session.templates[CAPTURED] = record
    return bench, record


def shown(bench: Bench) -> dict[int, object]:
    return {
        value_id: blob.failure.failure_id if isinstance(blob, Poison) else blob.tolist()
        for value_id, blob in bench.blobs.items()
        if value_id < 1000
    }


@pytest.mark.parametrize("words", BODIES.values(), ids=BODIES)
def test_it_does_what_its_ops_do_one_by_one(words: list[int]) -> None:
    captured, record = new_bench(words)
    captured.run(*STREAM)
    single, _ = new_bench(words)
    steps = parse_body(record, single.values.session.templates)
    single.run(*expand(record, steps, STREAM, 0)[0])
    assert shown(captured) == shown(single)
    assert [f.failure_id for f in captured.reported] == [f.failure_id for f in single.reported]
    assert [f.location_id for f in captured.reported] == [f.location_id for f in single.reported]
    assert all(value_id < 1000 for value_id in captured.blobs), "inner values are left"


@pytest.mark.parametrize("words", BODIES.values(), ids=BODIES)
def test_the_race_detector_sees_each_op(words: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[list[tuple[object, ...]]] = [[], []]

    class Noting(StreamWatch):
        def __init__(self, log: list[tuple[object, ...]]) -> None:
            super().__init__(Watch(), "compute")
            self._log = log

        def ran(self, op, location_id, inputs, outputs=(), mutates=()) -> None:
            super().ran(op, location_id, inputs, outputs, mutates)
            is_memory = [
                [isinstance(blob, torch.Tensor) for blob in blobs if blob is not None]
                for blobs in (inputs, outputs)
            ]
            self._log.append((op, location_id, *is_memory, list(mutates)))

    captured, record = new_bench(words, watch=Noting(noted[0]))
    captured.run(*STREAM)
    single, _ = new_bench(words, watch=Noting(noted[1]))
    single.run(*expand(record, parse_body(record, single.values.session.templates), STREAM, 0)[0])
    assert noted[0] or len(captured.reported) == 2
    assert noted[0] == noted[1]


def test_a_failed_input_is_the_failure_of_what_depends_on_it() -> None:
    bench, _ = new_bench(BODIES["a move"])
    bench.run(BAD, 9, 10, 20, CAPTURED, 0, 20, 11, 30, 31, 1000, NEG, 0, 11, 40)
    assert len(bench.reported) == 1
    assert bench.failure(30) == bench.failure(31) == bench.reported[0]
    assert torch.equal(bench.blobs[40], torch.tensor([-3.0, -4.0]))


def test_an_input_that_is_not_there_is_our_failure() -> None:
    bench, _ = new_bench(BODIES["values"])
    bench.run(CAPTURED, 0, 10, 77, 30, 31, 1000)
    assert [failure.kind for failure in bench.reported] == ["internal"]
    assert bench.failure(30) == bench.failure(31) == bench.reported[0]


def test_it_runs_again_and_again() -> None:
    bench, _ = new_bench(BODIES["a write"])
    for _ in range(3):
        bench.run(*STREAM)
    assert torch.equal(bench.blobs[10], torch.tensor([10.0, 14.0]))


def test_values_are_dropped_where_their_last_use_was() -> None:
    bench, _ = new_bench([NEG, 0, 1, 5, NEG, 0, 5, 3, FREE, 1, 5, NEG, 0, 3, 4])
    bench.run(*STREAM)
    body = bench.values._bodies[CAPTURED]
    assert "v5d0" in body.run.__code__.co_varnames
    assert set(bench.blobs) == {10, 11, 30, 31}
