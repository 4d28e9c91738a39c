"""Experts together with what else is on the way of a model: ZeRO, checkpoints of both kinds, other axes and scopes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtorch
import dtorch.checkpoint
import dtorch.nn as dnn
from dtorch.parallel import zero

pytestmark = pytest.mark.usefixtures("cluster")
R, S = dtorch.Replicate(), dtorch.Shard
WIDTH = 8


def new_model() -> nn.Module:
    return nn.Sequential(dnn.MoE(WIDTH, 6, 4, num_shared_experts=1), nn.Linear(WIDTH, WIDTH))


@pytest.fixture
def plain(rng: random.Random) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(rng.getrandbits(32))
        model = new_model()
        model[0].router.weight.data.mul_(4)  # type: ignore[index, union-attr, operator]
        return model


@pytest.fixture
def x(rng: random.Random) -> torch.Tensor:
    return torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(rng.getrandbits(32)))


def grid(*names: str) -> dtorch.DeviceMesh:
    return dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)


def losses(
    model: nn.Module, x: Any, num_steps: int, wrap: Callable[[nn.Module, torch.optim.Optimizer], Any]
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    wrap(model, optimizer)
    found = []
    for _ in range(num_steps):
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_zero_cuts_experts_once_more(stage: Any, plain: nn.Module, x: torch.Tensor) -> None:
    mesh = grid("dp", "ep")
    model = dtorch.parallelize(copy.deepcopy(plain), mesh)
    given = dtorch.from_torch(x, device_mesh=mesh, placements=[S(0), R])
    found = losses(model, given, 4, lambda m, optimizer: zero(m, optimizer, stage=stage))
    assert found == pytest.approx(losses(plain, x, 4, lambda m, optimizer: None), abs=1e-5)


def test_an_activation_checkpoint_routes_the_same_tokens_again(plain: nn.Module, x: torch.Tensor) -> None:
    mesh = grid("ep", "tp")
    model = dtorch.parallelize(copy.deepcopy(plain), mesh)
    given = dtorch.from_torch(x, device_mesh=mesh).requires_grad_()
    checkpoint(model, given, use_reentrant=False).square().sum().backward()
    plain_x = x.clone().requires_grad_()
    plain(plain_x).square().sum().backward()
    torch.testing.assert_close(given.grad.to_torch(), plain_x.grad, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_goes_on_with_experts_elsewhere(plain: nn.Module, tmp_path: Path) -> None:
    dtorch.checkpoint.save(tmp_path / "at", {"model": dtorch.parallelize(plain, grid("tp", "ep"))})
    mesh = dtorch.DeviceMesh("cpu", [2, 0, 1], mesh_dim_names=("ep",))
    other = dtorch.parallelize(new_model(), mesh)
    dtorch.checkpoint.load(tmp_path / "at", {"model": other})
    for ours, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.to_torch(), theirs.to_torch())  # type: ignore[attr-defined]
    assert other.get_parameter("0.experts.up").placements == (S(0),)  # type: ignore[attr-defined]  # ours


def test_tokens_that_are_cut_by_sequence_stay_so(plain: nn.Module, x: torch.Tensor) -> None:
    moe: Any = plain[0]  # type: ignore[index]
    mesh = grid("ring_cp", "ep")
    given = dtorch.from_torch(x, device_mesh=mesh, placements=[S(1), S(1)])
    ours: Any = dtorch.parallelize(copy.deepcopy(moe), mesh)
    found = ours.forward(given)
    assert found.placements == (S(1), S(1))
    torch.testing.assert_close(found.detach().to_torch(), moe(x).detach(), rtol=1e-4, atol=1e-5)


def test_experts_may_share_the_axis_of_the_batch(x: torch.Tensor) -> None:
    moe = dnn.MoE(WIDTH, 6, 5, axis="dp")
    mesh = dtorch.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))
    ours = dtorch.parallelize(copy.deepcopy(moe), mesh)
    found = ours(x)  # parallelize cuts the batch
    torch.testing.assert_close(found.detach().to_torch(), moe(x).detach(), rtol=1e-4, atol=1e-5)
    assert ours.experts.down.placements == (S(0),)


def test_scopes_of_inference_and_of_moving_by_itself(plain: nn.Module, x: torch.Tensor) -> None:
    model = dtorch.parallelize(copy.deepcopy(plain), grid("dp", "ep"))
    expected = plain(x).detach()
    with torch.inference_mode():
        torch.testing.assert_close(model(x).to_torch(), expected, rtol=1e-4, atol=1e-5)
    with dtorch.auto_redistribute():
        torch.testing.assert_close(model(x).detach().to_torch(), expected, rtol=1e-4, atol=1e-5)


def test_no_tokens() -> None:
    moe = dnn.MoE(WIDTH, 6, 4, device_mesh=dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("ep",)))
    x = dtorch.zeros((0, WIDTH), device_mesh=moe.router.weight.device_mesh).requires_grad_()  # type: ignore[attr-defined]
    moe(x).sum().backward()
    assert x.grad.to_torch().shape == (0, WIDTH)
    assert not moe.experts.up.grad.to_torch().any()  # type: ignore[union-attr]
