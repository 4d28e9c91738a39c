"""Factories that take a tensor for its shape, dtype or place: ``zeros_like(x)``, ``x.new_zeros(size)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dtorch import shapes
from dtorch.op_plan import NewOutput, OpPlan
from dtorch.rules import explain
from dtorch.rules.call import ArgumentEncoder, Call, local_shape
from dtorch.rules.dsl import full_names
from dtorch.rules.random import whole_where_partial
from dtorch.rules.registry import register
from dtorch.rules.whole import plan_same_op, plan_whole, replicated
from dtorch.shapes import Metas, TensorMeta, is_dense, preserved_stride, register_shape
from dtorch.spec import Spec, contiguous_stride, intern_spec
from dtorch_runtime.ir.placement import Shard
from dtorch_runtime.wire.records import DeviceArg, ListArg


@dataclass(frozen=True)
class LikeRule:
    """The new tensor is placed as the given one, whole where that is partial (its values do not matter).

    One of another shape (``sized``) is too, where the dims that are cut have the same sizes; else it is replicated.
    """

    sized: bool = False
    always: bool = False

    def plan(self, call: Call) -> OpPlan:
        """The plan of a call."""
        spec = call.inputs[0]
        metas = shapes.infer(call)
        (meta,) = metas
        assert isinstance(meta, TensorMeta)
        layout = whole_where_partial(spec.layout)
        replace: dict[str, Any] = {"device": DeviceArg()} if call.get("device") is not None else {}
        if self.sized:
            if not _has_cut_dims(spec, meta.shape):
                layout = replicated(spec.layout.mesh)
            replace["size"] = local_shape(meta.shape, layout)
        return plan_same_op(call, metas, [layout], replace=replace)

    def signatures(self, call: Call) -> list[str]:
        """Any placement will do."""
        return ["self: any -> as self, R where self is P" + (" or a cut dim differs" if self.sized else "")]


def _has_cut_dims(spec: Spec, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can be cut as ``spec`` is, at the same places."""
    cut = [p.dim for p in spec.layout.placements if isinstance(p, Shard)]
    return not cut or (len(shape) == len(spec.shape) and all(shape[dim] == spec.shape[dim] for dim in cut))


@dataclass(frozen=True)
class StridedRule:
    """``x.new_empty_strided(size, stride)``, as autograd asks for when it stores a gradient: placed as ``x``.

    One of another shape is replicated.
    """

    always: bool = False

    def plan(self, call: Call) -> OpPlan:
        """The plan of a call. Raises PlacementError where the strides of a tensor that is cut leave gaps."""
        spec = call.inputs[0]
        if call.is_replicated:
            return plan_whole(call)
        shape, stride = tuple(call.get("size")), tuple(call.get("stride"))
        if shape != spec.shape:
            replace: dict[str, Any] = {"device": DeviceArg()} if call.get("device") is not None else {}
            return plan_same_op(call, shapes.infer(call), [replicated(spec.layout.mesh)], replace=replace)
        if not is_dense(shape, stride):
            raise explain.refused(
                call, "the strides leave gaps, which pieces would not have", self.signatures(call)
            )
        layout = whole_where_partial(spec.layout)
        dtype = call.get("dtype") or spec.dtype
        order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
        encoder = ArgumentEncoder()
        return OpPlan(
            op="aten::empty_permuted.default",
            args=(local_shape(shape, layout), ListArg(list(order))),
            kwargs={"dtype": encoder.encode(dtype), "device": DeviceArg()},
            layouts=(spec.layout,),
            outputs=(NewOutput(intern_spec(shape, dtype, layout, stride)),),
        )

    def signatures(self, call: Call) -> list[str]:
        """Any placement will do for dense strides."""
        return ["self: any -> as self, R where self is P or the size differs"]


def _like_shape(call: Call) -> Metas | None:
    spec = call.inputs[0]
    if call.get("memory_format") is not None:
        return None
    return (TensorMeta(spec.shape, preserved_stride(spec), call.get("dtype") or spec.dtype),)


def _new_shape(call: Call) -> Metas | None:
    shape = tuple(call.get("size"))
    if any(not isinstance(n, int) or n < 0 for n in shape):
        return None
    return (TensorMeta(shape, contiguous_stride(shape), call.get("dtype") or call.inputs[0].dtype),)


_LIKE = full_names("zeros_like ones_like full_like empty_like")
_NEW = full_names("new_zeros new_ones new_full new_empty")
register(_LIKE, LikeRule())
register(_NEW, LikeRule(sized=True))
register(full_names("new_empty_strided"), StridedRule())
register_shape(_LIKE, _like_shape)
register_shape(_NEW, _new_shape)
