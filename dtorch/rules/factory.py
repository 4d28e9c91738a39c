"""Ops without tensor inputs: the layout comes from the caller, and each device makes its own piece."""

from __future__ import annotations

from typing import Any

import torch

from dtorch import shapes
from dtorch.meshes import layout_record
from dtorch.op_plan import NewOutput, OpPlan
from dtorch.rules.call import ArgumentEncoder, Call, local_shape
from dtorch.rules.whole import default_dtype, encode_arguments
from dtorch.shapes import Metas, TensorMeta, register_shape
from dtorch.spec import contiguous_stride, intern_spec
from dtorch_runtime.errors import PlacementError, UnsupportedError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Partial, Shard
from dtorch_runtime.wire.records import Arg, DeviceArg, ListArg, LocalStart

#: Every element is the same, or none is promised: a device makes only its piece, by the shape of the piece.
UNIFORM = frozenset({"aten::zeros", "aten::ones", "aten::full", "aten::empty"})


def plan_factory(call: Call, layout: Layout) -> OpPlan:
    """Make a tensor with this layout. Random ones are planned by ``rules/random.py``.

    Raises:
        PlacementError: the layout does not fit the shape, or is partial.
        UnsupportedError: the op cannot be sharded.
    """
    metas = shapes.infer(call)
    if len(metas) != 1 or not isinstance(metas[0], TensorMeta):
        raise UnsupportedError(
            f"{call.op} does not make one tensor; make it on the CPU and use dtorch.from_torch"
        )
    meta = metas[0]
    check_layout(call.op.name, meta.shape, layout)
    encoder = ArgumentEncoder()
    sharded = not layout.is_replicated
    replace: dict[str, Any] = {}
    if call.has("dtype"):
        replace["dtype"] = meta.dtype
    if call.has("device"):
        replace["device"] = DeviceArg()
    if sharded and call.op.base in UNIFORM:
        replace["size"] = local_shape(meta.shape, layout)
    args, kwargs = encode_arguments(call, encoder, replace)
    name = call.op.name
    if sharded and call.op.base not in UNIFORM:
        name, args = _box_of_whole(name, args, kwargs, meta, layout)
    stride = contiguous_stride(meta.shape) if sharded else meta.stride
    return OpPlan(
        op=name,
        args=args,
        kwargs=kwargs,
        layouts=(),
        outputs=(NewOutput(intern_spec(meta.shape, meta.dtype, layout, stride)),),
    )


def check_layout(op: str, shape: tuple[int, ...], layout: Layout) -> None:
    """Whether a tensor of this shape can be made with this layout.

    Raises:
        PlacementError: a partial axis, or a dim that the shape does not have.
    """
    for placement in layout.placements:
        if isinstance(placement, Partial):
            raise PlacementError(
                f"{op} cannot make a tensor with placements {layout}: a partial tensor is the result of an op; "
                f"make it with Replicate() or Shard(dim), then redistribute() it"
            )
        if isinstance(placement, Shard) and placement.dim >= len(shape):
            raise PlacementError(
                f"{op} makes a tensor of shape {list(shape)}, which has no dim {placement.dim} to shard; "
                f"allowed are Replicate()" + (f" and Shard(0) to Shard({len(shape) - 1})" if shape else "")
            )


def box_arguments(shape: tuple[int, ...], layout: Layout) -> tuple[ListArg, Arg]:
    """Where the local piece starts in each dim, and its shape, as arguments of a kernel."""
    record = layout_record(layout)
    starts = [LocalStart(list(shape), record, dim) for dim in range(len(shape))]
    return ListArg(list(starts)), local_shape(shape, layout)


def _box_of_whole(
    name: str, args: tuple[Arg, ...], kwargs: dict[str, Arg], meta: TensorMeta, layout: Layout
) -> tuple[str, tuple[Arg, ...]]:
    starts, sizes = box_arguments(meta.shape, layout)
    return "dtorch::factory_shard", (name, ListArg(list(args)), starts, sizes)


# ------------------------------------------------------------------------------------------------- shapes


def _wanted_dtype(call: Call) -> torch.dtype | None:
    """What ``dtype=`` or ``out=`` asks for."""
    dtype: torch.dtype | None = call.get("dtype") if call.has("dtype") else call.spec("out").dtype
    return dtype


def _sized(call: Call) -> Metas | None:
    size = call.get("size")
    if not isinstance(size, list | tuple) or any(not isinstance(n, int) or n < 0 for n in size):
        return None
    return _contiguous(tuple(size), default_dtype(_wanted_dtype(call)))


def _full(call: Call) -> Metas | None:
    dtype = _wanted_dtype(call)
    if dtype is None:
        value = call.get("fill_value")
        if isinstance(value, complex):
            return None
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else None
    return _contiguous(tuple(call.get("size")), default_dtype(dtype))


def _arange(call: Call) -> Metas | None:
    start = call.get("start") if call.has("start") else 0
    end = call.get("end")
    step = call.get("step") if call.has("step") else 1
    if not all(type(value) is int for value in (start, end, step)) or step == 0 or (end - start) * step < 0:
        return None
    return _contiguous((-(-(end - start) // step),), _wanted_dtype(call) or torch.int64)


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Metas:
    return (TensorMeta(shape, contiguous_stride(shape), dtype),)


register_shape(["aten::zeros", "aten::ones", "aten::rand", "aten::randn"], _sized)
register_shape(
    ["aten::empty.memory_format"], lambda call: None if call.get("memory_format") else _sized(call)
)
register_shape(["aten::full"], _full)
register_shape(["aten::arange"], _arange)
