"""What the values of a device hold: counted op by op the same as by a walk, and what a limit refuses."""

from __future__ import annotations

import pytest
import torch

from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.wire.records import DeviceMemoryRecord, ListArg, Slot
from dtorch_runtime.worker.blobs import Poison
from dtorch_runtime.worker.failures import OutOfMemoryError, asked_bytes_of
from dtorch_runtime.worker.ledger import CountedBlobs, DeviceTotal, Ledger, groups_of
from tests.support.device_bench import ADD, ADD_IN_PLACE, BAD, NEG, SPLIT, VIEW, Bench, template
from tests.unit.worker.test_bodies import BODIES, STREAM, new_bench, shown

#: Of values 10 and 11, and of each result of NEG and ADD.
ONE_BYTES = 8
SORT, HUGE = 30, 31


def measured(bench: Bench) -> Ledger:
    """The bench's ledger, from now on."""
    bench.values.memory(0, "reset")
    ledger = bench.values._ledger
    assert ledger is not None
    return ledger


def agrees(bench: Bench) -> DeviceMemoryRecord:
    """The bench's answer, which is that of a walk."""
    ledger = bench.values._ledger
    assert ledger is not None
    ledger.validate()
    walked = groups_of(bench.blobs, lambda value_id: ("", 0))
    assert [group[:2] for group in walked] == [group[:2] for group in ledger.groups()]
    return bench.values.memory(10, "keep")


def test_memory_that_values_share_counts_once() -> None:
    bench = Bench()
    measured(bench)
    bench.run(VIEW, 0, 10, 20, SPLIT, 0, 10, 21, 22)
    record = agrees(bench)
    assert (record.current_bytes, record.num_values) == (2 * ONE_BYTES, 5)
    assert [(value.value_id, value.num_values) for value in record.largest] == [(10, 4), (11, 1)]


def test_memory_is_held_until_its_last_value_is_free() -> None:
    bench = Bench()
    measured(bench)
    bench.run(VIEW, 0, 10, 20, FREE, 1, 10)
    assert agrees(bench).current_bytes == 2 * ONE_BYTES
    bench.run(FREE, 1, 20)
    assert agrees(bench).current_bytes == ONE_BYTES
    bench.run(FREE, 1, 20)
    assert agrees(bench).current_bytes == ONE_BYTES


def test_who_made_a_value_is_told() -> None:
    bench = Bench()
    measured(bench)
    bench.run(NEG, 41, 10, 20, ADD, 42, 20, 11, 21)
    made = {value.value_id: (value.op, value.location_id) for value in agrees(bench).largest}
    assert made == {10: ("", 0), 11: ("", 0), 20: ("aten::neg", 41), 21: ("aten::add.Tensor", 42)}


def test_without_a_ledger_the_values_are_walked() -> None:
    bench = Bench()
    bench.run(NEG, 41, 10, 20, VIEW, 0, 20, 21)
    record = bench.values.memory(2, "keep")
    assert (record.device, record.current_bytes, record.peak_bytes) == (0, 3 * ONE_BYTES, -1)
    assert (record.num_values, record.limit_bytes) == (4, 0)
    assert [(value.value_id, value.op) for value in record.largest] == [(10, ""), (11, "")]


def test_the_peak_is_the_most_since_it_was_asked_for() -> None:
    bench = Bench()
    bench.run(NEG, 0, 10, 20, NEG, 0, 10, 21, FREE, 2, 20, 21)
    assert bench.values.memory(0, "reset").peak_bytes == 2 * ONE_BYTES
    bench.run(NEG, 0, 10, 20, FREE, 1, 20, NEG, 0, 10, 21)
    assert agrees(bench).peak_bytes == 3 * ONE_BYTES
    bench.run(NEG, 0, 10, 22, FREE, 2, 21, 22)
    assert bench.values.memory(0, "keep").peak_bytes == 4 * ONE_BYTES
    assert bench.values.memory(0, "reset").peak_bytes == 2 * ONE_BYTES
    assert bench.values.memory(0, "stop").peak_bytes == -1
    bench.run(NEG, 0, 10, 23)
    assert type(bench.blobs) is dict


def test_memory_that_is_resized_is_measured_anew() -> None:
    bench = Bench()
    ledger = measured(bench)
    bench.blobs[10].untyped_storage().resize_(0)  # type: ignore[union-attr]  # no poison
    ledger.remeasure(bench.blobs[10])
    assert agrees(bench).current_bytes == ONE_BYTES
    bench.blobs[10].untyped_storage().resize_(4 * ONE_BYTES)  # type: ignore[union-attr]  # no poison
    bench.run(ADD_IN_PLACE, 0, 10, 11)
    assert agrees(bench).current_bytes == 5 * ONE_BYTES
    bench.blobs[10].untyped_storage().resize_(8 * ONE_BYTES)  # type: ignore[union-attr]  # no poison
    bench.run(VIEW, 0, 10, 20)
    assert agrees(bench).current_bytes == 9 * ONE_BYTES


def test_a_failed_op_holds_nothing() -> None:
    bench = Bench()
    measured(bench)
    bench.run(NEG, 0, 10, 20, BAD, 0, 20, 21, ADD, 0, 21, 10, 22)
    assert agrees(bench).current_bytes == 3 * ONE_BYTES


@pytest.mark.parametrize("words", BODIES.values(), ids=BODIES)
def test_a_captured_call_that_is_counted_does_what_it_does_otherwise(words: list[int]) -> None:
    counted, _ = new_bench(words)
    measured(counted)
    plain, _ = new_bench(words)
    for bench in (counted, plain):
        bench.run(*STREAM)
    assert shown(counted) == shown(plain)
    assert [f.failure_id for f in counted.reported] == [f.failure_id for f in plain.reported]
    record = agrees(counted)
    assert record.current_bytes == plain.values.memory(0, "keep").current_bytes


def test_values_inside_of_a_captured_call_count_until_their_last_use() -> None:
    words = [NEG, 0, 1, 5, NEG, 0, 5, 6, FREE, 1, 5, NEG, 0, 6, 3, FREE, 1, 6, NEG, 0, 1, 4]
    bench, _ = new_bench(words)
    measured(bench)
    bench.run(*STREAM)
    record = agrees(bench)
    # The inputs, outputs 3 and 4; and at no time more, although four values were made.
    assert (record.current_bytes, record.peak_bytes) == (4 * ONE_BYTES, 4 * ONE_BYTES)


class TestLimit:
    def test_what_would_hold_more_fails_and_the_rest_goes_on(self) -> None:
        bench = Bench(DeviceTotal(3 * ONE_BYTES))
        bench.run(NEG, 7, 10, 20, VIEW, 0, 10, 21, NEG, 8, 11, 22)
        bench.run(FREE, 1, 20, NEG, 9, 11, 23)
        (failure,) = bench.reported
        assert failure == bench.failure(22)
        assert (failure.kind, failure.op, failure.location_id) == ("op", "aten::neg", 8)
        assert failure.error_type == "OutOfMemoryError"
        shortage = failure.shortage
        assert shortage is not None
        assert (shortage.asked_bytes, shortage.other_bytes, shortage.value_id) == (ONE_BYTES, 0, 22)
        assert (shortage.held.current_bytes, shortage.held.limit_bytes) == (3 * ONE_BYTES, 3 * ONE_BYTES)
        assert [value.value_id for value in shortage.held.largest] == [10, 11, 20]
        assert isinstance(bench.blobs[23], torch.Tensor)
        assert agrees(bench).current_bytes == 3 * ONE_BYTES

    def test_it_holds_inside_of_a_captured_call_too(self) -> None:
        words = [NEG, 5, 1, 5, NEG, 6, 5, 6, FREE, 1, 5, NEG, 7, 6, 3, NEG, 8, 1, 4]
        bench, _ = new_bench(words, DeviceTotal(4 * ONE_BYTES))
        bench.run(*STREAM)
        (failure,) = bench.reported
        assert (failure.op, failure.location_id) == ("aten::neg", 8)
        assert failure.shortage is not None
        names = [(value.op, value.location_id) for value in failure.shortage.held.largest[2:]]
        assert sorted(names) == [("aten::neg", 6), ("aten::neg", 7)]
        assert isinstance(bench.blobs[30], torch.Tensor)
        assert bench.failure(31) == failure
        assert agrees(bench).current_bytes == 3 * ONE_BYTES

    def test_one_result_of_several_that_is_too_large_is_the_failure_of_all(self) -> None:
        bench = Bench(DeviceTotal(3 * ONE_BYTES))
        bench.values.session.templates[SORT] = template(SORT, "aten::sort", Slot(0), outputs=2)
        bench.run(SORT, 0, 10, 20, 21)
        assert bench.failure(20) == bench.failure(21) == bench.reported[0]
        assert agrees(bench).current_bytes == 2 * ONE_BYTES

    def test_what_the_batch_frees_later_makes_room_unless_it_is_needed(self) -> None:
        bench = Bench(DeviceTotal(4 * ONE_BYTES))
        bench.run(NEG, 0, 10, 20, NEG, 0, 10, 21, NEG, 0, 10, 22, FREE, 2, 20, 21)
        assert not bench.reported
        assert set(bench.blobs) == {10, 11, 22}
        bench.run(NEG, 0, 10, 23, NEG, 5, 10, 24, VIEW, 0, 23, 25, FREE, 1, 23)
        assert [failure.location_id for failure in bench.reported] == [5]
        assert agrees(bench).current_bytes == 4 * ONE_BYTES
        bench.run(NEG, 6, 22, 26, FREE, 1, 22)
        assert bench.reported[1].location_id == 6, "an op needs its inputs until it has its result"

    def test_what_is_freed_behind_a_captured_call_makes_room_inside_of_it(self) -> None:
        bench, _ = new_bench(BODIES["values"], DeviceTotal(4 * ONE_BYTES))
        bench.run(NEG, 0, 10, 20, NEG, 0, 10, 21, *STREAM, FREE, 2, 20, 21)
        assert not bench.reported
        assert agrees(bench).current_bytes == 4 * ONE_BYTES

    def test_sessions_share_it(self) -> None:
        total = DeviceTotal(5 * ONE_BYTES)
        first, second = Bench(total), Bench(total)
        first.run(NEG, 0, 10, 20)
        second.run(NEG, 0, 10, 20)
        (failure,) = second.reported
        assert failure.shortage is not None
        assert failure.shortage.other_bytes == 3 * ONE_BYTES
        assert failure.shortage.held.current_bytes == 2 * ONE_BYTES
        first.values.clear()
        second.run(NEG, 0, 10, 21)
        assert isinstance(second.blobs[21], torch.Tensor)
        assert total.held_bytes == 3 * ONE_BYTES

    def test_an_upload_that_is_too_large_is_a_failure(self) -> None:
        bench = Bench(DeviceTotal(2 * ONE_BYTES))
        bench.values.place(20, lambda: torch.zeros(100), 400)
        (failure,) = bench.reported
        assert failure == bench.failure(20)
        assert (failure.kind, failure.op) == ("op", "upload")
        assert failure.shortage is not None
        assert (failure.shortage.asked_bytes, failure.shortage.value_id) == (400, 20)

    def test_a_peak_is_measured_as_long_as_there_is_one(self) -> None:
        bench = Bench(DeviceTotal(100 * ONE_BYTES))
        assert bench.values.memory(0, "stop").peak_bytes == 2 * ONE_BYTES
        assert isinstance(bench.blobs, CountedBlobs)


def test_an_allocation_that_fails_tells_what_is_held_without_a_limit_too() -> None:
    bench = Bench()
    bench.values.session.templates[HUGE] = template(HUGE, "aten::new_empty", Slot(0), ListArg([1 << 50]))
    bench.run(NEG, 41, 10, 20, HUGE, 42, 20, 21)
    (failure,) = bench.reported
    assert failure.location_id == 42
    assert failure.shortage is not None
    assert failure.shortage.asked_bytes == 4 << 50
    held = failure.shortage.held
    assert (held.current_bytes, held.limit_bytes, held.peak_bytes) == (3 * ONE_BYTES, 0, -1)
    assert ("aten::neg", 41) in [(value.op, value.location_id) for value in held.largest]


@pytest.mark.parametrize(
    ("error", "asked_bytes"),
    [
        (ValueError("allocating 5 bytes"), None),
        (RuntimeError("shapes do not fit"), None),
        (OutOfMemoryError(7), 7),
        (MemoryError(), -1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes."), 12),
        (RuntimeError("CUDA error: out of memory"), -1),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), 5 << 29),
        (MemoryError("Out of memory allocating 1,024 bytes (allocated so far: 512 bytes)."), 1024),
    ],
    ids=lambda given: repr(given)[:40],
)
def test_errors_for_want_of_memory(error: Exception, asked_bytes: int | None) -> None:
    assert asked_bytes_of(error) == asked_bytes


def test_poison_holds_nothing() -> None:
    ledger = Ledger(DeviceTotal())
    blobs = CountedBlobs(ledger, {1: torch.zeros(2), 2: torch.zeros(2)})
    bench = Bench()
    blobs[1] = Poison(bench.values.fail("fetch", ValueError("no"), 1))
    ledger.validate()
    assert ledger.held_bytes == ONE_BYTES
    assert blobs.pop(7) is None
    blobs.clear()
    ledger.validate()
    assert (ledger.held_bytes, ledger.other_bytes, ledger.peak_bytes) == (0, 0, 2 * ONE_BYTES)
