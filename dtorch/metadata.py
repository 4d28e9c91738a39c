"""Calls that change what a tensor is, in place: ``t_``, ``squeeze_``, ``as_strided_``, ``resize_``, ``set_``.

The symbol comes to stand for another value, a view of the memory that it had: values on workers never change their
shape, so other symbols of the same value are not touched.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.auto_issue import with_bits
from dtorch.dispatch import special
from dtorch.graph import Handle
from dtorch.resize import adopt, resize
from dtorch.spec import Spec
from dtorch_runtime.errors import MixedTensorError, UnsupportedError

aten = torch.ops.aten


_VIEWS = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.as_strided_.default: aten.as_strided.default,
}


@special(*_VIEWS)
def _view_in_place(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    target = args[0]
    if target._is_view() and target.requires_grad:
        # Autograd follows a view by doing it again on the base, and knows of this change only where it may use strides.
        name = func._schema.name.removeprefix("aten::")
        raise UnsupportedError(
            f"{name}() would change the shape of a view that autograd follows, and its gradient would be lost. Allowed "
            f"is a tensor that is no view, or one that needs no gradient. Write x = x.{name.rstrip('_')}(...)"
        )
    return adopt(target, _VIEWS[func](*args, **kwargs))


@special(aten.resize_.default)
def _resize(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    target, size = args
    memory_format = kwargs.get("memory_format")
    return resize(target, [int(n) for n in size], memory_format, location)


@special(aten.resize_as_.default)
def _resize_as(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    target, template = args
    memory_format = kwargs.get("memory_format")
    if memory_format is torch.preserve_format:
        resize(target, list(template.shape), None, location)
        if target.stride() == template.stride():
            return target
        return adopt(target, aten.as_strided.default(target, template.shape, template.stride()))
    return resize(target, list(template.shape), memory_format, location)


# ---- set_ ----


@special(aten.set_.source_Tensor)
def _set(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    target, source = args
    if not isinstance(target, cls) or not isinstance(source, cls):
        raise MixedTensorError(
            f"x.set_(t) takes another dtorch tensor, got one on {source.device}; write x.set_(t.to('dtorch'))"
        )
    if target.dtype is not source.dtype:
        raise RuntimeError(
            f"Could not set tensor of type {source.dtype} to a tensor of type {target.dtype}; "
            f"write x.set_(y.to(x.dtype))"
        )
    return adopt(target, _as_it_is_seen(target, aten.detach.default(source)))


@special(aten.set_.default)
def _set_to_nothing(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    (target,) = args
    return adopt(target, _as_it_is_seen(target, aten.new_empty.default(target, [0])))


def _as_it_is_seen(target: Any, source: Any) -> Any:
    """``set_`` takes memory: a target that is a lazy conjugate, or negative, sees the new one so too."""
    spec: Spec = target._spec
    return with_bits(source, spec.is_conj, spec.is_neg)


@special(aten.set_.source_Storage, aten.set_.source_Storage_storage_offset)
def _set_to_storage(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    raise UnsupportedError(
        "x.set_(storage) has no memory to take: the storage of a dtorch tensor is on the workers. Allowed is a tensor; "
        "write x.set_(y), or x.set_(y.as_strided(size, stride, offset)) for a part of its memory; to read a storage, "
        "x.cpu().untyped_storage()"
    )


@special(aten.is_set_to.default)
def _is_set_to(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    first, second = args
    if type(first) is not type(second):
        return False
    a: Handle = first._handle
    b: Handle = second._handle
    same = (a.root, a.offset_bytes, first.shape, first.stride())
    return same == (b.root, b.offset_bytes, second.shape, second.stride())
