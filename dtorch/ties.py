"""Tied parameters stay tied when a module moves to the cluster or back.

``Module.to`` changes the data of a parameter where it can, so that modules that share one go on sharing it. Between the
CPU and this device it cannot, and makes a new parameter for each module: a model with tied embeddings would train two.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch.nn import Module

from dtorch.tensors import Tensor


def keep_ties() -> None:
    """Let ``Module._apply``, which ``to``, ``cpu``, ``half`` and others call, tie again what was tied before."""
    apply: Any = Module._apply
    if hasattr(apply, "keeps_ties"):
        return

    @wraps(apply)
    def tying(self: Module, fn: Any, recurse: bool = True) -> Module:
        before = _places(self)
        had = [isinstance(places[0][0][places[0][1]], Tensor) for places in before]
        result: Module = apply(self, fn, recurse)
        for places, was_ours in zip(before, had, strict=True):
            _tie(places, was_ours)
        return result

    tying.keeps_ties = True  # type: ignore[attr-defined]  # a mark on a function
    Module._apply = tying  # type: ignore[method-assign]  # the only place where all conversions pass


def _places(module: Module) -> list[list[tuple[dict[str, Any], str]]]:
    """Where each parameter stands that stands in more than one place of a tree of modules."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((part._parameters, name))
    return [places for places in found.values() if len(places) > 1]


def _tie(places: list[tuple[dict[str, Any], str]], was_ours: bool) -> None:
    """Let one parameter stand in all the places, where a move to or from this device has made several of it."""
    table, name = places[0]
    first = table[name]
    if was_ours or isinstance(first, Tensor):
        for other, key in places[1:]:
            other[key] = first
