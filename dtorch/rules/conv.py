"""Convolutions: batch, channels and groups may be cut. A cut of space would need the neighbours of its edge, but for
windows that lie side by side (patches)."""

from __future__ import annotations

from typing import Any

from dtorch.op_plan import OpPlan
from dtorch.rules import explain
from dtorch.rules.call import Call, local_shape
from dtorch.rules.dsl import rule
from dtorch.rules.empty import all_arguments, localized_or_zeros, on_pieces, some_device_is_empty
from dtorch.rules.equation import Matched, dim_cuts, nested_cuts
from dtorch.rules.reduce import other_op
from dtorch.rules.tiles import per_dim, space_letters, tiles
from dtorch.shapes import Metas, TensorMeta


def _space(call: Call) -> tuple[str, str, str, str]:
    """Letters of the spatial dims of input, weight and output, and those that must be whole."""
    small, large = call.spec("input").shape[2:], call.spec("weight").shape[2:]
    count = len(small)
    stride, padding, dilation, more = (
        per_dim(call.get(name), count) for name in ("stride", "padding", "dilation", "output_padding")
    )
    sizes = [s * n for s, n in zip(stride, small)] if call.get("transposed") else small
    tiled = [tiles(*options) for options in zip(sizes, large, stride, padding, dilation)]
    before, after, whole = space_letters([t and not m for t, m in zip(tiled, more)])
    window = "stu"[:count]
    return before, window, after, whole + window


def _channels(call: Call) -> tuple[str, str, str]:
    """Letters of the channels of the input, of the weight and of the output.

    With groups, all of them count groups: a cut between groups of one is the cut between those of the others.
    """
    if call.get("groups") != 1:
        return "o", "oj", "o"
    return ("i", "io", "o") if call.get("transposed") else ("i", "oi", "o")


def _convolution(call: Call) -> str:
    before, window, after, _ = _space(call)
    given, weight, made = _channels(call)
    return f"n{given}{before},{weight}{window},{made}->n{made}{after}"


def _convolution_backward(call: Call) -> str:
    """A result that is not wanted has every letter: nothing is asked for it."""
    before, window, after, _ = _space(call)
    given, weight, made = _channels(call)
    results = [f"n{given}{before}", f"{weight}{window}", made]
    wanted = [
        r if is_wanted else "nio" for r, is_wanted in zip(results, call.get("output_mask"), strict=True)
    ]
    return f"n{made}{after},n{given}{before},{weight}{window}->{','.join(wanted)}"


def _whole(call: Call) -> str:
    return _space(call)[3] + "j"


def _group_inputs(call: Call) -> int:
    return int(call.spec("input").shape[1]) // int(call.get("groups"))


def _check_groups(call: Call, matched: Matched) -> None:
    """Raises PlacementError where a cut falls inside a group."""
    index = call.operands["input"]
    assert isinstance(index, int)
    size = _group_inputs(call)
    cuts = nested_cuts(call.spec("input").shape[1], dim_cuts(matched.inputs[index], 1))
    if any(at % size for at in cuts):
        raise explain.refused(
            call, f"the cuts of channels at {list(cuts)} fall inside groups of {size} channels", []
        )


def _convolution_of_pieces(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    if call.get("groups") != 1 and "o" in matched.letters:
        _check_groups(call, matched)
        args = all_arguments(call)[:-1]
        return on_pieces(call, matched, metas, "dtorch::grouped_convolution", [*args, _group_inputs(call)])
    if not some_device_is_empty(call, matched):
        return None
    (meta,) = metas
    assert isinstance(meta, TensorMeta)
    shape = local_shape(meta.shape, matched.outputs[0])
    return other_op(call, matched, metas, "dtorch::convolution_or_bias", [*all_arguments(call), shape])


def _local_bias(call: Call, matched: Matched, metas: Metas) -> dict[str, Any]:
    sizes = call.get("bias_sizes")
    if sizes is None or not call.get("output_mask")[2]:
        return {}
    return {"bias_sizes": local_shape(tuple(sizes), matched.outputs[2])}


_backward_or_zeros = localized_or_zeros(_local_bias)


def _backward_of_pieces(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    if call.get("groups") != 1 and "o" in matched.letters:
        _check_groups(call, matched)
        *args, _, mask = all_arguments(call, _local_bias(call, matched, metas))
        args = [*args, _group_inputs(call), list(mask)]
        return on_pieces(call, matched, metas, "dtorch::grouped_convolution_backward", args)
    plan: OpPlan | None = _backward_or_zeros(call, matched, metas)
    return plan


rule(
    "convolution",
    _convolution,
    linear="a*b+c",
    lifts=True,
    whole=_whole,
    slices="c",
    grouped="opqr",
    specialize=_convolution_of_pieces,
)
rule(
    "convolution_backward",
    _convolution_backward,
    linear="a",
    whole=_whole,
    slices="*",
    grouped="opqr",
    unaffected=((2, "i"),),  # cutting input channels leaves the derivative of a bias whole
    localize=_local_bias,
    specialize=_backward_of_pieces,
)
