"""Gradients on a real cluster are those of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import dtorch
from dtorch import DeviceMesh, Replicate, Shard


def check_gradients(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], symbols: list[Any]
) -> None:
    """The same function on leaves of both kinds: same value, same gradients, held as the inputs are."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    expected = function(*leaves)
    actual: Any = function(*symbols)
    torch.testing.assert_close(actual.to_torch(), expected.detach())
    expected.backward()
    actual.backward()
    for leaf, symbol in zip(leaves, symbols, strict=True):
        torch.testing.assert_close(symbol.grad.to_torch(), leaf.grad)


def send(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> dtorch.Tensor:
    return dtorch.from_torch(tensor, device_mesh=mesh, placements=placements or None, requires_grad=True)


def whole(tensor: Any) -> Any:
    return tensor.redistribute(placements=[Replicate()]) if isinstance(tensor, dtorch.Tensor) else tensor


@pytest.mark.parametrize(
    ("x_placement", "w_placement", "b_placement"),
    [
        (Replicate(), Replicate(), Replicate()),
        (Replicate(), Shard(0), Shard(0)),
        (Shard(1), Shard(1), None),
        (Shard(0), Replicate(), Replicate()),
    ],
    ids=["replicated", "column", "row", "data"],
)
def test_linear_layer(mesh: DeviceMesh, x_placement: Any, w_placement: Any, b_placement: Any) -> None:
    x, w, b = torch.randn(4, 6), torch.randn(5, 6), torch.randn(5)
    inputs = [x, w] if b_placement is None else [x, w, b]
    placements = [x_placement, w_placement, b_placement]
    symbols = [send(t, mesh, p) for t, p in zip(inputs, placements)]
    check_gradients(lambda *args: (whole(F.linear(*args)) ** 2).sum(), inputs, symbols)
    if w_placement == Shard(0):
        assert symbols[1].grad.placements == (Shard(0),)  # type: ignore[union-attr]  # it has one


def test_the_gradient_of_a_linear_layer_may_be_cut_on_more_axes_than_its_input(grid: DeviceMesh) -> None:
    """As where only the target of a loss is cut by sequence."""
    x, w, target = torch.randn(4, 6, 3), torch.randn(5, 3), torch.randn(4, 6, 5)
    symbols = [send(x, grid, Shard(0), Replicate()), send(w, grid)]
    on_mesh = dtorch.from_torch(target, device_mesh=grid, placements=[Shard(0), Shard(1)])

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        output: Any = F.linear(x, w)
        return (output - (on_mesh if isinstance(output, dtorch.Tensor) else target)).square().sum()

    check_gradients(loss, [x, w], symbols)


def _through_views(a: torch.Tensor) -> torch.Tensor:
    y = a * 2
    y[1].mul_(3)
    y[:, 0] = 0
    y.view(-1)[3:5].add_(a.view(-1)[3:5])
    return (y**2).sum()


def _twice(a: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad((a**3).sum(), a, create_graph=True)
    return (gradient**2).sum()


@pytest.mark.parametrize(
    "function",
    [
        lambda a: (a.relu() @ a.t()).pow(2).sum(),
        lambda a: F.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None]).sum(),
        lambda a: F.cross_entropy(a, torch.tensor([0, 1, 2, 0], device=a.device)),
        lambda a: F.layer_norm(a, (6,)).sin().sum(),
        lambda a: checkpoint(lambda t: t.exp() * t, a, use_reentrant=False).sum(),
        lambda a: a.cpu().exp().to(a.device).sum(),
        _through_views,
        _twice,
    ],
    ids=["matmul", "attention", "cross_entropy", "layer_norm", "checkpoint", "via_cpu", "views", "twice"],
)
def test_functions(mesh: DeviceMesh, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    a = torch.randn(4, 6)
    check_gradients(function, [a], [send(a, mesh)])


@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Shard(0), Shard(1))], ids=str)
def test_redistribute_passes_gradients(grid: DeviceMesh, placements: Any) -> None:
    a = torch.randn(5, 7)
    x = send(a, grid, *placements)

    def function(t: Any) -> torch.Tensor:
        if isinstance(t, dtorch.Tensor):
            t = t.redistribute(placements=[Replicate(), Shard(1)]).redistribute(placements=[Replicate()] * 2)
        result: torch.Tensor = (t**2).sum()
        return result

    check_gradients(function, [a], [x])
    assert x.grad.placements == placements  # type: ignore[union-attr]  # it has one


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_a_write_to_a_list_is_counted(mesh: DeviceMesh, placement: Any) -> None:
    """So that a backward pass through what was overwritten is refused, as on the CPU."""
    leaf = send(torch.randn(4), mesh, placement)
    saved = leaf * 1
    result = saved.exp() * saved
    torch._foreach_add_([saved.detach()], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=lambda o: o.__name__)
def test_training_steps(mesh: DeviceMesh, optimizer: Any) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
    )
    with dtorch.Graph.default_graph().device_mesh_guard(mesh):
        remote = copy.deepcopy(plain).to("dtorch")
        x, y = torch.randn(5, 4), torch.randn(5, 2)
        losses = []
        for model, device in ((plain, "cpu"), (remote, "dtorch")):
            steps = optimizer(model.parameters(), lr=0.1)
            for _ in range(3):
                steps.zero_grad()
                loss = F.mse_loss(model(x.to(device)), y.to(device))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                steps.step()
            losses.append(loss.item())
        torch.testing.assert_close(losses[0], losses[1])
        for one, other in zip(plain.parameters(), remote.parameters(), strict=True):
            torch.testing.assert_close(one.detach(), other.to_torch())  # type: ignore[operator]  # a dtorch.Tensor


def test_autocast(mesh: DeviceMesh) -> None:
    x, w = send(torch.randn(2, 4), mesh), send(torch.randn(3, 4), mesh)
    with torch.autocast("dtorch", dtype=torch.bfloat16):
        y = F.linear(x, w)
        assert y.dtype is torch.bfloat16
        assert y.softmax(-1).dtype is torch.float32
    y.float().sum().backward()
    assert w.grad is not None
    assert w.grad.dtype is torch.float32


def test_an_error_of_a_worker_in_backward_names_the_line(cluster: dtorch.Cluster, mesh: DeviceMesh) -> None:
    x = send(torch.randn(4), mesh)
    index = dtorch.tensor([9], device_mesh=mesh)
    y = x[index].sum()
    y.backward()
    assert x.grad is not None
    with pytest.raises(dtorch.RemoteOpError, match=r"y = x\[index\]"):
        x.grad.to_torch()  # type: ignore[operator]  # a dtorch.Tensor
    with pytest.raises(dtorch.RemoteOpError, match=r"y = x\[index\]"):
        y.to_torch()  # type: ignore[operator]  # a dtorch.Tensor
