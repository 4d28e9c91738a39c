"""Pooling: planes are pooled one by one, so what counts them may be cut. What spans them may be cut only for averages
of windows that lie side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from dtorch.rules.call import Call, rounds_nothing
from dtorch.rules.dsl import full_names, rule
from dtorch.rules.empty import localized_or_zeros, or_zeros
from dtorch.rules.equation import Matched
from dtorch.rules.tiles import local_dims, per_dim, space_letters, tiles
from dtorch.shapes import Metas, TensorMeta, contiguous_like, register_shape

#: Letters of the spatial dims of what is pooled and of the result, by their number.
_SPACES = {2: ("pq", "xy"), 3: ("pqr", "xyz")}


# ------------------------------------------------------------------------------------------------- averages


def _tiled(call: Call) -> tuple[str, str, str]:
    """Letters of spatial dims before and after, and those that must be whole."""
    kernel, stride, padding = (call.get(name) for name in ("kernel_size", "stride", "padding"))
    count = 2 if "2d" in call.op.base else 3
    options = (per_dim(value, count) for value in (kernel, stride or kernel, padding))
    return space_letters([tiles(*o) for o in zip(call.spec("self").shape[-count:], *options)])


def _adaptively_tiled(call: Call) -> tuple[str, str, str]:
    """As ``_tiled``: windows are side by side where the result divides what is pooled."""
    if call.has("grad_output"):
        small = call.spec("grad_output").shape
    else:
        small = tuple(call.get("output_size"))
    count = 2 if "2d" in call.op.base else 3
    sizes = zip(call.spec("self").shape[-count:], small[-count:], strict=True)
    return space_letters([0 < after < before and before % after == 0 for before, after in sizes])


_Letters: TypeAlias = Callable[[Call], tuple[str, str, str]]


def _average(of: _Letters) -> Callable[[Call], str]:
    def notation(call: Call) -> str:
        before, after, _ = of(call)
        return (
            f"...{after},...{before}->...{before}" if call.has("grad_output") else f"...{before}->...{after}"
        )

    return notation


def _whole(of: _Letters) -> Callable[[Call], str]:
    return lambda call: of(call)[2]


def _local_output(call: Call, matched: Matched, metas: Metas) -> dict[str, Any]:
    """The size of the piece in place of the global one."""
    (meta,) = metas
    assert isinstance(meta, TensorMeta)
    count = len(call.get("output_size"))
    return {"output_size": local_dims(meta.shape, matched.outputs[0], count)}


for _of, _names in (
    (_tiled, "avg_pool2d avg_pool3d"),
    (_adaptively_tiled, "_adaptive_avg_pool2d _adaptive_avg_pool3d"),
):
    _localize = _local_output if _of is _adaptively_tiled else None
    rule(
        _names,
        _average(_of),
        linear="a",
        linear_if=rounds_nothing,
        whole=_whole(_of),
        grouped="pqr",
        localize=_localize,
        specialize=localized_or_zeros(_localize) if _localize else or_zeros,
    )
    rule(
        " ".join(f"{name}_backward" for name in _names.split()),
        _average(_of),
        linear="a",
        linear_if=rounds_nothing,
        whole=_whole(_of),
        grouped="pqr",
        slices="*",
        specialize=or_zeros,
    )


# ------------------------------------------------------------------------------------------------- the largest

for _count, (_before, _after) in _SPACES.items():
    _large, _small = f"...{_before}", f"...{_after}"
    _space = _before + _after
    rule(
        f"max_pool{_count}d_with_indices adaptive_max_pool{_count}d",
        f"{_large}->{_small},{_small}",
        whole=_space,
        specialize=or_zeros,
    )
    rule(
        f"max_pool{_count}d_with_indices_backward adaptive_max_pool{_count}d_backward "
        f"fractional_max_pool{_count}d_backward",
        f"{_small},{_large},{_small}->{_large}",
        linear="a",
        whole=_space,
        slices="*",
        specialize=or_zeros,
    )
    rule(
        f"max_unpool{_count}d",
        f"{_large},{_large}->{_small}",
        linear="a",
        whole=_space,
        slices="*",
        specialize=or_zeros,
    )


def _fractional(call: Call) -> str:
    """Random samples are [batch, channels, spatial dims], with a batch of one for a single image."""
    random_dims = call.spec("random_samples").shape[2]
    before, after = _SPACES[random_dims]
    lead, of_samples = ("nc", "nc") if len(call.inputs[0].shape) == random_dims + 2 else ("c", "1c")
    return f"{lead}{before},{of_samples}s->{lead}{after},{lead}{after}"


rule(
    "fractional_max_pool2d fractional_max_pool3d",
    _fractional,
    whole="pqrxyzs",
    slices="*",
    specialize=or_zeros,
)
register_shape(full_names("fractional_max_pool3d_backward"), contiguous_like("self"))
