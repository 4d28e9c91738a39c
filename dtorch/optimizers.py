"""State of optimizers that comes from a state dict goes where the parameters are, cut as they are.

Torch moves it to the device of the parameter. That is one device here, and the mesh and the placements say where.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer

from dtorch.factory import from_torch
from dtorch.tensors import Tensor
from dtorch_runtime.ir.placement import Partial, Replicate


def place_loaded_state() -> None:
    """Let ``Optimizer.load_state_dict`` cut tensors that have the shape of their parameter as the parameter is cut."""
    given: Any = Optimizer._process_value_according_to_param_policy
    if hasattr(given, "places_state"):
        return

    @wraps(given)
    def placing(
        param: torch.Tensor, value: torch.Tensor, param_id: int, param_groups: Any, key: Any = None
    ) -> torch.Tensor:
        if isinstance(param, Tensor) and key != "step" and value.shape == param.shape:
            value = value.to(param.dtype) if param.is_floating_point() else value
            if not isinstance(value, Tensor) or value.device_mesh != param.device_mesh:
                placements = [Replicate() if isinstance(p, Partial) else p for p in param.placements]
                value = from_torch(value, param.device_mesh, placements)
        result: torch.Tensor = given(param, value, param_id, param_groups, key)
        return result

    placing.places_state = True  # type: ignore[attr-defined]  # a mark on a function
    # The only place where all pass.
    type.__setattr__(Optimizer, "_process_value_according_to_param_policy", staticmethod(placing))
