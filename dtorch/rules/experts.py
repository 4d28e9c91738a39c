"""Rows times the weights of their experts: see ``dtorch.experts``. The letter e stands for experts."""

from __future__ import annotations

from dtorch.meshes import layout_record
from dtorch.op_plan import OpPlan
from dtorch.rules.call import Call
from dtorch.rules.dsl import rule
from dtorch.rules.equation import Matched
from dtorch.rules.reduce import other_op
from dtorch.shapes import Metas, TensorMeta
from dtorch.spec import contiguous_stride
from dtorch_runtime.wire.records import LocalStart


def _rows_shape(call: Call) -> Metas:
    x, weight = call.spec("x"), call.spec("weight")
    shape = (x.shape[0], weight.shape[1])
    return (TensorMeta(shape, contiguous_stride(shape), x.dtype),)


def _weight_shape(call: Call) -> Metas:
    weight = call.spec("weight")
    return (TensorMeta(weight.shape, contiguous_stride(weight.shape), weight.dtype),)


def _on_local_experts(call: Call, matched: Matched, metas: Metas) -> OpPlan:
    """Where experts are cut each device does the rows of its own, and gives zeros for the rest."""
    index = [parameter.name for parameter in call.op.tensor_parameters].index("weight")
    start = LocalStart(list(call.inputs[index].shape), layout_record(matched.inputs[index]), 0)
    return other_op(call, matched, metas, call.op.base, [*call.inputs, start])


rule(
    "dtorch::expert_linear",
    "si,eoi,s->so",
    linear="a*b",
    specialize=_on_local_experts,
    shape=_rows_shape,
    always=True,
)
rule(
    "dtorch::expert_linear_backward",
    "so,si,s,eoi->eoi",
    linear="a*b",
    specialize=_on_local_experts,
    shape=_weight_shape,
    always=True,
)
