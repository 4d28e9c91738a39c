"""Schedules of pipelines in abstract time: legal for all sizes, with the bubbles and the memory of the papers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, strategies as st

import dtorch
from dtorch.parallel.pipeline import Step, check_order, issue_order, make_orders, simulate
from dtorch.parallel.pipeline.order import check_ranks
from dtorch_runtime.errors import SettingError

RANKS = st.integers(1, 8)
MICRO_BATCHES = st.integers(1, 24)
CHUNKS = st.integers(1, 4)


@given(st.sampled_from(["gpipe", "1f1b", "zero_bubble"]), RANKS, MICRO_BATCHES)
def test_an_order_is_legal(name: Any, num_ranks: int, num_micro_batches: int) -> None:
    orders = make_orders(name, num_ranks, num_micro_batches)
    check_ranks(orders, num_ranks)
    order = issue_order(orders)
    check_order(order, num_ranks, num_micro_batches)
    for rank, own in enumerate(orders):
        assert [step for step in order if step.stage % num_ranks == rank] == own


@given(st.sampled_from(["gpipe", "interleaved", "forward_only"]), RANKS, st.integers(1, 4), CHUNKS)
def test_an_order_with_several_stages_a_rank_is_legal(
    name: Any, num_ranks: int, num_rounds: int, num_chunks: int
) -> None:
    num_micro_batches = num_rounds * num_ranks
    orders = make_orders(name, num_ranks, num_micro_batches, num_chunks)
    check_ranks(orders, num_ranks)
    check_order(issue_order(orders), num_ranks * num_chunks, num_micro_batches)


@given(RANKS, MICRO_BATCHES)
def test_the_bubble_of_gpipe_and_1f1b(p: int, m: int) -> None:
    for name in ("gpipe", "1f1b"):
        assert simulate(make_orders(name, p, m)).bubble_ratio == pytest.approx((p - 1) / (m + p - 1), rel=0.1)


@given(RANKS, st.integers(1, 4), CHUNKS)
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, num_rounds: int, v: int) -> None:
    m = num_rounds * p
    found = simulate(make_orders("interleaved", p, m, v)).bubble_ratio
    assert found == pytest.approx(((p - 1) / v) / (m + (p - 1) / v), rel=0.1)


@given(RANKS, MICRO_BATCHES)
def test_zero_bubble_has_a_third_of_the_bubble_of_1f1b(p: int, m: int) -> None:
    """(p - 1)(F + B - W) of idle time instead of (p - 1)(F + B + W), with equal F, B and W, and m >= p."""
    found = simulate(make_orders("zero_bubble", p, m)).bubble_ratio
    whole = simulate(make_orders("1f1b", p, m)).bubble_ratio
    assert found < whole or p == 1
    if m >= p:
        assert found == pytest.approx((p - 1) / (3 * m + p - 1), rel=0.1)


@given(RANKS, MICRO_BATCHES)
def test_what_waits_for_its_backward(p: int, m: int) -> None:
    assert simulate(make_orders("gpipe", p, m)).peak_live == (m,) * p
    assert simulate(make_orders("1f1b", p, m)).peak_live == tuple(min(m, p - rank) for rank in range(p))
    assert max(simulate(make_orders("zero_bubble", p, m)).peak_live) <= min(m, p)
    assert simulate(make_orders("forward_only", p, m)).length == m + p - 1


@given(RANKS, st.integers(1, 4), CHUNKS)
def test_what_waits_when_interleaved(p: int, num_rounds: int, v: int) -> None:
    peak = max(simulate(make_orders("interleaved", p, num_rounds * p, v)).peak_live)
    most = p if v == 1 else (v - 1) * p + 2 * (p - 1) + 1
    assert peak <= min(num_rounds * p * v, most)


def test_transfers_take_time_between_ranks_only() -> None:
    alone, two = make_orders("1f1b", 1, 4), make_orders("forward_only", 2, 3)
    assert simulate(alone, transfer=5.0).length == simulate(alone).length == 12
    assert simulate(two, transfer=0.5).length == 4.5
    costs = {"forward": 2.0, "backward": 3.0, "backward_input": 1.0, "backward_weight": 1.0}
    assert simulate(alone, costs=costs).length == 20


def test_a_timeline_can_be_looked_at() -> None:
    lines = str(simulate(make_orders("1f1b", 2, 3))).splitlines()
    assert lines == ["F0 F1       B0 -- F2 B1 --    B2 --", "   F0 B0 -- F1 B1 -- F2 B2 --"]
    assert str(simulate(make_orders("zero_bubble", 1, 1))) == "F0 I0 W0"
    assert str(simulate([])) == ""
    assert str(Step("backward", 3, 1)) == "B1@3"


F, B = (lambda stage, k: Step("forward", stage, k)), (lambda stage, k: Step("backward", stage, k))


@pytest.mark.parametrize(
    "order, text",
    [
        ([F(0, 0), F(0, 0)], "twice"),
        ([F(1, 0)], "before F0@0"),
        ([F(0, 0), B(0, 0)], "before B0@1 or I0@1"),
        ([F(0, 0), F(2, 0)], "no step of a pipeline of 2 stages"),
        ([F(0, 0), F(0, 1)], "no step of a pipeline"),
        ([F(0, 0)], "has nothing at stage 1; it needs forward"),
        ([F(0, 0), F(1, 0), B(1, 0)], "has forward at stage 0; it needs forward . backward or"),
        (
            [F(0, 0), F(1, 0), B(1, 0), Step("backward_input", 0, 0)],
            "has forward . backward_input at stage 0",
        ),
        ([F(0, 0), F(1, 0), Step("backward_weight", 1, 0)], "before I0@1"),
    ],
)
def test_an_illegal_order_is_refused(order: list[Step], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        check_order(order, 2, 1)


@given(st.permutations(list(itertools.chain(*make_orders("zero_bubble", 2, 2)))))
def test_an_order_is_legal_when_each_step_comes_after_what_it_needs(order: list[Step]) -> None:
    def place(kind: Any, stage: int, k: int) -> int:
        return order.index(Step(kind, stage, k))

    is_legal = all(
        place("forward", 0, k) < place("forward", 1, k) < place("backward_input", 1, k)
        and place("backward_input", 1, k) < place("backward_input", 0, k)
        and all(place("backward_input", stage, k) < place("backward_weight", stage, k) for stage in (0, 1))
        for k in (0, 1)
    )
    if is_legal:
        check_order(order, 2, 2)
    else:
        with pytest.raises(SettingError, match="comes before"):
            check_order(order, 2, 2)


def test_orders_that_wait_for_one_another_are_refused() -> None:
    with pytest.raises(
        SettingError, match=r"B0@0 \(backward of micro-batch 0 at stage 0\) waits for B0@1 or I0@1"
    ):
        issue_order([[F(0, 0), B(0, 0), F(0, 1)], [F(1, 1), F(1, 0), B(1, 0)]])
    with pytest.raises(SettingError, match="2 meshes, 1 lists"):
        check_ranks([[F(0, 0)]], 2)
    with pytest.raises(SettingError, match="stage 1 lies on rank 1"):
        check_ranks([[F(1, 0)], []], 2)


@pytest.mark.parametrize(
    "args, text",
    [
        (("2f2b", 2, 4), "one of 'gpipe', '1f1b'"),
        (("1f1b", 2, 4, 2), "schedule='interleaved'"),
        (("zero_bubble", 2, 4, 2), "schedule='interleaved'"),
        (("interleaved", 4, 6, 2), "num_micro_batches=8"),
        (("gpipe", 0, 4), "num_ranks takes a number"),
        (("gpipe", 2, True), "num_micro_batches takes a number"),
        (("gpipe", 2, 4, 1.5), "num_chunks takes a number"),
    ],
)
def test_numbers_that_no_schedule_takes(args: Any, text: str) -> None:
    with pytest.raises(SettingError, match=text):
        make_orders(*args)


@given(st.integers(1, 200), st.integers(1, 16))
def test_layers_are_dealt_evenly(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        with pytest.raises(SettingError, match=f"num_stages={num_layers}"):
            dtorch.assign_layers_to_stages(num_layers, num_stages)
        return
    stages = dtorch.assign_layers_to_stages(num_layers, num_stages)
    assert stages == sorted(stages)
    sizes = [stages.count(stage) for stage in range(num_stages)]
    assert sum(sizes) == num_layers == len(stages)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("args", [(0, 1), (4, 0), (4.0, 2), (True, 1), ("4", 2)])
def test_layers_and_stages_are_numbers(args: Any) -> None:
    with pytest.raises(SettingError, match="takes a number, 1 or more, got"):
        dtorch.assign_layers_to_stages(*args)
