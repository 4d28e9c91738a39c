"""Pooling: planes are pooled one by one, so what counts them may be cut, and what spans them may not."""

from __future__ import annotations

from dtorch.rules.call import Call
from dtorch.rules.dsl import full_names, rule
from dtorch.rules.empty import or_zeros
from dtorch.shapes import contiguous_like, register_shape

#: Letters of the spatial dims of what is pooled and of the result, by their number.
_SPACES = {2: ("pq", "xy"), 3: ("pqr", "xyz")}


for _count, (_before, _after) in _SPACES.items():
    _large, _small = f"...{_before}", f"...{_after}"
    _space = _before + _after
    rule(
        f"avg_pool{_count}d _adaptive_avg_pool{_count}d",
        f"{_large}->{_small}",
        linear="a",
        whole=_space,
        specialize=or_zeros,
    )
    rule(
        f"avg_pool{_count}d_backward _adaptive_avg_pool{_count}d_backward",
        f"{_small},{_large}->{_large}",
        linear="a",
        whole=_space,
        slices="*",
        specialize=or_zeros,
    )
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
