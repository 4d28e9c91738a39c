"""Whether a result differs from plain torch's by rounding alone: judged by the whole op in twice the precision.

A sum over a sharded dim is added in another order than the whole's, so its last digits differ. That is no fault as
long as the result is about as near to the true value as plain torch's own. The true value is what plain torch gives
for the same inputs in float64 (complex128); see ``is_rounding`` for how near.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tests.numerics.opinfo.entries import Sample

#: Times plain torch's own error that a result may be off: it is one draw of how roundings add up, and another order
#: of the same sums is a second draw. Largest errors of two orders are rarely twice apart, and a fault of a rule (a
#: term twice or not at all) is off by whole terms.
_NUM_OWN_ERRORS = 4
#: Units in the last place of the largest element that it may be off beside: plain torch may have no error at all by
#: luck. Four devices add three sums, each rounded by half a unit, and the result is rounded once: two units, and twice
#: that because parts of a sum may be larger than the sum.
_NUM_UNITS = 4
#: The same where there is no true value to be had, and what is compared are two results with an error each.
_NUM_UNITS_APART = 16
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


@dataclass(frozen=True)
class Exact:
    """What a call gives in float64: leaves, and gradients where there are any to compare."""

    leaves: list[Any]
    grads: list[torch.Tensor | None] | None


def widened(sample: Sample) -> Sample:
    """The same arguments in float64; dtypes among them too."""
    return sample.with_leaves([_wide(leaf) for leaf in sample.leaves])


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, torch.dtype):
        return _WIDE.get(leaf, leaf)
    return widened_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf


def widened_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in float64, a leaf of autograd; what has no fraction stays as it is."""
    made = tensor.detach().to(_WIDE.get(tensor.dtype, tensor.dtype))
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def is_rounding(value: torch.Tensor, expected: torch.Tensor, exact: Any) -> bool:
    """Whether ``value`` is as near to the true value as rounding explains, when it is not close to ``expected``.

    With e the largest error of ``expected`` (plain torch in the dtype of ``value``), u the unit in the last place of
    the largest element: the largest error of ``value`` is at most 4 e + 4 u. What is not finite must be the same.

    Where ``exact`` is no such tensor (the op takes no float64, draws random numbers, or finds results of another
    shape in it), or e is more than half of the digits, so that it is another solution of a problem that has several
    (the sign of an eigenvector) or none: ``value`` and ``expected`` are at most 16 u apart.

    Args:
        value, expected: tensors of one shape and dtype.
        exact: what float64 gives in this place, or anything else for nothing.
    """
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return False
    if not isinstance(exact, torch.Tensor) or exact.shape != value.shape or exact.layout is not torch.strided:
        exact = None
    wide = torch.complex128 if value.dtype.is_complex else torch.float64
    found, plain = value.detach().to(wide), expected.detach().to(wide)
    true = plain if exact is None else exact.detach().to(wide)
    finite = found.isfinite() & plain.isfinite() & true.isfinite()
    if not _same(found[~finite], plain[~finite]) or not bool(finite.any()):
        return False
    found, plain, true = found[finite], plain[finite], true[finite]
    eps = torch.finfo(value.dtype).eps
    own_error = _largest(plain - true)
    if exact is not None and own_error <= math.sqrt(eps) * _largest(true):
        allowed = _NUM_OWN_ERRORS * own_error + _NUM_UNITS * eps * _largest(true)
        return _largest(found - true) <= allowed
    return _largest(found - plain) <= _NUM_UNITS_APART * eps * _largest(plain)


def _same(found: torch.Tensor, plain: torch.Tensor) -> bool:
    return bool(torch.isclose(found, plain, rtol=0.0, atol=0.0, equal_nan=True).all())


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())
