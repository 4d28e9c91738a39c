"""``_foreach_*`` of tensors on several meshes, as optimizers of a model in stages call it: one op for each mesh."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.dispatch import special
from dtorch_runtime.ir.mesh import DeviceMesh


def _overloads() -> list[Any]:
    """All but norms: those of several meshes become one number, ``dtorch.parallel.pipeline.clip_grad_norm_``."""
    names = [
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::_foreach_") and not name.startswith("aten::_foreach_norm")
    ]
    return [
        getattr(getattr(torch.ops.aten, packet), overload or "default")
        for packet, _, overload in (name.partition(".") for name in names)
    ]


@special(*_overloads())
def _one_op_a_mesh(
    cls: type[torch.Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int
) -> Any:
    # One overload of pow has a number in front of its tensors.
    first = next((value for value in args if isinstance(value, list | tuple)), ())
    if any(type(tensor) is not cls for tensor in first):
        return NotImplemented
    groups: dict[DeviceMesh, list[int]] = {}
    for index, tensor in enumerate(first):
        groups.setdefault(tensor._spec.layout.mesh, []).append(index)
    if len(groups) < 2:
        return NotImplemented

    def of(indices: list[int], value: Any) -> Any:
        """The group's share of a list that has an item for each tensor; other arguments are for all."""
        is_list = isinstance(value, list | tuple) and len(value) == len(first)
        return [value[index] for index in indices] if is_list else value

    results: list[Any] = [None] * len(first)
    is_written = True
    for indices in groups.values():
        found = func(
            *(of(indices, value) for value in args),
            **{name: of(indices, value) for name, value in kwargs.items()},
        )
        if found is not None:
            is_written = False
            for index, result in zip(indices, found, strict=True):
                results[index] = result
    return None if is_written else results
