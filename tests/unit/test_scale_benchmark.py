"""That the benchmark of the controller counts what it says: messages, not time."""

from __future__ import annotations

import pytest

from benchmarks.scale import AHEAD, NUM_NODES, Costs, inner_node_us, measure, rows_of, seqs_told


@pytest.mark.parametrize("num_nodes", [1, 3])
async def test_every_node_is_sent_a_step_once_and_the_client_gets_one_credit(num_nodes: int) -> None:
    cost = measure(num_nodes, repeats=1)
    assert cost.num_sent == cost.num_read == num_nodes + 1
    assert min(cost.waited, cost.ahead, cost.eager, cost.define) > 0


async def test_many_nodes_are_reached_through_the_eight_at_the_top() -> None:
    cost = measure(20, repeats=1)
    assert cost.num_sent == cost.num_read == 8 + 1
    assert cost.num_read_ahead < 1 + 8


def test_a_node_in_the_middle_reports_a_step_once() -> None:
    assert inner_node_us(repeats=1) > 0


def test_nodes_that_are_behind_answer_a_few_times_only() -> None:
    told = seqs_told(AHEAD)
    assert told[-1] == AHEAD
    assert len(told) < AHEAD / 4
    assert seqs_told(1) == [1]


@pytest.mark.parametrize(("last", "is_met"), [(150.0, True), (151.0, False)])
def test_growth_is_held_against_the_logarithm(last: float, is_met: bool) -> None:
    costs = {num: Costs(100.0, 1, 1, 1, 1, 1, 1, 1, 1) for num in NUM_NODES}
    costs[512] = costs[512]._replace(waited=last)
    (growth,) = [row for row in rows_of(costs, (1, 1), 1) if row.unit == "x"]
    assert growth.met is is_met
