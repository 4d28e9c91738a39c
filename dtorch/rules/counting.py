"""Ops that count values: each device counts its own where the edges of the bins are known without the data."""

from __future__ import annotations

import torch

from dtorch.op_plan import OpPlan
from dtorch.rules.call import Call
from dtorch.rules.dsl import rule
from dtorch.rules.equation import Matched
from dtorch.rules.reduce import other_op
from dtorch.rules.view import letters
from dtorch.shapes import Metas, ShapeNeedsData, TensorMeta, register_shape
from dtorch.spec import contiguous_stride


def _counts(call: Call, *shape: int) -> TensorMeta:
    return TensorMeta(shape, contiguous_stride(shape), call.inputs[0].dtype)


def _every_dim(call: Call) -> str:
    return letters(len(call.inputs[0].shape))


# ------------------------------------------------------------------------------------------------- histograms


def _edges_need_data(call: Call) -> bool:
    return call.has("range") and call.get("range") is None


def _whole_where_data_decides(call: Call) -> str:
    """All of the values give the outermost edges when nobody does, and the total that a density is divided by."""
    return _every_dim(call) if _edges_need_data(call) or call.get("density") else ""


def _histogram(call: Call) -> str:
    values = _every_dim(call)
    bins = ",Z" if call.has("bins") and call.operands.get("bins") is not None else ""
    weight = f",{values}" if call.operands["weight"] is not None else ""
    return f"{values}{bins}{weight}->Y,Z"


def _histogram_shape(call: Call) -> Metas:
    bins = call.get("bins")
    num_bins = bins if isinstance(bins, int) else bins.shape[0] - 1
    return _counts(call, num_bins), _counts(call, num_bins + 1)


def _is_count(call: Call) -> bool:
    """Whether weights add up: densities are divided by their total."""
    return not call.get("density")


for _overload, _weight in (("histogram.bins_tensor", "c"), ("histogram.bin_ct", "b")):
    rule(
        _overload,
        _histogram,
        linear=_weight,
        spreads=_weight,
        linear_if=_is_count,
        whole=lambda call: _whole_where_data_decides(call) + "Z",
        reduce="sum",
        unaffected=(1,),
        shape=_histogram_shape,
    )


def _histc_whole(call: Call) -> str:
    return _every_dim(call) if call.get("min") == call.get("max") else ""


def _histc_of_integers(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    """Torch counts integers on a GPU only, and models that find themselves on an accelerator count on it."""
    dtype = call.inputs[0].dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return None
    constants = [call.get(name) for name in ("bins", "min", "max")]
    return other_op(call, matched, metas, OF_INTEGERS, [call.inputs[0], *constants])


#: The kernel that counts integers where torch has none.
OF_INTEGERS = "dtorch::histc_of_integers"
rule(
    "histc.default",
    lambda call: f"{_every_dim(call)}->Y",
    whole=_histc_whole,
    reduce="sum",
    specialize=_histc_of_integers,
    always=True,
)


# ------------------------------------------------------------------------------------------------- many dims


def _points(call: Call) -> str:
    """The dims that count points; the last one has their coordinates."""
    return _every_dim(call)[:-1]


def _histogramdd(call: Call) -> str:
    edges = call.operands.get("bins")
    num_edges = len(edges) if isinstance(edges, tuple) else 0
    weight = f",{_points(call)}" if call.operands["weight"] is not None else ""
    return f"{_every_dim(call)}{',Z' if num_edges else ''}{weight}->{_bins_letters(call)}"


def _bins_letters(call: Call) -> str:
    return "".join(chr(ord("A") + position) for position in range(call.inputs[0].shape[-1]))


def _histogramdd_whole(call: Call) -> str:
    return _whole_where_data_decides(call) + _every_dim(call)[-1:] + "Z"


def _histogramdd_shape(call: Call) -> Metas:
    bins = call.get("bins")
    return (_counts(call, *(n if isinstance(n, int) else n.shape[0] - 1 for n in bins)),)


def _histogramdd_edges_shape(call: Call) -> Metas:
    return (tuple(_counts(call, num_bins + 1) for num_bins in call.get("bins")),)


for _overload, _weight in (("_histogramdd_from_bin_tensors", "c"), ("_histogramdd_from_bin_cts", "b")):
    rule(
        f"{_overload}.default",
        _histogramdd,
        linear=_weight,
        spreads=_weight,
        linear_if=_is_count,
        whole=_histogramdd_whole,
        reduce="sum",
        shape=_histogramdd_shape,
    )


def _histogramdd_edges(call: Call) -> str:
    weight = f",{_points(call)}" if call.operands["weight"] is not None else ""
    return f"{_every_dim(call)}{weight}->Z"


# Weights have no say in where the edges are.
rule(
    "_histogramdd_bin_edges",
    _histogramdd_edges,
    linear="b",
    spreads="b",
    whole=_histogramdd_whole,
    unaffected=(0,),
    shape=_histogramdd_edges_shape,
)


# ------------------------------------------------------------------------------------------------- repeats


def _repeated_shape(call: Call) -> Metas | None:
    """The sum of the repeats, unless the caller knows it."""
    if call.get("output_size") is None:
        raise ShapeNeedsData(f"{call.op}: only the data tells how many repeats there are; pass output_size=")
    return None


register_shape(["aten::repeat_interleave.Tensor"], _repeated_shape)
