"""Attention that is differentiated and stays one op, where every device has whole sequences of its heads.

Torch makes it of products and a softmax then, which write and read all weights several times.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import Any

import torch

from dtorch.issue import issue, make_entry
from dtorch.location import capture
from dtorch.op_plan import NewOutput, OpPlan
from dtorch.propagate import propagate
from dtorch.spec import Spec, intern_spec
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Partial, Replicate, Shard
from dtorch_runtime.wire.records import Slot

aten = torch.ops.aten
_sdpa = aten.scaled_dot_product_attention.default
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def whole_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: Any,
    enable_gqa: bool,
) -> Any:
    """The result, or NotImplemented for calls that are made of several ops. Arguments as torch's; global shapes."""
    inputs = (query, key, value)
    if mask is not None or dropout_p or any(type(x) is not query._symbol_class for x in inputs):
        return NotImplemented
    if not _is_local(*(x._spec for x in inputs), bool(is_causal), bool(enable_gqa)):
        return NotImplemented
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    return _apply(query, key, value, bool(is_causal), scale, bool(enable_gqa))


@lru_cache(maxsize=4096)
def _is_local(query: Spec, key: Spec, value: Spec, is_causal: bool, enable_gqa: bool) -> bool:
    """Whether each device can do its heads of its rows by itself, and has the kernel."""
    specs = (query, key, value)
    layout = query.layout
    if layout.mesh.device_type != "cpu" or any(
        len(s.shape) != 4 or s.layout.mesh != layout.mesh for s in specs
    ):
        return False
    if query.dtype not in _DTYPES or {s.dtype for s in specs} != {query.dtype}:
        return False
    if len({s.shape[-1] for s in specs}) > 1 or 0 in (*query.shape, *key.shape):
        return False
    for placement in (p for s in specs for p in s.layout.placements):
        if isinstance(placement, Partial) or (isinstance(placement, Shard) and placement.dim > 1):
            return False
    try:
        plan = propagate(_sdpa, (*specs, None, 0.0, is_causal), {"enable_gqa": enable_gqa})
    except (PlacementError, RuntimeError):
        return False  # whoever makes it of several ops says why
    [output] = plan.outputs
    return not plan.conversions and isinstance(output, NewOutput) and output.spec.layout == layout


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, is_causal: bool, scale: float, enable_gqa: bool
    ) -> Any:
        spec: Spec = query._spec
        sums_dtype = torch.promote_types(spec.dtype, torch.float32)
        made = (_queries_first(spec, spec.layout), intern_spec(spec.shape[:-1], sums_dtype, spec.layout))
        out, sums = _issue("attention_forward", (query, key, value), made, is_causal, scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.constants = is_causal, scale, enable_gqa
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        is_causal, scale, enable_gqa = ctx.constants
        if torch.is_grad_enabled():  # it is differentiated again
            again = _sdpa._op_dk(
                torch._C.DispatchKey.CompositeImplicitAutograd,
                *(query, key, value, None, 0.0, is_causal),
                scale=scale,
                enable_gqa=enable_gqa,
            )
            needed = [x for x in (query, key, value) if x.requires_grad]
            found = iter(torch.autograd.grad(again, needed, gradient, create_graph=True))
            return *(next(found) if x.requires_grad else None for x in (query, key, value)), None, None, None
        layout: Layout = out._spec.layout
        # The derivatives of terms of a sum are terms of the derivatives: nothing is reduced before it must be.
        kept = [
            given if given == Partial("sum") and like == Replicate() else like
            for given, like in zip(_placements_on(gradient, layout), layout.placements, strict=True)
        ]
        gradient = gradient.redistribute(device_mesh=layout.mesh, placements=kept)
        made = []
        for x in (query, key, value):
            cuts = x._spec.layout.placements
            placements = tuple(k if isinstance(k, Partial) else c for k, c in zip(kept, cuts, strict=True))
            made.append(_queries_first(x._spec, Layout(layout.mesh, placements)))
        tensors = (gradient, query, key, value, out, sums)
        return *_issue("attention_backward", tensors, tuple(made), is_causal, scale), None, None, None


_apply: Any = _Attention.apply  # torch declares it without types


def _placements_on(gradient: Any, layout: Layout) -> tuple[Any, ...]:
    """Those of a gradient; one on another mesh has none here."""
    given: Layout = gradient._spec.layout
    return given.placements if given.mesh == layout.mesh else layout.placements


def _queries_first(spec: Spec, layout: Layout) -> Spec:
    """[batch, heads, queries, features], with queries before heads in memory."""
    batch, heads, length, features = spec.shape
    stride = (length * heads * features, features, heads * features, 1)
    return intern_spec((batch, heads, length, features), spec.dtype, layout, stride)


def _issue(
    op: str, tensors: tuple[Any, ...], made: tuple[Spec, ...], is_causal: bool, scale: float
) -> tuple[Any, ...]:
    graph = tensors[0]._handle.graph
    key = (op, *(x._spec for x in tensors), is_causal, scale)
    entry = graph.entries.get(key)
    if entry is None:
        graph.session.check_open()
        plan = OpPlan(
            op=f"dtorch::{op}",
            args=(*(Slot(number) for number in range(len(tensors))), is_causal, scale),
            layouts=tuple(x._spec.layout for x in tensors),
            outputs=tuple(NewOutput(spec) for spec in made),
            returns="tuple",
        )
        entry = graph.entries[key] = make_entry(graph.session, plan, op, len(tensors))
    location = capture(sys._getframe(1), graph.thread_id)
    found: tuple[Any, ...] = issue(tensors[0]._symbol_class, entry, graph, tensors, location)
    return found
