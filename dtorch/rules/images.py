"""Padding and resizing of images, sampling of them, and regrouping of their pixels."""

from __future__ import annotations

from typing import Any

from dtorch.rules.call import Call, local_shape, rounds_nothing
from dtorch.rules.dsl import rule
from dtorch.rules.empty import localized_or_zeros, or_zeros
from dtorch.rules.equation import Matched
from dtorch.rules.nn_shapes import resized, sampled
from dtorch.shapes import Metas

#: Letters of the spatial dims before and after, by their number.
_SPACES = {1: ("p", "x"), 2: ("pq", "xy"), 3: ("pqr", "xyz")}
_RESIZES = {
    1: "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    2: "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    3: "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
}


def _backward(names: str) -> str:
    return " ".join(f"{name}_backward" for name in names.split())


def _local_input_size(call: Call, matched: Matched, metas: Metas) -> dict[str, Any]:
    """Batch and channels of the piece, in place of the global ones."""
    return {"input_size": local_shape(tuple(call.get("input_size")), matched.outputs[0])}


for _count, (_before, _after) in _SPACES.items():
    _large, _small = f"...{_after}", f"...{_before}"
    _space = _before + _after
    _pads = f"reflection_pad{_count}d replication_pad{_count}d"
    rule(_pads, f"{_small}->{_large}", linear="a", spreads="a", whole=_space, specialize=or_zeros)
    rule(
        _RESIZES[_count],
        f"{_small}->{_large}",
        linear="a",
        linear_if=rounds_nothing,
        whole=_space,
        specialize=or_zeros,
        shape=resized,
    )
    rule(
        _backward(_pads),
        f"{_large},{_small}->{_small}",
        linear="a",
        whole=_space,
        slices="*",
        specialize=or_zeros,
    )
    rule(
        _backward(_RESIZES[_count]),
        f"{_large}->{_small}",
        linear="a",
        whole=_space,
        localize=_local_input_size,
        specialize=localized_or_zeros(_local_input_size),
    )


# ------------------------------------------------------------------------------------------------- sampling


def _local_size(call: Call, matched: Matched, metas: Metas) -> dict[str, Any]:
    return {"size": local_shape(tuple(call.get("size")), matched.outputs[0])}


# A grid says for each place of the result where in the whole image it comes from.
for _count, (_before, _after) in {2: ("pq", "xy"), 3: ("pqr", "xyz")}.items():
    rule(
        f"grid_sampler_{_count}d",
        f"nc{_before},n{_after}d->nc{_after}",
        linear="a",
        whole=f"{_before}d",
        slices="*",
        specialize=or_zeros,
        shape=sampled,
    )
    rule(
        f"grid_sampler_{_count}d_backward",
        f"nc{_after},nc{_before},n{_after}d->nc{_before},n{_after}d",
        linear="a",
        whole=f"{_before}d",
        slices="*",
        specialize=or_zeros,
    )


def _affine_grid(call: Call) -> str:
    _, after = _SPACES[len(call.get("size")) - 2]
    return f"nij->n{after}k"


rule(
    "affine_grid_generator",
    _affine_grid,
    linear="a",
    whole="ij",
    localize=_local_size,
    specialize=localized_or_zeros(_local_size),
)


# ------------------------------------------------------------------------------------------------- pixels

# Dims are a multiple on one side, and a cut of one is that of the other where they are even.
rule("pixel_shuffle pixel_unshuffle", "...cpq->...cpq", linear="a", grouped="cpq", specialize=or_zeros)
rule("im2col", "...cpq->...cl", linear="a", whole="pql", grouped="c", specialize=or_zeros)
rule("col2im", "...cl->...cpq", linear="a", whole="pql", grouped="c", specialize=or_zeros)


def _channel_shuffle(call: Call) -> str:
    space = "pqrstu"[: len(call.inputs[0].shape) - 2]
    return f"nc{space}->nc{space}"


rule("channel_shuffle", _channel_shuffle, moves="a", whole="c", specialize=or_zeros)
