"""Ops that compute each element from the elements at the same place, after broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch

from dtorch.rules.call import Call, Op
from dtorch.rules.dsl import full_names, rule
from dtorch.shapes import (
    Metas,
    TensorMeta,
    broadcast,
    elementwise_stride,
    is_contiguous,
    preserved_stride,
    register_shape,
    result_type,
)
from dtorch.spec import Spec, contiguous_stride

#: The dtype of the result: promoted; promoted, then floating; promoted, then real; bool; or that of the first tensor.
ResultKind: TypeAlias = Literal["promoted", "floating", "real", "bool", "first"]
#: Parameters whose numbers take part in the promotion of dtypes.
_NUMBERS = ("other", "exponent", "min", "max", "scale")

#: Names of the ops with a rule of this kind.
_names: set[str] = set()


def pointwise(
    names: str,
    *,
    linear: str = "",
    moves: str = "",
    result: ResultKind = "promoted",
    linear_if: Callable[[Call], bool] | None = None,
    converts: str = "",
) -> None:
    """Define the rule and the shapes of pointwise ops (names with blanks between them).

    Whole inputs are cut locally to meet sharded ones, and whole terms of a sum become partial to meet partial
    ones; neither moves a byte.
    """
    rule(
        names,
        "...,...,...->...",
        linear=linear,
        moves=moves,
        slices="*",
        lifts="+" in (linear or moves),
        linear_if=linear_if,
        converts=converts,
    )
    full = full_names(names)
    register_shape(full, lambda call: pointwise_shape(call, result))
    _names.update(full)


def is_pointwise(op: Op) -> bool:
    """Whether the plan of a call on tensors of one spec, row-major and not empty, says nothing of their sizes.

    Then its template does for all sizes, and the result has the shape of the tensors, row-major too.
    """
    return op.base in _names and not op.writes


def pointwise_shape(call: Call, kind: ResultKind) -> Metas | None:
    """Broadcast shape, strides in the operands' order in memory, promoted dtype."""
    tensors = [call.inputs[n] for p, n in call.operands.items() if isinstance(n, int) and p != "out"]
    if call.op.name == "aten::pow.Scalar" and not is_contiguous(tensors[0].shape, tensors[0].stride):
        return None  # its strides are not those of a pointwise op
    shape = broadcast([spec.shape for spec in tensors])
    dtype = _result_dtype(call, tensors, kind)
    if shape is None or dtype is None:
        return None
    return (TensorMeta(shape, elementwise_stride(shape, tensors), dtype),)


def _result_dtype(call: Call, tensors: list[Spec], kind: ResultKind) -> torch.dtype | None:
    if kind == "bool":
        return torch.bool
    if kind == "first":
        return tensors[0].dtype
    operands: list[Spec | bool | int | float | complex | None] = list(tensors)
    for name in _NUMBERS:
        if call.has(name) and type(value := call.get(name)) is not Spec:
            operands.append(value)
    if call.has("self") and type(number := call.get("self")) is not Spec:
        operands.append(number)
    dtype = result_type(operands)
    if kind == "real":
        return dtype.to_real()
    if kind == "floating" and not (dtype.is_floating_point or dtype.is_complex) and _true_division(call):
        return torch.get_default_dtype()
    return dtype


def _no_number(call: Call) -> bool:
    """Adding a number to each term of a partial sum would count it once on every device."""
    return not any(
        call.has(name) and call.get(name) is not None and type(call.get(name)) not in (Spec, list, tuple)
        for name in ("other", "scalar")
    )


def _adds_terms(call: Call) -> bool:
    """Not of bools: a term may be true on one device only, or ops that count would count it more than once."""
    return _no_number(call) and any(spec.dtype is not torch.bool for spec in call.inputs)


def _copies_terms(call: Call) -> bool:
    """The terms of the source take the place of those of the target; a cast term may be no term of the cast sum."""
    target, source = call.inputs
    return target.dtype is source.dtype


def _true_division(call: Call) -> bool:
    return not call.has("rounding_mode") or call.get("rounding_mode") is None


def _fills_with_zero(call: Call) -> bool:
    return not isinstance(call.get("value"), Spec) and call.get("value") == 0


# Linear
pointwise("add sub rsub", linear="a+b", linear_if=_adds_terms)
pointwise("mul", linear="a*b")
pointwise("div", linear="a", linear_if=_true_division, result="floating")
pointwise("neg", linear="a")
pointwise("lerp", linear="a+b")
pointwise("addcmul", linear="a+b*c")
pointwise("addcdiv", linear="a+b", result="floating")

# Elements are moved or chosen, not computed with
rule(
    "masked_fill",
    "...,...,...->...",
    linear="a",
    linear_if=_fills_with_zero,
    slices="*",
    shape=lambda call: _masked_fill_shape(call),
)
pointwise("copy_", moves="a+b", linear_if=_copies_terms, converts="b", result="first")

# Not linear: one tensor
pointwise("abs", result="real")
pointwise(
    "sign sgn relu relu6 silu gelu mish elu celu selu softplus hardtanh hardswish hardsigmoid leaky_relu "
    "hardshrink softshrink threshold ceil floor round trunc frac square bitwise_not clamp clamp_min clamp_max "
    "nan_to_num"
)
pointwise(
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh sigmoid erf erfc erfinv lgamma digamma logit sinc i0 special_erfcx special_i0e special_i1 special_i1e "
    "special_ndtri special_log_ndtr special_entr deg2rad rad2deg",
    result="floating",
)
pointwise("isnan isinf isposinf isneginf signbit logical_not", result="bool")

# Not linear: two tensors
pointwise(
    "maximum minimum fmax fmin remainder fmod pow floor_divide bitwise_and bitwise_or bitwise_xor gcd lcm hypot "
    "nextafter logaddexp logaddexp2 bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ __and__ __or__ __xor__"
)
pointwise("atan2 copysign xlogy special_xlog1py special_zeta", result="floating")
pointwise("eq ne lt le gt ge logical_and logical_or logical_xor", result="bool")

# Derivatives: linear in the gradient, which comes first
pointwise(
    "threshold_backward gelu_backward silu_backward hardtanh_backward hardswish_backward hardsigmoid_backward "
    "leaky_relu_backward elu_backward softplus_backward mish_backward sigmoid_backward tanh_backward logit_backward "
    "softshrink_backward hardshrink_backward",
    linear="a",
)
# aten::native_dropout_backward(grad_output, mask, scale): the mask chooses
pointwise("native_dropout_backward", linear="a")


# ------------------------------------------------------------------------------------------------- copies


def _copy_shape(call: Call) -> Metas | None:
    spec = call.inputs[0]
    dtype = (call.get("dtype") if call.has("dtype") else None) or spec.dtype
    memory_format = call.get("memory_format") if call.has("memory_format") else None
    if memory_format is torch.contiguous_format:
        return (TensorMeta(spec.shape, contiguous_stride(spec.shape), dtype),)
    if memory_format not in (None, torch.preserve_format):
        return None
    return (TensorMeta(spec.shape, preserved_stride(spec), dtype),)


def _keeps_sums(call: Call) -> bool:
    """A sum of floating terms is not the sum of the terms cut to integers."""
    dtype = (call.get("dtype") if call.has("dtype") else None) or call.inputs[0].dtype
    given = call.inputs[0].dtype
    return dtype is given or dtype.is_complex or (dtype.is_floating_point and not given.is_complex)


rule("clone _conj_physical", "...->...", moves="a", shape=_copy_shape)
rule("_conj", "...->...", moves="a", shape=lambda call: _target(call))
rule("alias_copy detach_copy lift_fresh_copy", "...->...", moves="a")
rule("_to_copy", "...->...", linear="a", linear_if=_keeps_sums, shape=_copy_shape)
rule("fill_.Scalar", "...->...", shape=lambda call: _target(call))
rule("fill_.Tensor", "...,->...", shape=lambda call: _target(call))
rule("zero_", "...->...", moves="a", shape=lambda call: _target(call))


def _target(call: Call) -> Metas:
    spec = call.inputs[0]
    return (TensorMeta(spec.shape, spec.stride, spec.dtype),)


# ------------------------------------------------------------------------------------------------- choices


def _masked_fill_shape(call: Call) -> Metas | None:
    spec = call.spec("self")
    shape = broadcast([spec.shape, call.spec("mask").shape])
    return None if shape is None else (TensorMeta(shape, contiguous_stride(shape), spec.dtype),)


def _where_shape(call: Call) -> Metas | None:
    if call.op.func._overloadname not in ("self", "ScalarSelf", "ScalarOther"):
        return None
    shape = broadcast([spec.shape for spec in call.inputs])
    if shape is None:
        return None
    dtype = result_type([call.get("self"), call.get("other")])
    return (TensorMeta(shape, elementwise_stride(shape, call.inputs), dtype),)


rule("where", "...,...,...->...", moves="b+c", slices="*", lifts=True, shape=_where_shape)
