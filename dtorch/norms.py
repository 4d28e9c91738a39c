"""Norms of cut tensors, many at once: what ``clip_grad_norm_`` asks of gradients, each cut in its own way."""

from __future__ import annotations

import math
from typing import Any

import torch

from dtorch.dispatch import special
from dtorch.foreach import by_mesh
from dtorch_runtime.ir.placement import Partial, Replicate

aten = torch.ops.aten
#: Orders whose norm of all pieces is a sum, or an extreme, of the norms of the pieces.
_REDUCED_AS_THEY_ARE = (0.0, 1.0, math.inf, -math.inf)


@special(aten._foreach_norm.Scalar)
def _foreach_norm(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """One number a tensor is communicated, for all tensors in one step: the sum of powers of each piece."""
    tensors = args[0]
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    layouts = [tensor._spec.layout for tensor in tensors if type(tensor) is cls]
    if len(layouts) < len(tensors):
        return NotImplemented
    if any(layout.mesh != layouts[0].mesh for layout in layouts):
        return _on_several_meshes(func, tensors, args[1:], kwargs)
    if all(layout.is_replicated for layout in layouts):
        return NotImplemented
    if any(isinstance(p, Partial) for layout in layouts for p in layout.placements):
        return NotImplemented  # to be refused
    terms: list[Any] = [_terms(tensor, order, dtype).reshape(1) for tensor in tensors]
    # On an axis where one is partial all are: that moves nothing.
    partial = [
        next((p for p in on_axis if isinstance(p, Partial)), Replicate())
        for on_axis in zip(*(term.placements for term in terms), strict=True)
    ]
    together: Any = torch.cat([term.redistribute(placements=partial) for term in terms])
    whole = together.redistribute(placements=[Replicate()] * layouts[0].mesh.ndim)
    norms = whole if order in _REDUCED_AS_THEY_ARE else whole.pow(1 / order)
    kinds = [dtype or torch.empty(0, dtype=tensor.dtype).abs().dtype for tensor in tensors]
    return [norm.to(kind) for norm, kind in zip(norms.unbind(), kinds, strict=True)]


def _on_several_meshes(func: Any, tensors: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The norms of each mesh's tensors, all brought to the mesh of the first: a norm of them all is made of these."""
    first = tensors[0].device_mesh
    norms: list[Any] = [None] * len(tensors)
    for mesh, indices in by_mesh(tensors).items():
        found = func([tensors[index] for index in indices], *rest, **kwargs)
        for kind in dict.fromkeys(norm.dtype for norm in found):
            own = [place for place, norm in enumerate(found) if norm.dtype == kind]
            together: Any = torch.stack([found[place] for place in own])
            if mesh != first:
                together = together.redistribute(device_mesh=first, placements=[Replicate()] * first.ndim)
            for place, norm in zip(own, together.unbind(), strict=True):
                norms[indices[place]] = norm
    return norms


def _terms(tensor: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """What the pieces of a tensor add to a norm: 0-dim, partial where it is cut."""
    precise = torch.promote_types(dtype or tensor.dtype, torch.float32)
    values = tensor.to(precise)
    if order in _REDUCED_AS_THEY_ARE:
        norm: torch.Tensor = torch.linalg.vector_norm(values, order)
        return norm
    values = values.abs() if values.is_complex() or order % 2 else values
    return (values * values if order == 2 else values.pow(order)).sum()
