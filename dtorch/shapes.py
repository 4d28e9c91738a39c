"""Shape, strides and dtype of results: arithmetic of our own for common ops, meta kernels for the rest.

Meta kernels are exact and slow (up to a millisecond), and a decode loop makes new shapes at every token. The
functions here answer in a few microseconds; ``tests/unit/rules/test_shapes.py`` compares them with the meta kernels.
All shapes and strides are global; strides are in elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch

from dtorch.rules.call import Call
from dtorch.spec import Spec, contiguous_stride
from dtorch.strided import check_strided
from dtorch_runtime.errors import UnsupportedError


class ShapeNeedsData(UnsupportedError):
    """Torch cannot tell the shape of the result without the data, or has no meta kernel for the op."""


class NeedsResize(UnsupportedError):
    """``out=`` tensors have other shapes than the results, and torch would resize them.

    ``sizes`` has (input index, shape of the result) for each of them.
    """

    def __init__(self, message: str, sizes: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        super().__init__(message)
        self.sizes = sizes


class TensorMeta(NamedTuple):
    """What a tensor is, but for where it lives."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    #: Of a view: elements between the first of the tensor it looks at and its own first.
    offset: int = 0


#: One entry for each return of the schema: a tensor, several for a list, or None.
Metas: TypeAlias = tuple["TensorMeta | tuple[TensorMeta, ...] | None", ...]
#: Gives the metas of a call, or None when it does not cover the case (the meta kernel then answers, or raises).
ShapeFunction: TypeAlias = Callable[[Call], "Metas | None"]

_functions: dict[str, ShapeFunction] = {}


def register_shape(names: Sequence[str], function: ShapeFunction) -> None:
    """Let ``function`` answer for ops by name: ``aten::mm`` for all overloads, ``aten::max.dim`` for one."""
    for name in names:
        assert name not in _functions, f"{name} has two shape functions"
        _functions[name] = function


def shape_function(call: Call) -> ShapeFunction | None:
    """Our own arithmetic for this op, if there is some. In-place variants use that of their namesake."""
    op = call.op
    found = _functions.get(op.name) or _functions.get(op.base)
    if found is None and op.is_inplace and op.base.endswith("_"):
        base = op.base[:-1]
        found = _functions.get(f"{base}.{op.func._overloadname}") or _functions.get(base)
    return found


def infer(call: Call) -> Metas:
    """What the call returns.

    Raises:
        RuntimeError, IndexError, TypeError, ValueError: as torch raises them for these shapes and dtypes.
        ShapeNeedsData: torch has no meta kernel, or the shape depends on data.
    """
    function = shape_function(call)
    if function is not None and not any(call.op.returned_parameter):
        metas = function(call)
        if metas is not None:
            return metas
    return run_on_meta(call)


def check_written(call: Call) -> None:
    """Refuse an in-place or ``out=`` call whose result does not fit the tensor that it writes to.

    Raises:
        RuntimeError: as torch raises it.
        NeedsResize: torch would resize the ``out=`` tensor.
    """
    function = shape_function(call)
    metas = function(_without_targets(call)) if function is not None else None
    targets = [call.inputs[i] for i in call.written]
    writes_aside = bool(call.op.returns) and not any(call.op.returned_parameter)
    if metas is not None and (writes_aside or _fits(metas, targets)):
        return
    before = [spec.shape for spec in targets]
    after = run_on_meta(call)
    results = [meta.shape for meta in after if isinstance(meta, TensorMeta)]
    if results and len(results) == len(before) and results != before:
        raise NeedsResize(
            f"{call.op} would resize its output from {list(before[0])} to {list(results[0])}; "
            f"pass a tensor of the right shape, or leave out= away",
            tuple(zip(call.written, results, strict=True)),
        )


def _without_targets(call: Call) -> Call:
    """The call without its ``out=`` tensors, of which the results of all but factories do not depend."""
    targets = [name for name in call.op.returned_parameter if name in call.kwargs]
    if not targets or len(targets) == len(call.inputs):
        return call
    return Call(
        call.op, call.args, {name: value for name, value in call.kwargs.items() if name not in targets}
    )


def _fits(metas: Metas, targets: list[Spec]) -> bool:
    flat: list[object] = []
    for meta in metas:
        flat.extend(meta) if _is_list(meta) else flat.append(meta)
    return len(flat) == len(targets) and all(
        isinstance(meta, TensorMeta)
        and meta.shape == spec.shape
        and (meta.dtype is spec.dtype or torch.can_cast(meta.dtype, spec.dtype))
        for meta, spec in zip(flat, targets, strict=True)
    )


def _is_list(meta: object) -> TypeGuard[tuple[TensorMeta, ...]]:
    return isinstance(meta, tuple) and not isinstance(meta, TensorMeta)


# ------------------------------------------------------------------------------------------------- meta kernels


def run_on_meta(call: Call) -> Metas:
    """Run the op on meta tensors of the global shapes. Raises as ``infer`` does."""
    args = tuple(_to_meta(value) for value in call.args)
    kwargs = {name: _to_meta(value) for name, value in call.kwargs.items()}
    if call.has("device") and (call.kwargs.get("device") is not None or not call.inputs):
        kwargs["device"] = torch.device("meta")
    if call.has("pin_memory"):
        kwargs.pop("pin_memory", None)
    for name in call.op.writes:
        if isinstance(call.kwargs.get(name), Spec):  # an empty `out=` is resized without a warning
            kwargs[name] = torch.empty((0,), dtype=call.kwargs[name].dtype, device="meta")
    try:
        with torch.no_grad():
            result = call.op.func(*args, **kwargs)
    except NotImplementedError as error:
        raise ShapeNeedsData(
            f"{call.op}: torch cannot tell the shape of the result without the data; write it with ops whose result "
            f"has a known shape, or fetch the tensors with .cpu() and compute there ({_first_line(error)})"
        ) from error
    if not call.op.returns:
        return ()
    check_strided(call.op.name, result)
    results = result if len(call.op.returns) > 1 else (result,)
    return tuple(_from_meta(item) for item in results)


def _to_meta(value: Any) -> Any:
    if type(value) is Spec:
        meta = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
        if not value.is_resolved:
            torch._C._set_conj(meta, value.is_conj)
            torch._C._set_neg(meta, value.is_neg)
        return meta
    if type(value) in (list, tuple):
        return [_to_meta(item) for item in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value


def _from_meta(value: Any) -> TensorMeta | tuple[TensorMeta, ...] | None:
    if isinstance(value, torch.Tensor):
        return TensorMeta(tuple(value.shape), tuple(value.stride()), value.dtype, int(value.storage_offset()))
    if isinstance(value, list | tuple):
        return tuple(
            TensorMeta(tuple(item.shape), tuple(item.stride()), item.dtype, int(item.storage_offset()))
            for item in value
        )
    return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# ------------------------------------------------------------------------------------------------- dtypes


def _category(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype is torch.bool else 1


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """Tensors with dims decide over 0-dim tensors, those over numbers (ATen/native/TypeProperties.cpp)."""
    if higher is None or lower is None:
        return higher or lower
    if _category(lower) > _category(higher):
        if lower.is_complex and higher.is_floating_point:
            return higher.to_complex()
        return torch.promote_types(higher, lower)
    return higher


def result_type(operands: Sequence[Spec | bool | int | float | complex | None]) -> torch.dtype:
    """The dtype that torch computes in, as ``torch.result_type`` of all operands."""
    with_dims: torch.dtype | None = None
    zero_dim: torch.dtype | None = None
    numbers: torch.dtype | None = None
    for operand in operands:
        if type(operand) is Spec:
            dtype = operand.dtype
            if operand.shape:
                with_dims = dtype if with_dims in (None, dtype) else torch.promote_types(with_dims, dtype)
            else:
                zero_dim = dtype if zero_dim in (None, dtype) else torch.promote_types(zero_dim, dtype)
        elif operand is not None:
            dtype = _number_dtype(operand)
            numbers = dtype if numbers in (None, dtype) else torch.promote_types(numbers, dtype)
    result = _combine(_combine(with_dims, zero_dim), numbers)
    assert result is not None, "no operands"
    return result


def _number_dtype(number: object) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, int):
        return torch.int64
    if isinstance(number, float):
        return torch.get_default_dtype()
    return torch.get_default_dtype().to_complex()


# ------------------------------------------------------------------------------------------------- strides


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Row-major without gaps; strides of dims of size 1 do not count, as in torch."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size == 0:
            return True
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Non-overlapping and dense: some order of the dims is row-major without gaps."""
    if is_contiguous(shape, stride):
        return True
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def may_share_elements(spec: Spec) -> bool:
    """Whether two elements may be one place in memory: some dim steps over less than what lies within it."""
    reach = 0
    for step, size in sorted(zip(spec.stride, spec.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return 0 not in spec.shape
            reach += step * (size - 1)
    return False


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The common shape, or None when there is none."""
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    result = [1] * max(map(len, shapes))
    for shape in shapes:
        for dim in range(-len(shape), 0):
            size = shape[dim]
            if size != 1:
                if result[dim] not in (1, size):
                    return None
                result[dim] = size
    return tuple(result)


def elementwise_stride(shape: tuple[int, ...], operands: Sequence[Spec]) -> tuple[int, ...]:
    """Strides of a pointwise result: the order of dims in memory that the operands agree on.

    The algorithm is that of ``TensorIterator::reorder_dimensions`` (ATen/TensorIterator.cpp).
    """
    contiguous = contiguous_stride(shape)
    first = operands[0]
    same = True
    for spec in operands:
        same = same and spec.shape == shape and spec.stride == first.stride
    if same and (first.stride == contiguous or is_dense(shape, first.stride)):
        return first.stride if not is_contiguous(shape, first.stride) else contiguous
    if all(spec.stride == contiguous_stride(spec.shape) for spec in operands):
        return contiguous
    ndim = len(shape)
    aligned = []
    for spec in operands:
        missing = ndim - len(spec.shape)
        steps = [0] * missing
        for dim, (size, step) in enumerate(zip(spec.shape, spec.stride, strict=True)):
            steps.append(0 if size == 1 and shape[missing + dim] != 1 else step)
        aligned.append(steps)
    order = _memory_order(shape, aligned)
    if order == list(range(ndim - 1, -1, -1)):
        return contiguous
    result = [0] * ndim
    step = 1
    for dim in order:
        result[dim] = step
        step *= shape[dim]
    return tuple(result)


def _memory_order(shape: tuple[int, ...], strides: list[list[int]]) -> list[int]:
    """Dims from the fastest to the slowest, by insertion sort on the first operand that decides."""

    def compare(a: int, b: int) -> int:
        for steps in strides:
            if steps[a] == 0 or steps[b] == 0:
                continue
            if steps[a] != steps[b]:
                return -1 if steps[a] < steps[b] else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    order = list(range(len(shape) - 1, -1, -1))
    for start in range(1, len(order)):
        moving = start
        for other in range(start - 1, -1, -1):
            decided = compare(order[other], order[moving])
            if decided > 0:
                order[other], order[moving] = order[moving], order[other]
                moving = other
            elif decided < 0:
                break
    return order


def preserved_stride(spec: Spec) -> tuple[int, ...]:
    """Strides of a copy with ``torch.preserve_format``: kept when dense, otherwise as a pointwise result."""
    if is_dense(spec.shape, spec.stride):
        return spec.stride
    return elementwise_stride(spec.shape, (spec,))


def wrap(dim: int, ndim: int) -> int | None:
    """A dim counted from the front, or None when it is out of range."""
    limit = max(ndim, 1)
    return dim % limit if -limit <= dim < limit else None


def contiguous_like(name: str) -> ShapeFunction:
    """One row-major result with the shape and dtype of an argument, for ops without a meta kernel."""

    def metas(call: Call) -> Metas:
        spec = call.spec(name)
        return (TensorMeta(spec.shape, contiguous_stride(spec.shape), spec.dtype),)

    return metas
