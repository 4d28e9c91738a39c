"""Windows into cut tensors: by strides, and around their ends. Each device adds what it holds of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import DeviceMesh, Partial, PlacementError, Replicate, Shard

X = torch.arange(40.0).view(2, 4, 5) + 1
#: Of x [2, 4, 5] on a grid, with a dim that does not divide.
PLACEMENTS = [
    [Replicate(), Replicate()],
    [Shard(1), Replicate()],
    [Shard(2), Shard(2)],
    [Shard(0), Shard(1)],
    [Partial(), Shard(2)],
]


def place(tensor: torch.Tensor, grid: DeviceMesh, placements: list[Any]) -> Any:
    return dtorch.from_torch(tensor, device_mesh=grid).redistribute(placements=placements)


def value(tensor: Any) -> torch.Tensor:
    return tensor.to_torch()  # type: ignore[no-any-return]  # of a distributed tensor


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("pad", [(1, 2), (0, 1, 2, 0), (-1, 1, -2, 1), (3, -2), (0, 0, 4, 4)], ids=str)
def test_circular_padding(grid: DeviceMesh, pad: tuple[int, ...], placements: list[Any]) -> None:
    plain, x = X.clone().requires_grad_(), place(X, grid, placements).requires_grad_()
    if len(pad) == 4:
        plain, x = plain[None], x[None]
    want, got = F.pad(plain, pad, "circular"), F.pad(x, pad, "circular")
    assert torch.equal(value(got), want)
    weights = torch.arange(float(want.numel())).view(want.shape)
    (wanted,) = torch.autograd.grad((want * weights).sum(), plain)
    whole = got.redistribute(placements=[Replicate(), Replicate()])
    (found,) = torch.autograd.grad((whole * place(weights, grid, [Replicate()] * 2)).sum(), x)
    assert torch.equal(value(found), wanted)


@pytest.mark.parametrize("placements", [[Shard(1), Replicate()], [Replicate(), Replicate()]], ids=str)
def test_circular_padding_beyond_the_size_is_an_error_of_torch(
    grid: DeviceMesh, placements: list[Any]
) -> None:
    with pytest.raises(RuntimeError, match="wrapping around more than once"):
        F.pad(place(X, grid, placements)[None], (0, 0, 5, 0), "circular")


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("window", [([3, 2], [7, 4], 5), ([2, 2], [1, 1], None), ([0], [1], 2)], ids=str)
def test_windows_by_strides(grid: DeviceMesh, window: tuple[Any, ...], placements: list[Any]) -> None:
    x = place(X, grid, placements)
    assert torch.equal(value(torch.as_strided_copy(x, *window)), torch.as_strided_copy(X, *window))
    if window[1] != [1, 1]:  # each place written once
        source = -torch.arange(float(torch.Size(window[0]).numel())).view(window[0])
        for cut in ([Replicate(), Replicate()], [Shard(0), Replicate()]):
            got = torch.as_strided_scatter(x, place(source, grid, cut), *window)
            assert torch.equal(value(got), torch.as_strided_scatter(X, source, *window))


def test_a_window_counts_from_where_a_view_begins(grid: DeviceMesh) -> None:
    row = place(X, grid, [Shard(1), Replicate()])[1]
    assert torch.equal(
        value(torch.as_strided_copy(row, [3], [6], 21)), torch.as_strided_copy(X[1], [3], [6], 21)
    )
    assert torch.equal(value(torch.as_strided_copy(row, [3], [6])), torch.as_strided_copy(X[1], [3], [6]))
    for outside in (([3], [6], 19), ([3], [10], 20)):
        with pytest.raises(PlacementError, match="dim 0 of self whole"):
            torch.as_strided_copy(row, *outside)
