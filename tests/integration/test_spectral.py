"""Transforms of frames, and solvers that say at once what is wrong with a matrix."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard


@pytest.mark.parametrize(
    ("window", "align", "onesided"), list(itertools.product([None, 4], [None, True], [None, False]))
)
def test_stft(mesh: DeviceMesh, window: int | None, align: bool | None, onesided: bool | None) -> None:
    options: dict[str, Any] = {
        "n_fft": 8,
        "hop_length": 3,
        "win_length": window,
        "center": False,
        "onesided": onesided,
        "normalized": onesided is None,
        "return_complex": True,
        "align_to_window": align,
    }
    plain = torch.randn(3, 23, requires_grad=True)
    weights = torch.rand(window or 8)
    want = torch.stft(plain, window=weights, **options)
    placed = dtorch.from_torch(plain.detach(), device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
    got = torch.stft(placed, window=dtorch.from_torch(weights, device_mesh=mesh), **options)
    torch.testing.assert_close(got.detach().cpu(), want.detach())
    (gradient,) = torch.autograd.grad(got, placed, torch.ones_like(got))
    torch.testing.assert_close(gradient.cpu(), torch.autograd.grad(want, plain, torch.ones_like(want))[0])


@pytest.mark.filterwarnings("ignore:stft with return_complex")
@pytest.mark.parametrize("return_complex", [None, False, True])
@pytest.mark.parametrize("of_complex", ["signal", "window"])
def test_stft_of_complex_numbers(mesh: DeviceMesh, of_complex: str, return_complex: bool | None) -> None:
    signal, window = torch.randn(23), torch.rand(8)
    if of_complex == "signal":
        signal = torch.complex(signal, signal.flip(0))
    else:
        window = torch.complex(window, window.flip(0))
    options: dict[str, Any] = {"n_fft": 8, "center": False, "return_complex": return_complex}
    want = torch.stft(signal, window=window, **options)
    placed = dtorch.from_torch(signal, device_mesh=mesh)
    got = torch.stft(placed, window=dtorch.from_torch(window, device_mesh=mesh), **options)
    torch.testing.assert_close(got.cpu(), want)


@pytest.mark.parametrize(
    "options",
    [{"n_fft": 50}, {"n_fft": 8, "win_length": 10}, {"n_fft": 8, "win_length": 5, "align_to_window": True}],
)
def test_stft_refuses_what_torch_refuses(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    plain = torch.randn(23)
    for x in (plain, dtorch.from_torch(plain, device_mesh=mesh)):
        with pytest.raises(RuntimeError):
            torch.stft(x, center=False, return_complex=True, **options)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_a_singular_matrix_is_refused_at_once(mesh: DeviceMesh, placement: dtorch.Placement) -> None:
    matrices = torch.eye(3).repeat(2, 1, 1)
    matrices[1, 2, 2] = 0
    placed = dtorch.from_torch(matrices, device_mesh=mesh, placements=[placement])
    for x in (matrices, placed):
        with pytest.raises(torch.linalg.LinAlgError, match="Batch element 1"):
            torch.linalg.inv(x)
