"""What tests of ``dtorch.capture`` share. Shapes are global."""

from __future__ import annotations

from typing import Any

import torch

import dtorch
from dtorch import DeviceMesh

MESH = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
NUM_CALLS = 4


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def send(tensor: torch.Tensor, placements: Any = None, mesh: DeviceMesh = MESH) -> dtorch.Tensor:
    sent = dtorch.from_torch(tensor.detach(), device_mesh=mesh, placements=placements)
    return sent.requires_grad_(tensor.requires_grad)


def replays(function: Any) -> int:
    return sum(signature.num_replays for signature in function._signatures.values())


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert type(found) is dtorch.Tensor
        torch.testing.assert_close(found.to_torch(), expected.detach())
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        same(list(found.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert type(found) is type(expected)
        assert found == expected


def mlp() -> torch.nn.Module:
    """Of float64, with the same weights each time."""
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
    ).double()
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = numbers(*parameter.shape, seed=seed)
    return model
