"""Placements and layouts: how dims are cut, and which box of a tensor each device holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.layout import (
    Layout,
    box_shape,
    device_box,
    intersect,
    local_shape,
    num_elements,
    relative,
    resolve_placements,
)
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Replicate, Shard, split
from dtorch_runtime.ir.records import (
    layout_from_record,
    layout_to_record,
    mesh_from_record,
    mesh_to_record,
    placement_from_record,
)
from dtorch_runtime.wire.records import PlacementRecord
from tests.support.layouts import layout_pairs, numbers, put_together, shapes, take_apart


@pytest.mark.parametrize(
    ("length", "num_parts", "unit", "sizes"),
    [
        (6, 3, 1, [2, 2, 2]),
        (7, 3, 1, [3, 2, 2]),
        (8, 3, 1, [3, 3, 2]),
        (2, 3, 1, [1, 1, 0]),
        (0, 2, 1, [0, 0]),
        (576, 2, 192, [384, 192]),
        (7, 2, 3, [6, 1]),
        (7, 4, 3, [3, 3, 1, 0]),
    ],
)
def test_cuts_are_balanced_and_fall_on_units(length, num_parts, unit, sizes):
    assert [stop - start for start, stop in split(length, num_parts, unit)] == sizes


@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 9))
def test_pieces_follow_one_another_and_cover_all(length, num_parts, unit):
    pieces = split(length, num_parts, unit)
    assert [start for start, _ in pieces] + [length] == [0] + [stop for _, stop in pieces]
    assert all(start % unit == 0 or start == length for start, _ in pieces)
    counts = [-(-(stop - start) // unit) for start, stop in pieces]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Shard("0"),
        lambda: Shard(True),
        lambda: Shard(0, unit=0),
        lambda: Shard(0, unit=1.5),
        lambda: Partial("mean"),
    ],
)
def test_what_is_no_placement(make):
    with pytest.raises(PlacementError):
        make()


def test_placements_are_written_as_they_are_read():
    for placement in (Replicate(), Shard(1), Shard(0, unit=4), Partial(), Partial("max")):
        assert (
            eval(repr(placement), {"Replicate": Replicate, "Shard": Shard, "Partial": Partial}) == placement
        )
    texts = [str(p) for p in (Replicate(), Shard(1), Shard(0, 4), Partial(), Partial("max"))]
    assert texts == ["R", "S(1)", "S(0, unit=4)", "P", "P(max)"]


GRID = DeviceMesh("cpu", [[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("placements", "boxes"),
    [
        ((Replicate(), Replicate()), [((0, 5), (0, 3))] * 4),
        ((Shard(0), Replicate()), [((0, 3), (0, 3))] * 2 + [((3, 5), (0, 3))] * 2),
        ((Partial(), Shard(1)), [((0, 5), (0, 2)), ((0, 5), (2, 3))] * 2),
        ((Shard(0), Shard(0)), [((a, b), (0, 3)) for a, b in ((0, 2), (2, 3), (3, 4), (4, 5))]),
        ((Shard(1), Shard(0)), [((0, 3), (0, 2)), ((3, 5), (0, 2)), ((0, 3), (2, 3)), ((3, 5), (2, 3))]),
    ],
)
def test_boxes(placements, boxes):
    layout = Layout(GRID, placements)
    assert [device_box((5, 3), layout, device) for device in range(4)] == boxes
    assert [local_shape((5, 3), layout, device) for device in range(4)] == [box_shape(box) for box in boxes]


@given(data=st.data(), shape=shapes(), rng=st.randoms(use_true_random=False))
def test_boxes_are_where_taking_apart_cuts(data, shape, rng):
    layout, _ = data.draw(layout_pairs(len(shape), ops=("max",)))
    value = numbers(shape, rng)
    pieces = take_apart(value, layout, rng)
    for device, piece in pieces.items():
        assert piece.shape == local_shape(shape, layout, device)
        if not layout.is_partial:
            box = device_box(shape, layout, device)
            np.testing.assert_array_equal(piece, value[tuple(slice(a, b) for a, b in box)])
    np.testing.assert_array_equal(put_together(pieces, layout), value)


def test_boxes_meet_and_move():
    a, b = ((0, 4), (2, 6)), ((3, 9), (0, 3))
    assert intersect(a, b) == ((3, 4), (2, 3))
    assert intersect(a, ((4, 9), (2, 6))) is None
    assert intersect((), ()) == ()
    assert relative(((3, 4), (2, 3)), a) == ((3, 4), (0, 1))
    assert num_elements(box_shape(a)) == 16
    assert num_elements(()) == 1


def test_placements_are_resolved_against_the_tensor():
    assert resolve_placements(None, GRID, 2) == (Replicate(), Replicate())
    assert resolve_placements([Shard(-1, unit=2), Partial()], GRID, 3) == (Shard(2, unit=2), Partial())


@pytest.mark.parametrize(
    ("placements", "ndim", "message"),
    [
        (Shard(0), 2, "write \\[Shard"),
        ([Shard(0)], 2, "1 entries for a mesh with 2 axes"),
        ([Shard(0), "R"], 2, "got 'R'"),
        ([Shard(0), Replicate], 2, "with parentheses"),
        ([Shard(2), Replicate()], 2, "a dim from -2 to 1"),
        ([Shard(0), Replicate()], 0, "only Replicate"),
    ],
)
def test_placements_that_do_not_fit(placements, ndim, message):
    with pytest.raises(PlacementError, match=message):
        resolve_placements(placements, GRID, ndim)


@given(data=st.data(), ndim=st.integers(0, 3))
def test_layouts_survive_the_wire(data, ndim):
    layout, _ = data.draw(layout_pairs(ndim))
    mesh = mesh_from_record(mesh_to_record(layout.mesh, 5))
    assert layout_from_record(layout_to_record(layout, 5), {5: mesh}) == layout


@pytest.mark.parametrize(
    "record", [PlacementRecord("X"), PlacementRecord("P", op="mean"), PlacementRecord("S", unit=0)]
)
def test_a_malformed_placement_is_refused(record):
    with pytest.raises(ValueError):
        placement_from_record(record)
