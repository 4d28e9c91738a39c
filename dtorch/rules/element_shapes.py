"""Shapes of what ops give that move, pick or change elements of a row-major tensor.

A function gives None where arguments are unusual or wrong: a meta kernel then answers, or refuses them.
"""

from __future__ import annotations

import torch

from dtorch.rules.call import Call
from dtorch.rules.dsl import full_names
from dtorch.rules.nn_shapes import is_plain, row_major
from dtorch.shapes import (
    Metas,
    TensorMeta,
    broadcast,
    is_contiguous,
    register_shape,
    wrap,
)
from dtorch.spec import Spec, contiguous_stride


def _is_row_major(spec: Spec) -> bool:
    return 0 not in spec.shape and is_contiguous(spec.shape, spec.stride)


def _like(spec: Spec) -> Metas:
    return (row_major(spec.shape, spec),)


# ------------------------------------------------------------------------------------------------- by index


def scattered(call: Call) -> Metas | None:
    """A copy, with values at the places of an index of the same rank."""
    spec, index = call.inputs[0], call.spec("index")
    source = call.get("src") if call.has("src") else None
    dim = wrap(call.get("dim"), len(spec.shape))
    if not _is_row_major(spec) or dim is None or index.dtype is not torch.int64:
        return None
    if len(index.shape) != len(spec.shape) or not spec.shape:
        return None
    if isinstance(source, Spec):
        if source.dtype is not spec.dtype or len(source.shape) != len(spec.shape):
            return None
        if any(n > m for n, m in zip(index.shape, source.shape, strict=True)):
            return None
    fits = all(d == dim or n <= m for d, (n, m) in enumerate(zip(index.shape, spec.shape, strict=True)))
    return _like(spec) if fits else None


def indexed_along_a_dim(call: Call) -> Metas | None:
    """A copy, with values at the places of an index along one dim."""
    spec, index = call.inputs[0], call.spec("index")
    dim = wrap(call.get("dim"), len(spec.shape))
    if not _is_row_major(spec) or dim is None or not spec.shape:
        return None
    if index.dtype is not torch.int64 or len(index.shape) != 1:
        return None
    if call.has("source"):
        source = call.spec("source")
        wanted = (*spec.shape[:dim], *index.shape, *spec.shape[dim + 1 :])
        return _like(spec) if source.dtype is spec.dtype and source.shape == wanted else None
    value = call.get("value")
    if isinstance(value, Spec):
        return _like(spec) if value.shape == () and value.dtype is spec.dtype else None
    return None if isinstance(value, complex) and not spec.dtype.is_complex else _like(spec)


register_shape(
    full_names(
        "scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add scatter_reduce.two"
    ),
    scattered,
)
register_shape(
    full_names("index_fill.int_Scalar index_fill.int_Tensor index_copy index_add"), indexed_along_a_dim
)


def _shape_of_picked(call: Call) -> tuple[int, ...] | None:
    """The shape of ``x[indices]``: dims of the indices stand together, in place or in front. None with masks."""
    shape, indices = call.inputs[0].shape, call.get("indices")
    at = [dim for dim, index in enumerate(indices) if index is not None]
    if not at or len(indices) > len(shape) or 0 in shape or any(indices[d].dtype.itemsize == 1 for d in at):
        return None
    picked = broadcast([indices[dim].shape for dim in at])
    if picked is None or 0 in picked:
        return None
    rest = [size for dim, size in enumerate(shape) if dim not in at]
    place = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    return (*rest[:place], *picked, *rest[place:])


def picked_elements(call: Call) -> Metas | None:
    """Elements at the places of integer indices."""
    spec, shape = call.inputs[0], _shape_of_picked(call)
    if shape is None or spec.stride != contiguous_stride(spec.shape):
        return None
    return (row_major(shape, spec),)


def changed_elements(call: Call) -> Metas | None:
    """A copy, with other values at the places of integer indices."""
    spec, values, shape = call.inputs[0], call.spec("values"), _shape_of_picked(call)
    if shape is None or not _is_row_major(spec) or values.dtype is not spec.dtype:
        return None
    return _like(spec) if broadcast([shape, values.shape]) == shape else None


def changed_under_a_mask(call: Call) -> Metas | None:
    """A copy, with the next elements of a source wherever a mask is true."""
    spec, mask = call.inputs[0], call.spec("mask")
    if not _is_row_major(spec) or mask.dtype is not torch.bool or call.spec("source").dtype is not spec.dtype:
        return None
    return _like(spec) if broadcast([spec.shape, mask.shape]) == spec.shape else None


def _is_masked_well(call: Call, shape: tuple[int, ...]) -> bool:
    mask = call.spec("mask")
    return mask.dtype is torch.bool and broadcast([shape, mask.shape]) == shape


def picked_under_a_mask(call: Call) -> Metas | None:
    """Elements at the places of integer indices, where a mask is true."""
    metas, shape = picked_elements(call), _shape_of_picked(call)
    return metas if shape is not None and _is_masked_well(call, shape) else None


def added_under_a_mask(call: Call) -> Metas | None:
    """A copy, with values added at the places of integer indices, where a mask is true."""
    metas, shape = changed_elements(call), _shape_of_picked(call)
    return metas if shape is not None and _is_masked_well(call, shape) else None


register_shape(full_names("_unsafe_masked_index"), picked_under_a_mask)
register_shape(full_names("_unsafe_masked_index_put_accumulate"), added_under_a_mask)
register_shape(full_names("index.Tensor _unsafe_index.Tensor"), picked_elements)
register_shape(full_names("index_put _unsafe_index_put"), changed_elements)
register_shape(full_names("masked_scatter"), changed_under_a_mask)


# ------------------------------------------------------------------------------------------------- whole tensors


def sorted_along(call: Call) -> Metas | None:
    """Elements in order, and where they were."""
    spec = call.inputs[0]
    if not _is_row_major(spec) or not spec.shape or wrap(call.get("dim"), len(spec.shape)) is None:
        return None
    (values,) = _like(spec)
    assert isinstance(values, TensorMeta)
    return (values, values._replace(dtype=torch.int64))


def rolled(call: Call) -> Metas | None:
    """Elements shifted, around the ends."""
    spec, shifts, dims = call.inputs[0], call.get("shifts"), call.get("dims")
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    if not _is_row_major(spec) or len(shifts) != (len(dims) or 1):
        return None
    return None if any(wrap(dim, len(spec.shape)) is None for dim in dims) else _like(spec)


def stacked(call: Call) -> Metas | None:
    """Tensors of one shape, side by side along a new dim."""
    first = call.inputs[0]
    dim = wrap(call.get("dim"), len(first.shape) + 1)
    if dim is None or any(
        spec.shape != first.shape or spec.dtype is not first.dtype or not _is_row_major(spec)
        for spec in call.inputs
    ):
        return None
    return (row_major((*first.shape[:dim], len(call.inputs), *first.shape[dim:]), first),)


def halved(call: Call) -> Metas | None:
    """One half of a dim, gated by the other."""
    spec = call.inputs[0]
    dim = wrap(call.get("dim"), len(spec.shape))
    if not _is_row_major(spec) or not is_plain(call) or dim is None or not spec.shape or spec.shape[dim] % 2:
        return None
    return (row_major((*spec.shape[:dim], spec.shape[dim] // 2, *spec.shape[dim + 1 :]), spec),)


def distance(call: Call) -> Metas | None:
    """One number for two tensors of one dtype."""
    first, second = call.inputs
    if not is_plain(call) or first.dtype.is_complex or broadcast([first.shape, second.shape]) is None:
        return None
    return (row_major((), first),)


def outer_product_added(call: Call) -> Metas | None:
    """A matrix, and the outer product of two vectors."""
    spec, rows, columns = call.inputs
    shape = (*rows.shape, *columns.shape)
    if (
        not is_plain(call)
        or len(rows.shape) != 1
        or len(columns.shape) != 1
        or len(set(map(_dtype, call.inputs))) > 1
    ):
        return None
    return (row_major(shape, spec),) if broadcast([spec.shape, shape]) == shape else None


def _dtype(spec: Spec) -> torch.dtype:
    return spec.dtype


def diagonal_sum(call: Call) -> Metas | None:
    """One number of a matrix; sums of integers are int64."""
    spec = call.inputs[0]
    is_inexact = spec.dtype.is_floating_point or spec.dtype.is_complex
    return (TensorMeta((), (), spec.dtype if is_inexact else torch.int64),) if len(spec.shape) == 2 else None


def mantissa_and_exponent(call: Call) -> Metas | None:
    """Two tensors like the given one."""
    spec = call.inputs[0]
    if not is_plain(call) or not spec.dtype.is_floating_point:
        return None
    (mantissa,) = _like(spec)
    assert isinstance(mantissa, TensorMeta)
    return (mantissa, mantissa._replace(dtype=torch.int32))


def copies_of_rows(call: Call) -> Metas | None:
    """A copy of each element along a dim."""
    spec = call.inputs[0]
    dim = wrap(call.get("dim"), len(spec.shape))
    if not _is_row_major(spec) or dim is None or not spec.shape:
        return None
    shape = (*spec.shape[:dim], *spec.shape[dim + 1 :])
    return (tuple(TensorMeta(shape, contiguous_stride(shape), spec.dtype) for _ in range(spec.shape[dim])),)


register_shape(full_names("sort"), sorted_along)
register_shape(full_names("roll"), rolled)
register_shape(full_names("stack"), stacked)
register_shape(full_names("glu"), halved)
register_shape(full_names("dist"), distance)
register_shape(full_names("addr"), outer_product_added)
register_shape(full_names("trace"), diagonal_sum)
register_shape(full_names("frexp.Tensor"), mantissa_and_exponent)
register_shape(full_names("unbind_copy.int"), copies_of_rows)
