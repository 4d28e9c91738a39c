"""What kernels check and meta kernels do not: told at the user's line, as torch tells it, before anything is issued."""

from __future__ import annotations

import torch

from dtorch.rules.call import Call
from dtorch.shapes import wrap
from dtorch.spec import Spec

#: Products: all their tensors have one dtype.
_PRODUCTS = frozenset(
    f"aten::{name}"
    for name in ("mm", "bmm", "mv", "dot", "vdot", "matmul", "linear", "addmm", "addmv", "addbmm", "baddbmm")
)
_BITWISE = ("aten::bitwise_and", "aten::bitwise_or", "aten::bitwise_xor", "aten::bitwise_not")
_SHIFTS = ("aten::bitwise_left_shift", "aten::bitwise_right_shift", "aten::__lshift__", "aten::__rshift__")
_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.int64: "long",
    torch.int32: "int",
}


def check_arguments(call: Call) -> None:
    """Refuse a dim out of range, factors of several dtypes, bits of floats, and indices that are no integers.

    Raises:
        IndexError, RuntimeError, NotImplementedError: as torch raises them.
    """
    base = call.op.base.removesuffix("_")
    if call.has("dim"):
        _check_dim(call)
    if base in _PRODUCTS:
        _check_one_dtype(call)
    elif call.op.base.startswith((*_BITWISE, *_SHIFTS)):
        _check_bits(call)
    elif base == "aten::embedding":
        _check_indices(call)
    elif call.op.name in ("aten::view_as_real.default", "aten::view.dtype"):
        _check_lazy(call)


def _check_dim(call: Call) -> None:
    dim, ndim = call.get("dim"), len(call.inputs[0].shape)
    if type(dim) is int and "softmax" in call.op.base and wrap(dim, ndim) is None:
        limit = max(ndim, 1)
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], but got {dim})"
        )


def _check_one_dtype(call: Call) -> None:
    first = call.inputs[0].dtype
    other = next((spec.dtype for spec in call.inputs if spec.dtype is not first), None)
    if other is not None and (call.op.is_inplace or not call.op.writes):
        given, found = (_NAMES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in (first, other))
        raise RuntimeError(
            f"expected m1 and m2 to have the same dtype, but got: {given} != {found}. {call.op.name} takes tensors of "
            f"one dtype; write y.to(x.dtype)"
        )


def _check_bits(call: Call) -> None:
    spec = next((s for s in call.inputs if s.dtype.is_floating_point or s.dtype.is_complex), None)
    if spec is not None:
        name = call.op.base.removeprefix("aten::").removesuffix("_")
        raise NotImplementedError(
            f'"{name}_cpu" not implemented for {str(spec.dtype).removeprefix("torch.")!r}: only integers and bools '
            f"have bits; write x.to(torch.int64)"
        )


def _check_lazy(call: Call) -> None:
    spec = call.inputs[0]
    if call.op.name == "aten::view_as_real.default":
        if spec.is_conj:
            raise RuntimeError(
                "view_as_real doesn't work on unresolved conjugated tensors.  To resolve the conjugate tensor so you "
                "can view it as real, use self.resolve_conj(); however, be warned that the resulting tensor will NOT "
                "alias the original."
            )
    elif not spec.is_resolved:
        kind, name = (
            ("conjugate view tensors", "conj") if spec.is_conj else ("tensors with negative bit set", "neg")
        )
        raise RuntimeError(
            f"torch.Tensor.view is not supported for {kind} when converting to a different dtype. "
            f"Write x.resolve_{name}().view(dtype), which does not alias x"
        )


def _check_indices(call: Call) -> None:
    indices: Spec = call.spec("indices")
    if indices.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but got "
            f"{indices.dtype} instead; write indices.long()"
        )
