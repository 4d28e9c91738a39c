"""Attention, norms, losses, convolutions and pooling."""

from __future__ import annotations

import math
from typing import Any

import torch

from dtorch import shapes
from dtorch.meshes import layout_record
from dtorch.op_plan import OpPlan
from dtorch.rules.call import Call
from dtorch.rules.dsl import Binder, EquationRule, full_names, rule
from dtorch.rules.equation import Equation, Matched
from dtorch.rules.reduce import other_op
from dtorch.rules.registry import register
from dtorch.shapes import Metas, TensorMeta, is_contiguous
from dtorch.spec import Spec, contiguous_stride
from dtorch_runtime.errors import UnsupportedError
from dtorch_runtime.wire.records import LocalStart

# ------------------------------------------------------------------------------------------------- attention


def _attention(call: Call) -> str:
    """Heads and batch may be cut, and queries where no causal mask counts them."""
    lead = "abcdefg"[: max(len(call.spec("query").shape) - 3, 0)] + (
        "h" if len(call.spec("query").shape) > 2 else ""
    )
    return f"{lead}qx,{lead}kx,{lead}ky,?{lead}qk->{lead}qy"


def _attention_shape(call: Call) -> Metas | None:
    """Queries before heads in memory, as the kernel ``dtorch::attention`` gives it."""
    query, key, value = call.spec("query"), call.spec("key"), call.spec("value")
    ndim = len(query.shape)
    if ndim < 2 or {len(key.shape), len(value.shape)} != {ndim} or key.shape[-1] != query.shape[-1]:
        return None
    if query.dtype is not key.dtype or key.dtype is not value.dtype or key.shape[:-1] != value.shape[:-1]:
        return None
    if query.shape[:-3] != key.shape[:-3] or not _heads_fit(query, key, call.get("enable_gqa")):
        return None
    mask = call.get("attn_mask")
    if mask is not None and shapes.broadcast([mask.shape, (*query.shape[:-1], key.shape[-2])]) is None:
        return None
    shape = (*query.shape[:-1], value.shape[-1])
    if ndim != 4:
        return (TensorMeta(shape, contiguous_stride(shape), query.dtype),)
    batch, heads, length, features = shape
    swapped = contiguous_stride((batch, length, heads, features))
    return (TensorMeta(shape, (swapped[0], swapped[2], swapped[1], swapped[3]), query.dtype),)


def _heads_fit(query: Spec, key: Spec, enable_gqa: bool) -> bool:
    if len(query.shape) < 3 or query.shape[-3] == key.shape[-3]:
        return True
    return enable_gqa and key.shape[-3] > 0 and query.shape[-3] % key.shape[-3] == 0


def _attention_whole(call: Call) -> str:
    return "kxq" if call.get("is_causal") else "kx"


def _attention_op(call: Call, matched: Matched, metas: Metas) -> OpPlan:
    if call.get("dropout_p"):
        raise UnsupportedError(
            f"{call.op} with dropout_p={call.get('dropout_p')} would draw other numbers on every device; compute "
            f"softmax(q @ k.transpose(-2, -1) * scale), F.dropout it, and multiply by v"
        )
    args = [
        call.get(name) for name in ("query", "key", "value", "attn_mask", "is_causal", "scale", "enable_gqa")
    ]
    return other_op(call, matched, metas, "dtorch::attention", args)


rule(
    "scaled_dot_product_attention",
    _attention,
    linear="c",
    whole=_attention_whole,
    slices="d",
    grouped="h",
    specialize=_attention_op,
    shape=_attention_shape,
    always=True,
)


# ------------------------------------------------------------------------------------------------- norms


def _normalized(call: Call) -> tuple[str, str]:
    """Letters of the dims that are normalized, and as many 1."""
    count = len(call.get("normalized_shape"))
    return "ABCDEFGH"[:count], "1" * count


def _layer_norm(call: Call) -> str:
    names, ones = _normalized(call)
    return f"...{names},{names},{names}->...{names},...{ones},...{ones}"


def _layer_norm_backward(call: Call) -> str:
    names, ones = _normalized(call)
    return f"...{names},...{names},...{ones},...{ones},{names},{names}->...{names},{names},{names}"


def _rms_norm(call: Call) -> str:
    names, ones = _normalized(call)
    return f"...{names},{names}->...{names},...{ones}"


def _norm_dims(call: Call) -> str:
    return _normalized(call)[0]


def _layer_norm_shape(call: Call) -> Metas | None:
    spec = call.inputs[0]
    normalized = tuple(call.get("normalized_shape"))
    kept = len(spec.shape) - len(normalized)
    if (
        not normalized
        or spec.shape[max(kept, 0) :] != normalized
        or not is_contiguous(spec.shape, spec.stride)
    ):
        return None
    if spec.dtype not in (torch.float32, torch.float64) or any(
        g.dtype is not spec.dtype for g in call.inputs
    ):
        return None
    if any(given.shape != normalized for given in call.inputs[1:]):
        return None
    statistics = (*spec.shape[:kept], *(1 for _ in normalized))
    row = TensorMeta(statistics, contiguous_stride(statistics), spec.dtype)
    whole = TensorMeta(spec.shape, contiguous_stride(spec.shape), spec.dtype)
    return (whole, row, row)


rule("native_layer_norm", _layer_norm, whole=_norm_dims, shape=_layer_norm_shape)
rule("native_layer_norm_backward", _layer_norm_backward, linear="a", whole=_norm_dims)
rule("_fused_rms_norm", _rms_norm, whole=_norm_dims)


# ------------------------------------------------------------------------------------------------- losses

_NONE, _MEAN, _SUM = 0, 1, 2


def _nll(call: Call) -> str:
    """Rows may be cut. For a mean every device needs all targets: they say how many rows count."""
    if len(call.inputs[0].shape) == 1:
        return "c,,c->,"
    if call.get("reduction") == _NONE:
        return "nc...,n...,c->n...,"
    if call.get("reduction") == _MEAN:
        return "nc...,z...,c->,"
    return "nc...,n...,c->,"


def _nll_whole(call: Call) -> str:
    return "cz" if call.get("reduction") == _MEAN else "c"


def _nll_binders() -> tuple[Binder, Binder]:
    summed = Binder(_nll, whole=_nll_whole, reduce="sum", slices="b")
    mean = Binder(_nll, whole=_nll_whole, reduce="sum", unaffected=frozenset({1}), converts="b")
    return summed, mean


_SUMMED, _MEANED = _nll_binders()


def _bind_nll(call: Call) -> Equation | None:
    if call.get("reduction") != _MEAN or len(call.inputs[0].shape) == 1:
        return _SUMMED(call)
    equation = _MEANED(call)
    return equation if equation is None or len(call.inputs[0].shape) == 2 else _rows_whole(equation)


def _rows_whole(equation: Equation) -> Equation:
    return Equation(
        equation.inputs, equation.outputs, frozenset(n for dims in equation.inputs for n in dims or () if n)
    )


def _nll_of_pieces(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    if call.get("reduction") != _MEAN or "n" not in matched.letters:
        return None
    start = LocalStart(list(call.inputs[0].shape), layout_record(matched.inputs[0]), 0)
    args = [call.get(name) for name in ("self", "target", "weight", "ignore_index")]
    return other_op(call, matched, metas, "dtorch::nll_loss_shard", [*args, start])


register(
    full_names("nll_loss_forward nll_loss2d_forward"), EquationRule(_bind_nll, specialize=_nll_of_pieces)
)


def _nll_backward(call: Call) -> str:
    if len(call.spec("self").shape) == 1:
        return ",c,,c,->c"
    grad = "n..." if call.get("reduction") == _NONE else ""
    return f"{grad},nc...,n...,c,->nc..."


rule("nll_loss_backward nll_loss2d_backward", _nll_backward, linear="a", whole="c", slices="c")


def _pair_loss(call: Call) -> str:
    return "...,...,...->..." if call.get("reduction") == _NONE else "...,...,...->"


def _mean_of_losses(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    """A mean over cut dims: the sum of the device's losses over the global count."""
    if call.get("reduction") != _MEAN or not any(matched.letters):
        return None
    return other_op(call, matched, metas, "dtorch::divided", [call.op.name, _summing(call), _count(call)])


def _summing(call: Call) -> list[Any]:
    """The arguments with the reduction that sums, in the order of the schema."""
    names = [p.name for p in call.op.parameters]
    return [_SUM if name == "reduction" else call.get(name) for name in names]


def _count(call: Call) -> int:
    shape = shapes.broadcast([spec.shape for spec in call.inputs])
    assert shape is not None
    return math.prod(shape)


def _pair_loss_backward(call: Call) -> str:
    return "...,...,...,...->..."


def _derivative_of_mean(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    return _mean_of_losses(call, matched, metas)


rule(
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy",
    _pair_loss,
    reduce="sum",
    slices="*",
    specialize=_mean_of_losses,
)
rule(
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward "
    "binary_cross_entropy_backward",
    _pair_loss_backward,
    linear="a",
    slices="*",
    specialize=_derivative_of_mean,
)


# ------------------------------------------------------------------------------------------------- images


def _space(call: Call) -> tuple[str, str, str]:
    """Letters of the spatial dims of input, weight and output."""
    count = len(call.spec("input").shape) - 2
    return "pqr"[:count], "stu"[:count], "xyz"[:count]


def _convolution(call: Call) -> str:
    before, window, after = _space(call)
    if call.get("transposed"):
        return f"ni{before},io{window},o->no{after}"
    return (
        f"ni{before},oi{window},o->no{after}"
        if call.get("groups") == 1
        else f"ni{before},oj{window},o->no{after}"
    )


def _convolution_whole(call: Call) -> str:
    return "".join(_space(call)) + ("" if call.get("groups") == 1 else "oij")


def _convolution_backward(call: Call) -> str:
    before, window, after = _space(call)
    outer, inner = ("i", "o") if call.get("transposed") else ("o", "i")
    weight = f"{outer}{inner}{window}" if call.get("groups") == 1 else f"{outer}j{window}"
    return f"no{after},ni{before},{weight}->ni{before},{weight},o"


rule("convolution", _convolution, linear="a*b+c", lifts=True, whole=_convolution_whole)
rule(
    "convolution_backward",
    _convolution_backward,
    linear="a",
    whole=lambda call: "".join(_space(call)) + "oij",
)
rule("max_pool2d_with_indices", "...pq->...xy,...xy", whole="pqxy", nonempty=True)
rule("max_pool2d_with_indices_backward", "...xy,...pq,...xy->...pq", linear="a", whole="pqxy", nonempty=True)
rule(
    "avg_pool2d _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d",
    "...pq->...xy",
    linear="a",
    whole="pqxy",
    nonempty=True,
)
rule("avg_pool2d_backward", "...xy,...pq->...pq", linear="a", whole="pqxy", nonempty=True)
rule("_adaptive_avg_pool2d_backward", "...xy,...pq->...pq", linear="a", whole="pqxy", nonempty=True)
