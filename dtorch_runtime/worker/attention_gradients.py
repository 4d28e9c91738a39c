"""Attention with its derivatives, each one op: whole sequences, no mask, on a CPU.

The forward pass keeps the log-sum-exp of each row, from which the backward pass makes the weights again: Dao,
"FlashAttention-2" (arXiv:2307.08691), as torch has it for the CPU. Importing this module registers the kernels. Shapes
are local, and queries lie before heads in the memory of every result, as in what linear layers make and take.
"""

from __future__ import annotations

import torch

from dtorch_runtime.worker.kernels import kernel

aten = torch.ops.aten


@kernel("attention_forward", num_returns=2)
def attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, heads, queries, features] and, of keys and values, [batch, key heads, keys, features].

    Returns:
        The result, like the query, and the log-sum-exp of its rows, [batch, heads, queries], float32 or wider.
    """
    if query.numel() == 0 or key.numel() == 0:
        sums = torch.zeros(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        return _queries_first(torch.zeros_like(query)), sums
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=None, scale=scale
    )
    return _queries_first(out), sums.contiguous()


@kernel("attention_backward", num_returns=3)
def attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The derivatives of query, key and value, from that of the result; they are linear in it."""
    if query.numel() == 0 or key.numel() == 0:
        found: tuple[torch.Tensor, ...] = tuple(torch.zeros_like(x) for x in (query, key, value))
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, sums, 0.0, is_causal, attn_mask=None, scale=scale
        )
    of_query, of_key, of_value = map(_queries_first, found)
    return of_query, of_key, of_value


def _queries_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)
