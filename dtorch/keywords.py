"""Keyword arguments that PyTorch's functions take and DTorch's of the same name do not: what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_WRITE = {
    "device": "device_mesh= for where the tensor lives, e.g. dtorch.DeviceMesh('cpu', [0, 1]); PyTorch's own function "
    "takes device='dtorch'",
    "mesh": "device_mesh=",
    "placement": "placements=[...], one for each mesh axis",
    "out": "y.copy_(x) for a tensor that exists",
    "layout": "nothing for it: tensors are strided",
    "pin_memory": "nothing for it: the memory is the workers'",
    "generator": "dtorch.manual_seed(n) before it; PyTorch's own function takes generator= with device='dtorch'",
    "memory_format": "x.contiguous(memory_format=...) on the result",
    "num_gpus": "devices_per_node=",
    "num_devices": "devices_per_node=",
    "world_size": "num_nodes= and devices_per_node=",
    "map_location": "device_mesh= for where the tensors live",
    "weights_only": "nothing for it: the files hold tensors, and nothing that runs",
    "async_op": "nothing for it: every op is asynchronous, and only a value is waited for",
}


def teaches_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function tell of an unknown keyword argument what to write instead.

    Raises:
        TypeError: as Python raises it, by the function.
    """
    code = function.__code__
    known = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - {"self"}

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in known:
                raise TypeError(_message(function.__name__, name, sorted(known)))
        return function(*args, **kwargs)

    return call


def _message(function: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if function.endswith("_by_dict") and not near:
        return f"{function}() takes a dict, got the keyword argument {name!r}; write {function}({{{name!r}: ...}})"
    write = _WRITE.get(name) or (f"{near[0]}=" if near else f"one of {', '.join(known)}")
    return f"{function}() got an unexpected keyword argument {name!r}; write {write}"
