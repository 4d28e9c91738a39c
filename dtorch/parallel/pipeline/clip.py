"""The norm of gradients that live on several meshes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dtorch.tensors import Tensor
from dtorch_runtime.errors import SettingError


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_``, which takes gradients on several meshes, for parameters of the cluster.

    Returns:
        The norm before clipping, on the first mesh; zero where there is no gradient.

    Raises:
        SettingError: gradients that are not on the cluster, or a norm that is none.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or max_norm < 0:
        raise SettingError(f"max_norm takes a number, 0 or more, got {max_norm!r}; write e.g. max_norm=1.0")
    given = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in given:
        if not isinstance(parameter.grad, Tensor):
            raise SettingError(
                f"the gradient of a parameter of shape {list(parameter.shape)} is not on the cluster; write "
                f"torch.nn.utils.clip_grad_norm_ for those"
            )
    return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)
