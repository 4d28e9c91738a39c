"""How a tensor gets from one layout to another: a pure plan, the cheapest sequence of exchanges.

A tensor without partial terms gets anywhere in one exchange, in which each device receives what it lacks and nothing
else. Terms can be reduced at once, each device for itself, which is one step; or in two, each device a share of the
result, which is then gathered: reduce-scatter and all-gather (Rabenseifner 2004, "Optimization of collective reduction
operations"). A piece that many devices want and few have can likewise be scattered and then gathered (van de Geijn
1994, "On global combine operations"). The shares are boxes, not placements: any mesh and any layout have them.

The ops of partial axes do not commute, and inner axes are reduced first: the maximum of sums is not the sum of maxima.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from dtorch_runtime.ir.exchange import Axes, Holding, Step, busiest_bytes, exchange, spread_inner
from dtorch_runtime.ir.layout import Layout, all_boxes
from dtorch_runtime.ir.placement import Partial, ReduceOp

#: What a step costs beside its bytes, in bytes of the busiest device (measured among CPU devices of one host).
STEP_COST_BYTES = 1024 * 1024

_Steps: TypeAlias = tuple[Step, ...]
#: Neighbouring partial axes of the same op.
_Group: TypeAlias = tuple[ReduceOp, tuple[int, ...]]


def plan_redistribute(
    shape: Sequence[int],
    source: Layout,
    target: Layout,
    *,
    itemsize_bytes: int,
    node_of: Mapping[int, str] | None = None,
) -> tuple[Step, ...]:
    """The steps that bring a tensor of global ``shape`` from ``source`` to ``target``.

    Args:
        shape: the global shape.
        itemsize_bytes: size of one element, which decides between few steps and few bytes; 0 asks for few steps.
        node_of: the node of each device; a copy on the own node is preferred where there is a choice.

    Every device of the two meshes can take its own part from the plan; all of them compute the same plan.
    """
    return _Planner(tuple(shape), source, target, itemsize_bytes, node_of or {}).plan()


def cost_bytes(steps: Sequence[Step], itemsize_bytes: int) -> int:
    """What a plan costs: bytes through the busiest device, in or out, and the price of each step that moves any."""
    return sum(
        max(busiest_bytes(step, itemsize_bytes)) + (0 if step.is_local else STEP_COST_BYTES) for step in steps
    )


@dataclass(frozen=True, slots=True)
class _Begun:
    """Steps so far, and who holds what after them, on the mesh of the source."""

    steps: _Steps
    holding: Holding


class _Planner:
    """Plans one redistribution.

    Attributes:
        kept: the outer partial axes of source and target that stay as they are.
        reduced: the groups of partial axes of the source inside of these.
        made: the groups of the target inside of these.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        source: Layout,
        target: Layout,
        itemsize_bytes: int,
        node_of: Mapping[int, str],
    ) -> None:
        self._source = source
        self._target = target
        self._held = Holding(source.mesh, tuple(all_boxes(shape, source)))
        self._goal = Holding(target.mesh, tuple(all_boxes(shape, target)))
        self._itemsize_bytes = itemsize_bytes
        #: No device sends or receives more in one step.
        self._most_bytes = math.prod(shape) * itemsize_bytes * max(source.mesh.size(), target.mesh.size())
        self._node_of = node_of
        self._reduced = _groups(source)
        self._made = _groups(target)
        self._kept = self._take_kept()

    def _take_kept(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        kept: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        # The innermost group of the source is left to be exchanged term by term.
        while len(self._reduced) > 1 and self._made and self._is_same(self._reduced[0], self._made[0]):
            (_, old), (_, new) = self._reduced.pop(0), self._made.pop(0)
            kept = (kept[0] + old, kept[1] + new)
        return kept

    def _is_same(self, old: _Group, new: _Group) -> bool:
        return old == new and _sizes(self._source, old[1]) == _sizes(self._target, new[1])

    def plan(self) -> _Steps:
        if (self._held, self._source.placements) == (self._goal, self._target.placements):
            return ()
        begun = [_Begun((), self._held)]
        while len(self._reduced) > 1:
            group = self._reduced.pop()
            begun = [after for before in begun for after in self._reduce_inner(before, group)]
        last = self._reduced[0] if self._reduced else None
        plans = [(*before.steps, *rest) for before in begun for rest in self._finish(before.holding, last)]
        best = plans[0] if len(plans) == 1 else min(plans, key=self._cost)
        inner = self._made[1:]
        return (*best, spread_inner(self._goal, inner)) if inner else best

    def _cost(self, steps: _Steps) -> int:
        return cost_bytes(steps, self._itemsize_bytes)

    def _reduce_inner(self, begun: _Begun, group: _Group) -> Iterator[_Begun]:
        """Ways to reduce an inner group on the source's mesh: every device the whole, or each its share."""
        op, axes = group
        outer = self._kept[0] + tuple(axis for _, others in self._reduced for axis in others)
        roles = Axes(kept=(outer, outer), terms=(axes, ()))
        for goal in (begun.holding, begun.holding.split(outer)):
            step = exchange(begun.holding, goal, op, roles, self._node_of)
            yield _Begun((*begun.steps, step), goal)

    def _finish(self, holding: Holding, group: _Group | None) -> Iterator[_Steps]:
        """Ways from what the source's mesh holds, with one group of terms left, to the goal."""
        direct = self._move(holding, group)
        yield direct
        if self._is_best(direct, group):
            return
        op, axes = group or (None, ())
        kept = self._kept[1]
        for shares in self._shares_of_goal():
            step = exchange(holding, shares, op, Axes(self._kept, (axes, ())), self._node_of)
            yield (step, *self._move(shares, None, (kept, kept)))
        own = holding.split(self._kept[0])
        if group is not None and own != shares:
            step = exchange(holding, own, op, Axes((self._kept[0], self._kept[0]), (axes, ())), self._node_of)
            yield from ((step, *rest) for rest in self._finish(own, None))

    def _shares_of_goal(self) -> list[Holding]:
        """The goal, each box shared by all devices that hold it, and shared along the axes that become partial."""
        shares = [self._goal.split(self._kept[1])]
        if self._made:
            _, made = self._made[0]
            others = [axis for axis in range(self._goal.mesh.ndim) if axis not in made]
            shares += [self._goal.split(others, dim) for dim in range(len(self._goal.boxes[0]))]
        return shares

    def _is_best(self, direct: _Steps, group: _Group | None) -> bool:
        """Whether no other way can be cheaper than the direct one."""
        if all(step.is_local for step in direct):
            return True
        if self._made:
            return False
        if self._most_bytes <= STEP_COST_BYTES:
            return True
        received, sent = busiest_bytes(direct[-1], self._itemsize_bytes)
        # Where nothing is reduced, a device receives only what it lacks.
        return max(received, sent) <= STEP_COST_BYTES or (group is None and sent <= received)

    def _move(
        self,
        holding: Holding,
        group: _Group | None,
        kept: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> _Steps:
        """To the goal with as few steps as can be: one, or two where terms of one op become terms of another."""
        op, axes = group or (None, ())
        roles = self._kept if kept is None else kept
        if not self._made or (group is not None and not self._joins(group)):
            resolved = exchange(holding, self._goal, op, Axes(roles, (axes, ())), self._node_of)
            if not self._made:
                return (resolved,)
            return (resolved, *self._move(self._goal, None, (self._kept[1], self._kept[1])))
        new_op, new_axes = self._made[0]
        return (exchange(holding, self._goal, new_op, Axes(roles, (axes, new_axes)), self._node_of),)

    def _joins(self, group: _Group) -> bool:
        """Whether terms of the source become terms of the target as they are. Averages only one for one."""
        (op, old), (new_op, new) = group, self._made[0]
        sizes = math.prod(_sizes(self._source, old)), math.prod(_sizes(self._target, new))
        return op == new_op and (op != "avg" or sizes[0] == sizes[1])


def _groups(layout: Layout) -> list[_Group]:
    """Partial axes, outermost first, neighbours with the same op together."""
    axes = [(p.op, axis) for axis, p in enumerate(layout.placements) if isinstance(p, Partial)]
    return [(op, tuple(axis for _, axis in items)) for op, items in groupby(axes, key=lambda item: item[0])]


def _sizes(layout: Layout, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(layout.mesh.shape[axis] for axis in axes)
