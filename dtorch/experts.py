"""A linear layer with a weight for each expert, and for each row the number of its expert.

Rows need not be sorted: each device sorts those that it has. So rows may be cut, and features, and experts as well, as
in any product; see ``rules/experts.py``. Shapes are global.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dtorch.tensors import Tensor
from dtorch_runtime.ir.placement import Partial, Replicate
from dtorch_runtime.worker.expert_kernels import (
    expert_linear as _local_linear,
    expert_linear_backward as _local_backward,
)

_library = torch.library.Library("dtorch", "DEF")
_library.define("expert_linear(Tensor x, Tensor weight, Tensor expert_ids) -> Tensor")
_library.define(
    "expert_linear_backward(Tensor gradient, Tensor x, Tensor expert_ids, Tensor weight) -> Tensor"
)
_library.impl("expert_linear", lambda x, weight, ids: _local_linear(x, weight, ids, 0), "CPU")
_library.impl(
    "expert_linear_backward",
    lambda gradient, x, ids, weight: _local_backward(gradient, x, ids, weight, 0),
    "CPU",
)


def expert_linear(x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """Each row times the weights of its expert. Differentiable by ``x`` and ``weight``, once.

    Args:
        x: [rows, in].
        weight: [experts, out, in].
        expert_ids: [rows], integers.

    Returns:
        [rows, out]; partial where ``in`` or the experts are cut.

    Raises:
        PlacementError: the three are cut in ways that do not match.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        result: torch.Tensor = _apply(x, weight, expert_ids)
    else:
        result = torch.ops.dtorch.expert_linear(x, weight, expert_ids)
    return result


class _ExpertLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, expert_ids: Any) -> Any:
        ctx.save_for_backward(x, weight, expert_ids)
        out = torch.ops.dtorch.expert_linear(x, weight, expert_ids)
        ctx.placements = out.placements if isinstance(out, Tensor) else None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, Any, None]:
        x, weight, expert_ids = ctx.saved_tensors
        if ctx.placements is not None:
            # Terms of a sum all have the gradient of the sum.
            placements = [Replicate() if isinstance(p, Partial) else p for p in ctx.placements]
            gradient = gradient.redistribute(placements=placements)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = torch.ops.dtorch.expert_linear(gradient, weight.transpose(1, 2), expert_ids)
        if ctx.needs_input_grad[1]:
            of_weight = torch.ops.dtorch.expert_linear_backward(gradient, x, expert_ids, weight)
        return of_x, of_weight, None


_apply: Any = _ExpertLinear.apply  # torch declares it without types
