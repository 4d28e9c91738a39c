"""Kernels that compute a piece of what the whole op would give: they know where the piece starts.

Importing this module registers them. Shapes are local unless a name says whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dtorch_runtime.worker import (  # noqa: F401  register their kernels
    attention_gradients as _attention_gradients,
    attention_kernels as _attention_kernels,
    bucket_kernels as _bucket_kernels,
    expert_kernels as _expert_kernels,
    file_kernels as _file_kernels,
    nn_kernels as _nn_kernels,
    piece_kernels as _piece_kernels,
    random_kernels as _random_kernels,
    regions as _regions,
    route_kernels as _route_kernels,
    row_kernels as _row_kernels,
)
from dtorch_runtime.worker.kernels import find_kernel, kernel


@kernel("box")
def box_of(whole: torch.Tensor, starts: list[int], sizes: list[int]) -> torch.Tensor:
    """A copy of a box of a tensor."""
    index = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    result: torch.Tensor = whole[index].clone(memory_format=torch.contiguous_format)
    return result


@kernel("resized")
def resized(x: torch.Tensor, size: list[int], stride: list[int]) -> torch.Tensor:
    """The memory of ``x`` as a tensor of another size, more of it where it is too small.

    Args:
        size: local.
        stride: of the global tensor; its order of dims is kept.
    """
    order = sorted(range(len(size)), key=lambda dim: (-stride[dim], dim))
    rows: torch.Tensor = torch.ops.aten.alias(x).resize_([size[dim] for dim in order])
    return rows.permute([order.index(dim) for dim in range(len(size))])


@kernel("embedding_shard")
def embedding_shard(weight: torch.Tensor, indices: torch.Tensor, start: int) -> torch.Tensor:
    """Rows of a vocabulary of which this device holds the rows from ``start`` on; zeros for rows elsewhere.

    The sum over the devices that cut the vocabulary is the whole look-up.

    Args:
        weight: [local rows, features].
        indices: any shape, integers into the global vocabulary.
        start: global row of ``weight[0]``.

    Returns:
        [*indices.shape, features].
    """
    local = indices - start
    outside = (local < 0) | (local >= weight.shape[0])
    if weight.shape[0] == 0:
        return weight.new_zeros((*indices.shape, weight.shape[1]))
    rows = torch.embedding(weight, local.masked_fill(outside, 0))
    return rows.masked_fill_(outside.unsqueeze(-1), 0)


@kernel("nonzero_shard")
def nonzero_shard(x: torch.Tensor, starts: torch.Tensor, first: int, num_places: int) -> torch.Tensor:
    """The places of elements of a device's rows in the list of all places; zeros for those of other devices.

    Args:
        x: [local rows, ...].
        starts: [local rows], int64: how many places of the whole come before each row.
        first: global row of ``x[0]``.
        num_places: of the whole.

    Returns:
        int64 [num_places, ndim], the transpose of a row-major tensor.
    """
    found = torch.nonzero(x)
    result = found.new_zeros((x.ndim, num_places)).t()
    rows = found[:, 0].contiguous()
    in_row = torch.arange(len(rows), device=x.device) - torch.searchsorted(rows, rows)
    places = starts[rows] + in_row
    found[:, 0] += first
    result[places] = found
    return result


@kernel("segment_reduce_shard")
def segment_reduce_shard(
    data: torch.Tensor,
    where: torch.Tensor,
    reduce: str,
    has_lengths: bool,
    axis: int,
    start: int,
    num_rows: int | None,
    initial: float | None,
) -> torch.Tensor:
    """A device's rows of every segment, reduced. Those of all devices are reduced in turn; means are added.

    Args:
        data: [..., local rows, ...], the rows in dim ``axis``.
        where: whole: [..., segments] lengths, or [..., segments + 1] offsets into the whole rows.
        start: the first local row in the whole; a sum or product begins with ``initial`` on the first device only.
        num_rows: of the whole, which the segments must cover; None where the caller vouches for them.

    Returns:
        [..., segments, ...].

    Raises:
        RuntimeError: the segments do not cover the rows.
    """
    offsets = torch.nn.functional.pad(where.cumsum(-1), (1, 0)) if has_lengths else where
    if num_rows is not None and not bool((offsets[..., -1] == num_rows).all()):
        raise RuntimeError(
            f"segment_reduce takes segments of all {num_rows} rows, they end at {offsets[..., -1]}"
        )
    local = (offsets - start).clamp(0, data.shape[axis])
    is_mean = reduce == "mean"
    if start and reduce in ("sum", "mean", "prod"):
        initial = None
    kind = "sum" if is_mean else reduce
    result = torch.segment_reduce(data, kind, offsets=local, axis=axis, unsafe=True, initial=initial)
    if not is_mean:
        return result
    in_segment = offsets.diff().view(*offsets.shape[:-1], -1, *[1] * (data.ndim - 1 - axis))
    if initial is None and not start:
        result = result.masked_fill(in_segment == 0, math.nan)
    return result / in_segment.clamp(min=1)


@kernel("masked_scatter_shard")
def masked_scatter_shard(
    x: torch.Tensor,
    mask: torch.Tensor,
    source: torch.Tensor,
    shape: list[int],
    starts: list[int],
    sizes: list[int],
    in_place: bool,
) -> torch.Tensor | None:
    """A piece of ``masked_scatter``: the mask, which is whole, says which element of the whole source comes where.

    Args:
        x: local; broadcast to ``sizes``.
        shape: of the whole result, to which the mask is broadcast.
        starts, sizes: of the piece in it.

    Raises:
        RuntimeError: the source has fewer elements than the mask asks for.
    """
    whole = mask.expand(shape)
    order = whole.flatten().cumsum(0)
    if order.numel() and int(order[-1]) > source.numel():
        raise RuntimeError(
            f"masked_scatter takes an element of source for each true element of the mask, {int(order[-1])}, but "
            f"source has {source.numel()}"
        )
    target = x if in_place else x.expand(sizes).clone(memory_format=torch.contiguous_format)
    index = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    here = whole[index]
    target[here] = source.flatten()[order.view(shape)[index][here] - 1]
    return None if in_place else target


@kernel("index_shard")
def index_shard(
    x: torch.Tensor, indices: list[torch.Tensor | None], starts: list[int], sizes: list[int]
) -> torch.Tensor:
    """``x[indices]`` of a piece: what this device holds of it, and zeros for what others hold.

    Args:
        indices: for each of the first dims integers into the whole, or None.
        starts, sizes: where the piece starts in each dim of the whole, and the sizes of that.

    Raises:
        IndexError: a number is not one of the whole.
    """
    local: list[torch.Tensor | None] = []
    outside = torch.zeros((), dtype=torch.bool, device=x.device)
    for dim, index in enumerate(indices):
        if index is not None:
            index, is_elsewhere = _on_piece(index, starts[dim], x.shape[dim], sizes[dim])
            outside = outside | is_elsewhere
        local.append(index)
    indexed = [dim for dim, index in enumerate(local) if index is not None]
    held = _with_an_element(x, indexed)
    result: torch.Tensor = torch.ops.aten.index(held, local)
    at = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    num_behind = x.ndim - len(indexed) - at
    return result.masked_fill_(outside.view(*outside.shape, *[1] * num_behind), 0)


@kernel("gather_shard")
def gather_shard(x: torch.Tensor, dim: int, index: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """``gather`` along a cut dim: what this device holds of it, and zeros for what others hold.

    Args:
        index: integers into the whole, which has ``size`` elements along ``dim``; the piece has those from ``start``.

    Raises:
        IndexError: a number is not one of the whole.
    """
    local, outside = _on_piece(index, start, x.shape[dim], size)
    return torch.gather(_with_an_element(x, [dim]), dim, local).masked_fill_(outside, 0)


def _on_piece(
    index: torch.Tensor, start: int, num_local: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in a whole dim as numbers in a piece of it, and which of them are elsewhere (those become 0).

    Raises:
        IndexError: one is not in the whole dim.
    """
    index = index.long()
    is_inside = ((index >= -size) & (index < size)).all()
    if index.device.type != "cpu":
        torch._assert_async(is_inside)  # as torch does there: to look would wait for the device
    elif not is_inside:
        raise IndexError(f"an index is out of bounds for a dim of size {size}")
    local = index.where(index >= 0, index + size) - start
    outside = (local < 0) | (local >= num_local)
    return local.masked_fill(outside, 0), outside


def _with_an_element(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """A piece, with one element along these dims where it has none, so that number 0 can be picked."""
    shape = [max(size, 1) if dim in dims else size for dim, size in enumerate(x.shape)]
    return x if shape == list(x.shape) else x.new_zeros(shape)


@kernel("factory_shard")
def factory_shard(
    operator: str, args: list[Any], starts: list[int], sizes: list[int], **kwargs: Any
) -> torch.Tensor:
    """The box of what a factory makes, e.g. of ``aten::arange``: made whole, cut, and let go."""
    whole: torch.Tensor = find_kernel(operator).function(*args, **kwargs)
    return box_of(whole, starts, sizes)


@kernel("divided")
def divided(operator: str, args: list[Any], divisor: float, **kwargs: Any) -> torch.Tensor:
    """A local sum as a part of a global mean: what ``operator`` gives, divided by the global count."""
    total: torch.Tensor = find_kernel(operator).function(*args, **kwargs)
    return total.div(divisor)


@kernel("histc_of_integers")
def histc_of_integers(x: torch.Tensor, bins: int, low: float, high: float) -> torch.Tensor:
    """``torch.histc`` of integers, counted in their dtype; [bins]."""
    return torch.histc(x.to(torch.float64), bins, low, high).to(x.dtype)
