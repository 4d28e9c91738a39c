"""Products of rows with the weights of the expert that each row is for. Shapes are local."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch

from dtorch_runtime.worker.failures import InternalFailure
from dtorch_runtime.worker.kernels import kernel

#: A local expert, and which rows are for it.
Group: TypeAlias = tuple[int, torch.Tensor | slice]


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
    return _products(x, weight, _rows_by_expert(expert_ids, start, weight.shape[0]))


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
    return _outer_products(gradient, x, weight.shape, _rows_by_expert(expert_ids, start, weight.shape[0]))


@kernel("routed_linear")
def routed_linear(rows: torch.Tensor, counts: torch.Tensor, weight: torch.Tensor, start: int) -> torch.Tensor:
    """As ``expert_linear`` for rows that lie sorted by expert, all of them of experts that are here.

    Args:
        counts: [..., all experts], how many rows of each every rank has sent; see ``row_exchange``.
    """
    return _products(rows, weight, _runs_by_expert(rows, counts, start, weight.shape[0]))


@kernel("routed_linear_backward")
def routed_linear_backward(
    gradient: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, start: int, shape: Sequence[int]
) -> torch.Tensor:
    """The derivative by the weight, which has this shape."""
    return _outer_products(gradient, rows, shape, _runs_by_expert(rows, counts, start, shape[0]))


def _products(x: torch.Tensor, weight: torch.Tensor, groups: Iterable[Group]) -> torch.Tensor:
    result = x.new_zeros((x.shape[0], weight.shape[1]))
    for expert, rows in groups:
        result[rows] = x[rows] @ weight[expert].t()
    return result


def _outer_products(
    gradient: torch.Tensor, x: torch.Tensor, shape: Sequence[int], groups: Iterable[Group]
) -> torch.Tensor:
    result = gradient.new_zeros(tuple(shape))
    for expert, rows in groups:
        result[expert] = gradient[rows].t() @ x[rows]
    return result


def _rows_by_expert(expert_ids: torch.Tensor, start: int, num_experts: int) -> Iterator[Group]:
    """Each local expert that has rows, and their numbers."""
    ordered, rows = torch.sort(expert_ids, stable=True)
    experts = torch.arange(start, start + num_experts + 1, device=ordered.device, dtype=ordered.dtype)
    bounds: list[int] = torch.searchsorted(ordered, experts).tolist()
    for expert, (first, last) in enumerate(pairwise(bounds)):
        if last > first:
            yield expert, rows[first:last]


def _runs_by_expert(
    rows: torch.Tensor, counts: torch.Tensor, start: int, num_experts: int
) -> Iterator[Group]:
    """Each local expert that has rows, and where these lie."""
    sizes: list[int] = counts.reshape(-1, counts.shape[-1])[:, start : start + num_experts].sum(0).tolist()
    bounds = [0, *accumulate(sizes)]
    if bounds[-1] != rows.shape[0]:
        raise InternalFailure(
            f"experts {start} and on have {bounds[-1]} rows by their counts, not {rows.shape[0]}"
        )
    for expert, (first, last) in enumerate(pairwise(bounds)):
        if last > first:
            yield expert, slice(first, last)
