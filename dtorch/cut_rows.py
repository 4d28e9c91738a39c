"""Rows of a dim that is cut: more of them at its end, and some of them written. What a cache of keys and values needs.

Cuts are balanced, so a longer dim has other cuts. When a few rows are added each device gives its first ones to the one
before it, and what moves does not grow with the dim. Shapes are global; nothing here is differentiated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from dtorch.graph import Graph
from dtorch.issue import issue, make_entry, transfer
from dtorch.location import capture
from dtorch.meshes import layout_record
from dtorch.op_plan import NewOutput, OpPlan, SameTensor
from dtorch.spec import Spec, intern_spec
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Replicate, Shard, split
from dtorch_runtime.wire.records import Arg, LocalShape, LocalStart, Slot


def appended(x: Any, new: Any, dim: int) -> Any:
    """``torch.cat([x, new], dim)``, cut as ``x``, whose dim ``dim`` is cut along some axes.

    Args:
        new: on the mesh of ``x``, placed as it but for these axes; on them, whole.

    Returns:
        The same values for each placement. Where the rows that a device needs are not those of its neighbour (more
        new ones than it has) the dim is made whole in between.
    """
    spec: Spec = x._spec
    axes = cut_axes(spec, dim)
    count = new.shape[dim]
    if not _is_neighbourly(spec, axes, dim, count) or (
        torch.is_grad_enabled() and (x.requires_grad or new.requires_grad)
    ):
        together: Any = torch.cat([whole_along(x, axes), new], dim)
        return together.redistribute(placements=spec.layout.placements)
    cls, graph = x._symbol_class, x._handle.graph
    location = capture(sys._getframe(1), graph.thread_id)
    first = _first(
        cls, graph, x, dim, math.prod(spec.layout.mesh.shape[axis] for axis in axes), count, location
    )
    target = Layout(_turned(spec.layout.mesh, axes), first._spec.layout.placements)
    following = transfer(cls, first, target, location)
    return _joined(cls, graph, (x, following, new), dim, location)


def written(target: Any, index: Any, source: Any, dim: int) -> None:
    """``target.index_copy_(dim, index, source)``, where ``target`` is cut along ``dim`` on some axes.

    Args:
        index: int64 [rows]; source: [..., rows, ...] on the mesh of ``target``, placed as it but for these axes. On
            them, both are whole.
    """
    graph: Graph = target._handle.graph
    key = ("rows_written", target._spec, index._spec, source._spec, dim)
    entry = graph.entries.get(key)
    if entry is None:
        spec: Spec = target._spec
        plan = OpPlan(
            op="dtorch::rows_written",
            args=(
                Slot(0),
                Slot(1),
                Slot(2),
                dim,
                LocalStart(list(spec.shape), layout_record(spec.layout), dim),
            ),
            layouts=(spec.layout, index._spec.layout, source._spec.layout),
            outputs=(SameTensor(0),),
            mutates=(0,),
        )
        entry = graph.entries[key] = make_entry(graph.session, plan, "rows_written", 3)
    location = capture(sys._getframe(1), graph.thread_id)
    issue(target._symbol_class, entry, graph, (target, index, source), location)


def cut_axes(spec: Spec, dim: int) -> tuple[int, ...]:
    """The mesh axes that cut a dim."""
    placements = enumerate(spec.layout.placements)
    return tuple(axis for axis, p in placements if isinstance(p, Shard) and p.dim == dim)


def whole_along(x: Any, axes: Sequence[int]) -> Any:
    """A tensor that every device along these axes has all of."""
    placements = [Replicate() if axis in axes else p for axis, p in enumerate(x._spec.layout.placements)]
    return x.redistribute(placements=placements)


def _first(
    cls: type[torch.Tensor], graph: Graph, x: Any, dim: int, num_parts: int, count: int, location: int
) -> Any:
    """The first ``count`` rows of each device, as many of each."""
    key = ("rows_first", x._spec, dim, count)
    entry = graph.entries.get(key)
    if entry is None:
        spec: Spec = x._spec
        shape = (*spec.shape[:dim], num_parts * count, *spec.shape[dim + 1 :])
        plan = OpPlan(
            op="dtorch::rows_first",
            args=(Slot(0), dim, count),
            layouts=(spec.layout,),
            outputs=(NewOutput(intern_spec(shape, spec.dtype, spec.layout)),),
        )
        entry = graph.entries[key] = make_entry(graph.session, plan, "rows_first", 1)
    return issue(cls, entry, graph, (x,), location)


def _joined(cls: type[torch.Tensor], graph: Graph, tensors: Sequence[Any], dim: int, location: int) -> Any:
    key = ("rows_joined", *(x._spec for x in tensors), dim)
    entry = graph.entries.get(key)
    if entry is None:
        spec, _, new = (x._spec for x in tensors)
        length = spec.shape[dim]
        made = intern_spec(
            (*spec.shape[:dim], length + new.shape[dim], *spec.shape[dim + 1 :]), spec.dtype, spec.layout
        )
        before, after = list(spec.shape), list(made.shape)
        record = layout_record(spec.layout)
        args: tuple[Arg, ...] = (
            *(Slot(number) for number in range(3)),
            dim,
            length,
            LocalStart(before, record, dim),
            LocalStart(after, record, dim),
            LocalShape(after, record),
        )
        plan = OpPlan(
            op="dtorch::rows_joined",
            args=args,
            layouts=tuple(x._spec.layout for x in tensors),
            outputs=(NewOutput(made),),
        )
        entry = graph.entries[key] = make_entry(graph.session, plan, "rows_joined", 3)
    return issue(cls, entry, graph, tensors, location)


@lru_cache(maxsize=4096)
def _is_neighbourly(spec: Spec, axes: tuple[int, ...], dim: int, count: int) -> bool:
    """Whether each device needs no more than its own rows, the first ``count`` of the next one, and new ones."""
    sizes = [spec.layout.mesh.shape[axis] for axis in axes]
    units = [spec.layout.placements[axis] for axis in axes]
    length = spec.shape[dim]
    if len(set(units)) > 1 or units[0] != Shard(dim):
        return False
    before, after = _pieces(length, sizes), _pieces(length + count, sizes)
    for place, ((start, stop), (new_start, new_stop)) in enumerate(zip(before, after, strict=True)):
        if not start <= new_start <= stop:
            return False
        missing = min(new_stop, length) - stop
        if missing > 0 and (place + 1 == len(before) or missing > min(count, _length(before[place + 1]))):
            return False
    return True


def _pieces(length: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each device's rows start and stop: axes that cut the same dim nest."""
    pieces = [(0, length)]
    for size in sizes:
        pieces = [
            (start + inner, start + outer)
            for start, stop in pieces
            for inner, outer in split(stop - start, size)
        ]
    return pieces


def _length(piece: tuple[int, int]) -> int:
    return piece[1] - piece[0]


@lru_cache(maxsize=1024)
def _turned(mesh: DeviceMesh, axes: tuple[int, ...]) -> DeviceMesh:
    """The mesh in which the pieces of each device, cut over ``axes``, are at the device before it."""
    places = torch.arange(math.prod(mesh.shape)).reshape(mesh.shape)
    order = [*axes, *(axis for axis in range(mesh.ndim) if axis not in axes)]
    moved = places.permute(order)
    turned = moved.flatten(0, len(axes) - 1).roll(1, 0).reshape(moved.shape)
    back = [order.index(axis) for axis in range(mesh.ndim)]
    devices = [mesh.devices[place] for place in turned.permute(back).flatten().tolist()]
    return DeviceMesh.from_flat(mesh.device_type, mesh.shape, devices)
