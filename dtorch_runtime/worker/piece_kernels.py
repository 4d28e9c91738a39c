"""Kernels for pieces that are not like the whole: without elements, or off the diagonal of the whole.

Shapes are local.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dtorch_runtime.worker.kernels import find_kernel, kernel

_LEAST_CHANGE = {"sum": 0.0, "avg": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


@kernel("unless_empty")
def unless_empty(
    operator: str,
    args: list[Any],
    shapes: list[list[int]],
    dtypes: list[torch.dtype],
    kinds: list[str],
    num_without: int,
    **kwargs: Any,
) -> Any:
    """What ``operator`` gives; where some piece has no elements, results that change nothing when reduced.

    For kernels that refuse tensors without elements, as the largest of none does not exist. Results without elements
    need no kernel: it may refuse a piece of an input that has no elements as a whole, too.

    Args:
        shapes, dtypes: of the local results.
        kinds: how each result is reduced over devices.
        num_without: how many of the tensors have no elements on any device.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    has_results = any(0 not in shape for shape in shapes)
    if has_results and sum(not tensor.numel() for tensor in tensors) == num_without:
        found = find_kernel(operator)
        result = found.function(*args, **kwargs)
        return result if len(shapes) == 1 else list(found.spread(result, len(shapes)))
    device = tensors[0].device
    results = [
        torch.full(shape, _least_change(kind, dtype), dtype=dtype, device=device)
        for shape, dtype, kind in zip(shapes, dtypes, kinds, strict=True)
    ]
    return results[0] if len(results) == 1 else results


def _least_change(kind: str, dtype: torch.dtype) -> float:
    value = _LEAST_CHANGE[kind]
    if math.isfinite(value) or dtype.is_floating_point or dtype.is_complex:
        return value
    if dtype is torch.bool:
        return value > 0
    return torch.iinfo(dtype).max if value > 0 else torch.iinfo(dtype).min


@kernel("copied_to")
def copied_to(targets: list[torch.Tensor], operator: str, args: list[Any], **kwargs: Any) -> None:
    """What ``operator`` gives, copied into the tensors that ``out=`` names: local pieces with the same placements."""
    found = find_kernel(operator)
    result = found.function(*args, **kwargs)
    results = [result] if isinstance(result, torch.Tensor) else found.spread(result, len(targets))
    for target, made in zip(targets, results, strict=True):
        if made is not None:
            target.copy_(made)


@kernel("along_diagonal")
def along_diagonal(operator: str, args: list[Any], at: int, row: int, column: int) -> torch.Tensor | None:
    """An op that follows a diagonal, on a piece of a matrix.

    Args:
        args: of the whole op; the one at position ``at`` is the offset of the diagonal in the whole.
        row, column: where the piece starts in the whole.

    Returns:
        What the op makes; None where it writes to its argument.
    """
    found = find_kernel(operator)
    result: torch.Tensor = found.function(*args[:at], args[at] + row - column, *args[at + 1 :])
    return None if found.mutated_returns else result


@kernel("trace_shard")
def trace_shard(piece: torch.Tensor, row: int, column: int) -> torch.Tensor:
    """The sum of the elements of the whole's diagonal in a piece [rows, columns] that starts at row and column."""
    return piece.diagonal(row - column).sum()


@kernel("block_diag_shard")
def block_diag_shard(
    pieces: list[torch.Tensor], shapes: list[list[int]], starts: list[list[int]], *, dtype: torch.dtype
) -> torch.Tensor:
    """The whole block diagonal matrix with this device's pieces of the blocks, and zeros elsewhere.

    Args:
        shapes: [rows, columns] of each whole block.
        starts: [row, column] in its block where each piece starts.
    """
    num_rows, num_columns = (sum(shape[dim] for shape in shapes) for dim in (0, 1))
    result = torch.zeros(num_rows, num_columns, dtype=dtype, device=pieces[0].device)
    row = column = 0
    for piece, (rows, columns), (top, left) in zip(pieces, shapes, starts, strict=True):
        block = result[row : row + rows, column : column + columns]
        matrix = torch.atleast_2d(piece)
        block[top : top + matrix.shape[0], left : left + matrix.shape[1]] = matrix
        row, column = row + rows, column + columns
    return result


@kernel("lu_unpack_shard", num_returns=3)
def lu_unpack_shard(
    data: torch.Tensor,
    pivots: torch.Tensor,
    unpack_data: bool,
    unpack_pivots: bool,
    num_rows: int,
    num_columns: int,
    row: int,
    column: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The whole permutation, and the rows (columns) of both factors that lie in a piece of their packed form.

    Args:
        data: [..., local rows, local columns]; rows are cut where the whole is wide, columns where it is tall.
        num_rows, num_columns: of the whole, in which the piece starts at ``row`` and ``column``.
    """
    packed = data.new_empty((*data.shape[:-2], num_rows, num_columns))
    permutation = torch.ops.aten.lu_unpack.default(packed, pivots, False, unpack_pivots)[0]
    if not unpack_data:
        return permutation, data.new_empty(0), data.new_empty(0)
    shift = row - column
    size = min(num_rows, num_columns)
    lower = data[..., :size].tril(shift - 1)
    lower.diagonal(shift, -2, -1).fill_(1)
    return permutation, lower, data[..., :size, :].triu(shift)
