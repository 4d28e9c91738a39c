"""The state of a program as JSON and named tensors, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtorch.tensors import Tensor
from dtorch_runtime.errors import SettingError

_PLAIN = (bool, int, float, str, type(None))


def expanded(state: Any) -> Any:
    """``state`` with the state dict of everything that has one, models and optimizers, in its place."""
    if hasattr(state, "state_dict") and not isinstance(state, torch.Tensor):
        return expanded(state.state_dict())
    if isinstance(state, Mapping):
        return {key: expanded(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(expanded, state)) if type(state) in (list, tuple) else state
    return state


def packed(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """What ``state`` is, as JSON, and its tensors by name. Tensors that are the same value are named once.

    Raises:
        SettingError: something that is neither a tensor nor a number, string, bool, None, dict, list or tuple, or two
            tensors with one name.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[Any, str] = {}

    def pack(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            name = names.setdefault(identity(value), "/".join(path) or "tensor")
            if tensors.setdefault(name, value) is not value and identity(tensors[name]) != identity(value):
                raise SettingError(f"save(): two tensors would have the name {name!r}; rename a key")
            return {"tensor": name}
        if isinstance(value, dict):
            return {"dict": [[_key(key, path), pack(item, (*path, str(key)))] for key, item in value.items()]}
        if type(value) in (list, tuple):
            items = [pack(item, (*path, str(number))) for number, item in enumerate(value)]
            return {type(value).__name__: items}
        if type(value) in _PLAIN:
            return value
        raise SettingError(
            f"save(): {'/'.join(path) or 'the state'} is a {type(value).__name__}; a checkpoint holds tensors, "
            f"numbers, strings, bools, None, dicts, lists, tuples, and what has a state_dict()"
        )

    return pack(expanded(state), ()), tensors


def _key(key: Any, path: tuple[str, ...]) -> Any:
    if type(key) not in _PLAIN:
        raise SettingError(
            f"save(): a key of {'/'.join(path) or 'the state'} is a {type(key).__name__}; keys are numbers or strings"
        )
    return key


def identity(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are one value."""
    if isinstance(tensor, Tensor):
        return id(tensor._handle), tensor._spec
    return tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype


def unpacked(node: Any, tensor: Callable[[str, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    """The state; ``tensor(name, path)`` gives what stands for each tensor."""
    if not isinstance(node, dict):
        return node
    [(kind, content)] = node.items()
    if kind == "tensor":
        return tensor(content, path)
    if kind == "dict":
        return {key: unpacked(item, tensor, (*path, key)) for key, item in content}
    items = [unpacked(item, tensor, (*path, number)) for number, item in enumerate(content)]
    return tuple(items) if kind == "tuple" else items
