"""Trilinear forms, and reductions of segments and bags of rows."""

from __future__ import annotations

import torch

from dtorch.meshes import layout_record
from dtorch.op_plan import OpPlan
from dtorch.rules.call import Call
from dtorch.rules.dsl import rule
from dtorch.rules.empty import or_zeros
from dtorch.rules.equation import Matched
from dtorch.rules.reduce import other_op
from dtorch.rules.view import letters
from dtorch.shapes import Metas, TensorMeta
from dtorch.spec import contiguous_stride
from dtorch_runtime.ir.placement import ReduceOp
from dtorch_runtime.wire.records import LocalStart

# ------------------------------------------------------------------------------------------------- bilinear


def _trilinear(call: Call) -> str:
    """Each tensor is expanded by the dims that it lacks; their product is summed over ``sumdim``."""
    expanded = [set(call.get(f"expand{number}")) for number in (1, 2, 3)]
    ndim = len(call.spec("i1").shape) + len(expanded[0])
    names = letters(ndim)
    inputs = ["".join(c for dim, c in enumerate(names) if dim not in lacks) for lacks in expanded]
    summed = call.get("sumdim")
    return f"{','.join(inputs)}->{''.join(c for dim, c in enumerate(names) if dim not in summed)}"


rule("_trilinear", _trilinear, linear="a*b*c", slices="*", specialize=or_zeros)


# ------------------------------------------------------------------------------------------------- segments

_SEGMENTS: dict[str, ReduceOp] = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "prod": "prod"}


def _segment_letters(call: Call) -> tuple[str, str, str]:
    """Letters of the data, of where its segments are (which end in a letter of their own), and of the result."""
    names, axis = letters(len(call.spec("data").shape)), call.get("axis")
    where = "Z" if call.operands["lengths"] is not None else "Y"
    return names, f"{names[:axis]}{where}", f"{names[:axis]}Z{names[axis + 1 :]}"


def _segments(call: Call) -> str:
    data, where, result = _segment_letters(call)
    lengths = where if call.operands["lengths"] is not None else "1"
    return f"{data},{lengths},1,{where}->{result}"


def _whole_segments(call: Call) -> str:
    """Without rows no device is the first one, which alone starts from ``initial``."""
    axis = call.get("axis")
    return "YZ" if call.spec("data").shape[axis] else f"YZ{_segment_letters(call)[0][axis]}"


def _segments_of_piece(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    """Each device reduces its rows of every segment, and the results of devices are reduced."""
    axis = call.get("axis")
    if _segment_letters(call)[0][axis] not in matched.letters:
        return None
    data = call.spec("data")
    start = LocalStart(list(data.shape), layout_record(matched.inputs[0]), axis)
    has_lengths = call.operands["lengths"] is not None
    where = call.spec("lengths" if has_lengths else "offsets")
    covered = None if call.get("unsafe") else data.shape[axis]
    args = [data, where, call.get("reduce"), has_lengths, axis, start, covered, call.get("initial")]
    return other_op(call, matched, metas, "dtorch::segment_reduce_shard", args)


rule(
    "segment_reduce",
    _segments,
    whole=_whole_segments,
    reduce=lambda call: _SEGMENTS[call.get("reduce")],
    specialize=_segments_of_piece,
    nonempty=True,
)


def _segments_backward(call: Call) -> str:
    data, where, result = _segment_letters(call)
    lengths = where if call.operands["lengths"] is not None else "1"
    return f"{result},{result},{data},{lengths},{where}->{data}"


rule(
    "_segment_reduce_backward",
    _segments_backward,
    linear="a",
    whole=lambda call: f"YZ{_segment_letters(call)[0][call.get('axis')]}",
    slices="*",
    nonempty=True,
)


# ------------------------------------------------------------------------------------------------- bags

_SUM, _MAX = 0, 2


def _largest(call: Call) -> str:
    """Letters of the rows that were largest in each bag and feature, if the bags' largest were asked for."""
    return "bd" if call.get("mode") == _MAX else "z"


def _bag(call: Call) -> str:
    return f"vd,i,o,i->bd,x,y,{_largest(call)}"


def _bag_backward(call: Call) -> str:
    return f"bd,i,o,x,y,{_largest(call)},i->vd"


def _bag_dense_backward(call: Call) -> str:
    return f"bd,i,x,y,{_largest(call)},i->vd"


def _bag_shape(call: Call) -> Metas | None:
    """What a CPU saves of a bag: nothing of where rows go when it sums them in one pass (EmbeddingBag.cpp)."""
    weight, indices, offsets = call.spec("weight"), call.spec("indices"), call.spec("offsets")
    assert call.mesh is not None
    if call.mesh.device_type != "cpu" or len(weight.shape) != 2 or len(indices.shape) != 1:
        return None
    bags = offsets.shape[0] - int(call.get("include_last_offset"))
    is_fast = (
        call.get("mode") == _SUM
        and call.get("padding_idx") < 0
        and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and weight.stride[1] == 1
    )
    places = (0,) if is_fast else indices.shape
    forward_only = call.op.base == "aten::_embedding_bag_forward_only"
    counts = offsets.shape if forward_only and call.get("mode") == _SUM else (bags,)
    result = (bags, weight.shape[1])
    largest = result if call.get("mode") == _MAX else counts
    return (
        TensorMeta(result, contiguous_stride(result), weight.dtype),
        *(TensorMeta(s, contiguous_stride(s), offsets.dtype) for s in (places, counts, largest)),
    )


# Features may be cut. Bags may not: where one ends is known from where the next begins.
rule("_embedding_bag _embedding_bag_forward_only", _bag, whole="vio", unaffected=(1, 2, 3), shape=_bag_shape)
rule("_embedding_bag_backward", _bag_backward, linear="a", whole="bioxyz", slices="af")
rule("_embedding_bag_dense_backward", _bag_dense_backward, linear="a", whole="bixyz", slices="ae")
rule(
    "_embedding_bag_per_sample_weights_backward",
    "bd,vd,i,o,x->i",
    linear="a*b",
    whole="bviox",
    slices="ab",
)
