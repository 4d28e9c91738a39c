"""A symbol that comes to stand for another value: ``resize_``, and ``out=`` tensors of another size than the result."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from dtorch import auto
from dtorch.graph import Graph
from dtorch.issue import issue, make_entry
from dtorch.op_plan import NewOutput, OpPlan, Window
from dtorch.overlap import memory_bytes, num_bytes_of
from dtorch.rules.call import local_shape
from dtorch.rules.explain import redistribute
from dtorch.shapes import is_contiguous
from dtorch.spec import Spec, intern_spec
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.placement import Replicate, Shard
from dtorch_runtime.wire.records import ListArg, Slot


def adopt(target: Any, source: Any) -> Any:
    """Let ``target`` stand for the value of ``source``, with its shape and strides; returns it."""
    target._become(source)
    return target


def resize(target: Any, size: list[int], memory_format: torch.memory_format | None, location: int) -> Any:
    """``resize_``: the same memory with another shape, more of it where it is too small. Returns ``target``.

    Raises:
        PlacementError: the tensor is cut or partial, and its elements would move between devices.
    """
    spec: Spec = target._spec
    meta = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    if memory_format is None:
        meta.resize_(size)
    else:
        meta.resize_(size, memory_format=memory_format)
    shape, stride = tuple(meta.shape), tuple(meta.stride())
    if shape == spec.shape and stride == spec.stride:
        return target
    is_empty = math.prod(spec.shape) == 0
    fits = all(not isinstance(p, Shard) or p.dim < len(shape) for p in spec.layout.placements)
    if not spec.layout.is_replicated and not (is_empty and fits):
        regrouped = _regrouped(target, shape, stride)
        if regrouped is not None:
            return adopt(target, regrouped)
        if auto.current() is not None:
            from dtorch.linked import resized_copy  # a subclass of the tensor, which can be resized

            return adopt(target, resized_copy(target, shape, stride, location))
        whole = [Replicate()] * len(spec.layout.placements)
        raise PlacementError(
            f"resize_() to {size} would move elements between devices: the tensor is {spec}. Allowed: Replicate() on "
            f"every axis, a tensor without elements, or as many elements where view() can regroup them. Write "
            f"x = {redistribute('x', whole)}, then x.resize_(...)"
        )
    result = resized(
        target,
        intern_spec(shape, spec.dtype, spec.layout, stride, spec.is_conj, spec.is_neg),
        location,
    )
    return adopt(target, target._view_of_mine(result))


def _regrouped(target: Any, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any | None:
    """The same elements in the same order as a view, where it follows the cuts; None where it does not."""
    spec: Spec = target._spec
    is_view = math.prod(shape) == math.prod(spec.shape) and type(target) is target._symbol_class
    if not is_view or not is_contiguous(spec.shape, spec.stride) or not is_contiguous(shape, stride):
        return None
    try:
        with auto.auto_redistribute(enabled=False):
            return torch.ops.aten.view.default(target, shape)
    except PlacementError:
        return None


def resized(target: Any, spec: Spec, location: int) -> Any:
    """A view of the memory of ``target``, of more memory where it is too small."""
    graph: Graph = target._handle.graph
    key = ("resized", target._spec, spec)
    entry = graph.entries.get(key)
    if entry is None:
        graph.session.check_open()
        plan = OpPlan(
            op="dtorch::resized",
            args=(Slot(0), local_shape(spec.shape, spec.layout), ListArg(list(spec.stride))),
            layouts=(spec.layout,),
            outputs=(NewOutput(spec, Window(0, 0)),),
        )
        entry = graph.entries[key] = make_entry(graph.session, plan, "resize_", 1)
    root = target._handle.root
    start = target._handle.offset_bytes
    root.num_bytes = max(memory_bytes(target) or 0, start + num_bytes_of(spec))
    return issue(target._symbol_class, entry, graph, (target,), location)


def resize_outputs(
    tensors: Sequence[Any], sizes: Sequence[tuple[int, tuple[int, ...]]], location: int
) -> None:
    """Resize the ``out=`` tensors, given as (input index, shape), as torch does, with its warning."""
    for index, shape in sizes:
        target = tensors[index]
        if target.numel() and tuple(target.shape) != shape:
            warnings.warn(
                f"An output with one or more elements was resized since it had shape {list(target.shape)}, which does "
                f"not match the required output shape {list(shape)}. This behavior is deprecated, and in a future "
                f"PyTorch release outputs will not be resized unless they have zero elements. You can explicitly reuse "
                f"an out tensor t by resizing it, inplace, to zero elements with t.resize_(0).",
                UserWarning,
                stacklevel=2,
            )
        resize(target, list(shape), None, location)
