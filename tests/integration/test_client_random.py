"""Random numbers of whole programs: the same on every mesh, from seeds, generators and states as in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dtorch
from dtorch import DeviceMesh, Placement, Replicate, Shard

pytestmark = pytest.mark.usefixtures("cluster")

Where = tuple[Any, Sequence[Placement]]
WHERE: dict[str, Where] = {
    "whole": ([0, 1], [Replicate()]),
    "rows": ([0, 1], [Shard(0)]),
    "uneven columns": ([0, 1, 2], [Shard(1)]),
    "units": ([0, 1, 2], [Shard(1, unit=4)]),
    "grid": ([[0, 1], [2, 3]], [Shard(1), Shard(0)]),
    "twice": ([[0, 1], [2, 3]], [Shard(0), Shard(0)]),
}
ONE: Where = ([0], [Replicate()])


def given(where: Where, *shape: int) -> dtorch.Tensor:
    devices, placements = where
    mesh = DeviceMesh("cpu", devices)
    numbers = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) / torch.Size(shape).numel()
    cut = [p if not isinstance(p, Shard) or p.dim < len(shape) else Replicate() for p in placements]
    return dtorch.from_torch(numbers, device_mesh=mesh, placements=cut)


def rows_only(x: dtorch.Tensor) -> dtorch.Tensor:
    """Columns whole, for programs that need them so."""
    return x.redistribute(
        placements=[Replicate() if isinstance(p, Shard) and p.dim else p for p in x.placements]
    )


def attention(x: dtorch.Tensor, causal: bool) -> torch.Tensor:
    q = rows_only(x).view(5, 2, 7, 3)
    if len(x.placements) == 1 and isinstance(x.placements[0], Shard):
        q = q.redistribute(placements=[Shard(x.placements[0].dim)])  # batches or heads
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=causal)


def recurrent(x: dtorch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    layer = torch.nn.LSTM(6, 4, num_layers=2, dropout=0.5).to("dtorch")
    output: torch.Tensor = layer(x.redistribute(placements=[Replicate()] * x.device_mesh.ndim))[0]
    return output.detach()


def out_of(x: dtorch.Tensor) -> torch.Tensor:
    return torch.normal(x, 2.0, out=torch.empty_like(x))


PROGRAMS: dict[str, Callable[[dtorch.Tensor], torch.Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "randint_like": lambda x: torch.randint_like(x, 3, 1000),
    "randint_like of a tensor": lambda x: torch.randint_like(x, torch.tensor(1000)),
    "normal": lambda x: torch.normal(x, x),
    "normal_": lambda x: x.normal_(3, 2),
    "random_": lambda x: x.random_(),
    "bernoulli": torch.bernoulli,
    "bernoulli p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: x.clone().bernoulli_(x),
    "exponential_": lambda x: x.exponential_(2),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "geometric_": lambda x: x.geometric_(0.2),
    "poisson": lambda x: torch.poisson(x * 30),
    "binomial": lambda x: torch.binomial((x * 50).floor(), x),
    "gamma": lambda x: torch._standard_gamma(x * 5),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x, 0.5, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
    "dropout1d": lambda x: F.dropout1d(x[None], 0.5),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(rows_only(x), dim=1),
    "multinomial": lambda x: torch.multinomial(rows_only(x), 4),
    "multinomial with replacement": lambda x: torch.multinomial(rows_only(x), 9, replacement=True),
    "trunc_normal_": lambda x: torch.nn.init.trunc_normal_(x, std=0.5),
    "kaiming_uniform_": lambda x: torch.nn.init.kaiming_uniform_(x, a=2),
    "xavier_normal_": torch.nn.init.xavier_normal_,
    "out=": out_of,
    "rand out=": lambda x: torch.rand(5, 42, out=x),
    "attention": lambda x: attention(x, causal=False),
    "causal attention": lambda x: attention(x, causal=True),
    "LSTM": lambda x: recurrent(rows_only(x).view(5, 7, 6)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_numbers_on_every_mesh(name: str) -> None:
    def run(where: Where) -> list[torch.Tensor]:
        torch.manual_seed(3)
        with torch.no_grad():
            return [PROGRAMS[name](given(where, 5, 42)).to_torch() for _ in range(2)]

    one = run(ONE)
    assert not torch.equal(one[0], one[1]) or name == "LSTM", "two calls give the same numbers"
    for place, where in WHERE.items():
        for got, expected in zip(run(where), one, strict=True):
            torch.testing.assert_close(
                got, expected, rtol=1e-5, atol=1e-6, msg=lambda t, p=place: f"{p}: {t}"
            )


FACTORIES: dict[str, Callable[..., torch.Tensor]] = {
    "rand": lambda **kw: dtorch.rand(6, 5, **kw),
    "randn": lambda **kw: dtorch.randn(6, 5, dtype=torch.float64, **kw),
    "randint": lambda **kw: dtorch.randint(-3, 100, (6, 5), **kw),
    "randint of 64 bits": lambda **kw: dtorch.randint(-(2**62), 2**62, (6, 5), **kw),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_give_the_same_numbers_on_every_mesh_and_after_resharding(name: str) -> None:
    def make(where: Where) -> dtorch.Tensor:
        dtorch.manual_seed(9)
        made: Any = FACTORIES[name](device_mesh=DeviceMesh("cpu", where[0]), placements=where[1])
        return made

    expected = make(ONE).to_torch()
    for where in WHERE.values():
        made = make(where)
        assert torch.equal(made.to_torch(), expected)
        whole = made.redistribute(placements=[Replicate()] * made.device_mesh.ndim)
        dtorch.manual_seed(4)
        first = torch.rand_like(whole.double()).to_torch()
        dtorch.manual_seed(4)
        assert torch.equal(torch.rand_like(made.double()).to_torch(), first)


def test_randperm_is_a_permutation_on_every_mesh() -> None:
    torch.manual_seed(1)
    expected = torch.randperm(50, device="dtorch").cpu()
    assert torch.equal(expected.sort().values, torch.arange(50))
    torch.manual_seed(1)
    made = dtorch.randperm(50, device_mesh=DeviceMesh("cpu", [0, 1, 2]), placements=[Shard(0)])
    assert torch.equal(made.to_torch(), expected)
    out = torch.empty(50, dtype=torch.int64, device="dtorch")
    torch.manual_seed(1)
    assert torch.equal(torch.randperm(50, out=out).cpu(), expected)


# ------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("make", [dtorch.Generator, torch.Generator])
def test_generators_have_sequences_of_their_own(make: Callable[[], torch.Generator]) -> None:
    def draw(generator: torch.Generator, devices: list[int]) -> list[torch.Tensor]:
        mesh = DeviceMesh("cpu", devices)
        x = dtorch.zeros(4, 6, device_mesh=mesh, placements=[Shard(1)])
        results: list[Any] = [
            torch.rand(4, 6, device="dtorch", generator=generator),
            torch.randint(9, (4, 6), device="dtorch", generator=generator),
            torch.randperm(9, device="dtorch", generator=generator),
            x.normal_(generator=generator),
            torch.nn.init.xavier_uniform_(x.clone(), generator=generator),
            torch.bernoulli(x.sigmoid(), generator=generator),
        ]
        return [result.cpu() for result in results]

    torch.manual_seed(0)
    before = dtorch.get_rng_state()
    first = draw(make().manual_seed(5), [0])
    again = draw(make().manual_seed(5), [0, 1, 2])
    other = draw(make().manual_seed(6), [0, 1])
    assert torch.equal(dtorch.get_rng_state(), before)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    generator = make().manual_seed(5)
    draw(generator, [0])
    state = generator.get_state()
    more = draw(generator, [0])
    assert not torch.equal(more[0], first[0])
    generator.set_state(state)
    assert torch.equal(draw(generator, [0, 1])[0], more[0])


def draw() -> torch.Tensor:
    return torch.rand(4, device="dtorch").cpu()


def test_states_are_kept_and_restored() -> None:
    module: Any = torch.get_device_module("dtorch")
    dtorch.manual_seed(2)
    assert module.initial_seed() == 2
    state = dtorch.get_rng_state()
    first = draw()
    with dtorch.fork_rng():
        torch.manual_seed(77)
        forked = draw()
    second = draw()
    dtorch.set_rng_state(state)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    assert not torch.equal(first, forked)
    with torch.random.fork_rng(device_type="dtorch"):
        module.manual_seed(77)
        assert torch.equal(draw(), forked)
    module.set_rng_state_all([state])
    assert torch.equal(draw(), first)
    module.seed()
    assert module.initial_seed() != 2
    with pytest.raises(ValueError, match="16 bytes"):
        dtorch.set_rng_state(torch.get_rng_state())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_checkpoints_drop_the_same_elements_again(use_reentrant: bool, placement: Placement) -> None:
    mesh = DeviceMesh("cpu", [0, 1])

    def layer(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * x, 0.5).sigmoid()

    gradients = []
    for kept in (True, False):
        x = dtorch.from_torch(
            torch.linspace(1, 2, 40).view(8, 5),
            device_mesh=mesh,
            placements=[placement],
            requires_grad=True,
        )
        torch.manual_seed(8)
        y = layer(x) if kept else checkpoint(layer, x, use_reentrant=use_reentrant)
        after = dtorch.get_rng_state()
        y.sum().backward()
        assert torch.equal(dtorch.get_rng_state(), after)
        assert x.grad is not None
        gradients.append(x.grad.cpu())
    assert torch.equal(*gradients)
    assert 0 < int((gradients[0] == 0).sum()) < 40


def test_gradients_of_dropouts_and_of_attention_with_one_do_not_depend_on_the_mesh() -> None:
    def gradient(where: Where) -> torch.Tensor:
        x = given(where, 2, 4, 6, 3).requires_grad_()
        torch.manual_seed(1)
        y = F.scaled_dot_product_attention(x, x, x, dropout_p=0.4)
        F.dropout2d(y, 0.3).square().mean().backward()
        assert x.grad is not None
        return x.grad.cpu()

    expected = gradient(ONE)
    for where in (WHERE["rows"], WHERE["uneven columns"], WHERE["grid"]):
        torch.testing.assert_close(gradient(where), expected)


def test_bad_parameters_are_refused() -> None:
    x = dtorch.ones(3, 4)
    for call in (
        lambda: torch.rand(3, dtype=torch.int64, device="dtorch"),
        lambda: x.normal_(0, -1),
        lambda: x.random_(5, 5),
        lambda: torch.randint(5, 3, (2,), device="dtorch"),
        lambda: torch.multinomial(x, 9),
        lambda: torch.bernoulli(x, 2.0),
    ):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            call()
    with pytest.raises(dtorch.RemoteOpError, match="probabilities from 0 to 1"):
        torch.bernoulli(x * 2).cpu()
    with pytest.raises(dtorch.RemoteOpError, match="finite and not negative"):
        torch.multinomial(-x, 2).cpu()


def test_outputs_are_resized_as_torch_does() -> None:
    out = torch.empty(0, device="dtorch")
    torch.manual_seed(1)
    assert torch.rand(9, out=out) is out
    torch.manual_seed(1)
    assert torch.equal(out.cpu(), torch.rand(9, device="dtorch").cpu())
    with pytest.warns(UserWarning, match="was resized"):
        torch.normal(0.0, torch.ones(2, device="dtorch"), out=out)
    assert out.shape == (2,)
