"""Attention of queries that every device has, to keys that are cut by sequence: flash decoding.

Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference" (2023). Each device computes what its keys
give to all queries, and the results are merged by the log-sum-exp of their scores. What moves is as large as the
result, and not as the keys: the step that decodes a token leaves the cache where it is. Shapes are global.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from dtorch.graph import Graph
from dtorch.issue import issue, make_entry, transfer
from dtorch.location import capture
from dtorch.meshes import layout_record
from dtorch.op_plan import NewOutput, OpPlan
from dtorch.propagate import propagate
from dtorch.spec import Spec, intern_spec
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from dtorch_runtime.wire.records import DTypeArg, LocalStart, Slot

_sdpa = torch.ops.aten.scaled_dot_product_attention.default

#: The layouts of query, key, value and mask, and what comes out.
_Plan: TypeAlias = tuple[tuple[Layout | None, ...], Spec]


def merged_attention(
    tensors: Sequence[Any], axes: tuple[int, ...], is_causal: bool, scale: float | None, enable_gqa: bool
) -> Any:
    """The result, whole along ``axes``; it is not differentiated.

    Args:
        tensors: query [..., heads, queries, features], whole along the axes; key and value
            [..., key heads, keys, features], cut by keys along them; a mask, whole, or None. On one mesh.
        axes: of the mesh.

    Raises:
        PlacementError, RuntimeError: shapes, or the cuts on the other axes, do not fit.
    """
    query = tensors[0]
    specs = tuple(None if x is None else x._spec for x in tensors)
    layouts, made = _plan(*specs, axes, is_causal, enable_gqa)
    placed = [
        x if x is None or layout is None else x.redistribute(placements=layout.placements)
        for x, layout in zip(tensors, layouts, strict=True)
    ]
    graph: Graph = query._handle.graph
    location = capture(sys._getframe(1), graph.thread_id)
    size = query.shape[-1]
    scale = float(scale) if scale is not None else 1 / math.sqrt(size) if size else 1.0
    parts = _part(graph, placed, axes, made, is_causal, scale, location)
    parts = transfer(query._symbol_class, parts, _shifted(made.layout), location)
    return _merged(graph, query._symbol_class, parts, made, location)


def _part(
    graph: Graph,
    tensors: Sequence[Any],
    axes: tuple[int, ...],
    made: Spec,
    is_causal: bool,
    scale: float,
    location: int,
) -> Any:
    """[runs of keys, ..., features + 1]: each device has that of its keys."""
    given = [x for x in tensors if x is not None]
    key = ("attention_part", *(None if x is None else x._spec for x in tensors), axes, is_causal, scale)
    entry = graph.entries.get(key)
    if entry is None:
        mesh = made.layout.mesh
        of_keys: Spec = tensors[1]._spec
        runs = math.prod(mesh.shape[axis] for axis in axes)
        placements = list(_shifted(made.layout).placements)
        for axis in axes:
            placements[axis] = Shard(0)
        spec = intern_spec(
            (runs, *made.shape[:-1], made.shape[-1] + 1),
            torch.promote_types(made.dtype, torch.float32),
            Layout(mesh, tuple(placements)),
        )
        start = LocalStart(list(of_keys.shape), layout_record(of_keys.layout), len(of_keys.shape) - 2)
        mask = None if tensors[3] is None else Slot(3)
        plan = OpPlan(
            op="dtorch::attention_part",
            args=(Slot(0), Slot(1), Slot(2), mask, start, is_causal, scale),
            layouts=tuple(x._spec.layout for x in given),
            outputs=(NewOutput(spec),),
        )
        entry = graph.entries[key] = make_entry(graph.session, plan, "attention_part", len(given))
    return issue(given[0]._symbol_class, entry, graph, given, location)


def _merged(graph: Graph, cls: type[torch.Tensor], parts: Any, made: Spec, location: int) -> Any:
    key = ("attention_merged", parts._spec, made)
    entry = graph.entries.get(key)
    if entry is None:
        plan = OpPlan(
            op="dtorch::attention_merged",
            args=(Slot(0), DTypeArg(str(made.dtype).removeprefix("torch."))),
            layouts=(parts._spec.layout,),
            outputs=(NewOutput(made),),
        )
        entry = graph.entries[key] = make_entry(graph.session, plan, "attention_merged", 1)
    return issue(cls, entry, graph, (parts,), location)


@lru_cache(maxsize=4096)
def _plan(
    query: Spec,
    key: Spec,
    value: Spec,
    mask: Spec | None,
    axes: tuple[int, ...],
    is_causal: bool,
    enable_gqa: bool,
) -> _Plan:
    """What the inputs are brought to, without communication, and the spec of the result.

    They fit where they would if the keys were whole along ``axes``.

    Raises:
        PlacementError, RuntimeError: they do not.
    """
    whole = [None if s is None else with_placement(s, axes, Replicate()) for s in (query, key, value, mask)]
    plan = propagate(_sdpa, (*whole, 0.0, is_causal), {"enable_gqa": enable_gqa})
    if any(isinstance(p, Partial) for spec in (query, key, value) for p in spec.layout.placements):
        raise PlacementError(
            f"scaled_dot_product_attention to keys that are cut by sequence takes no terms of a sum, got query "
            f"{query.layout}, value {value.layout}; write x = x.redistribute(placements=[...]) without Partial()"
        )
    converted = dict(plan.conversions)
    layouts: list[Layout | None] = []
    for index, spec in enumerate(whole):
        layout = None if spec is None else converted.get(index, spec.layout)
        if layout is not None and index in (1, 2):
            layout = _layout_with(layout, axes, Shard(len(key.shape) - 2))
        layouts.append(layout)
    [output] = plan.outputs
    assert isinstance(output, NewOutput), "attention makes a value"
    return tuple(layouts), output.spec


def with_placement(spec: Spec, axes: tuple[int, ...], placement: Placement) -> Spec:
    """The same tensor, placed so along these axes."""
    return intern_spec(spec.shape, spec.dtype, _layout_with(spec.layout, axes, placement), spec.stride)


def _layout_with(layout: Layout, axes: tuple[int, ...], placement: Placement) -> Layout:
    placements = list(layout.placements)
    for axis in axes:
        placements[axis] = placement
    return Layout(layout.mesh, tuple(placements))


def _shifted(layout: Layout) -> Layout:
    """That of a stack of tensors, along a new first dim."""
    placements = (Shard(p.dim + 1, p.unit) if isinstance(p, Shard) else p for p in layout.placements)
    return Layout(layout.mesh, tuple(placements))
