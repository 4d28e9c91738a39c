"""Kernels of the pass ``bucket``: pieces of several tensors laid end to end, and cut apart again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch_runtime.worker.kernels import kernel


@kernel("pack")
def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of local pieces, one piece behind the other; a new tensor of one dim."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@kernel("unpack")
def unpack(
    flat: torch.Tensor, shapes: Sequence[Sequence[int]], dims: Sequence[int], num_pieces: int
) -> list[torch.Tensor]:
    """The inverse; each tensor has memory of its own.

    Args:
        flat: what ``num_pieces`` devices have packed, one behind the other.
        shapes: of the piece of one of them, for each tensor.
        dims: along which a tensor's pieces lie behind one another.
    """
    rows = flat.view(num_pieces, -1)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = rows.split_with_sizes(sizes, 1)
    if num_pieces == 1:
        return [part.clone().view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return [
        torch.cat([piece.view(shape) for piece in part], dim)
        for part, shape, dim in zip(parts, shapes, dims, strict=True)
    ]
