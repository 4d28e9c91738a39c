"""``redistribute``: the only communication that a user writes. The identity on the global value."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch.autograd import forward_ad

from dtorch.issue import transfer
from dtorch.location import capture
from dtorch.spec import Spec
from dtorch_runtime.errors import MeshError, PlacementError
from dtorch_runtime.ir.layout import Layout, resolve_placements
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate

aten = torch.ops.aten


class _Redistribute(torch.autograd.Function):
    """Its gradient is the gradient of the identity: the same global value, held as the input is held."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, layout: Layout) -> Any:
        ctx.source, ctx.target = tensor._spec.layout, layout
        return _move(tensor, layout)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, _: None) -> Any:
        return _apply(tangent, ctx.target)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        source: Layout = ctx.source
        # The terms of a partial sum all have the gradient of the sum.
        placements = tuple(Replicate() if isinstance(p, Partial) else p for p in source.placements)
        return _apply(gradient, Layout(source.mesh, placements)), None


_apply: Any = _Redistribute.apply  # torch declares it without types


def redistribute(tensor: Any, device_mesh: DeviceMesh | None, placements: Sequence[Placement] | None) -> Any:
    """See ``Tensor.redistribute``."""
    spec = tensor._spec
    mesh = spec.layout.mesh if device_mesh is None else device_mesh
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"redistribute(device_mesh=) takes a DeviceMesh, got {mesh!r}; for placements write placements=[...]"
        )
    if placements is None:
        if mesh.ndim != spec.layout.mesh.ndim:
            raise PlacementError(
                f"redistribute() to {mesh!r} needs placements: the tensor has {len(spec.layout.placements)} "
                f"({spec.layout}) and the mesh {mesh.ndim} axes; write placements=[...], one for each axis"
            )
        placements = spec.layout.placements
    layout = Layout(mesh, resolve_placements(placements, mesh, len(spec.shape)))
    if layout == spec.layout:
        return aten.alias.default(tensor)
    _check_ops(layout, spec)
    if (tensor.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
        return _apply(tensor, layout)
    return _move(tensor, layout)


def _check_ops(layout: Layout, spec: Spec) -> None:
    """
    Raises:
        PlacementError: the terms cannot be of this dtype: integers have no exact average, complex numbers no order.
    """
    ops = {p.op for p in layout.placements if isinstance(p, Partial)}
    dtype = str(spec.dtype).removeprefix("torch.")
    if "avg" in ops and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        raise PlacementError(
            f"Partial('avg') does not hold a tensor of {dtype}, whose averages are not of that dtype; "
            f"write Partial('sum'), or x.to(torch.float32) first"
        )
    unordered = ops & {"max", "min"}
    if unordered and spec.dtype.is_complex:
        raise PlacementError(
            f"Partial('{min(unordered)}') does not hold a tensor of {dtype}, which has no order; "
            f"write Partial('sum') or Partial('prod')"
        )


def _move(tensor: Any, layout: Layout) -> Any:
    if layout == tensor._spec.layout:
        return tensor.detach()
    return transfer(
        tensor._symbol_class, tensor, layout, capture(sys._getframe(1), tensor._handle.graph.thread_id)
    )


def redistribute_by_dict(
    tensor: Any,
    placements: Mapping[str, Placement],
    device_mesh: DeviceMesh | None,
    default: Literal["keep", "replicate", "error"],
) -> Any:
    """See ``Tensor.redistribute_by_dict``."""
    if default not in ("keep", "replicate", "error"):
        raise PlacementError(
            f"redistribute_by_dict(default=) is 'keep', 'replicate' or 'error', got {default!r}; write default='keep'"
        )
    mesh = tensor.device_mesh if device_mesh is None else device_mesh
    if not isinstance(placements, Mapping):
        raise PlacementError(
            f"redistribute_by_dict takes a dict from axis names to placements, got {placements!r}; write e.g. "
            f"{{'tp': Shard(0)}}, or x.redistribute(placements=[...])"
        )
    by_axis = {mesh.axis(name): placement for name, placement in placements.items()}
    if len(by_axis) != len(placements):
        raise PlacementError(
            f"redistribute_by_dict takes one placement for each axis, got {dict(placements)!r}, which names an axis "
            f"twice; write each axis once"
        )
    resolved = [
        by_axis[axis] if axis in by_axis else _default_placement(tensor, mesh, axis, default)
        for axis in range(mesh.ndim)
    ]
    return redistribute(tensor, mesh, resolved)


def _default_placement(tensor: Any, mesh: DeviceMesh, axis: int, default: str) -> Placement:
    names = mesh.mesh_dim_names
    name = names[axis] if names is not None else None
    if default == "replicate":
        return Replicate()
    if default == "error":
        raise PlacementError(
            f"redistribute_by_dict(default='error') has no placement for axis {name!r} of {mesh!r}; "
            f"write a placement for every axis, or default='keep' or 'replicate'"
        )
    old: DeviceMesh = tensor.device_mesh
    if mesh == old:
        return tensor.placements[axis]  # type: ignore[no-any-return]  # of a Tensor
    if name is not None and old.has_axis(name):
        return tensor.placements[old.axis(name)]  # type: ignore[no-any-return]  # of a Tensor
    raise PlacementError(
        f"redistribute_by_dict(default='keep') cannot keep a placement for axis {name!r} of {mesh!r}: "
        f"the tensor's own mesh {old!r} has no axis of that name; write a placement for it, or default='replicate'"
    )
