"""What ``zero`` refuses because of what came before it, and what may."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dtorch
import dtorch.nn as dnn
from dtorch_runtime.errors import SettingError

R, S0 = dtorch.Replicate(), dtorch.Shard(0)


def two_devices() -> dtorch.DeviceMesh:
    return dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))


def test_parts_and_orders_that_zero_refuses(cluster: dtorch.Cluster) -> None:
    zero: Any = dtorch.parallel.zero
    mesh = two_devices()
    with dtorch.Graph.default_graph().device_mesh_guard(mesh):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("dtorch")
    inner = model[0]
    zero(inner, torch.optim.SGD(inner.parameters(), lr=0.1), stage=2)
    before = [p.placements for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call, says in (
        (
            lambda: zero(model, optimizer, stage=1),
            r"2 parameters of this Sequential have ZeRO already, 0\.weight",
        ),
        (lambda: zero(model, stage=3), r"call zero\(\) once"),
        (
            lambda: zero(model[1], torch.optim.SGD(inner.parameters()), stage=2),
            "none of the parameters of this SGD",
        ),
        (lambda: dtorch.parallelize(model, mesh, {}), r"parallelize\(model, mesh\) first"),
        (lambda: zero(nn.Linear(4, 4), optimizer, stage=1), "on a mesh"),
    ):
        with pytest.raises(SettingError, match=says):
            call()
    assert [p.placements for p in model.parameters()] == before
    assert not hasattr(model, "dtorch_zero")
    assert not hasattr(model, "dtorch_mesh")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reduce_gradients_leaves_what_zero_has_decided(stage: Any, cluster: dtorch.Cluster) -> None:
    """Of modules of torch that were made on the mesh: called before it, and behind it."""
    mesh = two_devices()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 6, generator=generator)
    torch.manual_seed(2)
    plain = nn.Linear(6, 4)
    with dtorch.Graph.default_graph().device_mesh_guard(mesh):
        model = copy.deepcopy(plain).to("dtorch")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    pieces = (S0,)
    dnn.reduce_gradients(model)
    dtorch.parallel.zero(model, optimizers[0], stage=stage)
    dnn.reduce_gradients(model)
    on_mesh = dtorch.from_torch(x, device_mesh=mesh, placements=[S0])
    for _ in range(2):
        for module, given, optimizer in zip((model, plain), (on_mesh, x), optimizers, strict=True):
            optimizer.zero_grad()
            module(given).square().sum().backward()
            if module is model:
                gradient: Any = model.weight.grad
                assert gradient.placements == ((R,) if stage == 1 else pieces)
            optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-5, atol=1e-6)
