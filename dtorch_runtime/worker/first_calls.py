"""Functions of torch that several threads must not call for the first time at once.

PyTorch's CPU build computes functions such as ``exp`` with the vector functions of oneMKL, which choose each one's
kernel in its first call. In oneMKL 2024.2 another thread that calls it meanwhile can get a kernel of low accuracy,
for this one call (https://github.com/pytorch/pytorch/issues/188792). The devices of an agent are threads that come to
the same op at the same time, so the choice is made before they start.
"""

from __future__ import annotations

from functools import cache

import torch

#: Those of one floating tensor that may be of oneMKL; one that is not costs some microseconds.
_FUNCTIONS = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.cosh,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.exp2,
    torch.expm1,
    torch.lgamma,
    torch.log,
    torch.log10,
    torch.log1p,
    torch.log2,
    torch.sin,
    torch.sinh,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)


@cache
def make_first_calls() -> None:
    """Call each function, once a process; some milliseconds."""
    for dtype in (torch.float32, torch.float64):
        x = torch.full((16,), 0.5, dtype=dtype, device="cpu")
        for function in _FUNCTIONS:
            function(x)
