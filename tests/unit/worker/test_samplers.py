"""Categories, and samplers that reject: their means, variances and distributions, and what is no parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from dtorch_runtime.worker.random_kernels import dirichlet_shard
from dtorch_runtime.worker.samplers import multinomial, sampled

NUM = 20_000


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are small: more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(name: str, *parameters: float) -> torch.Tensor:
    filled = [torch.full((NUM,), float(p)) for p in parameters]
    return sampled(name, filled, [NUM], [NUM], [0], 123)


@pytest.mark.parametrize(
    ("name", "parameters", "mean", "variance"),
    [
        *(("poisson", (rate,), rate, rate) for rate in (0.1, 4, 9.99, 10, 40, 1e4)),
        *(
            ("binomial", (n, p), n * p, n * p * (1 - p))
            for n, p in ((5, 0.3), (10, 0.9), (1000, 0.009), (20, 0.5), (100, 0.3), (10_000, 0.999))
        ),
        *(("gamma", (shape,), shape, shape) for shape in (0.1, 0.9, 1, 3, 1000)),
    ],
)
def test_moments(name: str, parameters: tuple[float, ...], mean: float, variance: float) -> None:
    values = draw(name, *parameters)
    assert abs(float(values.mean()) - mean) < 4 * math.sqrt(variance / NUM)
    assert float(values.var()) == pytest.approx(variance, rel=0.15)
    if name != "gamma":
        assert torch.equal(values, values.round())


@pytest.mark.parametrize("rate", [3.0, 30.0])
def test_frequencies_of_poisson_numbers(rate: float) -> None:
    counts = torch.arange(200, dtype=torch.float64)
    expected = (counts * math.log(rate) - rate - (counts + 1).lgamma()).exp() * NUM
    got = torch.bincount(draw("poisson", rate).to(torch.int64), minlength=200)
    frequent = expected > 20
    chi_squared = ((got[frequent] - expected[frequent]) ** 2 / expected[frequent]).sum()
    degrees = int(frequent.sum())
    assert float(chi_squared) < degrees + 3.5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("shape", [0.5, 4.0])
def test_the_distribution_of_gamma_numbers(shape: float) -> None:
    ordered = torch.special.gammainc(
        torch.tensor(shape, dtype=torch.float64), draw("gamma", shape).sort().values
    )
    steps = torch.arange(NUM + 1, dtype=torch.float64) / NUM
    furthest = torch.maximum((ordered - steps[:-1]).abs().max(), (ordered - steps[1:]).abs().max())
    assert float(furthest) * math.sqrt(NUM) < 1.95


def test_parameters_at_the_edge() -> None:
    """What they are for torch, and no endless rejection."""
    inf, nan = math.inf, math.nan

    def one(name: str, *parameters: list[float]) -> list[float]:
        tensors = [torch.tensor(p) for p in parameters]
        result: list[float] = sampled(name, tensors, [len(parameters[0])], [9], [0], 1).tolist()
        return result

    zero, undefined, endless = one("gamma", [0.0, nan, inf])
    assert zero == pytest.approx(0, abs=1e-300)
    assert (math.isnan(undefined), endless) == (True, inf)
    zero, undefined = one("poisson", [0.0, nan])
    assert (zero, math.isnan(undefined)) == (0, True)
    assert one("binomial", [0.0, 10.0, 10.0], [0.5, 0.0, 1.0]) == [0, 0, 10]
    with pytest.raises(ValueError, match="not negative"):
        one("poisson", [-1.0])
    with pytest.raises(ValueError, match="from 0 to 1"):
        one("binomial", [3.0], [1.5])


def test_dirichlet() -> None:
    alpha = torch.tensor([1.0, 2.0, 5.0]).expand(NUM, 3)
    shares = dirichlet_shard(alpha, [NUM, 3], [0, 1], [NUM, 3], [0, 0], 5)
    torch.testing.assert_close(shares.sum(-1), torch.ones(NUM))
    torch.testing.assert_close(shares.mean(0), torch.tensor([1, 2, 5]) / 8, rtol=0, atol=0.01)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_categories_come_by_their_weights(replacement: bool, num_samples: int) -> None:
    weights = torch.tensor([1.0, 2.0, 0.0, 5.0])
    drawn = multinomial(weights.expand(NUM, 4), num_samples, replacement, NUM, 0, 5)
    first = torch.bincount(drawn[:, 0], minlength=4) / NUM
    torch.testing.assert_close(first, weights / 8, rtol=0, atol=0.015)
    if num_samples == 2:
        repeats = (drawn[:, 0] == drawn[:, 1]).to(torch.float64).mean()
        assert abs(float(repeats) - (30 / 64 if replacement else 0)) < 0.015
        second = torch.bincount(drawn[drawn[:, 0] == 3, 1], minlength=4)
        assert second[2] == 0


def test_categories_of_a_part_of_the_rows() -> None:
    weights = torch.rand(9, 5, generator=torch.Generator().manual_seed(0))
    for num_samples, replacement in ((1, False), (3, False), (4, True)):
        whole = multinomial(weights, num_samples, replacement, 9, 0, 5)
        assert torch.equal(multinomial(weights[4:7], num_samples, replacement, 9, 4, 5), whole[4:7])
    for bad in ([-1.0, 1], [0.0, 0], [math.nan, 1], [math.inf, 1]):
        with pytest.raises(ValueError, match="finite and not negative"):
            multinomial(torch.tensor([bad]), 1, True, 1, 0, 5)
