"""The logical graph: segments, the value table, and reading it back."""

from __future__ import annotations

import random

import pytest

from dtorch_runtime.controller.planning import plan_batch
from dtorch_runtime.ir.graph import GraphError, LogicalGraph, Operator, Release, RouteTable
from dtorch_runtime.ir.stream import pack, unpack, walk
from tests.support.control import frame, free, op, template


@pytest.fixture
def routes() -> RouteTable:
    return RouteTable()


@pytest.fixture
def graph(routes: RouteTable) -> LogicalGraph:
    """Template 1 goes to node 1, 2 to node 2, 3 to both; 4 takes two values and makes two, on both."""
    graph = LogicalGraph(routes)
    for template_id, nodes in ((1, (1,)), (2, (2,)), (3, (1, 2))):
        graph.define_template(template(template_id), routes.to(nodes))
    graph.define_template(template(4, 2, 2), routes.to((1, 2)))
    return graph


def nodes_and_words(graph: LogicalGraph, *records: list[int]) -> list[tuple[tuple[int, ...], list[int]]]:
    segments = graph.add_ops(1, 1, frame(*records))
    return [(segment.route.nodes, unpack(segment.payload())) for segment in segments]


def test_routes_are_one_object_a_set_of_nodes(routes: RouteTable) -> None:
    assert routes.to([2, 1]) is routes.to((1, 2, 2)) is routes.union(routes.to([1]), routes.to([2]))
    assert routes.nowhere.nodes == ()


def test_consecutive_records_with_one_way_are_one_segment(graph: LogicalGraph) -> None:
    assert nodes_and_words(graph, op(1, 5), op(1, 6), op(2, 7), op(1, 8)) == [
        ((1,), [1, 0, 5, 1, 0, 6]),
        ((2,), [2, 0, 7]),
        ((1,), [1, 0, 8]),
    ]


def test_free_goes_where_the_values_are(graph: LogicalGraph) -> None:
    made = nodes_and_words(graph, op(1, 5), op(2, 6), op(3, 7), free(5), free(6, 5), free(6), free(7))
    assert [nodes for nodes, _ in made] == [(1,), (2,), (1, 2), (1,), (2,), (1, 2)]
    assert not graph.values


def test_output_that_nobody_wants_is_no_value(graph: LogicalGraph) -> None:
    graph.add_ops(1, 1, frame(op(1, 0), op(3, 7), op(4, 7, 7, 0, 9)))
    assert sorted(graph.values) == [7, 9]


def test_value_with_pieces_from_two_uploads_is_freed_on_both_nodes(
    graph: LogicalGraph, routes: RouteTable
) -> None:
    graph.add_upload(1, 5, routes.to([1]))
    graph.add_upload(2, 5, routes.to([2]))
    assert nodes_and_words(graph, free(5)) == [((1, 2), [0, 1, 5])]


def test_retired_ops_are_dropped_and_values_stay(graph: LogicalGraph) -> None:
    graph.add_ops(1, 1, frame(op(1, 5)))
    graph.add_ops(3, 1, frame(op(2, 6), op(1, 7)))
    graph.retire(2)
    assert [segment.seq for segment in graph.pending] == [3, 3]
    graph.retire(3)
    assert not graph.pending
    assert [graph.values[v].seq for v in (5, 6, 7)] == [1, 3, 3]
    assert all(segment.frame is None for segment in graph.values.values())
    graph.validate()


def test_decoded_as_it_was_written(graph: LogicalGraph) -> None:
    graph.add_ops(1, 7, frame(op(1, 5), op(2, 6)))
    graph.add_ops(2, 8, frame(op(4, 5, 6, 8, 0), free(5)))
    *_, add, release = graph.operators()
    assert isinstance(add, Operator)
    assert (add.seq, add.graph_id, add.template.template_id, add.nodes) == (2, 8, 4, (1, 2))
    assert [(v.value_id, v.producer_seq, v.nodes) for v in add.inputs] == [(5, None, ()), (6, 1, (2,))]
    assert [v.value_id for v in add.outputs] == [8, 0]
    assert isinstance(release, Release)
    assert (release.value_ids, release.nodes) == ((5,), (1,))
    assert graph.dump().splitlines()[2:] == [
        "2: %8, _ = aten::add.Tensor(%5, %6) on [1, 2]",
        "2: free %5 on [1]",
    ]
    assert "4 ops not done, 2 values, 4 templates" in graph.explain()


@pytest.mark.parametrize(
    "words", [[1, 0], [9, 0, 5], [4, 0, 1, 2, 3], [1, 0, -5], [4, 0, 1, 2, 3, -1], [0], [0, 2, 5], [0, -1]]
)
def test_batch_that_cannot_be(graph: LogicalGraph, words: list[int]) -> None:
    with pytest.raises(GraphError):
        graph.add_ops(1, 1, pack(words))


def test_template_is_defined_once(graph: LogicalGraph, routes: RouteTable) -> None:
    graph.define_template(template(1), routes.to([1]))
    with pytest.raises(GraphError, match="twice"):
        graph.define_template(template(1, 3), routes.to([1]))


def test_every_node_gets_exactly_its_records_in_order(graph: LogicalGraph, rng: random.Random) -> None:
    """Against a slow model, on random programs."""
    for seq in range(1, 60):
        records: list[list[int]] = []
        expected: dict[int, list[int]] = {1: [], 2: []}
        made = {value_id: segment.route.nodes for value_id, segment in graph.values.items()}
        for _ in range(rng.randrange(1, 30)):
            if made and rng.random() < 0.4:
                ids = rng.sample(sorted(made), min(len(made), rng.randrange(1, 4)))
                record = free(*ids)
                nodes = sorted({node for value_id in ids for node in made.pop(value_id)})
            else:
                template_id = rng.randrange(1, 4)
                value_id = seq * 100 + len(records)
                record, nodes = op(template_id, value_id), {1: [1], 2: [2], 3: [1, 2]}[template_id]
                made[value_id] = tuple(nodes)
            records.append(record)
            for node in nodes:
                expected[node] += record
        payload = frame(*records)
        plan = plan_batch(graph.add_ops(seq, 1, payload), payload, {1, 2})
        got = {node: unpack(part) for nodes, part in plan for node in nodes}
        assert got == {node: words for node, words in expected.items() if words}
        assert {v: s.route.nodes for v, s in graph.values.items()} == made
        graph.validate()
    widths = {template_id: record.width for template_id, record in graph.templates.items()}
    total = sum(len(list(walk(unpack(s.payload()), widths))) for s in graph.pending)
    assert total == graph.num_records == sum(s.num_ops for s in graph.pending)
