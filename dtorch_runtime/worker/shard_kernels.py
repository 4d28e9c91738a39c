"""Kernels that compute a piece of what the whole op would give: they know where the piece starts.

Importing this module registers them. Shapes are local unless a name says whole.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch_runtime.worker import (  # noqa: F401  register their kernels
    nn_kernels as _nn_kernels,
    piece_kernels as _piece_kernels,
)
from dtorch_runtime.worker.kernels import find_kernel, kernel


@kernel("box")
def box_of(whole: torch.Tensor, starts: list[int], sizes: list[int]) -> torch.Tensor:
    """A copy of a box of a tensor, e.g. of a random one that every device has drawn from the same seed."""
    index = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    result: torch.Tensor = whole[index].clone(memory_format=torch.contiguous_format)
    return result


@kernel("embedding_shard")
def embedding_shard(weight: torch.Tensor, indices: torch.Tensor, start: int) -> torch.Tensor:
    """Rows of a vocabulary of which this device holds the rows from ``start`` on; zeros for rows elsewhere.

    The sum over the devices that cut the vocabulary is the whole look-up.

    Args:
        weight: [local rows, features].
        indices: any shape, integers into the global vocabulary.
        start: global row of ``weight[0]``.

    Returns:
        [*indices.shape, features].
    """
    local = indices - start
    outside = (local < 0) | (local >= weight.shape[0])
    if weight.shape[0] == 0:
        return weight.new_zeros((*indices.shape, weight.shape[1]))
    rows = torch.embedding(weight, local.masked_fill(outside, 0))
    return rows.masked_fill_(outside.unsqueeze(-1), 0)


@kernel("random_shard")
def random_shard(
    operator: str,
    args: list[Any],
    starts: list[int],
    sizes: list[int],
    generator: torch.Generator,
    **kwargs: Any,
) -> torch.Tensor:
    """The local box of a global random tensor, the same numbers on every mesh.

    Every device draws the whole tensor from the seed and keeps its box.

    Args:
        operator: e.g. ``aten::randn.generator``; takes ``args`` and ``generator=``.
        starts, sizes: the box, in each dim.
    """
    whole: torch.Tensor = find_kernel(operator).function(*args, generator=generator, **kwargs)
    return box_of(whole, starts, sizes)


@kernel("factory_shard")
def factory_shard(
    operator: str, args: list[Any], starts: list[int], sizes: list[int], **kwargs: Any
) -> torch.Tensor:
    """The box of what a factory makes, e.g. of ``aten::arange``: made whole, cut, and let go."""
    whole: torch.Tensor = find_kernel(operator).function(*args, **kwargs)
    return box_of(whole, starts, sizes)


@kernel("divided")
def divided(operator: str, args: list[Any], divisor: float, **kwargs: Any) -> torch.Tensor:
    """A local sum as a part of a global mean: what ``operator`` gives, divided by the global count."""
    total: torch.Tensor = find_kernel(operator).function(*args, **kwargs)
    return total.div(divisor)


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


def _box(whole: torch.Tensor, starts: list[int], like: torch.Tensor) -> torch.Tensor:
    """A view of the box of ``whole`` that begins at ``starts`` and has the shape of ``like``."""
    return whole[tuple(slice(start, start + size) for start, size in zip(starts, like.shape, strict=True))]


@kernel("random_fill")
def random_fill(
    target: torch.Tensor,
    operator: str,
    args: list[Any],
    shape: list[int],
    stride: list[int],
    starts: list[int],
    generator: torch.Generator,
) -> None:
    """Fill the local piece with its box of what a random in-place op would write to the whole tensor.

    Args:
        operator: e.g. ``aten::uniform_``; takes the tensor, ``args`` and ``generator=``.
        shape, stride: of the whole tensor; numbers are drawn in the order of memory.
    """
    whole = torch.empty_strided(shape, stride, dtype=target.dtype, device=target.device)
    find_kernel(operator).function(whole, *args, generator=generator)
    target.copy_(_box(whole, starts, target))


@kernel("random_like")
def random_like(
    like: torch.Tensor,
    operator: str,
    args: list[Any],
    dtype: torch.dtype,
    shape: list[int],
    stride: list[int],
    starts: list[int],
    generator: torch.Generator,
) -> torch.Tensor:
    """The local piece of a random tensor of the shape of another, the same numbers on every mesh."""
    piece = torch.empty_like(like, dtype=dtype)
    random_fill(piece, operator, args, shape, stride, starts, generator)
    return piece


@kernel("bernoulli_shard")
def bernoulli_shard(
    probability: torch.Tensor, shape: list[int], starts: list[int], generator: torch.Generator
) -> torch.Tensor:
    """1 with the probability that stands in the same place, else 0; the same numbers on every mesh."""
    whole = torch.rand(shape, generator=generator, dtype=torch.float32, device=probability.device)
    return (_box(whole, starts, probability) < probability).to(probability.dtype)


@kernel("dropout_shard", num_returns=2)
def dropout_shard(
    x: torch.Tensor, probability: float, shape: list[int], starts: list[int], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The local piece of a dropout in training, and its mask of kept elements; the same on every mesh."""
    whole = torch.rand(shape, generator=generator, dtype=torch.float32, device=x.device)
    kept = _box(whole, starts, x) >= probability
    scale = 0.0 if probability == 1 else 1.0 / (1.0 - probability)
    return x * kept * scale, kept
