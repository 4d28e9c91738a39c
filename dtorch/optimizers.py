"""State of optimizers goes where the parameters are: what comes from a state dict cut as they are, and counts of steps.

Torch moves state to the device of the parameter. That is one device here, and the mesh and the placements say where. A
hyperparameter that is a tensor, such as a learning rate, torch leaves where the state dict has it; here it goes where
that of the optimizer was.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from dtorch.factory import from_torch
from dtorch.tensors import Tensor
from dtorch_runtime.errors import StateDictError
from dtorch_runtime.ir.placement import Partial, Replicate

#: State of the optimizers of ``torch.optim`` that has the shape of its parameter.
_LIKE_PARAMETERS: Final = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta"),
        *("grad_avg", "sum", "ax", "prev", "step_size"),
    )
)


def fits_parameter(key: object, shape: Sequence[int], parameter: Sequence[int]) -> bool:
    """Whether state with this key can be of a parameter of this shape. Global shapes."""
    return key not in _LIKE_PARAMETERS or tuple(shape) == tuple(parameter)


def place_loaded_state() -> None:
    """Let ``Optimizer.load_state_dict`` cut tensors that have the shape of their parameter as the parameter is cut.

    State of another shape is refused with ``StateDictError``; torch sets what it has loaded at the end, all at once.
    """
    given: Any = Optimizer._process_value_according_to_param_policy
    if hasattr(given, "places_state"):
        return

    @wraps(given)
    def placing(
        param: torch.Tensor, value: torch.Tensor, param_id: int, param_groups: Any, key: Any = None
    ) -> torch.Tensor:
        if isinstance(param, Tensor) and not fits_parameter(key, value.shape, param.shape):
            problem = (
                f"{key} of parameter {param_id} has shape {list(value.shape)}, and that {list(param.shape)}"
            )
            raise StateDictError("an optimizer", (problem,))
        if isinstance(param, Tensor) and key != "step" and value.shape == param.shape:
            value = value.to(param.dtype) if param.is_floating_point() else value
            if not isinstance(value, Tensor) or value.device_mesh != param.device_mesh:
                placements = [Replicate() if isinstance(p, Partial) else p for p in param.placements]
                value = from_torch(value, param.device_mesh, placements)
        result: torch.Tensor = given(param, value, param_id, param_groups, key)
        return result

    placing.places_state = True  # type: ignore[attr-defined]  # a mark on a function
    load: Any = Optimizer.load_state_dict

    @wraps(load)
    def load_state_dict(self: Optimizer, state_dict: Any) -> None:
        before = [dict(group) for group in self.param_groups]
        load(self, state_dict)
        _settled.pop(self, None)
        for group, old in zip(self.param_groups, before, strict=True):
            for name, value in group.items():
                group[name] = _placed_like(value, old.get(name))

    # The only places where all pass.
    type.__setattr__(Optimizer, "_process_value_according_to_param_policy", staticmethod(placing))
    type.__setattr__(Optimizer, "load_state_dict", load_state_dict)


#: Optimizers whose numbers are where their parameters are, and of how many parameters they had state then.
_settled: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def settle_numbers() -> None:
    """Let numbers that an optimizer makes for a parameter, as its count of steps, be on the parameter's mesh.

    Torch makes them on the device of the parameter, which says no mesh; elsewhere they would be moved at every step.
    """
    if _settle not in _global_optimizer_post_hooks.values():
        register_optimizer_step_post_hook(_settle)


def _settle(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _settled.get(optimizer) == len(optimizer.state):
        return
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, dict):
            continue
        mesh = parameter.device_mesh
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim == 0 and value.device_mesh != mesh:
                state[name] = value.redistribute(device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
    _settled[optimizer] = len(optimizer.state)


def _placed_like(value: Any, old: Any) -> Any:
    """A hyperparameter where another is that it replaces."""
    if not isinstance(old, Tensor) or not isinstance(value, torch.Tensor) or value.shape != old.shape:
        return value
    if isinstance(value, Tensor) and value.device_mesh == old.device_mesh:
        return value
    return from_torch(value.to(old.dtype), old.device_mesh, old.placements)
