"""Products of rows with the weights of the expert that each row is for. Shapes are local."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from dtorch_runtime.worker.kernels import kernel


@kernel("expert_linear")
def expert_linear(
    x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor, start: int
) -> torch.Tensor:
    """Each row times the weights of its expert; zeros for rows of experts that are elsewhere.

    Args:
        x: [rows, in].
        weight: [local experts, out, in].
        expert_ids: [rows], of all experts.
        start: number of the first local expert.

    Returns:
        [rows, out].
    """
    result = x.new_zeros((x.shape[0], weight.shape[1]))
    for expert, rows in _rows_by_expert(expert_ids, start, weight.shape[0]):
        result[rows] = x[rows] @ weight[expert].t()
    return result


@kernel("expert_linear_backward")
def expert_linear_backward(
    gradient: torch.Tensor, x: torch.Tensor, expert_ids: torch.Tensor, weight: torch.Tensor, start: int
) -> torch.Tensor:
    """The derivative by ``weight``, of which only the shape is used.

    Args:
        gradient: [rows, out].
        x: [rows, in].
        weight: [local experts, out, in], and so is what is returned.
    """
    result = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    for expert, rows in _rows_by_expert(expert_ids, start, weight.shape[0]):
        result[expert] = gradient[rows].t() @ x[rows]
    return result


def _rows_by_expert(
    expert_ids: torch.Tensor, start: int, num_experts: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Each local expert that has rows, and their numbers."""
    ordered, rows = torch.sort(expert_ids, stable=True)
    experts = torch.arange(start, start + num_experts + 1, device=ordered.device, dtype=ordered.dtype)
    bounds: list[int] = torch.searchsorted(ordered, experts).tolist()
    for expert, (first, last) in enumerate(pairwise(bounds)):
        if last > first:
            yield expert, rows[first:last]
