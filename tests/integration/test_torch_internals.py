"""What torch makes for itself behind an op: tensors without memory, ops written in Python."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dtorch
from dtorch import DeviceMesh, Replicate, Shard


def gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    result = function(x)
    torch.autograd.backward(result, torch.ones_like(result) * 2)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("function", [torch.sgn, torch.fft.hfft, lambda x: torch.fft.hfft(x * 1j).cos()])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_gradients(
    mesh: DeviceMesh, function: Callable[..., torch.Tensor], placement: dtorch.Placement
) -> None:
    plain = torch.randn(4, 6)
    placed = dtorch.from_torch(plain, device_mesh=mesh, placements=[placement])
    torch.testing.assert_close(gradient(function, placed).cpu(), gradient(function, plain))


@torch.library.custom_op("dtorch_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    weight = torch.full(x.shape, factor, device=x.device)
    return torch.mul(x, weight, out=torch.empty(x.shape, device=x.device))


def test_an_op_written_in_python_runs_as_its_parts(mesh: DeviceMesh) -> None:
    plain = torch.randn(4, 6)
    placed = dtorch.from_torch(plain, device_mesh=mesh)
    result = scaled(placed, 3.0)
    assert result.device_mesh == mesh
    torch.testing.assert_close(result.cpu(), scaled(plain, 3.0))


def into_scratch(x: torch.Tensor, factor: float) -> torch.Tensor:
    scratch = torch.empty(x.shape, device=x.device)
    for row in range(x.shape[0]):
        torch.mul(x[row], factor, out=scratch[row])
    return scratch


scaled.register_autograd(
    lambda ctx, gradient: (into_scratch(gradient, ctx.factor), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


class Scaled(torch.autograd.Function):
    """The same as a function of the user's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return into_scratch(gradients[0], ctx.factor), None


@pytest.mark.parametrize("function", [scaled, Scaled.apply])
@pytest.mark.parametrize("scope", [nullcontext, dtorch.auto_redistribute])
def test_what_a_backward_function_makes_is_where_its_gradients_are(
    mesh: DeviceMesh, function: Any, scope: Any
) -> None:
    plain = torch.randn(4, 6)
    placed = dtorch.from_torch(plain, device_mesh=mesh)
    with scope():
        found: Any = gradient(lambda x: function(x, 3.0) ** 2, placed)
    assert found.device_mesh == mesh
    torch.testing.assert_close(found.cpu(), gradient(lambda x: function(x, 3.0) ** 2, plain))


def test_a_checkpoint_makes_its_tensors_where_the_forward_made_them(mesh: DeviceMesh) -> None:
    plain = torch.randn(4, 6)
    x = dtorch.from_torch(plain, device_mesh=mesh)
    made: list[Any] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        made.append(torch.ones(6, device=x.device))
        return x * made[-1]

    gradient(lambda x: checkpoint(forward, x, use_reentrant=True), x)
    assert len(made) == 2
    assert made[0].device_mesh == made[1].device_mesh != mesh


def test_a_tensor_with_any_stride_on_a_dim_of_size_1_is_sent(mesh: DeviceMesh) -> None:
    plain = torch.randn(2, 3).t()[:, :1]
    assert plain[:1].is_contiguous()
    assert plain[:1].stride() != (1, 1)
    placed = dtorch.from_torch(plain[:1], device_mesh=mesh)
    assert torch.equal(placed.to_torch(), plain[:1])


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_sparse_results_are_refused(mesh: DeviceMesh, placement: dtorch.Placement) -> None:
    weight = dtorch.from_torch(torch.randn(4, 6), device_mesh=mesh, placements=[placement])
    with pytest.raises(dtorch.UnsupportedError, match=r"x\.cpu\(\)\.to_sparse\(\)"):
        weight.to_sparse()
    weight.requires_grad_()
    rows = torch.nn.functional.embedding(
        dtorch.tensor([1, 2], device_mesh=mesh), weight.redistribute(placements=[Replicate()]), sparse=True
    )
    with pytest.raises(dtorch.UnsupportedError, match="sparse=False"):
        rows.sum().backward()
