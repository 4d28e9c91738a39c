"""Reductions, scans, and ops that need one dim whole."""

from __future__ import annotations

import math
from typing import Any

import torch

from dtorch.op_plan import OpPlan
from dtorch.rules.call import ArgumentEncoder, Call
from dtorch.rules.dsl import Kinds, full_names, rule
from dtorch.rules.equation import Matched
from dtorch.rules.view import LETTERS, letters
from dtorch.rules.whole import pack_outputs, packing
from dtorch.shapes import Metas, TensorMeta, is_contiguous, register_shape, wrap
from dtorch.spec import contiguous_stride


def reduced_dims(call: Call) -> list[int]:
    """The dims that a reduction takes away: those of ``dim``, or all when it has none."""
    ndim = len(call.inputs[0].shape)
    asked = call.get("dim") if call.has("dim") else None
    listed = asked if isinstance(asked, list | tuple) else [] if asked is None else [asked]
    if not listed:
        return list(range(ndim))
    return sorted({found for dim in listed if (found := wrap(dim, ndim)) is not None and found < ndim})


def _reduced(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    gone = reduced_dims(call)
    keepdim = call.has("keepdim") and call.get("keepdim")
    return "".join(("1" if keepdim else "") if d in gone else name for d, name in enumerate(names))


def _reduction(call: Call) -> str:
    return f"{letters(len(call.inputs[0].shape))}->{_reduced(call)}"


def _reduction_pair(call: Call) -> str:
    return f"{_reduction(call)},{_reduced(call)}"


def _reduced_letters(call: Call) -> str:
    return "".join(LETTERS[dim] for dim in reduced_dims(call))


def reduction_shape(call: Call) -> Metas | None:
    """Result of a reduction of a contiguous tensor; sums of integers are int64."""
    spec = call.inputs[0]
    if not is_contiguous(spec.shape, spec.stride) or (call.has("dim") and not _dims_in_range(call)):
        return None
    gone = reduced_dims(call)
    keepdim = call.has("keepdim") and call.get("keepdim")
    shape = tuple(1 if d in gone else n for d, n in enumerate(spec.shape) if keepdim or d not in gone)
    dtype = (call.get("dtype") if call.has("dtype") else None) or spec.dtype
    if call.op.base in ("aten::sum", "aten::prod"):
        if call.get("dtype") is None and not (dtype.is_floating_point or dtype.is_complex):
            dtype = torch.int64
    elif call.op.base in ("aten::any", "aten::all"):
        if dtype is torch.uint8:
            return None
        dtype = torch.bool
    elif call.op.base in ("aten::argmax", "aten::argmin", "aten::count_nonzero"):
        dtype = torch.int64
    elif not dtype.is_floating_point and call.op.base in _FLOATING:
        return None
    if math.prod(spec.shape) == 0 and call.op.base not in ("aten::sum", "aten::any", "aten::all"):
        return None
    metas = [TensorMeta(shape, contiguous_stride(shape), dtype)]
    if len(call.op.returns) == 2:
        second = dtype if call.op.base in _FLOATING or call.op.base == "aten::aminmax" else torch.int64
        metas.append(TensorMeta(shape, contiguous_stride(shape), second))
    return tuple(metas)


#: Of floating point numbers; of others the result has another dtype, or does not exist.
_FLOATING = frozenset(full_names("mean std var std_mean var_mean logsumexp linalg_vector_norm norm"))


def _dims_in_range(call: Call) -> bool:
    asked = call.get("dim")
    listed = asked if isinstance(asked, list | tuple) else [] if asked is None else [asked]
    ndim = len(call.inputs[0].shape)
    found = [wrap(dim, ndim) for dim in listed]
    return None not in found and len(set(found)) == len(found)


def _of_bools(call: Call) -> bool:
    """Whether it is the greatest (least) of terms that are themselves true or false."""
    return call.inputs[0].dtype is torch.bool


def _is_linear_sum(call: Call) -> bool:
    """``nansum`` is not linear; and a sum of bools counts them, where their terms are added by "or"."""
    return call.op.base == "aten::sum" and not _of_bools(call)


# Each kind of reduction leaves partial terms of its kind, and keeps those it is given.
rule("sum nansum", _reduction, linear="a", reduce="sum", linear_if=_is_linear_sum)
rule("count_nonzero", _reduction, reduce="sum")
rule("prod", _reduction, linear="a", kinds=("prod",), reduce="prod")
rule("amax max.default", _reduction, linear="a", kinds=("max",), reduce="max")
rule("amin min.default", _reduction, linear="a", kinds=("min",), reduce="min")
rule("any _is_any_true", _reduction, linear="a", linear_if=_of_bools, kinds=("max",), reduce="max")
rule("all _is_all_true", _reduction, linear="a", linear_if=_of_bools, kinds=("min",), reduce="min")

# These need what they reduce whole.
rule("max.dim min.dim median.dim nanmedian.dim mode kthvalue", _reduction_pair, whole=_reduced_letters)
rule("argmax argmin logsumexp median nanmedian std var hash_tensor", _reduction, whole=_reduced_letters)
rule("std_mean var_mean", _reduction_pair, whole=_reduced_letters)
rule("aminmax", _reduction_pair, reduce=("min", "max"))
register_shape(
    full_names(
        "sum prod amax amin max.default min.default any all max.dim min.dim argmax argmin mean logsumexp "
        "median.dim nanmedian.dim mode aminmax norm.Scalar norm.ScalarOpt_dim "
        "std.correction var.correction std_mean.correction var_mean.correction linalg_vector_norm count_nonzero"
    ),
    reduction_shape,
)


# ------------------------------------------------------------------------------------------------- means


def _mean_of_pieces(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    """A mean over a cut dim: each device divides its sum by the global count (pieces may be uneven)."""
    gone = reduced_dims(call)
    if not any(letter is not None and LETTERS.index(letter) in gone for letter in matched.letters):
        return None
    spec = call.inputs[0]
    count = math.prod(spec.shape[dim] for dim in gone)
    meta = metas[0]
    assert isinstance(meta, TensorMeta)
    keepdim = bool(call.has("keepdim") and call.get("keepdim"))
    args = ["aten::sum.dim_IntList", [spec, gone, keepdim], count]
    return other_op(call, matched, metas, "dtorch::divided", args, {"dtype": meta.dtype})


def other_op(
    call: Call, matched: Matched, metas: Metas, op: str, args: list[Any], kwargs: dict[str, Any] | None = None
) -> OpPlan:
    """A plan that runs another op; ``args`` hold the call's tensors in their order, ``kwargs`` constants."""
    encoder = ArgumentEncoder()
    encoded = tuple(encoder.encode(value) for value in args)
    layouts = list(matched.inputs)
    return OpPlan(
        op=op,
        args=encoded,
        kwargs={name: encoder.encode(value) for name, value in (kwargs or {}).items()},
        layouts=tuple(layouts),
        conversions=matched.conversions,
        outputs=pack_outputs(call, metas, matched.outputs),
        returns=packing(call.op),
        mutates=call.written,
        num_seeds=encoder.num_seeds,
    )


rule("mean", _reduction, linear="a", reduce="sum", specialize=_mean_of_pieces)


# ------------------------------------------------------------------------------------------------- norms


def _norm_kind(call: Call) -> float:
    order = call.get("ord" if call.has("ord") else "p")
    return 2.0 if order is None else float(order)


def _norm_of_norms(call: Call) -> Kinds:
    """Norms of order 0 and 1 are sums of those of the pieces, infinite ones extremes; a root of a sum is neither."""
    kinds: dict[float, Kinds] = {0.0: "sum", 1.0: "sum", math.inf: "max", -math.inf: "min"}
    return kinds.get(_norm_kind(call))


rule("linalg_vector_norm norm", _reduction, reduce=_norm_of_norms)


# ------------------------------------------------------------------------------------------------- along one dim


def _same(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    return f"{names}->{names}"


def _same_pair(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    return f"{names}->{names},{names}"


def _along(call: Call) -> str:
    ndim = len(call.inputs[0].shape)
    dim = wrap(call.get("dim"), ndim)
    return LETTERS[dim] if dim is not None and ndim else ""


_SAFE = "aten::_safe_softmax"


def _contiguous_same(call: Call) -> tuple[TensorMeta] | None:
    spec = call.inputs[0]
    if not is_contiguous(spec.shape, spec.stride) or wrap(call.get("dim"), len(spec.shape)) is None:
        return None
    if (call.has("half_to_float") and call.get("half_to_float")) or (
        call.op.base == _SAFE and call.get("dtype")
    ):
        return None
    return (TensorMeta(spec.shape, contiguous_stride(spec.shape), spec.dtype),)


def _scan_shape(call: Call) -> Metas | None:
    metas = _contiguous_same(call)
    given = call.inputs[0].dtype
    if metas is None or call.op.writes:
        return None
    dtype = call.get("dtype") or (given if given.is_floating_point or given.is_complex else torch.int64)
    return (metas[0]._replace(dtype=dtype),)


rule("cumsum", _same, linear="a", whole=_along, shape=_scan_shape)
rule("cumprod", _same, whole=_along, shape=_scan_shape)
rule("logcumsumexp", _same, whole=_along)
rule("cummax cummin", _same_pair, whole=_along)
rule("_softmax _log_softmax _safe_softmax", _same, whole=_along, shape=_contiguous_same)
rule("sort topk", _same_pair, whole=_along)


def _softmax_backward(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    return f"{names},{names}->{names}"


def _softmax_backward_shape(call: Call) -> Metas | None:
    grad, output = call.inputs[0], call.inputs[1]
    if call.get("input_dtype") is not grad.dtype or (grad.shape, grad.stride) != (
        output.shape,
        output.stride,
    ):
        return None
    return _contiguous_same(call)


rule(
    "_softmax_backward_data _log_softmax_backward_data",
    _softmax_backward,
    linear="a",
    whole=_along,
    slices="a",
    shape=_softmax_backward_shape,
)
