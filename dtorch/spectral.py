"""``stft`` in views that rules know: torch's own takes frames by strides, which say nothing about cut dims."""

from __future__ import annotations

import torch

aten = torch.ops.aten


def stft(
    x: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> torch.Tensor:
    """``aten::stft`` without padding at the ends: the Fourier transforms of frames of a signal.

    Shapes (global): x [samples] or [batch, samples], window [win_length]; returns [frequencies, frames] after the
    batch, and a dim of 2 for real and imaginary parts unless ``return_complex`` (of complex numbers by default).

    Raises:
        RuntimeError: as torch raises it.
    """
    _check(x, n_fft, hop_length, win_length, window, normalized, onesided, return_complex, align_to_window)
    length = n_fft if win_length is None else win_length
    missing = n_fft - length
    left = missing // 2
    hop = n_fft // 4 if hop_length is None else hop_length
    if align_to_window and left:
        num_frames = 1 + (x.shape[-1] - length) // hop
        x = torch.nn.functional.pad(x, (left, left))
        if (num_frames - 1) * hop + n_fft > x.shape[-1]:  # torch reads beyond the end, and says so
            raise RuntimeError(
                f"stft: the last of {num_frames} frames of {n_fft} samples is beyond the signal's end"
            )
    frames = x.unfold(-1, n_fft, hop)
    if window is None and missing:
        window = torch.ones(length, dtype=x.dtype, device=x.device)
    if window is not None:
        frames = frames * torch.nn.functional.pad(window, (left, missing - left))
    norm = "ortho" if normalized else "backward"
    is_half = not (frames.is_complex() or x.is_complex()) if onesided is None else onesided
    spectrum = torch.fft.rfft(frames, norm=norm) if is_half else torch.fft.fft(frames, norm=norm)
    result = spectrum.transpose(-2, -1)
    is_wanted = frames.is_complex() if return_complex is None else return_complex
    return result if is_wanted else torch.view_as_real(result)


def _check(x: torch.Tensor, n_fft: int, *rest: object) -> None:
    """Raise what torch raises: it looks at shapes only."""
    like = [
        torch.empty(v.shape, dtype=v.dtype, device="meta") if isinstance(v, torch.Tensor) else v for v in rest
    ]
    aten.stft.default(torch.empty(x.shape, dtype=x.dtype, device="meta"), n_fft, *like)
