"""Kernels that draw random numbers: the local piece of what one device would draw, whatever the mesh.

They take the shape of the global tensor, where the local piece starts in each dim, and a key of 64 bits.
Importing this module registers them.
"""

from __future__ import annotations

import math

import torch

from dtorch_runtime.worker import samplers
from dtorch_runtime.worker.distributions import (
    bernoulli,
    distribution,
    integers,
    normal,
    uniform,
)
from dtorch_runtime.worker.kernels import kernel
from dtorch_runtime.worker.positions import fill


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _empty(
    sizes: list[int], order: list[int], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """A tensor whose dims lie in memory in this order, the slowest first."""
    return torch.empty_permuted(sizes, order, dtype=dtype, device=device)


def _uniform(like: torch.Tensor, shape: list[int], starts: list[int], key: int) -> torch.Tensor:
    """Uniform numbers beside a local piece: float64 beside float64, else float32."""
    dtype = _real(like.dtype)
    piece = torch.empty(like.shape, dtype=dtype, device=like.device)
    fill(piece, shape, starts, key, uniform(dtype))
    return piece


@kernel("random_fill")
def random_fill(
    target: torch.Tensor, name: str, parameters: list[float], shape: list[int], starts: list[int], key: int
) -> None:
    """Overwrite the local piece with numbers of the distribution ``name``.

    Complex normal numbers have the variance ``std ** 2``, half of it in each part.
    """
    real = target.dtype.to_real()
    if target.is_complex() and name == "normal":
        mean, std = parameters
        fill(target, shape, starts, key, normal(real, 0.0, std / math.sqrt(2)))
        if mean:
            target.add_(mean)
        return
    fill(target, shape, starts, key, distribution(name, real, parameters))


@kernel("random_new")
def random_new(
    name: str,
    parameters: list[float],
    dtype: torch.dtype,
    sizes: list[int],
    order: list[int],
    device: torch.device,
    shape: list[int],
    starts: list[int],
    key: int,
) -> torch.Tensor:
    """A new local piece of the distribution ``name``."""
    piece = _empty(sizes, order, dtype, device)
    random_fill(piece, name, parameters, shape, starts, key)
    return piece


@kernel("randperm_shard")
def randperm_shard(
    count: int, dtype: torch.dtype, start: int, sizes: list[int], device: torch.device, key: int
) -> torch.Tensor:
    """A part of a random permutation of ``range(count)``: the order of random keys, ties by place."""
    keys = torch.empty(count, dtype=torch.int64, device=device)
    fill(keys, [count], [0], key, integers(-(1 << 63), 1 << 64))
    return keys.argsort(stable=True)[start : start + sizes[0]].to(dtype)


@kernel("normal_shard")
def normal_shard(
    mean: torch.Tensor | float,
    std: torch.Tensor | float,
    dtype: torch.dtype,
    sizes: list[int],
    order: list[int],
    device: torch.device,
    shape: list[int],
    starts: list[int],
    key: int,
) -> torch.Tensor:
    """Normal numbers with a mean and a standard deviation for each element; they are broadcast."""
    if isinstance(std, torch.Tensor) and std.device.type == "cpu" and bool((std < 0).any()):
        raise ValueError("normal takes standard deviations that are not negative")
    piece = _empty(sizes, order, dtype, device)
    random_fill(piece, "normal", [0.0, 1.0], shape, starts, key)
    return piece.mul_(std).add_(mean)


@kernel("bernoulli_fill")
def bernoulli_fill(
    target: torch.Tensor, probability: torch.Tensor, shape: list[int], starts: list[int], key: int
) -> None:
    """1 with the probability that stands in the same place, else 0; probabilities are broadcast."""
    if probability.device.type == "cpu" and not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ValueError("bernoulli takes probabilities from 0 to 1")
    like = probability.expand(target.shape)
    target.copy_(_uniform(like, shape, starts, key) < like)


@kernel("bernoulli_shard")
def bernoulli_shard(
    probability: torch.Tensor,
    dtype: torch.dtype,
    sizes: list[int],
    order: list[int],
    shape: list[int],
    starts: list[int],
    key: int,
) -> torch.Tensor:
    """As ``bernoulli_fill``, in a new tensor."""
    piece = _empty(sizes, order, dtype, probability.device)
    bernoulli_fill(piece, probability, shape, starts, key)
    return piece


@kernel("dropout_shard", num_returns=2)
def dropout_shard(
    x: torch.Tensor,
    probability: float,
    mask_dtype: torch.dtype,
    shape: list[int],
    starts: list[int],
    key: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The local piece of a dropout in training, and its mask of kept elements."""
    kept = torch.empty_like(x, dtype=torch.bool)
    fill(kept, shape, starts, key, bernoulli(1 - probability))
    scale = 0.0 if probability == 1 else 1.0 / (1.0 - probability)
    return torch.mul(x, kept).mul_(scale), kept.to(mask_dtype)


@kernel("rrelu_shard")
def rrelu_shard(
    x: torch.Tensor,
    noise: torch.Tensor,
    low: float,
    high: float,
    is_inplace: bool,
    shape: list[int],
    starts: list[int],
    key: int,
) -> torch.Tensor:
    """Leaky ReLU with random slopes, which are written to ``noise``: 1 where the input is positive."""
    fill(noise, shape, starts, key, uniform(noise.dtype, low, high))
    noise.masked_fill_(x > 0, 1)
    return x.mul_(noise) if is_inplace else x * noise


@kernel("multinomial_shard")
def multinomial_shard(
    weights: torch.Tensor, num_samples: int, replacement: bool, num_rows: int, start: int, key: int
) -> torch.Tensor:
    """Categories drawn from rows of weights, which need not add up to 1.

    Args:
        weights: [local rows, categories] or [categories].
        num_rows: of the whole; ``start`` is the global row of ``weights[0]``.

    Returns:
        int64 [local rows, num_samples] or [num_samples].
    """
    rows = weights if weights.ndim == 2 else weights.unsqueeze(0)
    result = samplers.multinomial(rows, num_samples, replacement, num_rows, start, key)
    return result if weights.ndim == 2 else result.squeeze(0)


@kernel("sampled_shard")
def sampled_shard(
    name: str,
    parameters: list[torch.Tensor],
    dtype: torch.dtype,
    sizes: list[int],
    order: list[int],
    shape: list[int],
    starts: list[int],
    key: int,
) -> torch.Tensor:
    """Numbers that take a varying number of draws: one for each element, by parameters that are broadcast.

    Args:
        name: poisson, binomial or gamma.
    """
    piece = _empty(sizes, order, dtype, parameters[0].device)
    samples = samplers.sampled(name, parameters, sizes, shape, starts, key)
    if name == "gamma":
        samples.clamp_(min=torch.finfo(dtype).tiny)
    return piece.copy_(samples)


@kernel("dirichlet_shard")
def dirichlet_shard(
    concentration: torch.Tensor,
    sizes: list[int],
    order: list[int],
    shape: list[int],
    starts: list[int],
    key: int,
) -> torch.Tensor:
    """Dirichlet along the last dim, which is whole: gamma numbers over their sum."""
    info = torch.finfo(concentration.dtype)
    gamma = samplers.sampled("gamma", [concentration], sizes, shape, starts, key)
    piece = _empty(sizes, order, concentration.dtype, concentration.device)
    return piece.copy_(gamma / gamma.sum(-1, keepdim=True)).clamp_(info.tiny, 1 - info.eps / 2)
