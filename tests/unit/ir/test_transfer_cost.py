"""What a redistribution costs, held against the bytes of its plan."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtorch_runtime.ir.layout import Layout, all_boxes, device_box
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Replicate, Shard
from dtorch_runtime.ir.transfer import plan_redistribute
from dtorch_runtime.ir.transfer_cost import bytes_at_once, moves_nothing, transfer_bytes
from tests.support.layouts import layout_pairs, numbers, put_together, shapes, take_apart

LINE = DeviceMesh("cpu", [0, 1, 2, 3])
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]])
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def received_by_busiest(shape: tuple[int, ...], source: Layout, target: Layout) -> int:
    """Bytes that the plan brings to the device that gets most, for elements of 4 bytes."""
    total = 0
    for step in plan_redistribute(shape, source, target, itemsize_bytes=4):
        received: Counter[int] = Counter()
        for (_, destination), num_bytes in step.bytes_by_link(4).items():
            received[destination] += num_bytes
        total += max(received.values(), default=0)
    return total


@given(data=st.data(), shape=shapes())
def test_without_partial_terms_it_is_what_the_plan_moves(data, shape):
    source, target = data.draw(layout_pairs(len(shape), ops=()))
    assert transfer_bytes(shape, 4, source, target) == received_by_busiest(shape, source, target)


@pytest.mark.parametrize(
    ("mesh", "source", "target", "num_bytes"),
    [
        (LINE, [R], [S0], 0),
        (LINE, [R], [P], 0),
        (LINE, [S0], [P], 0),
        (LINE, [P], [P], 0),
        (LINE, [S0], [R], 3 * 64),
        (LINE, [S0], [S1], 3 * 16),
        (LINE, [P], [S0], 3 * 64),
        (LINE, [P], [R], 2 * 3 * 64),
        (GRID, [P, S0], [R, S0], 128),
        (GRID, [P, P], [R, R], 2 * 3 * 64),
        (GRID, [P, R], [P, S0], 0),
        (GRID, [P, S0], [P, R], 128),
        (GRID, [S0, S1], [S1, S0], 64),
        (GRID, [Partial("avg"), R], [S0, R], 128),
    ],
    ids=str,
)
def test_bytes_of_a_tensor_of_256(mesh, source, target, num_bytes):
    assert transfer_bytes((8, 8), 4, Layout(mesh, tuple(source)), Layout(mesh, tuple(target))) == num_bytes


@given(data=st.data(), shape=shapes())
def test_boxes_of_all_devices_are_those_of_each(data, shape):
    layout, _ = data.draw(layout_pairs(len(shape)))
    expected = [device_box(shape, layout, device) for device in layout.mesh.devices]
    assert all_boxes(shape, layout) == expected


@st.composite
def lines(draw, ndim):
    """Two layouts on one mesh with one axis."""
    mesh = DeviceMesh("cpu", list(range(draw(st.integers(1, 5)))))
    cuts = [Shard(dim, unit) for dim in range(ndim) for unit in (1, 2, 3)]
    placements = [R, P, Partial("max"), Partial("avg"), *cuts]
    return tuple(Layout(mesh, (draw(st.sampled_from(placements)),)) for _ in range(2))


@given(data=st.data(), shape=shapes())
def test_on_one_axis_it_is_what_boxes_say(data, shape):
    source, target = data.draw(lines(len(shape)))
    beside = DeviceMesh("cpu", [source.mesh.devices], mesh_dim_names=("one", "line"))  # counted box by box
    source_2d, target_2d = (Layout(beside, (R, *layout.placements)) for layout in (source, target))
    assert transfer_bytes(shape, 4, source, target) == transfer_bytes(shape, 4, source_2d, target_2d)


@given(data=st.data(), shape=shapes())
def test_bytes_at_once_are_those_of_the_plan_of_a_small_tensor(data, shape):
    source, target = data.draw(lines(len(shape)))
    found = bytes_at_once(shape, 4, source, target)
    if target.is_partial:
        assert found is None
    else:
        steps = plan_redistribute(shape, source, target, itemsize_bytes=4)
        assert found == sum(sum(step.bytes_by_link(4).values()) for step in steps)


@given(data=st.data(), shape=shapes(), rng=st.randoms(use_true_random=False))
def test_where_nothing_moves_the_pieces_are_those_of_the_target(data, shape, rng):
    source, target = data.draw(layout_pairs(len(shape)))
    held = {
        device: piece.astype(float) for device, piece in take_apart(numbers(shape, rng), source, rng).items()
    }
    if not moves_nothing(shape, source, target):
        return
    np.testing.assert_array_equal(put_together(held, target), put_together(held, source))
    assert transfer_bytes(shape, 4, source, target) == 0


ROWS = DeviceMesh("cpu", [[0], [1], [2], [3]])
AVG = Partial("avg")


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((LINE, [R]), (ROWS, [R, R]), True),
        ((LINE, [S0]), (ROWS, [S0, S1]), True),
        ((LINE, [P]), (ROWS, [P, AVG]), True),
        ((ROWS, [AVG, P]), (ROWS, [AVG, R]), True),
        ((GRID, [S0, S0]), (LINE, [S0]), True),
        ((GRID, [P, S0]), (GRID, [P, S0]), True),
        ((ROWS, [P, P]), (ROWS, [R, P]), False),
        ((ROWS, [P, R]), (ROWS, [AVG, R]), False),
        ((GRID, [P, P]), (LINE, [P]), False),
        ((LINE, [R]), (ROWS, [P, R]), False),
        ((LINE, [R]), (DeviceMesh("cpu", [0, 1, 2]), [R]), False),
        ((LINE, [P]), (DeviceMesh("cpu", [3, 2, 1, 0]), [P]), False),
        ((LINE, [S0]), (DeviceMesh("cpu", [3, 2, 1, 0]), [S0]), False),
    ],
    ids=str,
)
def test_whether_devices_keep_what_they_have(source, target, expected):
    (mesh, placements), (other, others) = source, target
    found = moves_nothing((8, 8), Layout(mesh, tuple(placements)), Layout(other, tuple(others)))
    assert found is expected
