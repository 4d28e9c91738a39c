"""Ops on lists of tensors on several meshes, as optimizers of a model in stages call them: one op for each mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtorch.dispatch import special
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Replicate

_LISTS = (
    "aten::_foreach_",
    "aten::_fused_adam_",
    "aten::_fused_adamw_",
    "aten::_fused_sgd_",
    "aten::_fused_adagrad_",
)


def _overloads() -> list[Any]:
    """``_foreach_*``, all but norms, which go to one mesh (``norms``); and fused optimizers."""
    names = [
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(_LISTS) and not name.startswith("aten::_foreach_norm")
    ]
    return [
        getattr(getattr(torch.ops.aten, packet), overload or "default")
        for packet, _, overload in (name.partition(".") for name in names)
    ]


def by_mesh(tensors: Sequence[Any]) -> dict[DeviceMesh, list[int]]:
    """The places of the tensors of each mesh."""
    groups: dict[DeviceMesh, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor._spec.layout.mesh, []).append(index)
    return groups


@special(*_overloads())
def _one_op_a_mesh(
    cls: type[torch.Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int
) -> Any:
    # One overload of pow has a number in front of its tensors.
    first = next((value for value in args if isinstance(value, list | tuple)), ())
    if any(type(tensor) is not cls for tensor in first):
        return NotImplemented
    groups = by_mesh(first)
    if len(groups) < 2:
        return NotImplemented

    def of(mesh: DeviceMesh, indices: list[int], value: Any) -> Any:
        """The group's share of a list that has an item for each tensor; other arguments are for all."""
        if isinstance(value, list | tuple) and len(value) == len(first):
            return [value[index] for index in indices]
        if getattr(value, "_spec", None) is not None and value.ndim == 0:  # as the factor of clip_grad_norm_
            return value.redistribute(device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
        return value

    results: list[Any] = [None] * len(first)
    is_written = True
    for mesh, indices in groups.items():
        found = func(
            *(of(mesh, indices, value) for value in args),
            **{name: of(mesh, indices, value) for name, value in kwargs.items()},
        )
        if found is not None:
            is_written = False
            for index, result in zip(indices, found, strict=True):
                results[index] = result
    return None if is_written else results
