"""Random numbers and factories do not depend on the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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
    (aten.randint.low, (3, 9, [4, 5]), {}),
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


def uniform(x: Sharded) -> Sharded:
    return run(aten.uniform_.default, x, -1.0, 2.0)


RANDOM: list[Callable[[Sharded], Any]] = [
    uniform,
    lambda x: run(aten.normal_.default, x, 1.0, 2.0),
    lambda x: run(aten.bernoulli_.float, x, 0.3),
    lambda x: run(aten.exponential_.default, x),
    lambda x: run(aten.rand_like.default, x),
    lambda x: run(aten.randn_like.default, x, dtype=torch.float64),
    lambda x: run(aten.randint_like.low_dtype, x, 2, 9),
    lambda x: run(aten.bernoulli.default, uniform(x)),
    lambda x: run(aten.native_dropout.default, x, 0.4, True)[0],
    lambda x: run(aten.native_dropout.default, x, 0.4, True)[1],
]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS)
@pytest.mark.parametrize("draw", RANDOM)
def test_numbers_depend_on_seed_and_place_only(
    draw: Callable[[Sharded], Any], mesh: DeviceMesh, placements: list[Placement], transposed: bool
) -> None:
    def start() -> torch.Tensor:
        return (
            torch.linspace(0.1, 1, 20).reshape(5, 4).t()
            if transposed
            else torch.linspace(0.1, 1, 20).reshape(4, 5)
        )

    one = gather(draw(shard(start(), ONE, [Replicate()])))
    many = gather(draw(shard(start(), mesh, placements)))
    torch.testing.assert_close(many, one, rtol=0, atol=0)
    assert one.float().std() > 0, "the numbers are all the same"


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
