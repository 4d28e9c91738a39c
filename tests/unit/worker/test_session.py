"""A batch on one device: what runs, what fails, and what a failure does to other values. No thread, no socket."""

from __future__ import annotations

import pytest
import torch

from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.worker.blobs import Poison
from tests.support.device_bench import (
    ADD,
    ADD_IN_PLACE,
    ADD_LISTS,
    BAD,
    BAD_IN_PLACE,
    ELSEWHERE,
    NEG,
    NO_MESH,
    SPLIT,
    UNKNOWN,
    VIEW,
    Bench,
)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_batch_runs_in_order(bench):
    bench.run(NEG, 0, 10, 20, ADD, 0, 20, 11, 21, FREE, 1, 20, ADD_IN_PLACE, 0, 21, 21)
    assert set(bench.blobs) == {10, 11, 21}
    assert torch.equal(bench.blobs[21], torch.tensor([4.0, 4.0]))
    assert not bench.reported


def test_ops_of_other_devices_are_skipped(bench):
    bench.run(ELSEWHERE, 0, 99, 20, NEG, 0, 10, 21)
    assert set(bench.blobs) == {10, 11, 21}
    assert not bench.reported


def test_a_failure_says_what_where_and_why(bench):
    bench.run(BAD, 42, 10, 20)
    (failure,) = bench.reported
    assert failure == bench.failure(20)
    assert (failure.kind, failure.op, failure.location_id) == ("op", "aten::unsqueeze", 42)
    assert (failure.device, failure.node, failure.error_type) == (0, "n0", "IndexError")
    assert "Dimension out of range" in failure.message
    assert "Traceback" in failure.traceback


def test_a_failure_has_the_same_id_on_every_device(bench):
    other = Bench()
    for each in (bench, other):
        each.run(BAD, 42, 10, 20)
    assert bench.reported[0].failure_id == other.reported[0].failure_id
    bench.run(BAD, 42, 10, 21)
    assert bench.reported[1].failure_id != bench.reported[0].failure_id


def test_the_rest_of_the_batch_goes_on(bench):
    bench.run(BAD, 0, 10, 20, NEG, 0, 10, 21, BAD, 0, 11, 22, NEG, 0, 11, 23)
    assert torch.equal(bench.blobs[21], torch.tensor([-1.0, -2.0]))
    assert torch.equal(bench.blobs[23], torch.tensor([-3.0, -4.0]))
    assert len(bench.reported) == 2


def test_what_depends_on_a_failure_is_the_same_failure_and_is_not_reported(bench):
    bench.run(BAD, 0, 10, 20, NEG, 0, 20, 21, ADD, 0, 11, 21, 22, SPLIT, 0, 22, 23, 24)
    assert len(bench.reported) == 1
    assert {id(bench.blobs[value_id]) for value_id in (20, 21, 22, 23, 24)} == {id(bench.blobs[20])}


def test_a_write_that_fails_poisons_what_it_wrote_to_and_its_views(bench):
    bench.run(VIEW, 0, 10, 20, BAD_IN_PLACE, 0, 10)
    assert bench.failure(10) == bench.failure(20) == bench.reported[0]
    assert isinstance(bench.blobs[11], torch.Tensor)


def test_a_write_of_poison_poisons_what_it_wrote_to_and_its_base(bench):
    bench.run(BAD, 0, 11, 20, VIEW, 0, 10, 21, ADD_IN_PLACE, 0, 21, 20)
    assert bench.failure(21) == bench.failure(10) == bench.reported[0]
    assert len(bench.reported) == 1


def test_a_value_that_is_not_there_is_our_failure(bench):
    bench.run(NEG, 0, 77, 20)
    (failure,) = bench.reported
    assert failure.kind == "internal"
    assert "values [77], which device 0 does not hold" in failure.message
    assert bench.failure(20) == failure


@pytest.mark.parametrize(
    ("number", "message"), [(UNKNOWN, "no operator aten::no_such_op"), (NO_MESH, "meshes [3]")]
)
def test_a_template_that_cannot_be_used_fails_each_time(bench, number, message):
    bench.run(number, 0, 10, 20, NEG, 0, 10, 21)
    bench.run(number, 0, 10, 22)
    assert [failure.kind for failure in bench.reported] == ["internal", "internal"]
    assert message in bench.failure(20).message
    assert bench.reported[0].traceback.count("_make_runner") == bench.reported[1].traceback.count(
        "_make_runner"
    )
    assert isinstance(bench.blobs[21], torch.Tensor)


@pytest.mark.parametrize("words", [(77, 0, 10, 20), (NEG, 0, 10)], ids=["no such template", "cut off"])
def test_a_stream_that_cannot_be_read_on_is_reported(bench, words):
    bench.run(NEG, 0, 10, 20, *words)
    (failure,) = bench.reported
    assert failure.op == "op stream"
    assert isinstance(bench.blobs[20], torch.Tensor)


def test_an_ended_session_stops_at_the_next_op(bench):
    ended = []

    def end_then_fail(words: list[int], i: int) -> int:
        bench.values.end()
        ended.append(i)
        return i + 4

    bench.values._runners[NEG] = end_then_fail
    bench.run(NEG, 0, 10, 20, ADD, 0, 10, 11, 21)
    assert ended == [0]
    assert set(bench.blobs) == {10, 11}
    assert not bench.reported


def test_aliases_of_the_same_elements_do_not_overlap_partly(bench):
    """Strides along dims of size one say nothing about elements."""
    whole = torch.arange(4.0).view(1, 4)
    bench.blobs[20] = whole
    bench.blobs[21] = whole.as_strided((1, 4), (1, 1))
    with pytest.raises(RuntimeError, match="single memory location"):
        whole.add_(bench.blobs[21])
    bench.run(ADD_IN_PLACE, 0, 20, 21)
    assert not bench.reported
    assert bench.blobs[20].tolist() == [[0.0, 2.0, 4.0, 6.0]]
    assert min(bench.blobs) > 0


def test_a_list_of_which_a_part_was_written_to_is_not_written_to_twice(bench):
    """The second position is refused when the first is done: what is there can be told no more."""
    whole = torch.arange(4.0).view(1, 4)
    bench.blobs[20], bench.blobs[21] = torch.zeros(2), whole
    bench.blobs[22], bench.blobs[23] = torch.ones(2), whole.as_strided((1, 4), (1, 1))
    first = bench.blobs[20]
    bench.run(ADD_LISTS, 7, 20, 21, 22, 23)
    assert [failure.location_id for failure in bench.reported] == [7]
    assert first.tolist() == [1.0, 1.0]
    assert all(isinstance(bench.blobs[value], Poison) for value in (20, 21))


def test_a_write_to_repeated_elements_is_a_failure(bench):
    repeated = torch.zeros(1).expand(2)
    bench.blobs[20], bench.blobs[21] = repeated, repeated
    bench.run(ADD_IN_PLACE, 7, 20, 21)
    assert [failure.location_id for failure in bench.reported] == [7]
    assert min(bench.blobs) > 0
