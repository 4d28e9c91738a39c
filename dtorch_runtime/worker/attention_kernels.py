"""Kernels of attention: of whole sequences, and of one block of keys with what other blocks gave.

A block is some queries against some keys, each a run of the sequence. Results of blocks are merged by the log-sum-exp
of their scores: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867). The backward
pass of a block needs no other block once that of all is known: Dao, "FlashAttention-2" (arXiv:2307.08691).

Importing this module registers them. Shapes are local.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dtorch_runtime.worker.distributions import bernoulli
from dtorch_runtime.worker.kernels import kernel
from dtorch_runtime.worker.positions import fill

aten = torch.ops.aten
_FLASH_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@kernel("attention")
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Scaled dot-product attention of the local heads and batches: [..., heads, queries, features].

    Returns:
        [..., heads, queries, features of value]. With four dims, queries lie before heads in memory whatever
        kernel computed it, so that strides are the same on every device and known to the client.
    """
    if query.numel() == 0 or value.numel() == 0:
        result = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    else:
        result = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if result.ndim == 4:
        return result.transpose(1, 2).contiguous().transpose(1, 2)
    return result.contiguous()


@kernel("attention_seed")
def attention_seed(seed: int, device: torch.device) -> torch.Tensor:
    """A seed as a value: 0-dim int64."""
    return torch.tensor(seed, dtype=torch.int64, device=device)


@kernel("attention_block")
def attention_block(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    query_start: int,
    key_start: int,
    offset: int,
    is_causal: bool,
    scale: float,
    is_first: bool,
    dropout_p: float = 0.0,
    weights_shape: Sequence[int] = (),
    origin: Sequence[int] = (),
    starts: Sequence[int] = (),
) -> None:
    """Add what one block of keys gives to ``out`` and ``lse``, in place.

    Args:
        out: [..., heads, queries, features of value], float32 or wider. Zeros before the first block.
        lse: [..., heads, queries], logarithms of the sums of the exponentials. -inf before the first block.
        query: [..., heads, queries, features]; key, value: [..., key heads, keys, features].
        mask: broadcast to [..., heads, queries, all keys]; True and 0 let through.
        query_start, key_start: where the runs start in their sequences; the first key is the first of the mask.
        offset: how far the sequence of queries starts behind that of keys, for the causal mask.
        is_first: no block was added before.
        seed, dropout_p, weights_shape, origin, starts: of a dropout; see ``_kept``.
    """
    block = _block(query, key, value, mask, query_start, key_start, offset, is_causal)
    if block is None:
        return
    kept = _kept(query, key, seed, dropout_p, weights_shape, origin, (*starts, query_start, key_start))
    query, key, value, mask, is_diagonal = block
    out, lse = _four_dims(out), _four_dims(lse.unsqueeze(-1)).squeeze(-1)
    if kept is None and _has_flash(query, value):
        found, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_diagonal, attn_mask=mask, scale=scale
        )
    else:
        scores = _scores(query, key, mask, is_diagonal, scale)
        sums = scores.logsumexp(-1)
        weights = (scores - _finite(sums).unsqueeze(-1)).exp_()
        weights = weights if kept is None else weights.mul_(kept)
        found = weights @ _repeated(value, query).to(weights.dtype)
    if mask is not None:  # a row that sees no key: kernels differ in what they say of it
        sums = sums.masked_fill((mask == -math.inf).all(-1), -math.inf)
    if is_first:
        out.copy_(found)
        lse.copy_(sums)
        return
    total = torch.logaddexp(lse, sums)
    base = _finite(total)
    out.mul_((lse - base).exp_().unsqueeze(-1)).addcmul_(
        found.to(out.dtype), (sums - base).exp_().unsqueeze(-1)
    )
    lse.copy_(total)


@kernel("attention_part")
def attention_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    key_start: int,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """What some of the keys give to all queries, to be merged by ``attention_merged``.

    Args:
        query, key, value, mask: as for ``attention_block``; the queries are all there are.

    Returns:
        [1, ..., heads, queries, features of value + 1], float32 or wider; the last feature is the log-sum-exp.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=dtype)
    lse = query.new_full(query.shape[:-1], -math.inf, dtype=dtype)
    attention_block(out, lse, query, key, value, mask, None, 0, key_start, 0, is_causal, scale, True)
    return torch.cat([out, lse.unsqueeze(-1)], -1).unsqueeze(0)


@kernel("attention_merged")
def attention_merged(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The attention to all keys, from what runs of them gave (flash decoding: Dao, Haziza, Massa and Sizov, 2023).

    Args:
        parts: [runs of keys, ..., heads, queries, features of value + 1], of ``attention_part``.

    Returns:
        [..., heads, queries, features of value]; with four dims queries lie before heads, as ``attention`` has them.
    """
    lse = parts[..., -1:]
    weights = (lse - _finite(lse.logsumexp(0))).exp_()
    result = (parts[..., :-1] * weights).sum(0).to(dtype)
    if result.ndim == 4:
        return result.transpose(1, 2).contiguous().transpose(1, 2)
    return result.contiguous()


@kernel("attention_block_backward")
def attention_block_backward(
    mask_gradient: torch.Tensor | None,
    query_gradient: torch.Tensor,
    key_gradient: torch.Tensor,
    value_gradient: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    query_start: int,
    key_start: int,
    offset: int,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    weights_shape: Sequence[int] = (),
    origin: Sequence[int] = (),
    starts: Sequence[int] = (),
) -> None:
    """Add the derivatives of one block of keys to the first four, in place.

    Args:
        mask_gradient: as the mask, float32 or wider; None where nobody asks for it.
        out, gradient: [..., heads, queries, features of value], of the attention to all keys.
        lse: [..., heads, queries], of all keys.
        others: as for ``attention_block``.
    """
    block = _block(query, key, value, mask, query_start, key_start, offset, is_causal)
    if block is None:
        return
    kept = _kept(query, key, seed, dropout_p, weights_shape, origin, (*starts, query_start, key_start))
    scores_shape = (*query.shape[:-1], key.shape[-2])
    query, key, value, mask, is_diagonal = block
    gradient, out = _four_dims(gradient), _four_dims(out)
    lse = _four_dims(lse.unsqueeze(-1)).squeeze(-1)
    lse = lse.masked_fill(lse == -math.inf, math.inf).contiguous()  # rows that saw no key have no weights
    if kept is None and mask_gradient is None and _has_flash(query, value):
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, is_diagonal, attn_mask=mask, scale=scale
        )
    else:
        of_scores, *found = _plain_backward(
            gradient, query, key, value, mask, kept, out, lse, is_diagonal, scale
        )
        if mask_gradient is not None:
            columns = slice(key_start, key_start + scores_shape[-1])
            target = mask_gradient[..., columns] if mask_gradient.shape[-1] > 1 else mask_gradient
            target.add_(of_scores.reshape(scores_shape).sum_to_size(target.shape))
    for total, part in zip((query_gradient, key_gradient, value_gradient), found, strict=True):
        _four_dims(total).add_(part)


def _plain_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kept: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_diagonal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The derivatives of the scores, [batch, heads, queries, keys], and of query, key and value."""
    weights = (_scores(query, key, mask, is_diagonal, scale) - lse.unsqueeze(-1)).exp_()
    gradient = gradient.to(weights.dtype)
    of_value = (weights if kept is None else weights * kept).mT @ gradient
    of_weights = gradient @ _repeated(value, query).to(weights.dtype).mT
    of_weights = of_weights if kept is None else of_weights.mul_(kept)
    delta = (gradient * out).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - delta)
    of_products = of_scores * scale
    of_key = of_products.mT @ query.to(weights.dtype)
    of_query = of_products @ _repeated(key, query).to(weights.dtype)
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    return of_scores, of_query, of_key.unflatten(1, groups).sum(2), of_value.unflatten(1, groups).sum(2)


# ---- what a block is ----


def _block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    query_start: int,
    key_start: int,
    offset: int,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool] | None:
    """The block with four dims, its own mask of numbers to add, and whether it lies on the diagonal; None if hidden."""
    if query.numel() == 0 or key.numel() == 0 or value.numel() == 0:
        return None
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    ahead = query_start + offset - key_start  # the first query sees so many keys of the block and one more
    if is_causal and ahead + num_queries <= 0:
        return None
    own = None
    if mask is not None:
        columns = slice(key_start, key_start + num_keys) if mask.shape[-1] > 1 else slice(None)
        own = _added(_mask_dims(mask[..., columns], query), query)
    is_diagonal = is_causal and ahead == 0
    if is_causal and ahead != 0 and ahead < num_keys - 1:
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril_(ahead)
        own = _added(visible[None, None], query)
    if own is not None:
        own = own.expand(-1, -1, num_queries, num_keys)
    return _four_dims(query), _four_dims(key), _four_dims(value), own, is_diagonal


def _added(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A mask as numbers to add to the scores."""
    if mask.dtype is not torch.bool:
        return mask.to(query.dtype)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)


def _four_dims(x: torch.Tensor) -> torch.Tensor:
    """[..., heads, rows, features] as [batch, heads, rows, features]: a view, of a contiguous one at least."""
    if x.ndim > 4:
        return x.reshape(-1, *x.shape[-3:])
    return x[(None,) * (4 - x.ndim)]


def _mask_dims(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if query.ndim > 4:
        mask = mask.expand(*query.shape[:-3], *mask[(None,) * (3 - mask.ndim)].shape[-3:])
        return mask.reshape(-1, *mask.shape[-3:])
    return _four_dims(mask)


# ---- dropout ----


def _kept(
    query: torch.Tensor,
    key: torch.Tensor,
    seed: torch.Tensor | None,
    dropout_p: float,
    weights_shape: Sequence[int],
    origin: Sequence[int],
    starts: Sequence[int],
) -> torch.Tensor | None:
    """What each weight of a block is multiplied by: 0 where it is dropped, else so much that the mean stays.

    It depends on the seed, and on where the weight is among all weights: as one device would drop it.

    Args:
        weights_shape: of all weights: [..., heads, queries, keys], global.
        origin: where those of the runs and of the part start in them.
        starts: where the local ones start in those.

    Returns:
        [batch, heads, queries, keys], float32 or wider; None without a seed.
    """
    if seed is None:
        return None
    kept = torch.empty((*query.shape[:-1], key.shape[-2]), dtype=torch.bool, device=query.device)
    places = [first + start for first, start in zip(origin, starts, strict=True)]
    fill(kept, weights_shape, places, int(seed.item()), bernoulli(1 - dropout_p))
    factor = 0.0 if dropout_p == 1 else 1 / (1 - dropout_p)
    return _four_dims(kept).to(torch.promote_types(query.dtype, torch.float32)).mul_(factor)


# ---- by plain products, where there is no fused kernel ----


def _has_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    same_size = query.shape[-1] == value.shape[-1]
    return query.device.type == "cpu" and query.dtype in _FLASH_DTYPES and same_size


def _scores(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_diagonal: bool, scale: float
) -> torch.Tensor:
    """[batch, heads, queries, keys], float32 or wider."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ _repeated(key, query).to(dtype).mT * scale
    if mask is not None:
        scores = scores + mask
    if is_diagonal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _repeated(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values once for each query head."""
    times = query.shape[1] // x.shape[1]
    return x.repeat_interleave(times, 1) if times > 1 else x


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """With 0 for -inf: nothing was summed there, and nothing is to be subtracted."""
    return lse.masked_fill(lse == -math.inf, 0.0)
