"""Complex numbers from their parts, and what they are made of."""

from __future__ import annotations

from dtorch.rules.call import Call
from dtorch.rules.dsl import rule
from dtorch.shapes import Metas, TensorMeta, broadcast, elementwise_stride
from dtorch.spec import contiguous_stride


def _of_parts(call: Call) -> Metas | None:
    """Complex numbers of the precision of their parts."""
    shape = broadcast([spec.shape for spec in call.inputs])
    dtypes = {spec.dtype for spec in call.inputs}
    if shape is None or len(dtypes) > 1:
        return None
    return (TensorMeta(shape, elementwise_stride(shape, call.inputs), dtypes.pop().to_complex()),)


def _angle(call: Call) -> Metas | None:
    spec = call.inputs[0]
    if spec.dtype.is_complex:
        return (TensorMeta(spec.shape, contiguous_stride(spec.shape), spec.dtype.to_real()),)
    if spec.dtype.is_floating_point:
        return (TensorMeta(spec.shape, elementwise_stride(spec.shape, (spec,)), spec.dtype),)
    return None


def _same(call: Call) -> Metas:
    spec = call.inputs[0]
    return (TensorMeta(spec.shape, spec.stride, spec.dtype),)


rule("complex", "...,...->...", linear="a+b", slices="*", lifts=True, shape=_of_parts)
rule("polar", "...,...->...", linear="a", slices="*", shape=_of_parts)
rule("angle", "...->...", shape=_angle)
rule("_neg_view", "...->...", linear="a", shape=_same)
