"""Random numbers and factories do not depend on the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from tests.support.simulated_mesh import Sharded, gather, run, shard

aten = torch.ops.aten
ONE, THREE = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [0, 1, 2])
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]])
LAYOUTS: list[tuple[DeviceMesh, list[Placement]]] = [
    (THREE, [Replicate()]),
    (THREE, [Shard(0)]),
    (THREE, [Shard(1, unit=2)]),
    (GRID, [Shard(1), Shard(1)]),
    (GRID, [Shard(0), Replicate()]),
]

FACTORIES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.rand.default, ([4, 5],), {}),
    (aten.randn.default, ([4, 5],), {"dtype": torch.float64}),
    (aten.rand.default, ([4, 5],), {"dtype": torch.complex64}),
    (aten.randn.default, ([4, 5],), {"dtype": torch.complex128}),
    (aten.randint.low, (3, 9, [4, 5]), {}),
    (aten.randint.default, (9, [4, 5]), {"dtype": torch.float32}),
    (aten.normal.float_float, (1.0, 2.0, [4, 5]), {}),
    (aten.zeros.default, ([4, 5],), {}),
    (aten.ones.default, ([4, 5],), {"dtype": torch.bool}),
    (aten.full.default, ([4, 5], 7), {}),
    (aten.full.default, ([4, 5], 0.5), {}),
    (aten.eye.m, (4, 5), {}),
]


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS)
@pytest.mark.parametrize(("func", "args", "kwargs"), FACTORIES)
def test_factories_give_the_same_on_every_mesh(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, placements: list[Placement]
) -> None:
    kwargs = {"device": torch.device("cpu"), "pin_memory": False, **kwargs}
    one = run(func, *args, default_layout=Layout(ONE, (Replicate(),)), **kwargs)
    many = run(func, *args, default_layout=Layout(mesh, tuple(placements)), **kwargs)
    torch.testing.assert_close(gather(many), gather(one), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.arange.default, (7,)),
        (aten.arange.start_step, (1, 9, 2)),
        (aten.linspace.default, (0, 1, 5)),
        (aten.randperm.default, (9,)),
    ],
)
def test_vectors(func: Any, args: tuple[Any, ...]) -> None:
    one = run(func, *args, default_layout=Layout(ONE, (Replicate(),)))
    many = run(func, *args, default_layout=Layout(THREE, (Shard(0),)))
    torch.testing.assert_close(gather(many), gather(one), rtol=0, atol=0)
    torch.testing.assert_close(gather(one).sort().values, func(*args).sort().values)


def probabilities(x: Sharded) -> Sharded:
    return run(aten.uniform_.default, x, 0.1, 0.9)


def noisy(x: Sharded) -> list[Sharded]:
    noise = run(aten.empty_like.default, x)
    centered = run(aten.sub.Scalar, x, 0.5)
    return [run(aten.rrelu_with_noise.default, centered, noise, 0.1, 0.3, True), noise]


FROM = getattr(aten.random_, "from")

#: A name, and what draws with the placement of a tensor of positive numbers. Results: one tensor or several.
RANDOM: dict[str, Callable[[Sharded], Any]] = {
    "uniform_": lambda x: run(aten.uniform_.default, x, -1.0, 2.0),
    "normal_": lambda x: run(aten.normal_.default, x, 1.0, 2.0),
    "log_normal_": lambda x: run(aten.log_normal_.default, x, 0.1, 0.5),
    "exponential_": lambda x: run(aten.exponential_.default, x, 3.0),
    "cauchy_": lambda x: run(aten.cauchy_.default, x, 1.0, 2.0),
    "geometric_": lambda x: run(aten.geometric_.default, x, 0.3),
    "random_": lambda x: run(aten.random_.default, x),
    "random_.to": lambda x: run(aten.random_.to, x, 9),
    "random_.from": lambda x: run(FROM, x, -5, 70000),
    "bernoulli_.float": lambda x: run(aten.bernoulli_.float, x, 0.3),
    "bernoulli_.Tensor": lambda x: run(aten.bernoulli_.Tensor, run(aten.clone.default, x), probabilities(x)),
    "bernoulli": lambda x: run(aten.bernoulli.default, probabilities(x)),
    "bernoulli.p": lambda x: run(aten.bernoulli.p, x, 0.3),
    "rand_like": lambda x: run(aten.rand_like.default, x),
    "randn_like": lambda x: run(aten.randn_like.default, x, dtype=torch.float64),
    "randint_like": lambda x: run(aten.randint_like.default, x, 9),
    "randint_like.low_dtype": lambda x: run(aten.randint_like.low_dtype, x, 2, 9, dtype=torch.int64),
    "normal.Tensor_float": lambda x: run(aten.normal.Tensor_float, x, 2.0),
    "normal.float_Tensor": lambda x: run(aten.normal.float_Tensor, 1.0, x),
    "normal.Tensor_Tensor": lambda x: run(aten.normal.Tensor_Tensor, x, x),
    "native_dropout": lambda x: run(aten.native_dropout.default, x, 0.4, True),
    "_fused_dropout": lambda x: run(aten._fused_dropout.default, x, 0.4),
    "rrelu_with_noise": noisy,
    "poisson": lambda x: run(aten.poisson.default, run(aten.mul.Scalar, x, 20)),
    "binomial": lambda x: run(
        aten.binomial.default, run(aten.floor.default, run(aten.mul.Scalar, x, 50)), probabilities(x)
    ),
    "_standard_gamma": lambda x: run(aten._standard_gamma.default, run(aten.mul.Scalar, x, 3)),
}


def draw_from(draw: Callable[[Sharded], Any], start: torch.Tensor, mesh: DeviceMesh, placements: Any) -> Any:
    drawn = draw(shard(start, mesh, placements))
    return [gather(result) for result in (drawn if isinstance(drawn, list) else [drawn])]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS)
@pytest.mark.parametrize("name", RANDOM)
def test_numbers_depend_on_seed_and_place_only(
    name: str, mesh: DeviceMesh, placements: list[Placement], transposed: bool
) -> None:
    numbers = torch.linspace(0.1, 1, 20)
    start = numbers.reshape(5, 4).t() if transposed else numbers.reshape(4, 5)
    one = draw_from(RANDOM[name], start, ONE, [Replicate()])
    many = draw_from(RANDOM[name], start, mesh, placements)
    for first, second in zip(many, one, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        assert second.double().std() > 0, "the numbers are all the same"


@pytest.mark.parametrize("name", RANDOM)
def test_a_number_does_not_depend_on_the_order_of_dims_in_memory(name: str) -> None:
    numbers = torch.linspace(0.1, 1, 20)
    rows, columns = (
        draw_from(RANDOM[name], start, ONE, [Replicate()])
        for start in (numbers.reshape(4, 5), numbers.reshape(4, 5).t().contiguous().t())
    )
    for first, second in zip(rows, columns, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


ROWS: list[tuple[DeviceMesh, list[Placement]]] = [
    (THREE, [Replicate()]),
    (THREE, [Shard(0)]),
    (THREE, [Shard(0, unit=2)]),
    (GRID, [Shard(0), Shard(0)]),
    (GRID, [Replicate(), Shard(0)]),
]
BY_ROWS: dict[str, Callable[[Sharded], Any]] = {
    "multinomial": lambda x: run(aten.multinomial.default, x, 1),
    "multinomial without replacement": lambda x: run(aten.multinomial.default, x, 3),
    "multinomial with replacement": lambda x: run(aten.multinomial.default, x, 6, True),
    "_sample_dirichlet": lambda x: run(aten._sample_dirichlet.default, x),
}


@pytest.mark.parametrize(("mesh", "placements"), ROWS)
@pytest.mark.parametrize("name", BY_ROWS)
def test_rows_are_drawn_where_they_are(name: str, mesh: DeviceMesh, placements: list[Placement]) -> None:
    start = torch.linspace(0.1, 1, 35).reshape(7, 5)
    (one,) = draw_from(BY_ROWS[name], start, ONE, [Replicate()])
    (many,) = draw_from(BY_ROWS[name], start, mesh, placements)
    torch.testing.assert_close(many, one, rtol=0, atol=0)
    assert len(one.unique(dim=0)) > 1
    if name != "_sample_dirichlet" and mesh is THREE:
        assert run(aten.multinomial.default, shard(start[0], THREE, [Replicate()]), 2).spec.shape == (2,)
        with pytest.raises(PlacementError):
            run(aten.multinomial.default, shard(start, THREE, [Shard(1)]), 2)


@pytest.mark.parametrize("name", RANDOM)
def test_values_of_partial_tensors_are_not_taken_for_whole(name: str) -> None:
    """Refused, but for calls that ask only for the shape."""
    start = torch.linspace(0.1, 1, 20).reshape(4, 5)
    if name.startswith(("rand_like", "randn_like", "randint_like")) or name == "bernoulli.p":
        one = draw_from(RANDOM[name], start, ONE, [Replicate()])
        assert torch.equal(draw_from(RANDOM[name], start, THREE, [Partial()])[0], one[0])
    else:
        with pytest.raises(PlacementError):
            RANDOM[name](shard(start, THREE, [Partial()]))


def test_broadcast_parameters_are_cut_to_fit() -> None:
    mean, std = torch.linspace(0, 1, 5), torch.linspace(1, 2, 20).reshape(4, 5)

    def draw(mesh: DeviceMesh, placement: Placement) -> torch.Tensor:
        return gather(
            run(aten.normal.Tensor_Tensor, shard(mean, mesh, [Replicate()]), shard(std, mesh, [placement]))
        )

    assert torch.equal(draw(THREE, Shard(1)), draw(ONE, Replicate()))
    assert torch.equal(draw(THREE, Shard(0)), draw(ONE, Replicate()))


def test_other_seeds_give_other_numbers() -> None:
    layout = Layout(THREE, (Shard(0),))
    first, second = (run(aten.rand.default, [30], default_layout=layout, seed=seed) for seed in (1, 2))
    assert not torch.equal(gather(first), gather(second))


def test_dropout_keeps_its_share_and_scales() -> None:
    x = shard(torch.ones(10_000), THREE, [Shard(0)])
    kept, mask = map(gather, run(aten.native_dropout.default, x, 0.25, True))
    assert 0.72 < mask.float().mean() < 0.78
    torch.testing.assert_close(kept, mask / 0.75)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()])
@pytest.mark.parametrize(
    ("func", "args", "want"),
    [
        (aten.zeros_like.default, (), torch.zeros(4, 5)),
        (aten.ones_like.default, (), torch.ones(4, 5)),
        (aten.full_like.default, (3,), torch.full((4, 5), 3.0)),
        (aten.new_zeros.default, ([4, 5],), torch.zeros(4, 5)),
        (aten.new_ones.default, ([2, 3],), torch.ones(2, 3)),
        (aten.new_full.default, ([4, 5], 2.0), torch.full((4, 5), 2.0)),
    ],
)
def test_likeness(placement: Placement, func: Any, args: tuple[Any, ...], want: torch.Tensor) -> None:
    x = shard(torch.randn(4, 5), THREE, [placement])
    torch.testing.assert_close(gather(run(func, x, *args)), want)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()])
@pytest.mark.parametrize("stride", [(5, 1), (1, 4)])
def test_new_tensors_with_strides(placement: Placement, stride: tuple[int, int]) -> None:
    x = shard(torch.randn(4, 5), THREE, [placement])
    new = run(aten.zero_.default, run(aten.new_empty_strided.default, x, [4, 5], list(stride)))
    assert new.spec.stride == stride
    torch.testing.assert_close(gather(new), torch.zeros(4, 5))
    for piece in new.pieces.values():
        assert min(piece.shape) < 2 or (piece.stride(0) > piece.stride(1)) == (stride == (5, 1))


@pytest.mark.parametrize(
    ("placement", "size", "want"),
    [
        (Shard(0), [4, 7], Shard(0)),
        (Shard(0, unit=2), [4, 1], Shard(0, unit=2)),
        (Shard(0), [5, 5], Replicate()),
        (Shard(1), [4, 7], Replicate()),
        (Shard(0), [4], Replicate()),
        (Partial(), [4, 7], Replicate()),
    ],
)
def test_a_new_tensor_is_cut_where_sizes_are_the_same(
    placement: Placement, size: list[int], want: Placement
) -> None:
    x = shard(torch.randn(4, 5), THREE, [placement])
    new = run(aten.new_full.default, x, size, 2.0)
    assert new.layout.placements == (want,)
    torch.testing.assert_close(gather(new), torch.full(size, 2.0))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()])
def test_a_new_tensor_of_another_size_is_whole(placement: Placement) -> None:
    x = shard(torch.randn(4, 5), THREE, [placement])
    new = run(aten.new_empty_strided.default, x, [2, 3], [7, 2])
    assert (new.spec.shape, new.spec.stride, new.layout.placements) == ((2, 3), (7, 2), (Replicate(),))
    assert {(tuple(piece.shape), piece.stride()) for piece in new.pieces.values()} == {((2, 3), (7, 2))}
