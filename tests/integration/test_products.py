"""``linear`` and ``matmul`` stay whole under autograd: gradients with batch, heads and features cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch_runtime.ir.placement import Placement
from tests.support.tiny_llama import prompt, tiny_llama

R = Replicate()


def leaf(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> dtorch.Tensor:
    return dtorch.from_torch(tensor, device_mesh=mesh, placements=placements, requires_grad=True)


def whole(tensor: Any) -> Any:
    if not isinstance(tensor, dtorch.Tensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


@pytest.mark.parametrize(
    ("left", "right", "left_placement", "right_placement"),
    [
        ((3, 4), (4, 5), Shard(0), R),
        ((3, 4), (4, 5), Shard(1), Shard(0)),
        ((2, 3, 4), (4, 5), R, Shard(1)),
        ((2, 3, 4), (4, 5), Shard(1), R),
        ((2, 3, 4, 5), (2, 3, 5, 2), Shard(1), Shard(1)),
        ((2, 3, 4, 5), (3, 5, 2), Shard(1), Shard(0)),
        ((4,), (4, 5), R, Shard(1)),
        ((2, 3, 4), (4,), Shard(0), R),
        ((4,), (4,), Shard(0), Shard(0)),
    ],
)
def test_gradients_of_matmul(
    mesh: DeviceMesh,
    left: tuple[int, ...],
    right: tuple[int, ...],
    left_placement: Placement,
    right_placement: Placement,
) -> None:
    a, b = torch.randn(left), torch.randn(right)
    leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    (leaves[0] @ leaves[1]).square().sum().backward()
    x, y = leaf(a, mesh, left_placement), leaf(b, mesh, right_placement)
    whole(x @ y).square().sum().backward()
    torch.testing.assert_close(x.grad.to_torch(), leaves[0].grad)  # type: ignore[union-attr]  # it has one
    torch.testing.assert_close(y.grad.to_torch(), leaves[1].grad)  # type: ignore[union-attr]  # it has one


@pytest.mark.parametrize("placement", [R, Shard(0), Shard(1)])
def test_gradients_keep_the_strides_of_the_parameter(mesh: DeviceMesh, placement: Placement) -> None:
    """The gradient of a transposed weight comes transposed, and is stored as the weight is."""
    a, b = torch.randn(4, 6), torch.randn(5, 6)
    want = b.clone().requires_grad_()
    (a @ want.t()).square().sum().backward()
    x = dtorch.from_torch(a, device_mesh=mesh, placements=[Shard(1) if placement == Shard(1) else R])
    w = leaf(b, mesh, placement)
    whole(x @ w.t()).square().sum().backward()
    gradient: Any = w.grad
    assert gradient.placements == (placement,)
    assert gradient.stride() == b.stride()
    torch.testing.assert_close(gradient.to_torch(), want.grad)


def test_second_derivatives(mesh: DeviceMesh) -> None:
    def penalty(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(whole(F.linear(x, w)).square().sum(), x, create_graph=True)
        return whole(gradient).square().sum()

    a, b = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    want = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    penalty(*want).backward()
    x, w = leaf(a, mesh, R), leaf(b, mesh, Shard(0))
    penalty(x, w).backward()
    torch.testing.assert_close(w.grad.to_torch(), want[1].grad)  # type: ignore[union-attr]  # it has one
    torch.testing.assert_close(x.grad.to_torch(), want[0].grad)  # type: ignore[union-attr]  # it has one


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ],
)
def test_optimizers_step_on_pieces(
    mesh: DeviceMesh, make: Any, options: dict[str, Any], foreach: bool
) -> None:
    """State is held as the parameter is: nothing moves in a step."""
    start, gradients = torch.randn(5, 3), torch.randn(3, 5, 3)
    plain = start.clone().requires_grad_()
    cut = leaf(start, mesh, Shard(0))
    for parameter in (plain, cut):
        optimizer = make([parameter], foreach=foreach, **options)
        for gradient in gradients:
            if parameter is cut:
                parameter.grad = dtorch.from_torch(gradient, device_mesh=mesh, placements=[Shard(0)])
            else:
                parameter.grad = gradient.clone()
            optimizer.step()
    assert cut.placements == (Shard(0),)
    torch.testing.assert_close(cut.detach().to_torch(), plain.detach())


@pytest.mark.timeout(120)
def test_a_language_model_learns_the_same_on_two_by_two_devices(grid: DeviceMesh) -> None:
    """Batch of three on dp, nine heads in groups of three on tp, AdamW: losses of plain PyTorch."""
    ids = prompt(batch=3)
    reference, model = tiny_llama(num_hidden_layers=1), tiny_llama(num_hidden_layers=1)
    dtorch.parallelize(model, grid)
    losses = []
    for network, tokens in ((reference, ids), (model, dtorch.from_torch(ids, device_mesh=grid))):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        history = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = network(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        losses.append(history)
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("product", [torch.matmul, torch.nn.functional.linear])
def test_a_factor_that_no_derivative_needs_may_be_written_to(
    mesh: DeviceMesh, product: Any, written: int, needs: tuple[bool, bool]
) -> None:
    """Torch saves what the other factor's derivative needs; a write to that is an error, to anything else it is not."""

    def outcome(send: Any) -> Any:
        leaves = [send(torch.full((3, 3), float(i + 2))).requires_grad_(need) for i, need in enumerate(needs)]
        factors = [leaf * 1 for leaf in leaves]
        result = product(*factors)
        factors[written].add_(1)
        try:
            result.sum().backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        return [None if leaf.grad is None else leaf.grad.tolist() for leaf in leaves]

    expected = outcome(lambda t: t)
    assert outcome(lambda t: dtorch.from_torch(t, device_mesh=mesh)) == expected
    assert (expected is True) is needs[1 - written]
