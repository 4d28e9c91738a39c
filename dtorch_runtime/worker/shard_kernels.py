"""Kernels that compute a piece of what the whole op would give: they know where the piece starts.

Importing this module registers them. Shapes are local unless a name says whole.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch_runtime.worker.kernels import box_of, find_kernel, kernel


@kernel("factory_shard")
def factory_shard(
    operator: str, args: list[Any], starts: list[int], sizes: list[int], **kwargs: Any
) -> torch.Tensor:
    """The box of what a factory makes, e.g. of ``aten::arange``: made whole, cut, and let go."""
    whole: torch.Tensor = find_kernel(operator).function(*args, **kwargs)
    return box_of(whole, starts, sizes)


@kernel("divided")
def divided(operator: str, args: list[Any], divisor: float) -> torch.Tensor:
    """A local sum as a part of a global mean: what ``operator`` gives, divided by the global count."""
    total: torch.Tensor = find_kernel(operator).function(*args)
    return total.div(divisor)
