"""``Module.load_state_dict`` into tensors of the cluster: all of a state dict, or nothing.

Torch copies one tensor after the other and says at the end what did not fit, so the model is neither the old nor
the new one then. Here what torch would say is found before anything is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import nn

from dtorch.tensors import Tensor
from dtorch_runtime.errors import StateDictError

#: Modules of torch that read what older versions wrote; the names that they fill in themselves.
_FILLED = "num_batches_tracked"
_EXPLAINED: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._NormBase,)


def load_all_or_nothing() -> None:
    """Let ``Module.load_state_dict`` refuse a state dict that does not fit before it copies anything.

    Modules without a tensor of the cluster are left to torch.
    """
    given: Any = nn.Module.load_state_dict
    if hasattr(given, "loads_all_or_nothing"):
        return

    @wraps(given)
    def load_state_dict(
        self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        if isinstance(state_dict, Mapping) and any(
            isinstance(tensor, Tensor) for tensor in chain(self.parameters(), self.buffers())
        ):
            _check(self, state_dict, strict)
        return given(self, state_dict, strict, assign)

    load_state_dict.loads_all_or_nothing = True  # type: ignore[attr-defined]  # a mark on a function
    type.__setattr__(nn.Module, "load_state_dict", load_state_dict)


def _check(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """
    Raises:
        StateDictError: something does not fit.
    """
    if any(_rewrites(each) for each in module.modules()):
        return  # what it makes of the state dict only its own code knows
    wanted = module.state_dict(keep_vars=True)
    problems = [*_keys(wanted, state)] if strict else []
    for name, tensor in wanted.items():
        if name in state and isinstance(tensor, torch.Tensor):
            problems += _values(name, tensor, state[name])
    if problems:
        raise StateDictError(type(module).__name__, tuple(problems))


def _rewrites(module: nn.Module) -> bool:
    own = type(module)._load_from_state_dict
    is_known = own is nn.Module._load_from_state_dict or isinstance(module, _EXPLAINED)
    return bool(module._load_state_dict_pre_hooks) or not is_known


def _keys(wanted: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[str]:
    missing = [name for name in wanted if name not in state and name.rpartition(".")[2] != _FILLED]
    unexpected = [name for name in state if name not in wanted]
    for what, names in (("Missing", missing), ("Unexpected", unexpected)):
        if names:
            shown = ", ".join(f'"{name}"' for name in names[:5])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            yield f"{what} key(s) in state_dict: {shown}{more}"


def _values(name: str, tensor: torch.Tensor, value: Any) -> Iterator[str]:
    if not isinstance(value, torch.Tensor):
        yield f"{name} is a {type(value).__name__}, and a tensor is wanted"
    elif value.shape != tensor.shape and not (tensor.ndim == 0 and value.shape == (1,)):
        yield (
            f"size mismatch for {name}: shape {list(value.shape)} in the state dict, {list(tensor.shape)} in the model"
        )
    elif not torch.can_cast(value.dtype, tensor.dtype):
        yield f"dtype mismatch for {name}: {value.dtype} in the state dict, {tensor.dtype} in the model"
    elif value.is_meta:
        yield f"{name} is on 'meta', and has no values"
