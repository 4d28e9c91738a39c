"""From random words to random numbers, one element at a time: element i takes its words from block i // per_block.

Everything is elementwise on contiguous tensors, so that a number does not depend on what is computed beside it. Powers
of two scale exactly, so uniform numbers have all the bits of their dtype; normal ones are by Box and Muller ("A note on
the generation of random normal deviates", Ann. Math. Statist. 29, 1958), others by inversion of their distribution.
CPUs and GPUs get the same bits; their logarithms and sines may differ in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dtorch_runtime.worker.philox import WORDS

#: Elements that a block is enough for: of one word each, or of two.
_NARROW, _WIDE = WORDS, WORDS // 2
#: Integers from a smaller range are made of 32 bits: each is at most 2**-16 too likely or unlikely.
_SMALL_RANGE = 1 << 16
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Distribution:
    """How words become numbers.

    Attributes:
        per_block: elements made of one block.
        of_words: words int32 [n * WORDS], which it may overwrite -> values [n * per_block].
    """

    per_block: int
    of_words: Callable[[torch.Tensor], torch.Tensor]


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype is torch.float64


def _real(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: half precision and integers have float32."""
    return torch.float64 if _is_wide(dtype) else torch.float32


def _per_block(dtype: torch.dtype) -> int:
    return _WIDE if _is_wide(dtype) else _NARROW


def _integers(words: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Signed integers, and their bits: int64 where numbers are double, else int32."""
    return (words.view(torch.int64), 64) if _is_wide(dtype) else (words, 32)


def _mantissa_bits(dtype: torch.dtype) -> int:
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def unit(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of the dtype's precision on [0, 1): 53, 24, 11 or 8 bits. float64 for float64, else float32."""
    integers, width = _integers(words, dtype)
    bits = _mantissa_bits(dtype)
    integers >>= width - bits
    return integers.to(_real(dtype)).mul_(2.0**-bits).add_(0.5)


def _positive(integers: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Uniform on (0, 1], with the full precision of small floating point numbers near 0."""
    return integers.to(_real(dtype)).abs_().mul_(2.0 ** (1 - width)).add_(2.0**-width)


def _inside(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uniform on (0, 1)."""
    integers, width = _integers(words, dtype)
    below_one = 1 - torch.finfo(_real(dtype)).eps / 2
    return _positive(integers, width, dtype).clamp_(max=below_one)


def uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Distribution:
    """Uniform on [low, high)."""

    def of_words(words: torch.Tensor) -> torch.Tensor:
        values = unit(words, dtype)
        return values if (low, high) == (0, 1) else values.mul_(high - low).add_(low)

    return Distribution(_per_block(dtype), of_words)


def standard_normal(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pairs of normal numbers from pairs of integers: a radius and an angle."""
    integers, width = _integers(words, dtype)
    first, second = integers.view(-1, 2).unbind(1)
    radius = _positive(first, width, dtype).log_().mul_(-2).sqrt_()
    angle = second.to(_real(dtype)).mul_(math.pi * 2.0 ** (1 - width))
    values = torch.empty((len(radius), 2), dtype=radius.dtype, device=radius.device)
    torch.mul(angle.cos(), radius, out=values[:, 0])
    torch.mul(angle.sin_(), radius, out=values[:, 1])
    return values.view(-1)


def normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Distribution:
    """Normal with this mean and standard deviation."""

    def of_words(words: torch.Tensor) -> torch.Tensor:
        values = standard_normal(words, dtype)
        return values if (mean, std) == (0, 1) else values.mul_(std).add_(mean)

    return Distribution(_per_block(dtype), of_words)


def log_normal(dtype: torch.dtype, mean: float, std: float) -> Distribution:
    """The exponential of normal numbers."""
    inner = normal(dtype, mean, std)
    return Distribution(inner.per_block, lambda words: inner.of_words(words).exp_())


def exponential(dtype: torch.dtype, rate: float = 1.0) -> Distribution:
    """Exponential with this rate; never 0."""
    return Distribution(_per_block(dtype), lambda words: _inside(words, dtype).log_().neg_().mul_(1.0 / rate))


def cauchy(dtype: torch.dtype, median: float, scale: float) -> Distribution:
    """Cauchy: the tangent of a uniform angle."""

    def of_words(words: torch.Tensor) -> torch.Tensor:
        integers, width = _integers(words, dtype)
        angle = integers.to(_real(dtype)).mul_(math.pi * 2.0**-width)
        return angle.tan_().mul_(scale).add_(median)

    return Distribution(_per_block(dtype), of_words)


def geometric(dtype: torch.dtype, probability: float) -> Distribution:
    """How many trials of this probability it takes to succeed: 1, 2, ..."""
    scale = 1.0 / math.log1p(-probability)
    return Distribution(
        _per_block(dtype), lambda words: _inside(words, dtype).log_().mul_(scale).ceil_().clamp_(min=1)
    )


def bernoulli(probability: float) -> Distribution:
    """True with this probability (to 2**-32), as bool."""
    below = round(probability * 2.0**32) - (1 << 31)

    def of_words(words: torch.Tensor) -> torch.Tensor:
        if below > 0x7FFFFFFF:
            return torch.ones_like(words, dtype=torch.bool)
        return words < below

    return Distribution(_NARROW, of_words)


def integers(low: int, count: int) -> Distribution:
    """``low`` to ``low + count - 1``, each as likely, as int64 (modulo 2**64)."""
    if count <= _SMALL_RANGE:
        # The upper part of a product (D. Lemire, "Fast random integer generation in an interval", 2019).
        def of_words(words: torch.Tensor) -> torch.Tensor:
            return words.to(torch.int64).add_(1 << 31).mul_(count).bitwise_right_shift_(32).add_(low)

        return Distribution(_NARROW, of_words)
    return Distribution(_WIDE, lambda words: _modulo(words.view(torch.int64), count).add_(low))


def _modulo(values: torch.Tensor, count: int) -> torch.Tensor:
    """63 or 64 random bits modulo ``count``, up to 2**64, as int64 modulo 2**64."""
    if count == 1 << 64:
        return values
    if count <= 1 << 63:
        values &= _INT64_MAX
        return values.remainder_(count) if count <= _INT64_MAX else values
    # Unsigned comparison: with the upper bit flipped, signed order is unsigned order.
    exceeds = (values ^ _INT64_MIN) >= count - (1 << 63)
    return values.sub_(exceeds.to(torch.int64).mul_(count - (1 << 64)))


#: By the name that plans give; parameters as in the functions.
_BY_NAME: dict[str, Callable[..., Distribution]] = {
    "uniform": uniform,
    "normal": normal,
    "log_normal": log_normal,
    "exponential": exponential,
    "cauchy": cauchy,
    "geometric": geometric,
    "bernoulli": lambda dtype, probability: bernoulli(probability),
    "integers": lambda dtype, low, last: integers(low, last - low + 1),
}


def distribution(name: str, dtype: torch.dtype, parameters: list[float]) -> Distribution:
    """The distribution with this name, for numbers of this dtype."""
    return _BY_NAME[name](dtype, *parameters)
