"""Shapes and strides of views, as ATen computes them. None where a call is wrong: the meta kernel then raises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from dtorch.rules.call import Call
from dtorch.shapes import Metas, ShapeFunction, TensorMeta, wrap
from dtorch.spec import Spec, contiguous_stride


def resolve_size(size: Sequence[int], num_elements: int) -> tuple[int, ...] | None:
    """A size with its -1 filled in; None when it does not fit."""
    if -1 not in size:
        return tuple(size) if math.prod(size) == num_elements else None
    known = -math.prod(size)
    if known <= 0 or num_elements % known or list(size).count(-1) != 1:
        return None
    return tuple(num_elements // known if n == -1 else n for n in size)


def view_stride(shape: Sequence[int], stride: Sequence[int], viewed: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of a view without a copy, or None when there is none (``at::detail::computeStride``)."""
    if math.prod(shape) == 0:
        return tuple(stride) if tuple(shape) == tuple(viewed) else contiguous_stride(viewed)
    result = [1] * len(viewed)
    view_dim = len(viewed) - 1
    if not shape:
        return (1,) * len(viewed)
    base = stride[-1]
    num_in = num_out = 1
    for dim in range(len(shape) - 1, -1, -1):
        num_in *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and stride[dim - 1] != num_in * base):
            while view_dim >= 0 and (num_out < num_in or viewed[view_dim] == 1):
                result[view_dim] = num_out * base
                num_out *= viewed[view_dim]
                view_dim -= 1
            if num_out != num_in:
                return None
            if dim > 0:
                base = stride[dim - 1]
                num_in = num_out = 1
    return tuple(result) if view_dim == -1 else None


def view(call: Call) -> Metas | None:
    spec = call.inputs[0]
    shape = resolve_size(call.get("size"), math.prod(spec.shape))
    if shape is None:
        return None
    stride = view_stride(spec.shape, spec.stride, shape)
    return None if stride is None else _one(spec, shape, stride)


def of_copy(view: ShapeFunction) -> ShapeFunction:
    """The shape of a view; copies of its part, by the op that ends in ``_copy``, are row-major."""

    def function(call: Call) -> Metas | None:
        metas = view(call)
        if metas is None or not call.op.base.endswith("_copy"):
            return metas
        (meta,) = metas
        assert isinstance(meta, TensorMeta)
        return (TensorMeta(meta.shape, contiguous_stride(meta.shape), meta.dtype),)

    return function


def transpose(call: Call) -> Metas | None:
    spec = call.inputs[0]
    a, b = wrap(call.get("dim0"), len(spec.shape)), wrap(call.get("dim1"), len(spec.shape))
    if a is None or b is None or not spec.shape:
        return None
    order = list(range(len(spec.shape)))
    order[a], order[b] = order[b], order[a]
    return _permuted(spec, order)


def t(call: Call) -> Metas | None:
    spec = call.inputs[0]
    return _permuted(spec, list(range(len(spec.shape)))[::-1]) if len(spec.shape) <= 2 else None


def permute(call: Call) -> Metas | None:
    spec = call.inputs[0]
    order = [wrap(dim, len(spec.shape)) for dim in call.get("dims")]
    found = [dim for dim in order if dim is not None]
    if sorted(found) != list(range(len(spec.shape))):
        return None
    return _permuted(spec, found)


def unsqueeze(call: Call) -> Metas | None:
    spec = call.inputs[0]
    ndim = len(spec.shape)
    dim = wrap(call.get("dim"), ndim + 1)
    if dim is None:
        return None
    step = spec.shape[dim] * spec.stride[dim] if dim < ndim else 1
    return _one(
        spec,
        (*spec.shape[:dim], 1, *spec.shape[dim:]),
        (*spec.stride[:dim], step, *spec.stride[dim:]),
    )


def squeezed_dims(call: Call) -> list[int] | None:
    """The dims that a squeeze takes away."""
    spec = call.inputs[0]
    ndim = len(spec.shape)
    if call.has("dim"):
        asked = call.get("dim")
        dims = [wrap(dim, ndim) for dim in (asked if isinstance(asked, list | tuple) else [asked])]
    else:
        dims = list(range(ndim))
    if any(dim is None for dim in dims):
        return None
    return sorted({dim for dim in dims if dim is not None and dim < ndim and spec.shape[dim] == 1})


def squeeze(call: Call) -> Metas | None:
    spec = call.inputs[0]
    gone = squeezed_dims(call)
    if gone is None:
        return None
    kept = [dim for dim in range(len(spec.shape)) if dim not in gone]
    return _permuted(spec, kept)


def expand(call: Call) -> Metas | None:
    spec = call.inputs[0]
    size = list(call.get("size"))
    missing = len(size) - len(spec.shape)
    if missing < 0:
        return None
    stride = [0] * len(size)
    for dim in range(len(size) - 1, -1, -1):
        have = spec.shape[dim - missing] if dim >= missing else 1
        if size[dim] == -1:
            if dim < missing:
                return None
            size[dim] = have
        if size[dim] < 0 or have not in (1, size[dim]):
            return None
        if dim >= missing:
            stride[dim] = spec.stride[dim - missing] if have == size[dim] else 0
        elif size[dim] == 1:
            stride[dim] = stride[dim + 1] * size[dim + 1] if dim + 1 < len(size) else 1
    return _one(spec, tuple(size), tuple(stride))


def select(call: Call) -> Metas | None:
    spec = call.inputs[0]
    dim = wrap(call.get("dim"), len(spec.shape))
    index = call.get("index")
    if dim is None or not spec.shape or not isinstance(index, int):
        return None
    if not -spec.shape[dim] <= index < spec.shape[dim]:
        return None
    (piece,) = _permuted(spec, [d for d in range(len(spec.shape)) if d != dim])
    return (piece._replace(offset=index % spec.shape[dim] * spec.stride[dim]),)


def slice_range(call: Call) -> tuple[int, int, int, int] | None:
    """(dim, start, stop, step) of a slice, within the dim."""
    shape = call.inputs[0].shape
    dim = wrap(call.get("dim"), len(shape))
    step = call.get("step")
    if dim is None or not shape or step < 1:
        return None
    size = shape[dim]
    start, stop, _ = slice(call.get("start"), call.get("end")).indices(size)
    return dim, start, max(start, stop), step


def slice_(call: Call) -> Metas | None:
    spec = call.inputs[0]
    found = slice_range(call)
    if found is None:
        return None
    dim, start, stop, step = found
    shape, stride = list(spec.shape), list(spec.stride)
    shape[dim] = -(-(stop - start) // step)
    stride[dim] *= step
    (piece,) = _one(spec, tuple(shape), tuple(stride))
    return (piece._replace(offset=start * spec.stride[dim]),)


def unbind(call: Call) -> Metas | None:
    spec = call.inputs[0]
    dim = wrap(call.get("dim"), len(spec.shape))
    if dim is None or not spec.shape:
        return None
    (piece,) = _permuted(spec, [d for d in range(len(spec.shape)) if d != dim])
    return (tuple(piece._replace(offset=i * spec.stride[dim]) for i in range(spec.shape[dim])),)


def split(call: Call) -> Metas | None:
    spec = call.inputs[0]
    dim = wrap(call.get("dim"), len(spec.shape))
    if dim is None or not spec.shape:
        return None
    size = spec.shape[dim]
    if call.has("split_size"):
        length = call.get("split_size")
        if not isinstance(length, int) or length < 1:
            return None
        lengths = [min(length, size - at) for at in range(0, size, length)] or [0]
    else:
        lengths = list(call.get("split_sizes"))
        if sum(lengths) != size or any(n < 0 for n in lengths):
            return None
    starts = itertools.accumulate(lengths, initial=0)
    return (
        tuple(
            TensorMeta(
                (*spec.shape[:dim], n, *spec.shape[dim + 1 :]),
                spec.stride,
                spec.dtype,
                start * spec.stride[dim],
            )
            for n, start in zip(lengths, starts)
        ),
    )


def cat(call: Call) -> Metas | None:
    used = [spec for spec in call.inputs if spec.shape != (0,)] or list(call.inputs)
    first = used[0]
    dim = wrap(call.get("dim"), len(first.shape))
    if dim is None or not first.shape or any(spec.dtype is not first.dtype for spec in call.inputs):
        return None
    rest = (*first.shape[:dim], *first.shape[dim + 1 :])
    for spec in used:
        if len(spec.shape) != len(first.shape) or (*spec.shape[:dim], *spec.shape[dim + 1 :]) != rest:
            return None
    # The result is row-major unless every input is laid out with channels last.
    if len(first.shape) in (4, 5) and all(spec.stride[1] <= spec.stride[-1] for spec in used):
        return None
    size = sum(spec.shape[dim] for spec in used)
    shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
    return (TensorMeta(shape, contiguous_stride(shape), first.dtype),)


def _permuted(spec: Spec, order: Sequence[int]) -> tuple[TensorMeta]:
    return _one(spec, tuple(spec.shape[dim] for dim in order), tuple(spec.stride[dim] for dim in order))


def _one(spec: Spec, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[TensorMeta]:
    return (TensorMeta(shape, stride, spec.dtype),)
