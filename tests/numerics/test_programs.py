"""Random programs of views, in-place writes, products and sums on random placements give what plain torch gives.

Pieces have strides of their own, and views of pieces share memory with their bases, so this is also where a stride that
the client believes and the worker does not have would show.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from tests.support.simulated_mesh import Sharded, gather, run, shard

aten = torch.ops.aten
MESHES = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [[0, 1], [2, 3]])]
Pair = tuple[Sharded, torch.Tensor]
#: Calls that fit a tensor: (overload, arguments after the tensor). None where there is none.
Choose = Callable[[random.Random, Pair, list[Pair]], "tuple[Any, tuple[Any, ...]] | None"]


def dim_of(rng: random.Random, x: Pair) -> int | None:
    return rng.randrange(x[1].ndim) if x[1].ndim else None


def with_dim(func: Any, *rest: Any) -> Choose:
    def choose(rng: random.Random, x: Pair, others: list[Pair]) -> tuple[Any, tuple[Any, ...]] | None:
        dim = dim_of(rng, x)
        return None if dim is None else (func, (dim, *rest))

    return choose


def plain(func: Any, *rest: Any) -> Choose:
    return lambda rng, x, others: (func, rest)


def with_other(func: Any) -> Choose:
    def choose(rng: random.Random, x: Pair, others: list[Pair]) -> tuple[Any, tuple[Any, ...]] | None:
        other = rng.choice(others)
        # Writing to what is read at the same time has no defined result in torch.
        shares = other[1].untyped_storage().data_ptr() == x[1].untyped_storage().data_ptr()
        return None if shares and func in (aten.add_.Tensor, aten.copy_.default) else (func, (other,))

    return choose


def view(rng: random.Random, x: Pair, others: list[Pair]) -> tuple[Any, tuple[Any, ...]]:
    rest, size = x[1].numel(), []
    while rest > 1:
        factor = rng.choice([n for n in range(2, rest + 1) if rest % n == 0])
        size.append(factor)
        rest //= factor
    if rng.random() < 0.3:
        size.insert(rng.randint(0, len(size)), 1)
    return aten.view.default, (size,)


def transpose(rng: random.Random, x: Pair, others: list[Pair]) -> tuple[Any, tuple[Any, ...]] | None:
    return (aten.transpose.int, (rng.randrange(x[1].ndim), rng.randrange(x[1].ndim))) if x[1].ndim else None


def expand(rng: random.Random, x: Pair, others: list[Pair]) -> tuple[Any, tuple[Any, ...]]:
    size = [rng.choice([2, 3]) if n == 1 else n for n in x[1].shape]
    return aten.expand.default, ([2, *size] if rng.random() < 0.3 else size,)


def slice_(rng: random.Random, x: Pair, others: list[Pair]) -> tuple[Any, tuple[Any, ...]] | None:
    dim = dim_of(rng, x)
    return None if dim is None else (aten.slice.Tensor, (dim, rng.choice([0, 1]), rng.choice([2, 100])))


def sum_(rng: random.Random, x: Pair, others: list[Pair]) -> tuple[Any, tuple[Any, ...]] | None:
    dim = dim_of(rng, x)
    return (
        None
        if dim is None
        else (rng.choice([aten.sum.dim_IntList, aten.mean.dim]), ([dim], rng.random() < 0.5))
    )


MENU: list[Choose] = [
    view,
    view,
    transpose,
    expand,
    slice_,
    sum_,
    with_dim(aten.unsqueeze.default),
    with_dim(aten.squeeze.dim),
    with_dim(aten._softmax.default, False),
    with_dim(aten.select.int, 0),
    plain(aten.squeeze.default),
    plain(aten.clone.default),
    plain(aten.tanh.default),
    plain(aten.neg.default),
    plain(aten.mul.Tensor, 0.5),
    plain(aten.add_.Tensor, 1.0),
    plain(aten.mul_.Tensor, -0.5),
    plain(aten.zero_.default),
    with_other(aten.add.Tensor),
    with_other(aten.mul.Tensor),
    with_other(aten.add_.Tensor),
    with_other(aten.copy_.default),
    with_other(aten.matmul.default),
    with_other(aten.maximum.default),
]


def random_placement(rng: random.Random, ndim: int) -> Placement:
    kind = rng.random()
    if kind < 0.25 or not ndim:
        return Replicate() if kind < 0.2 else Partial("sum")
    return Shard(rng.randrange(ndim), unit=rng.choice([1, 1, 1, 2, 3]))


def start(rng: random.Random, mesh: DeviceMesh) -> Pair:
    shape = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4))]
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    whole = torch.randn(shape, generator=generator, dtype=torch.float64)
    placements = [random_placement(rng, len(shape)) for _ in range(mesh.ndim)]
    return shard(whole, mesh, placements, generator), whole


def step(rng: random.Random, tensors: list[Pair], history: list[str]) -> bool:
    """One op on both sides; whether there was one that torch and the placements allow."""
    x = rng.choice(tensors)
    chosen = rng.choice(MENU)(rng, x, tensors)
    if chosen is None:
        return False
    func, rest = chosen
    mine = [item[0] if isinstance(item, tuple) else item for item in rest]
    theirs = [item[1] if isinstance(item, tuple) else item for item in rest]
    try:
        got = run(func, x[0], *mine, moves_bytes=func is aten.copy_.default)
    except PlacementError:
        return False
    except (RuntimeError, IndexError):
        with pytest.raises((RuntimeError, IndexError)):
            func(x[1], *theirs)
        return False
    want = func(x[1], *theirs)
    if got is not x[0]:
        tensors.append((got, want))
    numbers = [
        next(i for i, t in enumerate(tensors) if t is item) if isinstance(item, tuple) else item
        for item in rest
    ]
    first = next(i for i, t in enumerate(tensors) if t is x)
    history.append(f"{len(tensors) - 1} = {func}({first} {got.spec}, {numbers})")
    return True


@pytest.mark.parametrize("block", range(2))
def test_random_programs(rng: random.Random, block: int) -> None:
    num_steps = 0
    for _ in range(40):
        mesh = rng.choice(MESHES)
        tensors = [start(rng, mesh) for _ in range(3)]
        history = [str(t[0].spec) for t in tensors]
        for _ in range(12):
            num_steps += step(rng, tensors, history)
        for got, want in tensors:
            torch.testing.assert_close(
                gather(got),
                want,
                rtol=1e-6,
                atol=1e-6,
                equal_nan=True,
                msg=lambda m, h=history: "\n".join([m, *h]),
            )
    assert num_steps > 100, "nearly nothing was allowed"


def test_a_whole_operand_that_is_cut_loses_its_order_in_memory() -> None:
    """The client must not allow a view that the pieces do not have."""
    mesh = MESHES[0]
    whole, cut = torch.randn(4, 6).t(), torch.randn(4, 6).t()
    product = run(aten.mul.Tensor, shard(whole, mesh, [Replicate()]), shard(cut, mesh, [Shard(0)]))
    assert product.spec.stride == tuple(product.pieces[0].new_empty(6, 4).stride())
    flat = run(aten.view.default, product, [24])
    torch.testing.assert_close(gather(flat), (whole * cut).reshape(24))
