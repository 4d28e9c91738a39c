"""Plans of ``redistribute``: whatever the layouts, following the plan gives the same tensor."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dtorch_runtime.ir import transfer
from dtorch_runtime.ir.exchange import Step
from dtorch_runtime.ir.layout import Layout, local_shape
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Replicate, Shard
from dtorch_runtime.ir.transfer import plan_redistribute
from tests.support.layouts import Array, layout_pairs, numbers, put_together, shapes, take_apart

_REDUCE = {
    None: lambda terms: terms[0],
    "sum": lambda terms: terms.sum(0),
    "avg": lambda terms: terms.mean(0),
    "max": lambda terms: terms.max(0),
    "min": lambda terms: terms.min(0),
    "prod": lambda terms: terms.prod(0),
}


def follow(step: Step, held: dict[int, Array]) -> dict[int, Array]:
    """Carry out one step as its words say; what nobody fills stays NaN."""
    result = {}
    for device, part in step.parts.items():
        piece = np.full(part.shape, np.nan if part.fill is None else part.fill)
        for item in part.pieces:
            terms = [
                held[source.device][tuple(slice(a, b) for a, b in source.box)] for source in item.sources
            ]
            piece[tuple(slice(a, b) for a, b in item.box)] = _REDUCE[step.reduce](np.stack(terms))
        result[device] = piece
    return result


def redistribute(
    value: Array, source: Layout, target: Layout, rng: random.Random, **options: object
) -> Array:
    held = {device: piece.astype(float) for device, piece in take_apart(value, source, rng).items()}
    for step in plan_redistribute(value.shape, source, target, itemsize_bytes=8, **options):
        held = follow(step, held)
    assert set(held) >= set(target.mesh.devices)
    for device in target.mesh.devices:
        assert held[device].shape == local_shape(value.shape, target, device)
    return put_together(held, target)


@settings(max_examples=150)
@given(data=st.data(), shape=shapes(), in_two_steps=st.booleans(), rng=st.randoms(use_true_random=False))
def test_the_tensor_is_the_same_afterwards(data, shape, in_two_steps, rng):
    source, target = data.draw(layout_pairs(len(shape)))
    value = numbers(shape, rng)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "STEP_COST_BYTES", 0 if in_two_steps else 1 << 40)
        nodes = {device: f"node{device % 2}" for device in range(12)}
        np.testing.assert_array_equal(redistribute(value, source, target, rng, node_of=nodes), value)


def layout(mesh: DeviceMesh, *placements: object) -> Layout:
    return Layout(mesh, placements)


LINE = DeviceMesh("cpu", [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("source", "target", "num_steps", "num_bytes"),
    [
        pytest.param(Shard(0), Shard(0), 0, 0, id="nothing"),
        pytest.param(Replicate(), Shard(0), 1, 0, id="cut"),
        pytest.param(Replicate(), Partial(), 1, 0, id="spread"),
        pytest.param(Shard(0), Replicate(), 1, 3 * 64 * 8, id="all-gather"),
        pytest.param(Shard(0), Shard(1), 1, 3 * 16 * 8, id="all-to-all"),
        pytest.param(Partial(), Shard(0), 1, 3 * 64 * 8, id="reduce-scatter"),
        pytest.param(Partial(), Replicate(), 1, 4 * 3 * 64 * 8, id="small all-reduce"),
    ],
)
def test_plans_move_no_more_than_they_must(source, target, num_steps, num_bytes):
    steps = plan_redistribute((8, 8), layout(LINE, source), layout(LINE, target), itemsize_bytes=8)
    assert len(steps) == num_steps
    assert sum(sum(step.bytes_by_link(8).values()) for step in steps) == num_bytes


def test_a_large_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    size = transfer.STEP_COST_BYTES
    steps = plan_redistribute((size,), layout(LINE, Partial()), layout(LINE, Replicate()), itemsize_bytes=1)
    assert [step.reduce for step in steps] == ["sum", None]
    moved = sum(sum(step.bytes_by_link(1).values()) for step in steps)
    assert moved == 2 * 3 * size


def test_terms_are_reduced_in_the_same_order_on_every_device():
    (step,) = plan_redistribute((8,), layout(LINE, Partial()), layout(LINE, Replicate()), itemsize_bytes=8)
    orders = {tuple(s.device for s in piece.sources) for part in step.parts.values() for piece in part.pieces}
    assert orders == {(0, 1, 2, 3)}


def test_a_copy_comes_from_the_own_node_where_it_can():
    source = layout(DeviceMesh("cpu", [0, 1]), Replicate())
    target = layout(DeviceMesh("cpu", [2, 3]), Replicate())
    node_of = {0: "a", 2: "a", 1: "b", 3: "b"}
    (step,) = plan_redistribute((4,), source, target, itemsize_bytes=8, node_of=node_of)
    assert {(s, d) for s, d in step.bytes_by_link(8)} == {(0, 2), (1, 3)}


def test_sends_are_the_parts_seen_from_the_sources():
    (step,) = plan_redistribute((8,), layout(LINE, Shard(0)), layout(LINE, Replicate()), itemsize_bytes=8)
    for device, sends in step.sends.items():
        for send in sends:
            source = step.parts[send.device].pieces[send.piece_index].sources[send.source_index]
            assert (source.device, source.box) == (device, send.box)
    assert not step.is_local
    assert step.devices == {0, 1, 2, 3}


@pytest.mark.parametrize("inner", ["sum", "prod"])
@pytest.mark.parametrize("source_outer", [Partial("max"), Partial("prod"), Replicate()])
@pytest.mark.parametrize("target_outer", [Partial("prod"), Replicate()])
def test_ops_that_do_not_commute_are_reduced_inner_axis_first(source_outer, target_outer, inner, rng):
    mesh = DeviceMesh("cpu", [[2, 1, 0], [3, 4, 5]])
    source, target = layout(mesh, source_outer, Partial(inner)), layout(mesh, target_outer, Partial(inner))
    value = np.arange(1, 7).reshape(2, 3)
    np.testing.assert_array_equal(redistribute(value, source, target, rng), value)
