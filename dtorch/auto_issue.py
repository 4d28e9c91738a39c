"""Carries out what ``auto_plan`` decided: convert, run, and bring back what was written on a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dtorch.auto import Log, Moved
from dtorch.auto_plan import memory_order, repeated_dims
from dtorch.graph import Graph
from dtorch.issue import Entry, issue, make_entry, transfer
from dtorch.op_plan import OpPlan, SameTensor
from dtorch.overlap import memory_bytes
from dtorch.propagate import propagate
from dtorch.rules.call import op_of
from dtorch.shapes import is_contiguous, is_dense
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Shard
from dtorch_runtime.wire.records import Slot

aten = torch.ops.aten


class AutoEntry:
    """An ``AutoPlan`` made ready for one session: what the cache of the scope holds."""

    __slots__ = ("conversions", "entry", "is_view", "moves", "written_back")

    def __init__(
        self,
        entry: Entry,
        conversions: tuple[tuple[int, Layout], ...],
        written_back: tuple[int, ...],
        moves: tuple[Moved, ...],
        is_view: bool,
    ) -> None:
        self.entry = entry
        self.conversions = conversions
        self.written_back = written_back
        self.moves = moves
        #: Whether the results alias the first input.
        self.is_view = is_view


def issue_converted(
    cls: type[torch.Tensor],
    found: AutoEntry,
    log: Log,
    graph: Graph,
    given: Sequence[Any],
    location: int,
    draw_seed: Callable[[], int],
) -> Any:
    """Issue a call on converted inputs and return what the user gets.

    What it wrote to is the tensor given; views of a converted copy are linked to the tensor given.
    """
    if found.is_view:
        return _issue_view(cls, found, log, graph, given[0], location)
    tensors = list(given)
    for index, layout in found.conversions:
        tensors[index] = converted(cls, tensors[index], layout, location)
    result = issue(cls, found.entry, graph, tensors, location, draw_seed)
    log.add(found.moves, location, "auto")
    if not found.written_back:
        return result
    targets = {}
    for index in found.written_back:
        target, copy = given[index], tensors[index]
        targets[id(copy)] = target
        copy_into(cls, target, converted(cls, copy, target._spec.layout, location), location)
    if result is None:
        torch._C._increment_version([given[index] for index in found.written_back])
    if isinstance(result, list | tuple):
        return type(result)(targets.get(id(item), item) for item in result)
    return targets.get(id(result), result)


def _issue_view(
    cls: type[torch.Tensor], found: AutoEntry, log: Log, graph: Graph, base: Any, location: int
) -> Any:
    """Views of a mirror of ``base``: the one that other views have, or a new one."""
    from dtorch.linked import Mirror, link_results  # a subclass of the tensor, whose dispatch issues views

    if found.entry.func is aten.as_strided.default:
        refuse_part_of_memory(base, "as_strided")
    layout = dict(found.conversions)[0]
    mirror = Mirror.of(base, layout)
    if mirror is None:
        name = op_of(found.entry.func).name
        once = unrepeated(base)
        mirror = Mirror(once, mirrored(cls, once, layout, location), name)
        log.add(found.moves, location, "auto")
    copy = mirror.copy
    if copy._spec.shape != base._spec.shape:
        copy = aten.expand.default(copy, base._spec.shape)
    result = issue(cls, found.entry, graph, (copy,), location)
    return link_results(result, base, mirror)


def unrepeated(base: Any) -> Any:
    """An expanded tensor without its repetitions, which a copy would have in memory of their own; else itself."""
    for dim in repeated_dims(base._spec):
        base = aten.slice.Tensor(base, dim, 0, 1)
    return base


def is_entangled(found: AutoEntry, tensors: Sequence[Any]) -> bool:
    """Whether an op on lists writes to memory that it uses at another position too, so that the order counts."""
    written = found.entry.plan.mutates
    if len(written) < 2:
        return False
    roots = [tensor._handle.root for tensor in tensors]
    return any(roots.count(roots[index]) > 1 for index in written)


def one_by_one(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of an op on lists for each position of the first list."""
    length = len(args[0])
    for position in range(length):

        def part(value: Any, at: int = position) -> Any:
            is_list = isinstance(value, list | tuple) and len(value) == length
            return value[at : at + 1] if is_list else value

        yield tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()}


def converted(cls: type[torch.Tensor], tensor: Any, layout: Layout, location: int) -> Any:
    """A copy with another layout, its dims in the same order in memory; see ``auto_plan.converted_spec``."""
    order = memory_order(tensor._spec)
    if order is None:
        return transfer(cls, tensor, layout, location)
    placements = tuple(
        Shard(order.index(p.dim), p.unit) if isinstance(p, Shard) else p for p in layout.placements
    )
    rows = _permuted(cls, tensor, order, location)
    moved = transfer(cls, rows, Layout(layout.mesh, placements), location)
    return _permuted(cls, moved, [order.index(dim) for dim in range(len(order))], location)


def mirrored(cls: type[torch.Tensor], tensor: Any, layout: Layout, location: int) -> Any:
    """As ``converted``, for views: a lazy conjugate, or negative, of a copy of what is in memory."""
    spec = tensor._spec
    copy = converted(cls, with_bits(tensor, False, False), layout, location)
    return with_bits(copy, spec.is_conj, spec.is_neg)


def with_bits(tensor: Any, is_conj: bool, is_neg: bool) -> Any:
    """The same memory seen as it is, or as its lazy conjugate or negative."""
    if tensor._spec.is_conj != is_conj:
        tensor = aten._conj.default(tensor)
    return tensor if tensor._spec.is_neg == is_neg else aten._neg_view.default(tensor)


def _permuted(cls: type[torch.Tensor], tensor: Any, order: list[int], location: int) -> Any:
    graph: Graph = tensor._handle.graph
    key = ("permute", tensor._spec, tuple(order))
    entry = graph.entries.get(key)
    if entry is None:
        plan = propagate(aten.permute.default, (tensor._spec, order), {})
        entry = graph.entries[key] = make_entry(graph.session, plan, aten.permute.default, 1)
    return issue(cls, entry, graph, (tensor,), location)


def copy_into(cls: type[torch.Tensor], target: Any, source: Any, location: int) -> None:
    """Copy local pieces of ``source`` into those of ``target``, which has the same layout, partial terms included."""
    graph: Graph = target._handle.graph
    key = ("copy_into", target._spec, source._spec)
    entry = graph.entries.get(key)
    if entry is None:
        plan = OpPlan(
            op="aten::copy_.default",
            args=(Slot(0), Slot(1)),
            layouts=(target._spec.layout,),
            outputs=(SameTensor(0),),
            mutates=(0,),
        )
        entry = graph.entries[key] = make_entry(graph.session, plan, aten.copy_.default, 2)
    issue(cls, entry, graph, (target, source), location)


def refuse_part_of_memory(tensor: Any, name: str) -> None:
    """A converted copy has the elements of a tensor, and not what else is in the memory of its base.

    Raises:
        PlacementError: the tensor is a part of its memory.
    """
    if not is_whole_memory(tensor):
        raise PlacementError(
            f"{name} of a view of a tensor that is cut cannot be computed: a copy on other devices has not the same "
            f"memory around it. Allowed is a tensor that is no view; write {name} on the base, or index it"
        )


def is_whole_memory(tensor: Any) -> bool:
    """Whether a tensor is all that is in its memory."""
    handle, spec = tensor._handle, tensor._spec
    if handle.root is handle:
        return is_dense(spec.shape, spec.stride)
    return (
        handle.offset_bytes == 0
        and is_contiguous(spec.shape, spec.stride)
        and memory_bytes(tensor) == spec.num_bytes
    )
