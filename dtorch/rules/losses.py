"""Losses. Where rows are cut, a mean is the device's sum over the global count, so that uneven cuts are exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dtorch import shapes
from dtorch.meshes import layout_record
from dtorch.op_plan import OpPlan
from dtorch.rules import nn_shapes
from dtorch.rules.call import Call
from dtorch.rules.dsl import Binder, EquationRule, Specialize, full_names, rule
from dtorch.rules.empty import all_arguments, on_pieces
from dtorch.rules.equation import Equation, Matched
from dtorch.rules.reduce import other_op
from dtorch.rules.registry import register
from dtorch.shapes import Metas, TensorMeta, contiguous_like, register_shape
from dtorch.spec import contiguous_stride
from dtorch_runtime.wire.records import LocalStart

_NONE, _MEAN, _SUM = 0, 1, 2


def _mean_over(count: Callable[[Call], int], kernel: str = "dtorch::divided") -> Specialize:
    """A mean over cut dims: the sum of the device's losses over the global count. Derivatives alike."""

    def plan(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
        if call.get("reduction") != _MEAN or not any(matched.letters):
            return None
        summing = all_arguments(call, {"reduction": _SUM})
        return other_op(call, matched, metas, kernel, [call.op.name, summing, count(call)])

    return plan


# ------------------------------------------------------------------------------------------------- pairs


def _pair_loss(call: Call) -> str:
    return "...,...,...,...->..." if call.get("reduction") == _NONE else "...,...,...,...->"


def _num_elements(call: Call) -> int:
    shape = shapes.broadcast([spec.shape for spec in call.inputs])
    assert shape is not None
    return math.prod(shape)


rule(
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits",
    _pair_loss,
    reduce="sum",
    slices="*",
    specialize=_mean_over(_num_elements),
    shape=nn_shapes.pair_loss,
)
rule(
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward "
    "binary_cross_entropy_backward",
    "...,...,...,...->...",
    linear="a",
    slices="*",
    specialize=_mean_over(_num_elements),
    shape=nn_shapes.pair_loss_backward,
)


# ------------------------------------------------------------------------------------------------- classes


def _nll(call: Call) -> str:
    """Rows may be cut. For a mean every device needs all targets: they say how many rows count."""
    if len(call.inputs[0].shape) == 1:
        return "c,,c->,"
    if call.get("reduction") == _NONE:
        return "nc...,n...,c->n...,"
    if call.get("reduction") == _MEAN:
        space = len(call.inputs[0].shape) - 2
        return f"nc{'pq'[:space]},{'zyx'[: space + 1]},c->,"
    return "nc...,n...,c->,"


_SUMMED = Binder(_nll, whole="c", reduce="sum", slices="b")
_MEANED = Binder(_nll, whole="czyx", reduce="sum", unaffected=frozenset({1}), converts="b")


def _bind_nll(call: Call) -> Equation | None:
    return _MEANED(call) if call.get("reduction") == _MEAN else _SUMMED(call)


def _nll_of_pieces(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    if call.get("reduction") != _MEAN or not any(matched.letters):
        return None
    shape, layout = list(call.inputs[0].shape), layout_record(matched.inputs[0])
    starts = [LocalStart(shape, layout, dim) for dim in range(len(shape)) if dim != 1]
    args = [call.get(name) for name in ("self", "target", "weight", "ignore_index")]
    return other_op(call, matched, metas, "dtorch::nll_loss_shard", [*args, starts])


_NLLS = full_names("nll_loss_forward nll_loss2d_forward")
register(_NLLS, EquationRule(_bind_nll, specialize=_nll_of_pieces))
register_shape(_NLLS, nn_shapes.nll)


def _nll_backward(call: Call) -> str:
    if len(call.spec("self").shape) == 1:
        return ",c,,c,->c"
    grad = "n..." if call.get("reduction") == _NONE else ""
    return f"{grad},nc...,n...,c,->nc..."


_NLL_BACKWARD = Binder(_nll_backward, whole="c", slices="ac", terms=((0,),), reduce="sum")


def _bind_nll_backward(call: Call) -> Equation | None:
    """Only the derivative of a mean looks at the total weight, which may be partial for others."""
    equation = _NLL_BACKWARD(call)
    if equation is None or call.get("reduction") == _MEAN:
        return equation
    total = call.operands["total_weight"]
    inputs = tuple(None if index == total else dims for index, dims in enumerate(equation.inputs))
    return replace(equation, inputs=inputs)


_NLL_BACKWARDS = full_names("nll_loss_backward nll_loss2d_backward")
register(_NLL_BACKWARDS, EquationRule(_bind_nll_backward))
register_shape(_NLL_BACKWARDS, nn_shapes.likes("self"))


# ------------------------------------------------------------------------------------------------- margins


def _num_rows(call: Call) -> int:
    shape = call.spec("self").shape
    return shape[0] if len(shape) == 2 else 1


def _rows(call: Call) -> tuple[str, str]:
    """Letters of scores by class, and of one loss a row."""
    is_batched = len(call.spec("self").shape) == 2
    row = "n" if is_batched else "1" * len(call.spec("target").shape)
    scores = "nc" if is_batched else "c"
    return scores, row


def _of_rows(call: Call, row: str) -> str:
    return row if call.get("reduction") == _NONE else ""


def _multi_margin(call: Call) -> str:
    scores, row = _rows(call)
    return f"{scores},{row},c->{_of_rows(call, row)}"


def _multi_margin_backward(call: Call) -> str:
    scores, row = _rows(call)
    return f"{_of_rows(call, row)},{scores},{row},c->{scores}"


def _multilabel(call: Call) -> str:
    scores = "nc"[-len(call.spec("self").shape) :]
    return f"{scores},{scores}->{_of_rows(call, scores[:-1])},{scores}"


def _multilabel_backward(call: Call) -> str:
    scores = "nc"[-len(call.spec("self").shape) :]
    return f"{_of_rows(call, scores[:-1])},{scores},{scores},{scores}->{scores}"


def _losses(call: Call) -> TensorMeta:
    """One loss a row, or one; the shape of the target says whether a single row has a dim."""
    target = call.spec("target").shape
    shape = () if call.get("reduction") != _NONE else target[:1]
    return TensorMeta(shape, contiguous_stride(shape), call.spec("self").dtype)


def _multi_margin_shape(call: Call) -> Metas | None:
    scores, target = call.spec("self").shape, call.spec("target").shape
    fits = target == scores[:1] if len(scores) == 2 else len(scores) == 1 and target in ((), (1,))
    return (_losses(call),) if fits and 0 not in scores else None


def _multilabel_shape(call: Call) -> Metas | None:
    scores, target = call.spec("self").shape, call.spec("target").shape
    if scores != target or 0 in scores or len(scores) not in (1, 2):
        return None
    losses = _losses(call)
    if len(scores) == 1:
        losses = TensorMeta((), (), losses.dtype)
    return (losses, TensorMeta(target, contiguous_stride(target), losses.dtype))


rule(
    "multi_margin_loss",
    _multi_margin,
    whole="c",
    reduce="sum",
    slices="b",
    specialize=_mean_over(_num_rows),
    shape=_multi_margin_shape,
)
rule(
    "multi_margin_loss_backward",
    _multi_margin_backward,
    linear="a",
    whole="c",
    slices="ac",
    specialize=_mean_over(_num_rows),
)
rule(
    "multilabel_margin_loss_forward",
    _multilabel,
    whole="c",
    reduce="sum",
    slices="b",
    specialize=_mean_over(_num_rows, "dtorch::first_divided"),
    shape=_multilabel_shape,
)
rule(
    "multilabel_margin_loss_backward",
    _multilabel_backward,
    linear="a",
    whole="c",
    slices="acd",
    specialize=_mean_over(_num_rows),
)
register_shape(
    full_names("multi_margin_loss_backward multilabel_margin_loss_backward"), contiguous_like("self")
)


# ------------------------------------------------------------------------------------------------- sequences


def _ctc_targets(call: Call) -> str:
    """One sequence of targets a row, or all of them in one vector."""
    return "ns" if len(call.spec("targets").shape) == 2 else "s"


def _ctc(call: Call) -> str:
    return f"tnc,{_ctc_targets(call)}->n,nta"


def _ctc_backward(call: Call) -> str:
    return f"n,tnc,{_ctc_targets(call)},n,nta->tnc"


def _ctc_shape(call: Call) -> Metas | None:
    """As ``ctc_loss_allocate_outputs`` (ATen/native/LossCTC.cpp): losses, and the table of log probabilities."""
    log_probabilities = call.spec("log_probs")
    if len(log_probabilities.shape) != 3 or not isinstance(call.get("target_lengths"), list | tuple):
        return None
    time, batch, _ = log_probabilities.shape
    table = (batch, time, _ctc_width(call))
    dtype = log_probabilities.dtype
    return (
        TensorMeta((batch,), (1,), dtype),
        TensorMeta(table, contiguous_stride(table), dtype),
    )


def _ctc_width(call: Call) -> int:
    return 2 * max(call.get("target_lengths"), default=0) + 1


def _ctc_rows(call: Call, matched: Matched) -> list[Any]:
    """Lengths of all rows, and where the rows of the device start."""
    name = "log_probs"
    index = call.operands[name]
    assert isinstance(index, int)
    start = LocalStart(list(call.spec(name).shape), layout_record(matched.inputs[index]), 1)
    return [list(call.get("input_lengths")), list(call.get("target_lengths")), start]


def _ctc_of_pieces(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    if not any(matched.letters):
        return None
    options = [call.get("blank"), call.get("zero_infinity")]
    args = [call.get("log_probs"), call.get("targets"), *_ctc_rows(call, matched), *options]
    return on_pieces(call, matched, metas, "dtorch::ctc_loss_shard", args)


def _ctc_of_pieces_backward(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    if not any(matched.letters):
        return None
    tensors = [call.get(name) for name in ("grad", "log_probs", "targets", "neg_log_likelihood", "log_alpha")]
    options = [call.get("blank"), call.get("zero_infinity")]
    args = [*tensors, *_ctc_rows(call, matched), *options]
    return on_pieces(call, matched, metas, "dtorch::ctc_loss_shard_backward", args)


rule("_ctc_loss.default", _ctc, whole="tcsa", slices="b", specialize=_ctc_of_pieces, shape=_ctc_shape)
rule(
    "_ctc_loss_backward.default",
    _ctc_backward,
    linear="a",
    whole="tcsa",
    slices="ac",
    specialize=_ctc_of_pieces_backward,
    shape=contiguous_like("log_probs"),
)
