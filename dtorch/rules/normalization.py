"""Norms of layers, groups and batches. Softmaxes are among the reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtorch.op_plan import OpPlan
from dtorch.rules import explain, nn_shapes
from dtorch.rules.call import Call
from dtorch.rules.dsl import Binder, EquationRule, full_names, rule
from dtorch.rules.empty import on_pieces, or_zeros
from dtorch.rules.equation import Matched, dim_cuts, nested_cuts, signatures
from dtorch.rules.registry import register
from dtorch.shapes import Metas, TensorMeta, is_contiguous, register_shape, run_on_meta
from dtorch.spec import contiguous_stride

# ------------------------------------------------------------------------------------------------- layers


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


_EXACT = (torch.float32, torch.float64)


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
    assert call.mesh is not None
    # Other devices keep statistics of short floats in float32.
    exact = _EXACT if call.mesh.device_type != "cpu" else (*_EXACT, torch.bfloat16, torch.float16)
    if spec.dtype not in exact or any(g.dtype is not spec.dtype for g in call.inputs):
        return None
    if any(given.shape != normalized for given in call.inputs[1:]):
        return None
    statistics = (*spec.shape[:kept], *(1 for _ in normalized))
    row = TensorMeta(statistics, contiguous_stride(statistics), spec.dtype)
    whole = TensorMeta(spec.shape, contiguous_stride(spec.shape), spec.dtype)
    return (whole, row, row)


def _rms_norm_shape(call: Call) -> Metas | None:
    metas = _layer_norm_shape(call) if call.inputs[0].dtype in _EXACT else None
    return None if metas is None else metas[:2]


rule("native_layer_norm", _layer_norm, whole=_norm_dims, shape=_layer_norm_shape)
rule(
    "native_layer_norm_backward",
    _layer_norm_backward,
    linear="a",
    whole=_norm_dims,
    slices="*",
    shape=nn_shapes.likes("input", "weight", "bias"),
)
rule("_fused_rms_norm", _rms_norm, whole=_norm_dims, shape=_rms_norm_shape)


# ------------------------------------------------------------------------------------------------- groups


def _group_channels(call: Call) -> int:
    return int(call.get("C")) // int(call.get("group"))


def _check_groups(call: Call, matched: Matched, equation_of: Any) -> None:
    """Channels may be cut between groups only.

    Raises:
        PlacementError: a cut falls inside a group.
    """
    channels = call.get("C")
    index = call.operands["input"]
    assert isinstance(index, int)
    cuts = nested_cuts(channels, dim_cuts(matched.inputs[index], 1))
    size = _group_channels(call)
    if any(at % size for at in cuts):
        raise explain.refused(
            call,
            f"the cuts of channels at {list(cuts)} fall inside groups of {size} channels",
            [explain.show(call, s) for s in signatures(equation_of(call))],
        )


def _group_norm(call: Call) -> str:
    space = "pqrstu"[: len(call.inputs[0].shape) - 2]
    return f"nc{space},c,c->nc{space},nc,nc"


def _group_norm_backward(call: Call) -> str:
    space = "pqrstu"[: len(call.inputs[0].shape) - 2]
    return f"nc{space},nc{space},nc,nc,c->nc{space},c,c"


_GROUPS = Binder(_group_norm, whole="pqrstu", slices="*", grouped="c")
_GROUPS_BACKWARD = Binder(
    _group_norm_backward, whole="pqrstu", slices="*", grouped="c", reduce="sum", terms=((0,),)
)


def _groups_of_piece(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    if not any(matched.letters):
        return None
    _check_groups(call, matched, _GROUPS)
    args = [call.get(name) for name in ("input", "weight", "bias")]
    args += [_group_channels(call), call.get("eps")]
    return on_pieces(call, matched, metas, "dtorch::group_norm", args)


def _groups_of_piece_backward(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    if not any(matched.letters):
        return None
    _check_groups(call, matched, _GROUPS_BACKWARD)
    args = [call.get(name) for name in ("grad_out", "input", "mean", "rstd", "weight")]
    args += [_group_channels(call), list(call.get("output_mask"))]
    return on_pieces(call, matched, metas, "dtorch::group_norm_backward", args)


register(full_names("native_group_norm"), EquationRule(_GROUPS, specialize=_groups_of_piece))
register(
    full_names("native_group_norm_backward"),
    EquationRule(_GROUPS_BACKWARD, specialize=_groups_of_piece_backward),
)
register_shape(full_names("native_group_norm"), nn_shapes.group_norm)
register_shape(full_names("native_group_norm_backward"), nn_shapes.likes("input", "weight", "weight"))


# ------------------------------------------------------------------------------------------------- batches


def _is_training(call: Call) -> bool:
    """Whether statistics are those of the batch."""
    for name in ("training", "train", "update"):
        if call.has(name):
            return bool(call.get(name))
    return call.op.base == "aten::_batch_norm_with_update"


def _saved(call: Call) -> str:
    """Letters of the saved statistics: on a CPU there are none without training."""
    assert call.mesh is not None
    return "c" if _is_training(call) or call.mesh.device_type != "cpu" else "1"


def _batch_norm(call: Call) -> str:
    saved = _saved(call)
    statistics = ",c,c" if call.has("running_mean") else ""
    reserve = ",1" if len(call.op.returns) == 4 else ""
    return f"nc...,c,c{statistics}->nc...,{saved},{saved}{reserve}"


def _batch_norm_backward(call: Call) -> str:
    saved = _saved(call)
    return f"nc...,nc...,c,c,c,{saved},{saved},1->nc...,c,c"


def _batch_whole(call: Call) -> Sequence[str]:
    """In training every device would need the statistics of the whole batch."""
    if not _is_training(call):
        return ()
    input_ndim = len(call.spec("input").shape)
    return ("n", *(f"~{i}" for i in range(1, input_ndim - 1)))


def _batch_norm_shape(call: Call) -> Metas | None:
    """Meta kernels save statistics without training, as CUDA does; a CPU does not."""
    assert call.mesh is not None
    is_cpu, is_training = call.mesh.device_type == "cpu", _is_training(call)
    if is_training or is_cpu:
        metas = nn_shapes.batch_norm(call, has_saved=is_training)
        if metas is not None:
            return metas
    if is_training or not is_cpu:
        return None
    result, mean, deviation, *reserve = run_on_meta(call)
    assert isinstance(mean, TensorMeta)
    assert isinstance(deviation, TensorMeta)
    none = (TensorMeta((0,), (1,), mean.dtype), TensorMeta((0,), (1,), deviation.dtype))
    return (result, *none, *reserve)


_NORMS_OF_BATCHES = (
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update "
    "_batch_norm_no_update"
)
rule(
    _NORMS_OF_BATCHES,
    _batch_norm,
    whole=_batch_whole,
    slices="*",
    unaffected=(1, 2, 3),
    specialize=or_zeros,
    shape=_batch_norm_shape,
)
rule(
    "native_batch_norm_backward batch_norm_backward",
    _batch_norm_backward,
    linear="a",
    whole=_batch_whole,
    slices="*",
    specialize=or_zeros,
    shape=nn_shapes.likes("input", "weight", "weight"),
)
