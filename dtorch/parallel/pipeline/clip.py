"""The norm of gradients that live on several meshes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dtorch.parallel.pipeline.batches import to_mesh
from dtorch.tensors import Tensor
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.mesh import DeviceMesh


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for parameters of stages: one norm for the gradients on all meshes.

    One number a mesh is communicated. Parameters without a gradient are left out.

    Returns:
        The norm before clipping, on the first mesh; zero where there is no gradient.

    Raises:
        SettingError: gradients that are not on the cluster, or a norm that is none.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or max_norm < 0:
        raise SettingError(f"max_norm takes a number, 0 or more, got {max_norm!r}; write e.g. max_norm=1.0")
    groups: dict[DeviceMesh, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if not isinstance(parameter.grad, Tensor):
            raise SettingError(
                f"the gradient of a parameter of shape {list(parameter.shape)} is on {parameter.grad.device}; write "
                f"torch.nn.utils.clip_grad_norm_ for parameters that are not on the cluster"
            )
        groups.setdefault(parameter.grad.device_mesh, []).append(parameter)
    if not groups:
        return torch.tensor(0.0)
    first = next(iter(groups))
    norms: list[Any] = []
    for members in groups.values():
        norm: Any = torch.nn.utils.get_total_norm([member.grad for member in members], norm_type)
        norms.append(to_mesh(norm, first))
    total: Any = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for mesh, members in groups.items():
        torch.nn.utils.clip_grads_with_norm_(members, max_norm, to_mesh(total, mesh))
    return total  # type: ignore[no-any-return]  # a Tensor
