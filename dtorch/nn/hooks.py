"""Hooks that bring what goes into a module, or comes out of it, to given placements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dtorch.nn.sharding import moved
from dtorch.parallel.cuts import Axis, axis_number
from dtorch.parallel.hooks import map_tensors
from dtorch.parallel.reduction import add_gradient_hook
from dtorch.tensors import Tensor
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.placement import Placement


def redistribute_input(module: nn.Module, placements: Mapping[Axis, Placement]) -> RemovableHandle:
    """Bring every tensor among the arguments of ``module`` to these placements before it runs. Differentiable.

    Args:
        placements: by axis, by name or number, e.g. ``{"tp": Shard(1)}``. Axes that are not named, or that a
            tensor's mesh does not have, are left as they are; plain tensors are too.

    Returns:
        A handle; its ``remove()`` ends it.

    Raises:
        PlacementError: these are no placements by axis.
    """
    wanted = _checked(placements, "redistribute_input")

    def bring(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _brought(args, wanted), _brought(kwargs, wanted)

    return module.register_forward_pre_hook(bring, with_kwargs=True)


def redistribute_output(module: nn.Module, placements: Mapping[Axis, Placement]) -> RemovableHandle:
    """Bring every tensor that ``module`` returns to these placements. See ``redistribute_input``."""
    wanted = _checked(placements, "redistribute_output")
    return module.register_forward_hook(lambda module, args, output: _brought(output, wanted))


def reduce_gradients(module: nn.Module) -> None:
    """Bring the gradients of all parameters of ``module`` that are on a mesh to the placements of the parameters.

    Modules of ``dtorch.nn`` and of ``dtorch.parallelize`` do it by themselves; those of ``torch.nn`` that were made on
    a mesh, or moved there by ``.to("dtorch")``, leave a gradient as the terms that each device has of it. Behind
    ``dtorch.parallel.zero`` nothing is left to do, and gradients stay in the pieces that it makes of them.
    """
    for parameter in module.parameters():
        if isinstance(parameter, Tensor):
            add_gradient_hook(cast(nn.Parameter, parameter))


def _checked(placements: Mapping[Axis, Placement], name: str) -> dict[Axis, Placement]:
    if not isinstance(placements, Mapping) or not all(isinstance(p, Placement) for p in placements.values()):
        raise PlacementError(
            f"{name}(module, placements) takes placements by axis, got {placements!r}; "
            f"write {{'tp': dtorch.Replicate()}}"
        )
    return dict(placements)


def _brought(tree: Any, placements: Mapping[Axis, Placement]) -> Any:
    def bring(tensor: torch.Tensor) -> torch.Tensor:
        for axis, placement in placements.items():
            if isinstance(tensor, Tensor) and axis_number(tensor.device_mesh, axis) is not None:
                tensor = moved(tensor, axis, placement)
        return tensor

    return map_tensors(bring, tree)
