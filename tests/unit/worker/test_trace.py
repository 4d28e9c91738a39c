"""Profiling on one device: every op is noted, nothing else changes, and afterwards the plain runners are back."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
import torch

from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.tape import BATCH, SPAN_WORDS
from dtorch_runtime.wire.records import BodyRecord, LaneRecord, TemplateRecord
from dtorch_runtime.worker import timed
from dtorch_runtime.worker.blobs import Poison
from tests.support.device_bench import ADD, BAD, ELSEWHERE, NEG, Bench

CAPTURED = 21
#: Inputs are values 10 and 11, the output is value 30, inner values have ids from 1000.
CALL = [CAPTURED, 0, 10, 11, 30, 1000]
GOOD = [NEG, 6, 1, 4, ADD, 7, 4, 2, 3, FREE, 1, 4]
FAILING = [NEG, 6, 1, 4, BAD, 7, 4, 3, FREE, 1, 4]


def new_bench(body: list[int]) -> Bench:
    bench = Bench()
    record = TemplateRecord(CAPTURED, "dtorch::captured", [], {}, 2, 1, 1, [1], [], body=BodyRecord(body, 1))
    bench.values.session.templates[CAPTURED] = record
    return bench


def stop(bench: Bench) -> LaneRecord:
    lanes = bench.values.stop_trace()
    assert lanes is not None
    (lane,) = lanes
    return lane


def rows(lane: LaneRecord | None) -> list[list[int]]:
    assert lane is not None
    words = array("q")
    words.frombytes(lane.spans)
    return [list(words[i : i + SPAN_WORDS]) for i in range(0, len(words), SPAN_WORDS)]


def test_each_op_is_noted_with_its_line_and_the_batch_around_it():
    bench = Bench()
    bench.run(NEG, 1, 10, 20)
    bench.values.start_trace(100)
    bench.run(NEG, 3, 10, 20, ADD, 4, 20, 11, 21, FREE, 1, 20, ELSEWHERE, 5, 99, 22)
    lane = stop(bench)
    bench.run(NEG, 6, 10, 23)
    assert lane is not None
    assert (lane.kind, lane.device, lane.num_dropped) == ("worker", 0, 0)
    found = rows(lane)
    assert [row[:2] for row in found] == [[NEG, 3], [ADD, 4], [ELSEWHERE, 5], [BATCH, 5]]
    assert all(row[4] == 0 for row in found)
    assert all(before[3] <= after[2] for before, after in pairwise(found[:-1]))
    assert found[-1][2] <= found[0][2]
    assert found[-1][3] >= found[-2][3]
    assert torch.equal(bench.blobs[21], torch.tensor([2.0, 2.0]))
    assert set(bench.blobs) == {10, 11, 21, 23}


def test_without_a_profile_the_runners_are_the_plain_ones():
    bench = Bench()
    values = bench.values
    bench.run(NEG, 0, 10, 20, NEG, 0, 10, 21)
    assert values._runners is values._plain
    before = values._plain[NEG]
    assert before.__code__.co_filename == "<dtorch runner>", "what the compiler made, with nothing around it"
    values.start_trace(100)
    bench.run(NEG, 0, 10, 22, ADD, 0, 10, 11, 23)
    assert values._runners is not values._plain
    values.stop_trace()
    assert values._runners is values._plain
    assert values._plain[NEG] is before
    assert values._plain[ADD].__code__.co_filename == "<dtorch runner>", "first used while it was profiled"
    assert values.stop_trace() is None


def test_a_failure_is_noted_and_is_the_same():
    bench, other = Bench(), Bench()
    bench.values.start_trace(100)
    for each in (bench, other):
        each.run(BAD, 42, 10, 20, NEG, 43, 20, 21, NEG, 44, 11, 22)
    assert [row[::4] for row in rows(stop(bench))] == [[BAD, 1], [NEG, 1], [NEG, 0], [BATCH, 0]]
    assert bench.failure(20).failure_id == bench.failure(21).failure_id == other.failure(20).failure_id
    assert bench.reported[0].location_id == 42
    assert torch.equal(bench.blobs[22], other.blobs[22])


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize("body", [GOOD, FAILING])
def test_a_captured_call_runs_op_by_op_with_the_same_result(body, ran_before):
    bench, other = new_bench(body), new_bench(body)
    if ran_before:
        bench.run(*CALL)
    bench.values.start_trace(100)
    for each in (bench, other):
        each.run(*CALL)
    first, second, call, batch = rows(stop(bench))
    assert [first[:2], second[:2], call[0], batch[0]] == [[NEG, 6], [body[4], 7], CAPTURED, BATCH]
    assert call[2] <= first[2] <= first[3] <= second[2] <= second[3] <= call[3]
    assert set(bench.blobs) == set(other.blobs) == {10, 11, 30}
    if body is GOOD:
        assert torch.equal(bench.blobs[30], other.blobs[30])
    else:
        assert isinstance(bench.blobs[30], Poison)
        assert bench.failure(30).failure_id == other.failure(30).failure_id
        assert second[4] == 1
    bench.run(*CALL)
    assert bench.values._runners is bench.values._plain


def test_an_ended_session_stops_at_the_next_op():
    bench = Bench()
    bench.values.start_trace(100)
    bench.run(NEG, 0, 10, 20)
    bench.values.end()
    bench.run(NEG, 0, 10, 21)
    assert 21 not in bench.blobs
    assert not bench.reported


class Ranges:
    """What would go to NVTX."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def range_push(self, msg: str) -> None:
        self.seen.append(msg)

    def range_pop(self) -> None:
        self.seen.append("end")


def test_each_op_is_a_range_where_something_shows_them(monkeypatch: pytest.MonkeyPatch):
    ranges = Ranges()
    monkeypatch.setattr(timed, "find_marks", lambda: ranges)
    bench = new_bench(FAILING)
    bench.values.start_trace(100)
    bench.run(NEG, 3, 10, 20, *CALL)
    stop(bench)
    ops = [bench.values.session.templates[number].op for number in (NEG, NEG, BAD)]
    assert ranges.seen == [ops[0], "end", ops[1], "end", ops[2], "end"]
