"""Writes to memory that an op also reads, or that several elements share: refused as torch refuses them.

Which ops check is torch's choice (``assert_no_internal_overlap``, ``assert_no_partial_overlap`` in
ATen/MemoryOverlap.cpp): those that do not are listed here. Decided from shapes and strides of global tensors, before
anything is issued.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dtorch.graph import Handle
from dtorch.op_plan import NewOutput, OpPlan
from dtorch.rules.call import Call, op_of
from dtorch.shapes import is_dense
from dtorch.spec import Spec
from dtorch_runtime.errors import UnsupportedError


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for word in text.split() for name in (word, f"{word}_"))


#: These write to a tensor whose elements share memory: each gets the value that was written last.
_WRITES_SHARED = _names(
    "fill zero index_fill index_put masked_fill tril triu fill_diagonal threshold conj_physical addmv baddbmm bmm mv "
    "narrow_copy histc std var linalg_vector_norm avg_pool3d _index_put_impl"
)
#: These do not look whether what they read lies across what they write.
_READS_WRITTEN = _names(
    "addmm addmv addbmm baddbmm bmm mm mv linear masked_scatter alias_copy as_strided_copy diagonal_copy expand_copy "
    "permute_copy squeeze_copy t_copy transpose_copy unfold_copy unsqueeze_copy view_copy diag_embed avg_pool2d histc "
    "log_sigmoid_forward log_softmax softmax logsumexp mvlgamma slice_scatter std var tril triu linalg_vector_norm "
    "linalg_pinv linalg_householder_product linalg_ldl_solve linalg_lu_solve linalg_solve_triangular ormqr _fft_c2r "
    "_linalg_eigh _linalg_svd index_put _index_put_impl masked_fill"
)


def checks_overlap(func: Any) -> bool:
    """Whether an op refuses to write across what it reads. Ops on lists check each pair on the workers."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    op = op_of(func)
    is_single = all(p.tensors == "one" for p in op.tensor_parameters if p.writes)
    return bool(op.writes) and is_single and not op.is_inplace_view and op.base not in _READS_WRITTEN


def refuse_shared_elements(call: Call) -> None:
    """Refuse to write to a tensor several of whose elements are one place in memory, such as an expanded one.

    Raises:
        RuntimeError: as torch raises it.
    """
    if call.op.base in _WRITES_SHARED or call.op.is_inplace_view:
        return
    for index in call.written:
        spec = call.inputs[index]
        is_shared = any(size > 1 and step == 0 for size, step in zip(spec.shape, spec.stride, strict=True))
        if is_shared and 0 not in spec.shape:
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to a single memory "
                f"location. Please clone() the tensor before performing the operation. ({call.op.name} writes to a "
                f"tensor of shape {list(spec.shape)} with strides {list(spec.stride)})"
            )


def refuse_partial_overlap(name: object, written: Sequence[int], tensors: Sequence[Any]) -> None:
    """Refuse to write to a tensor that shares a part of its memory with one that is read.

    Raises:
        RuntimeError: as torch raises it.
    """
    for index in written:
        target = tensors[index]
        root = target._handle.root
        for other in tensors:
            if other is not target and other._handle.root is root and _is_partial(target, other):
                raise RuntimeError(
                    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a "
                    "single memory location. Please clone() the tensor before performing the operation. "
                    f"({name} writes to elements of a tensor that it reads)"
                )


def refuse_lost_gradient(source: Any) -> None:
    """Refuse ``as_strided(..., storage_offset)`` of a view that begins elsewhere, where autograd follows it.

    Autograd asks the view where it begins, to find its part of the gradient, and symbols do not know it in C++.

    Raises:
        UnsupportedError: the gradient would be that of other elements.
    """
    if source.requires_grad and torch.is_grad_enabled() and source._handle.offset_bytes:
        raise UnsupportedError(
            f"as_strided(storage_offset=) of a view that begins at element {source.storage_offset()} of its base has "
            f"no gradient here. Allowed are tensors that begin at element 0, and no offset. Write "
            f"base.as_strided(...) of the tensor that it is a view of, or index the view"
        )


def num_bytes_of(spec: Spec) -> int:
    """The memory from the first element of a tensor to its last one."""
    if 0 in spec.shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    return (last + 1) * spec.dtype.itemsize


def memory_bytes(source: Any) -> int | None:
    """The size of the memory that a tensor is in; None where nobody here knows it."""
    handle: Handle = source._handle
    root = handle.root
    known: int | None = getattr(root, "num_bytes", None)
    if known is None:
        plan = getattr(root.origin, "plan", None)
        outputs = plan.outputs if plan is not None else ()
        made = [output for output in outputs if isinstance(output, NewOutput)]
        if len(made) == 1:
            known = num_bytes_of(made[0].spec)
    own = handle.offset_bytes + num_bytes_of(source._spec)  # more than the root was made with after resize_()
    if known is None:
        return own if handle is handle.root else None
    return max(known, own)


def refuse_outside(source: Any, plan: OpPlan) -> None:
    """Refuse ``as_strided`` beyond the memory of its input.

    Raises:
        RuntimeError: as torch raises it.
    """
    (output,) = plan.outputs
    if not isinstance(output, NewOutput) or output.window is None:
        return
    spec, window, there = output.spec, output.window, memory_bytes(source)
    itemsize = spec.dtype.itemsize
    start = window.offset * itemsize + (0 if window.is_absolute else source._handle.offset_bytes)
    needed = start + num_bytes_of(spec)
    if there is not None and needed > there and 0 not in spec.shape:
        raise RuntimeError(
            f"setStorage: sizes {list(spec.shape)}, strides {list(spec.stride)}, storage offset {start // itemsize}, "
            f"and itemsize {itemsize} requiring a storage size of {needed} are out of bounds for storage of size "
            f"{there}: as_strided() counts in the memory of the tensor, which has {there // itemsize} elements; write "
            f"sizes and strides that end within them"
        )


def _is_partial(target: Any, other: Any) -> bool:
    """Whether two dense tensors of one memory overlap without being the same; where they have gaps nobody knows."""
    a: Spec = target._spec
    b: Spec = other._spec
    num_a: int = math.prod(a.shape)
    num_b: int = math.prod(b.shape)
    if not num_a or not num_b or not is_dense(a.shape, a.stride) or not is_dense(b.shape, b.stride):
        return False
    a_start, b_start = target._handle.offset_bytes, other._handle.offset_bytes
    a_stop, b_stop = a_start + num_a * a.dtype.itemsize, b_start + num_b * b.dtype.itemsize
    if (a_start, a_stop) == (b_start, b_stop):
        return a.stride != b.stride
    return bool(a_start < b_stop and b_start < a_stop)
