"""The algorithm of views against brute force: cut the numbers of the elements, view them, and look where they are."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dtorch.rules.dim_groups import CannotView, dim_groups, view_layout
from dtorch_runtime.ir.layout import Layout, local_box
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Replicate, Shard

LINE2, LINE3 = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])
GRID = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]])

CASES: list[tuple[DeviceMesh, tuple[int, ...], tuple[int, ...], list[Placement], list[Placement]]] = [
    # heads: 576 features are 9 heads of 64, cut at groups of 3 heads
    (LINE2, (1, 5, 576), (1, 5, 9, 64), [Shard(2, unit=192)], [Shard(2, unit=3)]),
    (LINE2, (1, 5, 9, 64), (1, 5, 576), [Shard(2, unit=3)], [Shard(2, unit=192)]),
    (LINE2, (1, 3, 3, 5, 64), (1, 9, 5, 64), [Shard(1)], [Shard(1, unit=3)]),
    (LINE2, (1, 5, 512), (1, 5, 8, 64), [Shard(2)], [Shard(2)]),
    (LINE3, (6, 4), (24,), [Shard(0)], [Shard(0, unit=4)]),
    (LINE3, (24,), (6, 4), [Shard(0, unit=4)], [Shard(0)]),
    (LINE2, (2, 7, 5), (14, 5), [Shard(0)], [Shard(0, unit=7)]),
    (LINE2, (2, 7, 5), (14, 5), [Shard(2)], [Shard(1)]),
    (LINE2, (1, 7), (7,), [Shard(0)], [Shard(0, unit=7)]),
    (LINE2, (1, 7), (7,), [Shard(1)], [Shard(0)]),
    # a batch of one sequence, whose tokens were merged; and one head
    (LINE2, (7, 5), (1, 7, 5), [Shard(0, unit=7)], [Shard(0)]),
    (LINE2, (1, 5, 64), (1, 5, 1, 64), [Shard(2, unit=64)], [Shard(2)]),
    (LINE2, (4, 1, 3), (1, 4, 3), [Shard(0)], [Shard(1)]),
    (LINE2, (0, 6), (0, 2, 3), [Shard(0)], [Shard(0)]),
    (GRID, (12, 4), (48,), [Shard(0), Shard(0)], [Shard(0, unit=4), Shard(0, unit=4)]),
    (GRID, (2, 576), (2, 9, 64), [Shard(0), Shard(1, unit=192)], [Shard(0), Shard(1, unit=3)]),
]


@pytest.mark.parametrize(("mesh", "shape", "viewed", "placements", "want"), CASES)
def test_units_follow(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    viewed: tuple[int, ...],
    placements: list[Placement],
    want: list[Placement],
) -> None:
    assert list(view_layout(shape, viewed, Layout(mesh, tuple(placements))).placements) == want
    assert_same_elements(shape, viewed, mesh, placements, want)


@pytest.mark.parametrize(
    ("shape", "viewed", "placement", "said"),
    [
        ((1, 5, 576), (1, 5, 9, 64), Shard(2), "cut at 288.*unit=64"),
        ((4, 6), (24,), Shard(1), "merged behind dim 0"),
        ((6,), (2, 3), Shard(0, unit=2), "cut at 4.*unit=3"),
    ],
)
def test_a_cut_inside_an_element_of_the_view_is_refused(
    shape: tuple[int, ...], viewed: tuple[int, ...], placement: Placement, said: str
) -> None:
    with pytest.raises(CannotView) as refused:
        view_layout(shape, viewed, Layout(LINE2, (placement,)))
    assert re.search(said, refused.value.reason), refused.value.reason


def assert_same_elements(
    shape: tuple[int, ...],
    viewed: tuple[int, ...],
    mesh: DeviceMesh,
    before: list[Placement],
    after: list[Placement],
) -> None:
    """Each device's piece of the view has the elements of its piece of the tensor, in the same order."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for device in mesh.devices:
        coordinate = mesh.coordinate(device)
        assert coordinate is not None
        box = local_box(shape, Layout(mesh, tuple(before)), coordinate)
        box_of_view = local_box(viewed, Layout(mesh, tuple(after)), coordinate)
        piece = whole[tuple(slice(*ends) for ends in box)]
        piece_of_view = whole.reshape(viewed)[tuple(slice(*ends) for ends in box_of_view)]
        assert piece.flatten().tolist() == piece_of_view.flatten().tolist()


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes with equally many elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 5]), min_size=1, max_size=5))

    def grouped() -> tuple[int, ...]:
        sizes = [1]
        for factor in factors:
            if draw(st.booleans()):
                sizes.append(factor)
            else:
                sizes[-1] *= factor
        return tuple(sizes[draw(st.integers(0, 1)) if sizes[0] == 1 and len(sizes) > 1 else 0 :])

    return grouped(), grouped()


@settings(max_examples=150)
@given(views(), st.data())
def test_pieces_of_a_view_are_views_of_pieces(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    shape, viewed = shapes
    mesh = data.draw(st.sampled_from([LINE2, LINE3, GRID]))
    cuts = st.builds(Shard, st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2, 3, 4]))
    placements = [data.draw(st.one_of(st.just(Replicate()), cuts)) for _ in range(mesh.ndim)]
    try:
        layout = view_layout(shape, viewed, Layout(mesh, tuple(placements)))
    except CannotView:
        return
    assert_same_elements(shape, viewed, mesh, placements, list(layout.placements))


@settings(max_examples=150)
@given(views(), st.sampled_from([LINE2, LINE3]), st.data())
def test_whatever_can_be_viewed_is(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], mesh: DeviceMesh, data: st.DataObject
) -> None:
    """Where some Shard(dim, unit=) of the view gives every device the elements that it has, one is found."""
    shape, viewed = shapes
    dim = data.draw(st.integers(0, len(shape) - 1))
    placement = Shard(dim, data.draw(st.sampled_from([1, 1, 2, 3])))
    possible = [
        Shard(d, unit)
        for d, size in enumerate(viewed)
        for unit in sorted({1, size, *(n for n in range(2, size) if size % n == 0)})
        if _same_elements(shape, viewed, mesh, placement, Shard(d, unit))
    ]
    if possible:
        view_layout(shape, viewed, Layout(mesh, (placement,)))


def _same_elements(
    shape: tuple[int, ...], viewed: tuple[int, ...], mesh: DeviceMesh, before: Placement, after: Placement
) -> bool:
    try:
        assert_same_elements(shape, viewed, mesh, [before], [after])
    except AssertionError:
        return False
    return True


@given(views())
def test_groups_have_equal_products(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    shape, viewed = shapes
    groups = dim_groups(shape, viewed)
    for ins, outs in groups:
        assert math.prod(shape[d] for d in ins) == math.prod(viewed[d] for d in outs)
    assert math.prod(shape[d] for ins, _ in groups for d in ins) == math.prod(shape)
