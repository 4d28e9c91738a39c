"""Where torch looks for gradients that are not finite: in a ``GradScaler``, and while it detects anomalies."""

from __future__ import annotations

import math
from typing import Any

import torch

from dtorch.dispatch import special
from dtorch.graph import is_default_mesh
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Replicate

aten = torch.ops.aten


@special(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """Each device has pieces of the gradients, so each would find something else: a norm of all tells all of them."""
    gradients, found, inverse_scale = args
    if any(type(tensor) is not cls for tensor in (*gradients, found, inverse_scale)):
        return NotImplemented
    by_mesh: dict[DeviceMesh, list[Any]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh, []).append(gradient)
    for mesh, members in by_mesh.items():
        largest = torch.stack(torch._foreach_norm(members, math.inf)).amax()
        is_bad: Any = largest.isfinite().logical_not().to(found.dtype)
        found.copy_(torch.maximum(found, is_bad.redistribute_like(found)))
        scale = inverse_scale
        if scale.device_mesh != mesh and not is_default_mesh(scale.device_mesh):
            scale = scale.redistribute(device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
        torch._foreach_mul_(members, scale)
    return None


@special(aten.isnan.default)
def _isnan(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """What a backward pass asks of each of its gradients while anomalies are detected. A partial one is reduced."""
    [tensor] = args
    is_asked_by_torch = torch.is_anomaly_enabled() and torch._C._current_graph_task_id() != -1
    if not is_asked_by_torch or type(tensor) is not cls or not tensor._spec.layout.is_partial:
        return NotImplemented
    whole = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
    return aten.isnan.default(tensor.redistribute(placements=whole))
