"""A call that the cache does not have: planned, made ready for its session, and put there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dtorch.auto import Moved
from dtorch.auto_issue import AutoEntry
from dtorch.auto_plan import moved, plan_cheapest
from dtorch.graph import Graph, is_default_mesh
from dtorch.issue import Entry, make_entry
from dtorch.op_plan import NewOutput, OpPlan
from dtorch.probe import refuse_dtypes
from dtorch.propagate import propagate
from dtorch.rules.call import Call, op_of
from dtorch.rules.explain import is_trial
from dtorch.rules.pointwise import is_pointwise
from dtorch.spec import Spec, contiguous_stride, intern_spec
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Replicate

#: The cache is emptied when it has grown to this: a decode loop makes new shapes at every token.
_MAX_ENTRIES = 100_000


def resized_entry(key: list[Any], tensors: list[Any], graph: Graph) -> Entry | None:
    """The entry of a call whose sizes are new, made of that of the same call with other sizes; put into the cache.

    Only for calls whose template and placements cannot depend on sizes: see ``is_pointwise``.
    """
    spec: Spec = tensors[0]._spec
    sizeless = _without_sizes(key, [tensor._spec for tensor in tensors])
    like: Entry | None = graph.entries.get(sizeless) if sizeless is not None else None
    if like is None:
        return None
    made = like.spec
    if made.dtype is spec.dtype and made.layout == spec.layout:
        result = spec
    else:
        result = intern_spec(spec.shape, made.dtype, made.layout)
    graph.session.counts.num_misses += 1
    _make_room(graph)
    entry = graph.entries[tuple(key)] = like.resized(result)
    return entry


def _without_sizes(key: Sequence[Any], specs: Sequence[Spec]) -> tuple[Any, ...] | None:
    """The key of a call without the sizes of its tensors; None when they differ, have gaps or are empty."""
    first = specs[0]
    shape = first.shape
    if 0 in shape or not first.is_resolved or first.stride != contiguous_stride(shape):
        return None
    if any(spec is not first for spec in specs):
        return None
    return (
        "any size",
        len(shape),
        first.dtype,
        first.layout,
        *[... if item is first else item for item in key],
    )


def _make_room(graph: Graph) -> None:
    if len(graph.entries) >= _MAX_ENTRIES:
        graph.entries.clear()


def known_auto(key: tuple[Any, ...], graph: Graph) -> AutoEntry | None:
    """The entry of a call that was planned with converted inputs before."""
    found: AutoEntry | None = graph.entries.get(("auto", key, torch.get_default_dtype()))
    return found


def entry_of(
    cls: type[torch.Tensor],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Any],
    key: tuple[Any, ...],
    graph: Graph,
    converts: bool,
) -> Any:
    """The entry of a call that has none: planned strictly, or else, when ``converts``, on converted inputs."""
    refused: PlacementError | None = None
    token = is_trial.set(converts)
    try:
        plan, is_settled = _plan(cls, func, args, kwargs, tensors)
    except PlacementError as error:
        if not converts:
            raise
        refused = error
    finally:
        is_trial.reset(token)
    _make_room(graph)
    if refused is not None:
        try:
            entry: Any = _auto_entry(cls, func, args, kwargs, tensors, graph, refused)
        except PlacementError as error:
            if error is refused:
                _plan(cls, func, args, kwargs, tensors)  # raises the same with its whole text
            raise
        graph.entries["auto", key, torch.get_default_dtype()] = entry
    else:
        dependence = _dtype_dependence(plan, tensors)
        given = [tensor._spec for tensor in tensors]
        entry = graph.entries[key] = make_entry(graph.session, plan, func, len(tensors), dependence, given)
        if is_settled and entry.is_direct and not entry.is_view and is_pointwise(op_of(func)):
            sizeless = _without_sizes(key, given)
            if sizeless is not None:
                graph.entries[sizeless] = entry
        if plan.conversions:
            entry.moves = _moves(cls, func, args, kwargs, tensors, plan)
    return entry


def _plan(
    cls: type[torch.Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
) -> tuple[OpPlan, bool]:
    """The plan, and whether other sizes need no look at the dtypes."""
    given = [tensor._spec for tensor in tensors]
    moves = _moves_to_one_mesh(given)
    if moves:
        specs = list(given)
        for index, layout in moves:
            specs[index] = intern_spec(specs[index].shape, specs[index].dtype, layout)
        plan, is_settled = _propagate(cls, func, args, kwargs, specs)
        if not any(index in plan.mutates for index, _ in moves):
            return dataclasses.replace(plan, conversions=(*moves, *plan.conversions)), is_settled
    return _propagate(cls, func, args, kwargs, given)


def _moves(
    cls: type[torch.Tensor],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Any],
    plan: OpPlan,
) -> tuple[Moved, ...]:
    """The conversions of a strict plan that move bytes: those that are documented."""
    given = [tensor._spec for tensor in tensors]
    layouts = dict(plan.conversions)
    specs = [
        intern_spec(s.shape, s.dtype, layouts.get(index, s.layout), s.stride) for index, s in enumerate(given)
    ]
    remaining = iter(specs)
    call = Call(op_of(func), _to_specs(cls, args, remaining), _to_specs(cls, kwargs, remaining))
    return moved(call, given, layouts.items())


def _auto_entry(
    cls: type[torch.Tensor],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Any],
    graph: Graph,
    refused: PlacementError,
) -> AutoEntry:
    """The cheapest way to run a call that was refused, when the scope allows to move its inputs."""
    specs = [tensor._spec for tensor in tensors]
    moves = dict(_moves_to_one_mesh(specs))
    for index, layout in moves.items():
        specs[index] = intern_spec(specs[index].shape, specs[index].dtype, layout)
    remaining = iter(specs)
    args, kwargs = _to_specs(cls, args, remaining), _to_specs(cls, kwargs, remaining)
    found = plan_cheapest(func, args, kwargs, refused)
    if any(index in found.plan.mutates for index in moves):
        raise refused
    refuse_dtypes(Call(op_of(func), args, kwargs), found.plan)
    entry = make_entry(graph.session, found.plan, func, len(tensors), given=specs)
    conversions = (moves | dict(found.conversions)).items()
    is_view = op_of(func).is_view and bool(found.conversions)
    return AutoEntry(entry, tuple(conversions), found.written_back, found.moves, is_view)


def _propagate(
    cls: type[torch.Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], specs: list[Spec]
) -> tuple[OpPlan, bool]:
    remaining = iter(specs)
    args, kwargs = _to_specs(cls, args, remaining), _to_specs(cls, kwargs, remaining)
    plan = propagate(func, args, kwargs)
    return plan, refuse_dtypes(Call(op_of(func), args, kwargs), plan)


def _moves_to_one_mesh(specs: list[Spec]) -> tuple[tuple[int, Layout], ...]:
    """Which inputs follow the others to their mesh: those on the default mesh, which nobody named.

    Model code makes masks and positions with ``torch.arange(..., device=x.device)``, which knows no mesh.
    """
    meshes = {spec.layout.mesh for spec in specs}
    named = [mesh for mesh in meshes if not is_default_mesh(mesh)]
    if len(meshes) < 2 or len(named) != 1:
        return ()
    layout = Layout(named[0], (Replicate(),) * named[0].ndim)
    return tuple((index, layout) for index, spec in enumerate(specs) if is_default_mesh(spec.layout.mesh))


def _to_specs(cls: type[torch.Tensor], value: Any, specs: Iterator[Spec]) -> Any:
    """The arguments with each tensor replaced by the next of ``specs``."""
    kind = type(value)
    if kind is cls:
        return next(specs)
    if kind is list or kind is tuple:
        return kind(_to_specs(cls, item, specs) for item in value)
    if kind is dict:
        return {name: _to_specs(cls, item, specs) for name, item in value.items()}
    return value


def _dtype_dependence(plan: OpPlan, tensors: list[Any]) -> torch.dtype | None:
    """The default dtype, when results of this plan have it because no input is a floating point one."""
    if any(_is_inexact(tensor._spec) for tensor in tensors):
        return None
    is_inexact = any(_is_inexact(output.spec) for output in plan.outputs if isinstance(output, NewOutput))
    return torch.get_default_dtype() if is_inexact else None


def _is_inexact(spec: Spec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex
