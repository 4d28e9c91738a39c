"""``Spec``: everything about a tensor but its identity. Interned, so that equal specs are one object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from dtorch_runtime.ir.layout import Layout

_Key: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, Layout, bool, bool]
_interned: dict[_Key, Spec] = {}

#: Sizes are counted in 64 bits with a sign.
_LIMIT = 2**63


class Spec:
    """Global shape, global strides (in elements), dtype and layout of a tensor; and torch's two bits of lazy views.

    ``is_conj`` and ``is_neg`` are those of the symbol and of every piece alike: the elements are the conjugates, or the
    negatives, of what is in memory. Views keep them, what ops make has neither.

    Make one with ``intern_spec``: equal specs are the same object, so a cache may hash them by identity.
    """

    __slots__ = ("dtype", "is_conj", "is_neg", "is_resolved", "layout", "shape", "stride")

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        layout: Layout,
        is_conj: bool = False,
        is_neg: bool = False,
    ) -> None:
        self.shape = shape
        self.stride = stride
        self.dtype = dtype
        self.layout = layout
        self.is_conj = is_conj
        self.is_neg = is_neg
        #: Whether the elements are what is in memory: neither bit is set.
        self.is_resolved = not (is_conj or is_neg)

    @property
    def num_bytes(self) -> int:
        """Size of the global tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)} {self.layout} on mesh {self.layout.mesh.shape}"


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements, as torch gives them (a dim of size 0 counts as 1)."""
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return tuple(stride)


def intern_spec(
    shape: Sequence[int],
    dtype: torch.dtype,
    layout: Layout,
    stride: Sequence[int] | None = None,
    is_conj: bool = False,
    is_neg: bool = False,
) -> Spec:
    """The one spec with these fields; row-major strides when none are given.

    Raises:
        RuntimeError: more elements or bytes than 64 bits can count, as torch raises it.
    """
    shape = tuple(shape)
    strides = contiguous_stride(shape) if stride is None else tuple(stride)
    key = (shape, strides, dtype, layout, is_conj, is_neg)
    found = _interned.get(key)
    if found is None:
        _check_size(shape, strides, dtype)
        found = _interned.setdefault(key, Spec(*key))
    return found


def _check_size(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> None:
    stored = (size for size, step in zip(shape, strides, strict=True) if step)
    if math.prod(shape) >= _LIMIT or math.prod(stored) * dtype.itemsize >= _LIMIT:
        raise RuntimeError(
            f"Storage size calculation overflowed with sizes={list(shape)}: a tensor has less than 2**63 elements and "
            f"bytes; write smaller sizes"
        )
