"""What modules of ``dtorch.nn`` have in common: parameters that say how they are cut, and moves along one axis."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from dtorch.cluster import session_if_open
from dtorch.factory import empty
from dtorch.graph import Graph
from dtorch.parallel.cuts import Axis, ShardedParameters, axis_number
from dtorch.parallel.reduction import add_gradient_hook
from dtorch.tensors import Tensor
from dtorch_runtime.errors import MeshError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate


class PlacedModule(ShardedParameters):
    """What makes its parameters on a mesh, cut as they are to be."""

    def _place(self, mesh: DeviceMesh | None, dtype: torch.dtype | None) -> None:
        """Make the parameters, which are on "meta", anew on the mesh; their values are not set."""
        module = cast(nn.Module, self)
        target = Graph.default_graph().default_mesh if mesh is None else mesh
        for name, placements in self.placements_on(target).items():
            old = module.get_parameter(name)
            made = empty(*old.shape, dtype=dtype or old.dtype, device_mesh=target, placements=placements)
            parameter = nn.Parameter(made)
            module.register_parameter(name, parameter)
            add_gradient_hook(parameter)


def made_on_mesh(device: Any, mesh: DeviceMesh | None) -> bool:
    """Whether a module is to make its parameters on a mesh: it was given one, or its device is "dtorch".

    Without a device, that is torch's default device, and a ``device_mesh_guard`` counts as one.

    Raises:
        MeshError: ``mesh`` is no mesh, or comes with another device.
    """
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh):
            raise MeshError(
                f"device_mesh takes a DeviceMesh, got {mesh!r}; write e.g. dtorch.DeviceMesh('cpu', [0])"
            )
        if device is not None and torch.device(device).type != "dtorch":
            raise MeshError(f"device_mesh= and device={device!r} contradict each other; leave out device=")
        return True
    if device is not None:
        return torch.device(device).type == "dtorch"
    default = torch.get_default_device().type
    if default != "cpu":
        return default == "dtorch"
    session = session_if_open()
    return session is not None and session.default_graph().is_guarded


def on_axis(tensor: torch.Tensor, axis: Axis) -> Placement | None:
    """The placement of a tensor on an axis; None for a plain tensor, and where its mesh has no such axis."""
    if not isinstance(tensor, Tensor):
        return None
    number = axis_number(tensor.device_mesh, axis)
    return None if number is None else tensor.placements[number]


def moved(tensor: torch.Tensor, axis: Axis, placement: Placement) -> torch.Tensor:
    """The tensor with another placement on an axis. Differentiable. As it is where its mesh has no such axis.

    Raises:
        PlacementError: the placement does not fit the tensor.
    """
    now = on_axis(tensor, axis)
    if now is None or now == placement:
        return tensor
    placed = cast(Tensor, tensor)
    number = axis_number(placed.device_mesh, axis)
    placements = [placement if index == number else p for index, p in enumerate(placed.placements)]
    return placed.redistribute(placements=placements)


def reduced(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its partial terms reduced, on every axis."""
    if not isinstance(tensor, Tensor) or not any(isinstance(p, Partial) for p in tensor.placements):
        return tensor
    return tensor.redistribute(
        placements=[Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
    )
