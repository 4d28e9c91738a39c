"""Kernels that bring rows into the order of the experts that they go to, and back.

A *pair* is a token and one of the experts it chose; pairs are the dims of a tensor ``[..., choices]``, counted row by
row. Kept pairs lie sorted by expert, as ``order`` lists them; a choice of ``num_experts`` is one that is dropped.

Importing this module registers them. Shapes are local; plain tensors of one device are whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch_runtime.worker.kernels import kernel


@kernel("expert_counts")
def expert_counts(choices: torch.Tensor, num_experts: int, num_dims: int) -> torch.Tensor:
    """How many pairs each expert has: [1, ..., 1, num_experts], int64, with ``num_dims`` dims in front."""
    counts = torch.bincount(choices.flatten(), minlength=num_experts + 1)[:num_experts]
    return counts.reshape([1] * num_dims + [num_experts])


@kernel("own_choices")
def own_choices(choices: torch.Tensor, num_experts: int, first: int, number: Sequence[int]) -> torch.Tensor:
    """The choices of the experts that are here, ``number[0]`` from ``first`` on; the others are dropped."""
    is_here = (choices >= first) & (choices < first + number[0])
    return choices.masked_fill(~is_here, num_experts)


@kernel("expert_order")
def expert_order(choices: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The kept pairs, sorted by expert: [kept pairs], int64."""
    pairs = choices.flatten()
    order = pairs.argsort(stable=True)
    return order[: int((pairs < num_experts).sum())].clone()


@kernel("rows_taken")
def rows_taken(pairs: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The rows of pairs: [..., choices, features] to [kept pairs, features]."""
    if pairs.stride(-2) == 0 and pairs.ndim > 2:  # each choice has the token's row, which lies in memory once
        order = order.div(pairs.shape[-2], rounding_mode="floor")
        pairs = pairs.select(-2, 0)
    return pairs.reshape(-1, pairs.shape[-1]).index_select(0, order)


@kernel("rows_put")
def rows_put(rows: torch.Tensor, order: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of ``rows_taken``; dropped pairs are 0.

    Args:
        shape: of the result, but for the features.
    """
    pairs = rows.new_zeros((*shape, rows.shape[1]))
    pairs.view(-1, rows.shape[1]).index_copy_(0, order, rows)
    return pairs
