"""How a tensor gets from one layout to another: a pure plan of boxes to copy and to reduce.

A plan is a tuple of ``Step``. In a step each destination device assembles its new local piece from boxes of
the local pieces of source devices; boxes that several partial terms contribute to are reduced, in the order
given, so that every rank computes the same bits. A copy is a reduction of one term, so all-gather,
all-to-all, reduce-scatter, all-reduce, broadcast and point-to-point transfers are the same plan with other
boxes, on any mesh, with uneven and empty pieces included.

All-reduce of large tensors over more than two ranks is planned as reduce-scatter then all-gather
(Rabenseifner 2004, "Optimization of collective reduction operations").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from dtorch_runtime.ir.layout import Box, Layout, box_shape, intersect, local_box, num_elements, relative
from dtorch_runtime.ir.placement import Partial, Placement, ReduceOp, Replicate, Shard

#: From this size on, an all-reduce among three or more ranks is split in two steps.
TWO_STEP_REDUCE_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class Source:
    """One term: a box of the local piece of ``device``, in that piece's coordinates."""

    device: int
    box: Box


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the destination's new local piece, and the terms that are reduced into it."""

    box: Box
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What one destination device assembles: the shape of its new piece, and the boxes that fill it.

    ``fill`` is the value of elements that no piece covers (only where a replicated value becomes partial).
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    fill: float | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """What one source device gives away: its ``box`` is term ``source_index`` of a piece of ``device``."""

    device: int
    piece_index: int
    source_index: int
    box: Box


@dataclass(frozen=True)
class Step:
    """One exchange. ``parts`` is keyed by destination device; ``sends`` by source device, others only."""

    reduce: ReduceOp | None
    parts: Mapping[int, Part]
    sends: Mapping[int, tuple[Send, ...]] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        sends: dict[int, list[Send]] = defaultdict(list)
        for device, part in self.parts.items():
            for piece_index, piece in enumerate(part.pieces):
                for source_index, source in enumerate(piece.sources):
                    if source.device != device:
                        sends[source.device].append(Send(device, piece_index, source_index, source.box))
        object.__setattr__(self, "sends", {device: tuple(items) for device, items in sends.items()})

    @property
    def is_local(self) -> bool:
        """Whether no device needs anything from another."""
        return not self.sends

    @property
    def devices(self) -> frozenset[int]:
        """Every device that takes part."""
        return frozenset(self.parts) | frozenset(self.sends)

    def bytes_by_link(self, itemsize_bytes: int) -> dict[tuple[int, int], int]:
        """Bytes that cross from one device to another, keyed by (source, destination)."""
        links: dict[tuple[int, int], int] = defaultdict(int)
        for source, sends in self.sends.items():
            for send in sends:
                links[source, send.device] += num_elements(box_shape(send.box)) * itemsize_bytes
        return dict(links)


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
        itemsize_bytes: size of one element; decides between one and two steps for an all-reduce.
        node_of: the node of each device; a copy on the own node is preferred where there is a choice.

    Every device of the two meshes can take its own part from the plan; all of them compute the same plan.
    """
    shape = tuple(shape)
    nodes = node_of or {}
    same_mesh = source.mesh.devices == target.mesh.devices and source.mesh.shape == target.mesh.shape
    kept = _kept_partial(source, target) if same_mesh else frozenset()
    whole_target = _without_new_partial(target, kept)
    steps: list[Step] = []
    current = source
    groups = _reduction_groups(source, kept)
    for index, (op, axes) in enumerate(groups):
        last = index == len(groups) - 1
        resolved = _replace(current, dict.fromkeys(axes, Replicate()))
        goal = whole_target if last else resolved
        if last and same_mesh:
            goal_after_scatter = _scatter_layout(shape, current, whole_target, axes, itemsize_bytes)
            if goal_after_scatter is not None:
                steps.append(_exchange(shape, current, goal_after_scatter, op, axes, nodes))
                current = goal_after_scatter
                continue
        steps.append(_exchange(shape, current, goal, op, axes, nodes))
        current = goal
    if current != whole_target or not (same_mesh or steps):
        steps.append(_exchange(shape, current, whole_target, None, (), nodes))
    if whole_target != target:
        steps.append(_spread_partial(shape, whole_target, target))
    return tuple(steps)


def _kept_partial(source: Layout, target: Layout) -> frozenset[int]:
    """Partial axes of both that stay as they are.

    Inner axes are reduced first: the maximum of sums is not the sum of maxima. So an axis stays partial only while
    every axis before it that is made or resolved here has the same op.
    """
    kept = set()
    changing: set[ReduceOp] = set()
    for axis, (old, new) in enumerate(zip(source.placements, target.placements, strict=True)):
        if isinstance(old, Partial) and old == new and changing <= {old.op}:
            kept.add(axis)
        else:
            changing |= {p.op for p in (old, new) if isinstance(p, Partial)}
    return frozenset(kept)


def _without_new_partial(target: Layout, kept: frozenset[int]) -> Layout:
    new = [axis for axis, p in enumerate(target.placements) if isinstance(p, Partial) and axis not in kept]
    return _replace(target, dict.fromkeys(new, Replicate()))


def _replace(layout: Layout, changes: Mapping[int, Placement]) -> Layout:
    return Layout(layout.mesh, tuple(changes.get(axis, p) for axis, p in enumerate(layout.placements)))


def _reduction_groups(source: Layout, kept: frozenset[int]) -> list[tuple[ReduceOp, tuple[int, ...]]]:
    """Partial axes to resolve, last axis first, neighbours with the same op together."""
    axes = [
        (p.op, axis)
        for axis, p in enumerate(source.placements)
        if isinstance(p, Partial) and axis not in kept
    ]
    groups = groupby(reversed(axes), key=lambda item: item[0])
    return [(op, tuple(axis for _, axis in items)) for op, items in groups]


def _scatter_layout(
    shape: tuple[int, ...], current: Layout, goal: Layout, axes: tuple[int, ...], itemsize_bytes: int
) -> Layout | None:
    """The sharded layout in the middle of a large all-reduce over one axis, or None when one step is better."""
    if len(axes) != 1 or not isinstance(goal.placements[axes[0]], Replicate):
        return None
    num_ranks = current.mesh.shape[axes[0]]
    if num_ranks < 3 or num_elements(shape) * itemsize_bytes < TWO_STEP_REDUCE_BYTES:
        return None
    taken = {p.dim for p in goal.placements if isinstance(p, Shard)}
    free = [dim for dim in range(len(shape)) if dim not in taken and shape[dim] >= num_ranks]
    if not free:
        return None
    return _replace(goal, {axes[0]: Shard(max(free, key=lambda dim: shape[dim]))})


def _exchange(
    shape: tuple[int, ...],
    source: Layout,
    target: Layout,
    op: ReduceOp | None,
    reduced: tuple[int, ...],
    node_of: Mapping[int, str],
) -> Step:
    kept = tuple(a for a, p in enumerate(source.placements) if isinstance(p, Partial) and a not in reduced)
    holders = _holders(shape, source, reduced, kept)
    parts = {}
    for rank, device in enumerate(target.mesh.devices):
        coordinate = target.mesh.coordinate(device)
        assert coordinate is not None
        box = local_box(shape, target, coordinate)
        same_kept = tuple(coordinate[axis] for axis in kept)
        pieces = []
        for source_box, terms in holders[same_kept].items():
            common = intersect(source_box, box)
            if common is not None:
                inner = relative(common, source_box)
                chosen = (_choose(devices, device, rank, node_of) for devices in terms.values())
                pieces.append(
                    Piece(relative(common, box), tuple(Source(chosen_, inner) for chosen_ in chosen))
                )
        parts[device] = Part(box_shape(box), tuple(pieces))
    return Step(op, parts)


def _holders(
    shape: tuple[int, ...], source: Layout, reduced: tuple[int, ...], kept: tuple[int, ...]
) -> dict[tuple[int, ...], dict[Box, dict[tuple[int, ...], list[int]]]]:
    """Who holds what: kept coordinate -> box of the global tensor -> partial coordinate -> equal devices."""
    holders: dict[tuple[int, ...], dict[Box, dict[tuple[int, ...], list[int]]]] = {}
    for device in source.mesh.devices:
        coordinate = source.mesh.coordinate(device)
        assert coordinate is not None
        term = tuple(coordinate[axis] for axis in reduced)
        same_kept = tuple(coordinate[axis] for axis in kept)
        boxes = holders.setdefault(same_kept, {})
        boxes.setdefault(local_box(shape, source, coordinate), {}).setdefault(term, []).append(device)
    return holders


def _choose(devices: Sequence[int], device: int, rank: int, node_of: Mapping[int, str]) -> int:
    """Which of several devices that hold the same bits gives them: itself, its own node, then in turn."""
    if device in devices:
        return device
    near = [d for d in devices if node_of.get(d) == node_of.get(device)] or devices
    return near[rank % len(near)]


#: What a rank contributes so that the reduction does not change; None: every rank gives the whole value.
_IDENTITY: dict[str, float | None] = {"sum": 0.0, "prod": 1.0, "avg": None, "max": None, "min": None}


def _spread_partial(shape: tuple[int, ...], source: Layout, target: Layout) -> Step:
    """Replicate -> Partial: rank 0 of the axis keeps the value and the others hold the identity."""
    parts = {}
    for device in target.mesh.devices:
        coordinate = target.mesh.coordinate(device)
        assert coordinate is not None
        fills = [
            _IDENTITY[new.op]
            for axis, (old, new) in enumerate(zip(source.placements, target.placements, strict=True))
            if isinstance(new, Partial) and old != new and coordinate[axis] != 0
        ]
        # Later axes are reduced first, so the identity of the last axis is the one that must reach it.
        fill = next((value for value in reversed(fills) if value is not None), None)
        local = box_shape(local_box(shape, target, coordinate))
        whole = tuple((0, size) for size in local)
        keep = () if fill is not None else (Piece(whole, (Source(device, whole),)),)
        parts[device] = Part(local, keep, fill)
    return Step(None, parts)
