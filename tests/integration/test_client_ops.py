"""Operators of PyTorch on a real cluster give what plain PyTorch gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard

A = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 7 - 1.3


def send(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Any, grad: bool = False) -> dtorch.Tensor:
    return dtorch.from_torch(
        tensor.detach(), device_mesh=mesh, placements=placements or None, requires_grad=grad
    )


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert isinstance(actual, dtorch.Tensor)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.to_torch(), expected.detach())


POINTWISE: list[Callable[[Any], Any]] = [
    lambda a: a + a,
    lambda a: a * 2 - a / 3,
    lambda a: 1 - a,
    lambda a: -a,
    lambda a: a**2,
    lambda a: a > 0,
    lambda a: torch.where(a > 0, a, -a),
    lambda a: a.exp().clamp(max=2.0),
    lambda a: F.gelu(a),
    lambda a: a.to(torch.float64),
    lambda a: a + True,
    lambda a: a.add(a, alpha=3),
]


@pytest.mark.parametrize("function", POINTWISE, ids=range(len(POINTWISE)))
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_pointwise(mesh: DeviceMesh, function: Callable[[Any], Any], placement: Any) -> None:
    result = function(send(A, mesh, placement))
    assert result.placements == (placement,)
    assert_equal(result, function(A))


WHOLE: list[Callable[[Any], Any]] = [
    lambda a: a.view(24),
    lambda a: a[1],
    lambda a: a[:, 2:4],
    lambda a: a[::2, -1],
    lambda a: a[None, ..., 0],
    lambda a: a.t(),
    lambda a: a.permute(1, 0).contiguous(),
    lambda a: a.reshape(2, 2, 6),
    lambda a: a.unsqueeze(0).expand(3, 4, 6),
    lambda a: a.split(2, 1)[1],
    lambda a: a.chunk(2)[0],
    lambda a: a.unbind(0)[2],
    lambda a: torch.cat([a, a], 1),
    lambda a: torch.stack(list(a)),
    lambda a: a[torch.tensor([0, 2])],
    lambda a: a[[1, 0]],
    lambda a: a.diagonal(),
    lambda a: a.sum(),
    lambda a: a.mean(0),
    lambda a: a.max(1).values,
    lambda a: a.softmax(-1),
    lambda a: a @ a.t(),
    lambda a: torch.einsum("ij,kj->ik", a, a),
    lambda a: F.layer_norm(a, (6,)),
    lambda a: a.sort(1, descending=True).indices,
    lambda a: a.topk(2).values,
    lambda a: torch.triu(a),
    lambda a: a.cumsum(0),
]


@pytest.mark.parametrize("function", WHOLE, ids=range(len(WHOLE)))
def test_replicated(mesh: DeviceMesh, function: Callable[[Any], Any]) -> None:
    assert_equal(function(send(A, mesh)), function(A))


def test_in_place_writes_are_seen_through_every_view(mesh: DeviceMesh) -> None:
    x, a = send(A, mesh), A.clone()
    for t in (x, a):
        row, column = t[1], t[:, 2]
        t.add_(1)
        row.mul_(3)
        column[:] = 7
        t[0, 0] += 2
        t.view(-1)[5:9].neg_()
    assert_equal(x, a)
    assert_equal(x.detach().zero_(), torch.zeros(4, 6))
    assert_equal(x, torch.zeros(4, 6))


def test_copies_between_cpu_and_cluster(mesh: DeviceMesh) -> None:
    x = send(torch.zeros(4, 6), mesh, Shard(0))
    x.copy_(A)
    assert_equal(x, A)
    back = torch.empty(4, 6)
    assert back.copy_(x) is back
    assert torch.equal(back, A)
    assert torch.equal(x.cpu(), A)
    assert torch.equal(x.to("cpu", torch.float64), A.to(torch.float64))


PLACEMENTS = [Replicate(), Shard(0), Shard(1), Shard(1, unit=2), Partial(), Partial("max")]


@pytest.mark.parametrize("source", [*itertools.product(PLACEMENTS[:5], PLACEMENTS[:5])], ids=str)
def test_redistribute_on_a_grid(grid: DeviceMesh, source: Any) -> None:
    x = send(A, grid, *source)
    assert_equal(x, A)
    for target in itertools.product(PLACEMENTS, [Replicate(), Shard(0), Shard(1, unit=3)]):
        y = x.redistribute(placements=target)
        assert y.placements == target
        assert_equal(y, A)


def test_redistribute_to_other_devices(mesh: DeviceMesh) -> None:
    x = send(A, mesh, Shard(0))
    for devices in ([2, 3], [1, 2, 3], [3], [1, 0]):
        y = x.redistribute(DeviceMesh("cpu", devices), [Shard(1)])
        assert_equal(y, A)
        assert_equal(y.redistribute_like(x), A)


@pytest.mark.parametrize("shape", [(1, 6), (0, 6), (3, 1)], ids=str)
def test_more_ranks_than_rows(cluster: dtorch.Cluster, shape: tuple[int, ...]) -> None:
    a = torch.randn(shape)
    mesh = dtorch.init_device_mesh("cpu", (4,))
    for dim in (0, 1):
        x = send(a, mesh, Shard(dim))
        assert_equal(x * 2, a * 2)
        assert_equal(x.redistribute(placements=[Shard(1 - dim)]), a)


# ---- factories and random numbers ----


@pytest.mark.parametrize(
    "placements", [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Replicate(),) * 2], ids=str
)
def test_random_numbers_do_not_depend_on_the_layout(grid: DeviceMesh, placements: Any) -> None:
    alone = DeviceMesh("cpu", [3])
    values = []
    for options in ({"device_mesh": grid, "placements": placements}, {"device_mesh": alone}):
        dtorch.manual_seed(11)
        made = [
            dtorch.rand(5, 3, **options),
            dtorch.randn((5, 3), **options),
            dtorch.randint(7, (5, 3), **options),
        ]
        values.append([t.to_torch() for t in made])
    for one, other in zip(*values, strict=True):
        assert torch.equal(one, other)
    assert 0 <= values[0][0].min() < values[0][0].max() < 1


def test_factories(grid: DeviceMesh) -> None:
    options: dict[str, Any] = {"device_mesh": grid, "placements": [Shard(0), Replicate()]}
    assert_equal(dtorch.zeros(5, 3, **options), torch.zeros(5, 3))
    assert_equal(dtorch.ones((5, 3), dtype=torch.int32, **options), torch.ones(5, 3, dtype=torch.int32))
    assert_equal(dtorch.full((5, 3), 2, **options), torch.full((5, 3), 2))
    assert_equal(dtorch.arange(7, **options), torch.arange(7))
    assert_equal(dtorch.arange(1, 2, 0.25, **options), torch.arange(1, 2, 0.25))
    assert_equal(dtorch.linspace(0, 1, 5, **options), torch.linspace(0, 1, 5))
    assert_equal(dtorch.eye(5, 3, **options), torch.eye(5, 3))
    assert_equal(dtorch.tensor([[1, 2], [3, 4]], **options), torch.tensor([[1, 2], [3, 4]]))
    assert sorted(dtorch.randperm(6, **options).tolist()) == list(range(6))
    x = dtorch.empty(5, 3, requires_grad=True, **options)
    assert x.requires_grad
    like = dtorch.zeros_like(x, dtype=torch.float64)
    assert (like.placements, like.dtype) == (x.placements, torch.float64)
    partial = dtorch.ones(3, device_mesh=grid, placements=[Partial(), Partial("max")])
    assert_equal(partial, torch.ones(3))
