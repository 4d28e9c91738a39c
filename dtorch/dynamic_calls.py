"""Calls that need data before they can be planned: masks as indices, counts, and cuts named by tensors.

Where inputs are whole, masks are planned like any other index. These calls take another way when something is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtorch.dispatch import dispatch, fetched, special
from dtorch.factory import from_torch
from dtorch.issue import issue, make_entry
from dtorch.meshes import layout_record
from dtorch.op_plan import NewOutput, OpPlan
from dtorch.resize import resize_outputs
from dtorch.rules.call import Call, op_of
from dtorch.rules.equation import layout_of
from dtorch.rules.index import is_mask_dtype
from dtorch.spec import intern_spec
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Partial, Replicate, Shard
from dtorch_runtime.wire.records import LocalStart, Slot

aten = torch.ops.aten


# ---- masks among the indices ----


@special(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """``x[mask]``: where ``x`` is cut elsewhere, the mask becomes the numbers of what it picks."""
    x, indices = args
    masks = _masks(cls, x, indices)
    if not masks or (all(type(mask) is cls for mask in masks) and _is_whole(cls, (x, *indices))):
        return NotImplemented
    if any(type(mask) is cls and not _is_whole(cls, (mask,)) for mask in masks):
        return NotImplemented  # to be refused, or brought together
    return dispatch(cls, func, (), (x, _numbers(indices)), kwargs)


@special(
    aten.index_put.default,
    aten.index_put_.default,
    aten._unsafe_index_put.default,
    aten._index_put_impl_.default,
)
def _index_put(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """``x[mask] = number``: ``masked_fill``, which works on any placement."""
    x, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    masks = _masks(cls, x, indices)
    given = [index for index in indices if index is not None]
    if len(masks) != 1 or len(given) != 1 or accumulate or values.numel() != 1:
        return NotImplemented
    if any(type(value) is not cls for value in (masks[0], values)) or _is_whole(cls, (x, *masks, values)):
        return NotImplemented
    mask = masks[0] if masks[0].dtype is torch.bool else aten._to_copy.default(masks[0], dtype=torch.bool)
    position = next(i for i, index in enumerate(indices) if index is not None)
    for _ in range(x.ndim - position - mask.ndim):
        mask = aten.unsqueeze.default(mask, -1)
    fill = aten.masked_fill_.Tensor if func._schema.is_mutable else aten.masked_fill.Tensor
    return fill(x, mask, values if values.ndim == 0 else aten.view.default(values, []))


def _masks(cls: Any, x: Any, indices: Sequence[Any]) -> list[torch.Tensor]:
    """The masks among indices of a dtorch tensor.

    Raises:
        IndexError: one does not have the shape of the dims that it stands for.
    """
    masks: list[torch.Tensor] = []
    dim = 0
    for position, index in enumerate(indices if type(x) is cls else ()):
        if index is None or not is_mask_dtype(index.dtype):
            dim += 1
            continue
        if x.shape[dim : dim + index.ndim] != index.shape:
            raise IndexError(
                f"The shape of the mask {list(index.shape)} at index {position} does not match the shape of the "
                f"indexed tensor {list(x.shape)} at dim {dim}"
            )
        dim += index.ndim
        masks.append(index)
    return masks


def _is_whole(cls: Any, tensors: Sequence[Any]) -> bool:
    return all(tensor._spec.layout.is_replicated for tensor in tensors if type(tensor) is cls)


def _numbers(indices: Sequence[Any]) -> list[Any]:
    """Each mask replaced by the numbers of what it picks, one tensor for each of its dims."""
    result: list[Any] = []
    for index in indices:
        if index is not None and is_mask_dtype(index.dtype):
            result.extend(aten.unbind.int(aten.nonzero.default(index), 1))
        else:
            result.append(index)
    return result


# ---- results of which another op tells the size ----


@special(aten.bincount.default)
def _bincount(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """Counts of sharded numbers: once the largest is known, each device adds its own to a partial sum."""
    call = Call(op_of(func), args, kwargs)
    x, weights, minlength = call.get("self"), call.get("weights"), call.get("minlength")
    given = (x,) if weights is None else (x, weights)
    if any(type(tensor) is not cls for tensor in given) or _is_whole(cls, given):
        return NotImplemented
    if x.ndim != 1 or x.numel() == 0 or (weights is not None and weights.shape != x.shape):
        return NotImplemented
    ends = [aten.amin.default(x, [0]), aten.amax.default(x, [0])]
    smallest, largest = (int(future.get()) for future in [end.value() for end in ends])
    if smallest < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if weights is None:
        weights = aten.ones_like.default(x, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = aten._to_copy.default(weights, dtype=torch.float64)
    size = max(largest + 1, minlength)
    # In two dims, because a new tensor of the shape of x would be cut as x is.
    zeros = aten.select.int(aten.new_zeros.default(x, [1, size], dtype=weights.dtype), 0, 0)
    return aten.index_add.default(zeros, 0, x, weights)


@special(aten.nonzero.default)
def _nonzero(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """Places in a tensor whose rows are cut: once their number in each row is known, each device adds its own."""
    (x,) = args
    if type(x) is not cls or not _is_cut_by_rows(x._spec.layout):
        return NotImplemented
    ones = aten._to_copy.default(aten.ne.Scalar(x, 0), dtype=torch.int64)
    counts = ones if x.ndim == 1 else aten.sum.dim_IntList(ones, list(range(1, x.ndim)))
    per_row = fetched(counts)
    starts = from_torch(per_row.cumsum(0) - per_row, device_mesh=x.device_mesh, placements=x.placements)
    return _places(x, starts, int(per_row.sum()), location)


def _places(x: Any, starts: Any, num_places: int, location: int) -> Any:
    """The places of all devices' rows as a sum. ``starts`` (rows): how many come before each row."""
    spec, graph = x._spec, x._handle.graph
    key = ("nonzero", spec, num_places)
    entry = graph.entries.get(key)
    if entry is None:
        layout = spec.layout
        terms = tuple(Partial() if isinstance(p, Shard) else p for p in layout.placements)
        shape = (num_places, len(spec.shape))
        first = LocalStart(list(spec.shape), layout_record(layout), 0)
        plan = OpPlan(
            op="dtorch::nonzero_shard",
            args=(Slot(0), Slot(1), first, num_places),
            layouts=(layout, starts._spec.layout),
            # Torch lists the first numbers of all places, then the second ones.
            outputs=(
                NewOutput(
                    intern_spec(shape, torch.int64, layout_of(layout.mesh, terms), (1, max(num_places, 1)))
                ),
            ),
        )
        entry = graph.entries[key] = make_entry(graph.session, plan, "nonzero", 2)
    return issue(x._symbol_class, entry, graph, (x, starts), location)


def _is_cut_by_rows(layout: Layout) -> bool:
    """Whether a device's elements follow one another in the whole."""
    return not layout.is_replicated and all(
        isinstance(p, Replicate) or (isinstance(p, Shard) and p.dim == 0) for p in layout.placements
    )


@special(aten.nonzero_static.default)
def _nonzero_static(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """The first places, and rows of ``fill_value`` where there are not so many."""
    (x,) = args
    if type(x) is not cls or not _is_cut_by_rows(x._spec.layout):
        return NotImplemented
    size = kwargs["size"]
    places = aten.slice.Tensor(aten.nonzero.default(x), 0, 0, size)
    missing = size - places.shape[0]
    fill = aten.new_full.default(places, [missing, x.ndim], kwargs.get("fill_value", -1))
    return aten.cat.default([places, fill])


@special(aten.masked_select.default)
def _masked_select(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """What a whole mask selects of a cut tensor: ``x[mask]`` of both, broadcast to one another."""
    x, mask = args
    if type(x) is not cls or type(mask) is not cls or not _is_whole(cls, (mask,)) or _is_whole(cls, (x,)):
        return NotImplemented
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    x, mask = aten.expand.default(x, shape), aten.expand.default(mask, shape)
    return aten.index.Tensor(x, _numbers([mask])) if shape else NotImplemented


@special(aten.nonzero.out, aten.masked_select.out)
def _into(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """``out=`` of a result of unknown shape: once it is known, it is brought there."""
    out = kwargs["out"]
    result = func._overloadpacket.default(*args)
    resize_outputs((out,), [(0, tuple(result.shape))], location)
    return aten.copy_.default(out, result)


def tensor_split(x: torch.Tensor, indices: torch.Tensor, dim: int = 0) -> Any:
    """``aten::tensor_split`` at indices, or into a number of sections, that a tensor holds. Differentiable."""
    where = indices.tolist()
    if indices.ndim == 0:
        return aten.tensor_split.sections(x, where, dim)
    return aten.tensor_split.indices(x, where, dim)


@special(aten.tensor_split.tensor_indices_or_sections)
def _tensor_split(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    return tensor_split(*args, **kwargs)


# ---- checks ----


@special(aten._linalg_check_errors.default)
def _linalg_check_errors(
    cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int
) -> None:
    """``linalg.inv`` and its like say at once that a matrix is singular, as torch does on any device."""
    info, *rest = args
    aten._linalg_check_errors.default(fetched(info), *rest, **kwargs)
