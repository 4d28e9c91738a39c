"""Kernels for rows of a dim that is cut: a few more at its end, and some of them written.

Importing this module registers them. Shapes are local.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dtorch_runtime.worker.kernels import kernel


@kernel("rows_first")
def rows_first(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """The first ``count`` rows; zeros behind them where there are fewer."""
    rows = x.narrow(dim, 0, min(count, x.shape[dim]))
    missing = count - rows.shape[dim]
    padding = [0, 0] * (x.ndim - 1 - dim) + [0, missing]
    return F.pad(rows, padding) if missing else rows.clone(memory_format=torch.contiguous_format)


@kernel("rows_joined")
def rows_joined(
    own: torch.Tensor,
    following: torch.Tensor,
    new: torch.Tensor,
    dim: int,
    length: int,
    start: int,
    new_start: int,
    shape: Sequence[int],
) -> torch.Tensor:
    """A device's rows of a longer dim: some of those that it had, of the next device's first ones, and of new ones.

    Args:
        own: from row ``start`` of the whole on; following: what comes behind them.
        new: all new rows, which come behind ``length``.
        new_start, shape: where the device's rows of the longer whole start, and its local shape.
    """
    own_stop, new_stop = start + own.shape[dim], new_start + shape[dim]

    def rows(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return x.narrow(dim, first, max(last - first, 0))

    return torch.cat(
        [
            rows(own, new_start - start, min(new_stop, own_stop) - start),
            rows(following, 0, min(new_stop, length) - own_stop),
            rows(new, max(new_start - length, 0), new_stop - length),
        ],
        dim,
    )


@kernel("rows_written")
def rows_written(
    target: torch.Tensor, index: torch.Tensor, source: torch.Tensor, dim: int, start: int
) -> torch.Tensor:
    """``index_copy_`` of the rows that this device has, in place.

    Args:
        index: [rows], in the whole; source: all rows.
        start: the first of ``target`` in the whole.
    """
    local = index - start
    here = ((local >= 0) & (local < target.shape[dim])).nonzero().squeeze(1)
    return target.index_copy_(dim, local[here], source.index_select(dim, here))
