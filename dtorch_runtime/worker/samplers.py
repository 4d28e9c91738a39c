"""Samplers that a single formula does not give: categories, and rejection that takes as many draws as it takes.

Element i owns block i of every draw of its key, so it may draw as often as it likes without asking what others do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dtorch_runtime.worker.distributions import exponential, standard_normal, uniform
from dtorch_runtime.worker.philox import WORDS, chunk_blocks, words
from dtorch_runtime.worker.positions import Part, fill, part_of

#: Terms of a sum of probabilities, of means up to 10, beyond which nothing is left in double precision.
_MAX_TERMS = 128
#: From this mean on, rejection is quicker than a sum.
_LARGE_MEAN = 10.0


# ------------------------------------------------------------------------------------------------- categories


def multinomial(
    weights: torch.Tensor, num_samples: int, replacement: bool, num_rows: int, start: int, key: int
) -> torch.Tensor:
    """Categories by weights [local rows, categories]; int64 [local rows, num_samples].

    Without replacement, each category runs a race of exponential rate ``weight``, and the first ones win
    (P. Efraimidis, P. Spirakis: "Weighted random sampling with a reservoir", 2006). With it, uniform numbers are
    looked up in the sums.

    Raises:
        ValueError: weights that are negative, infinite or nan, or a row of zeros.
    """
    rows, categories = weights.shape
    real = torch.float64 if weights.dtype is torch.float64 else torch.float32
    weights = weights.to(real)
    if weights.device.type == "cpu":
        _check_weights(weights)
    if num_samples == 1 or not replacement:
        race = torch.empty((rows, categories), dtype=real, device=weights.device)
        fill(race, [num_rows, categories], [start, 0], key, exponential(real))
        race = weights / race
        if num_samples == 1:
            return race.argmax(-1, keepdim=True)
        return race.topk(num_samples, -1).indices
    sums = weights.to(torch.float64).cumsum(-1)
    draws = torch.empty((rows, num_samples), dtype=torch.float64, device=weights.device)
    fill(draws, [num_rows, num_samples], [start, 0], key, uniform(torch.float64))
    last = categories - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(-1, keepdim=True)
    return torch.searchsorted(sums, draws.mul_(sums[:, -1:]), right=True).minimum(last)


def _check_weights(weights: torch.Tensor) -> None:
    sums = weights.sum(-1)
    if not bool(((weights >= 0).all(-1) & (sums > 0) & sums.isfinite()).all()):
        raise ValueError(
            "multinomial takes weights that are finite and not negative, and not all zero in any row"
        )


# ------------------------------------------------------------------------------------------------- rejection


class _Draws:
    """Random numbers for some elements, one block an element and draw."""

    def __init__(self, indices: torch.Tensor, key: int) -> None:
        self._indices = indices
        self._key = key

    def words(self, chosen: torch.Tensor, draw: int) -> torch.Tensor:
        """The blocks of the chosen elements: int32 [number, WORDS]."""
        return words(self._indices[chosen], 1, self._key, self._indices.device, draw).view(-1, WORDS)

    def uniforms(self, chosen: torch.Tensor, draw: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two uniform numbers on (0, 1) for each: float64."""
        integers = self.words(chosen, draw).view(torch.int64)[:, :2] >> 11
        first, second = integers.to(torch.float64).add_(0.5).mul_(2.0**-53).add_(0.5).unbind(1)
        return first.contiguous(), second.contiguous()


#: Parameters [n] in double precision, and draws -> samples [n].
_Sampler = Callable[[Sequence[torch.Tensor], _Draws], torch.Tensor]


def sampled(
    name: str,
    parameters: Sequence[torch.Tensor],
    sizes: Sequence[int],
    shape: Sequence[int],
    starts: Sequence[int],
    key: int,
) -> torch.Tensor:
    """Samples of poisson(rate), binomial(count, probability) or gamma(shape) for a local piece.

    Args:
        parameters: broadcast to ``sizes``.
        sizes: of the local piece; ``shape`` of the global tensor, and ``starts`` of the piece in it.

    Returns:
        float64 of shape ``sizes``.
    """
    device = parameters[0].device
    result = torch.empty(math.prod(sizes), dtype=torch.float64, device=device)
    if not len(result):
        return result.view(*sizes)
    flat = [p.to(torch.float64).expand(*sizes).reshape(-1) for p in parameters]
    part: Part = part_of(shape, starts, sizes)
    step = chunk_blocks(device)
    for low in range(0, len(result), step):
        high = min(low + step, len(result))
        draws = _Draws(part.indices(low, high, device), key)
        result[low:high] = _SAMPLERS[name]([p[low:high] for p in flat], draws)
    return result.view(*sizes)


def _reject(
    chosen: torch.Tensor,
    result: torch.Tensor,
    attempt: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Attempt (elements, number of the draw) -> (samples, accepted), until every chosen element has a sample."""
    draw = 1
    while len(chosen):
        samples, accepted = attempt(chosen, draw)
        result[chosen[accepted]] = samples[accepted]
        chosen = chosen[~accepted]
        draw += 1


def _where(condition: torch.Tensor) -> torch.Tensor:
    return condition.nonzero().view(-1)


def _gamma(parameters: Sequence[torch.Tensor], draws: _Draws) -> torch.Tensor:
    """G. Marsaglia, W. W. Tsang: "A simple method for generating gamma variables", ACM TOMS 26, 2000."""
    (shape,) = parameters
    result = torch.where(shape > 0, shape, shape * 0)  # 0, infinite and nan stay what they are
    chosen = _where((shape > 0) & shape.isfinite())
    is_small = shape < 1
    third = torch.where(is_small, shape + 1, shape) - 1.0 / 3
    scale = third.mul(9).rsqrt()

    def attempt(chosen: torch.Tensor, draw: int) -> tuple[torch.Tensor, torch.Tensor]:
        block = draws.words(chosen, draw)
        normal = standard_normal(block[:, :2].contiguous().view(-1), torch.float32)[::2].to(torch.float64)
        chance = (block.view(torch.int64)[:, 1] >> 11).to(torch.float64).add_(0.5).mul_(2.0**-53).add_(0.5)
        d, cube = third[chosen], (1 + scale[chosen] * normal) ** 3
        accepted = (cube > 0) & (
            chance.log() < 0.5 * normal * normal + d - d * cube + d * cube.clamp(min=1e-300).log()
        )
        return d * cube, accepted

    _reject(chosen, result, attempt)
    boosted = _where(is_small & (shape > 0))
    if len(boosted):
        chance, _ = draws.uniforms(boosted, 0)
        result[boosted] *= chance.pow(1 / shape[boosted])
    return result.clamp_(min=torch.finfo(torch.float64).tiny)


def _poisson(parameters: Sequence[torch.Tensor], draws: _Draws) -> torch.Tensor:
    """Small rates by a sum; large ones by W. Hörmann, "The transformed rejection method", PTRS, 1993."""
    (rate,) = parameters
    if rate.device.type == "cpu" and bool((rate < 0).any()):
        raise ValueError("poisson takes rates that are not negative")
    result = torch.where(rate.isfinite(), 0.0, rate)
    _sum_up(_where((rate > 0) & (rate < _LARGE_MEAN)), result, draws, (-rate).exp(), lambda i, k: rate[i] / k)
    root, log_rate = rate.sqrt(), rate.log()
    b = 0.931 + 2.53 * root
    a = -0.059 + 0.02483 * b

    def attempt(i: torch.Tensor, draw: int) -> tuple[torch.Tensor, torch.Tensor]:
        u, v = draws.uniforms(i, draw)
        u -= 0.5
        us = 0.5 - u.abs()
        k = ((2 * a[i] / us + b[i]) * u + rate[i] + 0.43).floor()
        quick = (us >= 0.07) & (v <= 0.9277 - 3.6224 / (b[i] - 2))
        possible = (k >= 0) & ((us >= 0.013) | (v <= us))
        height = v.log() + (1.1239 + 1.1328 / (b[i] - 3.4)).log() - (a[i] / (us * us) + b[i]).log()
        below = height <= k * log_rate[i] - rate[i] - (k.clamp(min=0) + 1).lgamma()
        return k, quick | (possible & below)

    _reject(_where((rate >= _LARGE_MEAN) & rate.isfinite()), result, attempt)
    return result


def _binomial(parameters: Sequence[torch.Tensor], draws: _Draws) -> torch.Tensor:
    """Small means by a sum; large ones by W. Hörmann, "The generation of binomial random variates", BTRS, 1993."""
    count, probability = parameters
    if count.device.type == "cpu" and not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ValueError("binomial takes probabilities from 0 to 1")
    count = count.floor()
    is_flipped = probability > 0.5
    p = torch.where(is_flipped, 1 - probability, probability)
    odds = p / (1 - p)
    mean = count * p
    result = torch.where(mean.isfinite(), 0.0, mean)
    nobody = (count * torch.log1p(-p)).exp()
    _sum_up(
        _where((mean > 0) & (mean < _LARGE_MEAN)),
        result,
        draws,
        nobody,
        lambda i, k: (count[i] - k + 1) / k * odds[i],
    )
    deviation = (mean * (1 - p)).sqrt()
    b = 1.15 + 2.53 * deviation
    a = -0.0873 + 0.0248 * b + 0.01 * p
    alpha = (2.83 + 5.1 / b) * deviation
    mode = ((count + 1) * p).floor()
    top = (mode + 1).lgamma() + (count - mode + 1).lgamma()

    def attempt(i: torch.Tensor, draw: int) -> tuple[torch.Tensor, torch.Tensor]:
        u, v = draws.uniforms(i, draw)
        u -= 0.5
        us = 0.5 - u.abs()
        k = ((2 * a[i] / us + b[i]) * u + mean[i] + 0.5).floor()
        possible = (k >= 0) & (k <= count[i])
        quick = (us >= 0.07) & (v <= 0.92 - 4.2 / b[i])
        height = (v * alpha[i] / (a[i] / (us * us) + b[i])).log()
        inside = torch.where(possible, k, mode[i])
        terms = top[i] - (inside + 1).lgamma() - (count[i] - inside + 1).lgamma()
        return k, possible & (quick | (height <= terms + (inside - mode[i]) * odds[i].log()))

    _reject(_where((mean >= _LARGE_MEAN) & mean.isfinite()), result, attempt)
    return torch.where(is_flipped, count - result, result)


def _sum_up(
    chosen: torch.Tensor,
    result: torch.Tensor,
    draws: _Draws,
    first: torch.Tensor,
    ratio: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    """The number of terms, the first and its successors by their ratios, that a uniform number exceeds the sum of."""
    if not len(chosen):
        return
    left, _ = draws.uniforms(chosen, 0)
    term = first[chosen]
    for k in range(1, _MAX_TERMS):
        left = left - term
        goes_on = left > 0
        chosen, left, term = chosen[goes_on], left[goes_on], term[goes_on]
        if not len(chosen):
            return
        result[chosen] = float(k)
        term = term * ratio(chosen, k)


_SAMPLERS: dict[str, _Sampler] = {"gamma": _gamma, "poisson": _poisson, "binomial": _binomial}
