"""The one algorithm of views: which dims of a shape become which dims of another, and where the cuts go.

``view`` keeps the elements in row-major order. Dims fall into groups with equal products, e.g. (1, s, 576) viewed
as (1, s, 9, 64) has the groups (s) -> (s) and (576) -> (9, 64). In a group only the first dim may be cut, because
only then a piece is one run of elements; the run's ends must be multiples of what lies behind the first dim of the
result, and then cut that dim. Units follow: ``Shard(2, unit=192)`` of 576 is ``Shard(2, unit=3)`` of 9.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dtorch.rules.equation import dim_cuts, layout_of, nested_cuts
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Placement, Shard

Shape = tuple[int, ...]


@dataclass(slots=True)
class CannotView(Exception):
    """A cut does not survive the view."""

    dim: int
    reason: str


@lru_cache(maxsize=4096)
def dim_groups(shape: Shape, viewed: Shape) -> tuple[tuple[Shape, Shape], ...]:
    """Groups of dims with equal products, dims of size 1 left out. Neither shape has a 0."""
    left = [dim for dim, size in enumerate(shape) if size != 1]
    right = [dim for dim, size in enumerate(viewed) if size != 1]
    groups = []
    while left and right:
        ins, outs = [left.pop(0)], [right.pop(0)]
        size_in, size_out = shape[ins[0]], viewed[outs[0]]
        while size_in != size_out:
            if size_in < size_out:
                ins.append(left.pop(0))
                size_in *= shape[ins[-1]]
            else:
                outs.append(right.pop(0))
                size_out *= viewed[outs[-1]]
        groups.append((tuple(ins), tuple(outs)))
    return tuple(groups)


def view_layout(shape: Shape, viewed: Shape, layout: Layout) -> Layout:
    """The layout of a view, such that each device's piece of it is a view of its piece of the tensor.

    Args:
        shape, viewed: global shapes with equal numbers of elements.
        layout: of the tensor.

    Raises:
        CannotView: a cut falls inside a dim of the view.
    """
    placements: list[Placement] = list(layout.placements)
    cut_dims = dict.fromkeys(p.dim for p in placements if isinstance(p, Shard))
    targets: dict[int, int] = {}
    for dim in cut_dims:
        target, units = _cut_in_view(shape, viewed, layout, dim)
        if target in targets.values():
            other = next(d for d, t in targets.items() if t == target)
            raise CannotView(dim, f"dims {other} and {dim} are both cut and become one dim of the view")
        targets[dim] = target
        axes = [axis for axis, p in enumerate(layout.placements) if isinstance(p, Shard) and p.dim == dim]
        for axis, unit in zip(axes, units, strict=True):
            placements[axis] = Shard(target, unit)
    return layout_of(layout.mesh, tuple(placements))


def _cut_in_view(shape: Shape, viewed: Shape, layout: Layout, dim: int) -> tuple[int, list[int]]:
    """The dim of the view that is cut where ``dim`` is, and the unit of each axis that cuts it."""
    cuts = dim_cuts(layout, dim)
    if 0 in shape:
        return _same_dim(shape, viewed, dim), [unit for _, unit in cuts]
    ends_of_dim = nested_cuts(shape[dim], cuts)
    if all(end == shape[dim] for end in ends_of_dim):
        return _all_on_the_first(shape, viewed, dim, [unit for _, unit in cuts])
    ins, outs = next(group for group in dim_groups(shape, viewed) if dim in group[0])
    if dim != ins[0]:
        raise CannotView(
            dim, f"dim {dim} is merged behind dim {ins[0]}, so a piece of it is not one run of elements"
        )
    target = outs[0]
    inner, inner_out = math.prod(shape[d] for d in ins[1:]), math.prod(viewed[d] for d in outs[1:])
    ends = [end * inner for end in ends_of_dim]
    crooked = next((end for end in ends if end % inner_out), None)
    if crooked is not None:
        raise CannotView(
            dim,
            f"dim {dim} is cut at {crooked // inner}, inside an element of dim {target} of the view, "
            f"whose elements span {_ratio(inner_out, inner)} of dim {dim}; "
            f"shard it with unit={math.lcm(inner_out, inner) // inner}",
        )
    wanted = tuple(end // inner_out for end in ends)
    for units in itertools.product(*(_unit_candidates(unit, inner, inner_out, wanted) for _, unit in cuts)):
        found = nested_cuts(viewed[target], tuple((n, u) for (n, _), u in zip(cuts, units, strict=True)))
        if found == wanted:
            return target, list(units)
    raise CannotView(dim, f"no Shard(dim={target}, unit=) of the view cuts it at {list(wanted[:-1])}")


def _ratio(a: int, b: int) -> str:
    return str(a // b) if a % b == 0 else f"{a}/{b}"


def _unit_candidates(unit: int, inner: int, inner_out: int, wanted: Sequence[int]) -> list[int]:
    exact = [unit * inner // inner_out] if unit * inner % inner_out == 0 else []
    return list(dict.fromkeys([*exact, 1, math.gcd(*wanted) or 1, wanted[0] or 1]))


def _all_on_the_first(shape: Shape, viewed: Shape, dim: int, units: list[int]) -> tuple[int, list[int]]:
    """A dim that only the first device has: any dim of the view can say so with a unit of its whole size.

    A batch of one sequence whose tokens were merged, ``[1, s] -> [s] -> [1, s]``, is cut by sequences again: a new dim
    of size 1 in front is what the cut was of.
    """
    num_before = _num_longer(shape, dim)
    ones, old_ones = (_ones_between(dims, num_before) for dims in (viewed, shape))
    if shape[dim] == 1 and ones:
        return ones[min(old_ones.index(dim), len(ones) - 1)], units
    if shape[dim] != 1 and len(ones) > len(old_ones):
        return ones[len(old_ones)], [1] * len(units)
    groups = dim_groups(shape, viewed)
    if not groups:
        raise CannotView(dim, f"dim {dim} has size 1 and the view drops it")
    ins, outs = next((group for group in groups if group[0][-1] >= dim), groups[-1])
    if (dim,) == ins and len(outs) == 1:
        return outs[0], units
    return outs[0], [viewed[outs[0]]] * len(units)


def _num_longer(shape: Shape, dim: int) -> int:
    return sum(size != 1 for size in shape[:dim])


def _ones_between(shape: Shape, num_before: int) -> list[int]:
    """Dims of size 1 that have so many longer dims before them."""
    return [dim for dim, size in enumerate(shape) if size == 1 and _num_longer(shape, dim) == num_before]


def _same_dim(shape: Shape, viewed: Shape, dim: int) -> int:
    """A tensor without elements: only a dim with equal neighbours on one side is known to be the same."""
    if shape[: dim + 1] == viewed[: dim + 1]:
        return dim
    from_end = len(shape) - dim
    if shape[dim:] == viewed[len(viewed) - from_end :]:
        return len(viewed) - from_end
    raise CannotView(dim, f"dim {dim} of a tensor without elements has no certain place in the view")
