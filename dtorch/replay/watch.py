"""The Python state that a function can reach: what it was, and whether it is that still.

A replay runs no Python, so it is right only while everything that the function would look at is as it was when it
ran. What it can look at is followed from the function: its closure, its defaults, the globals that its code names, the
object that it is a method of; and from there through containers, modules, attributes of objects, and methods of the
user's own classes. Code of libraries is taken as constant. DTorch's tensors are found on the way, they become inputs
of the replay; of plain tensors the version is remembered.

Whether anything has changed is asked before each replay, so it compares identities only, in loops that run in C. When
an identity is another, the place is looked for, and numbers and strings may still be equal.
"""

from __future__ import annotations

import enum
import functools
import os
import site
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch

from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Replicate, Shard

#: Values without parts, which are the same when they are equal.
PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), type(Ellipsis), enum.Enum, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(DeviceMesh, Replicate, Shard, Partial),
)
_SEQUENCES = (list, tuple, set, frozenset, deque)
#: Containers that can be watched.
_MAX_CONTAINERS = 100_000
_NOTHING = object()
_ITEM = "{}[{}]"
_ATTRIBUTE = "{}.{}"

Part = tuple[str, Any]


class TooMuch(Exception):
    """There is more state than can be watched."""


class Watch:
    """State at one moment.

    Attributes:
        tensors: DTorch's tensors that can be reached, with how.
    """

    def __init__(self, function: Callable[..., Any], roots: Iterable[Part] = ()) -> None:
        """Look at what ``function`` can reach, and at other roots, each with a name.

        Raises:
            TooMuch: that is more than can be watched.
        """
        self.tensors: list[tuple[str, Any]] = []
        #: Everything that was looked at, by identity; kept, so that no other object gets the same.
        self._seen: dict[int, Any] = {}
        #: What to iterate over again, how each is called and what it is of, and all that they gave.
        self._iterables: list[Any] = []
        self._names: list[tuple[str, Any]] = []
        self._sizes: list[int] = []
        self._flat: list[Any] = []
        #: How the items of each dict are called; ``vars(x)`` has attributes.
        self._forms: dict[int, str] = {}
        self._empty: list[Any] = []
        self._empty_names: list[str] = []
        #: Single places: how to look, and what was there.
        self._getters: list[Callable[[], Any]] = []
        self._getter_names: list[str] = []
        self._got: list[Any] = []
        self._plain_tensors: list[tuple[str, torch.Tensor]] = []
        self._versions: list[int] = []
        todo: list[Part] = [(function_name(function), function), *roots]
        while todo:
            name, value = todo.pop()
            if isinstance(value, PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            todo.extend(self._parts(name, value))
            if len(self._iterables) > _MAX_CONTAINERS:
                raise TooMuch(
                    f"reaches more than {_MAX_CONTAINERS} containers of Python objects, the last is {name}"
                )

    # ---- looking again ----

    def is_same(self) -> bool:
        """Whether everything is what it was."""
        return self._is_identical() or self.change() is None

    def _is_identical(self) -> bool:
        iterables = self._iterables
        return (
            not any(self._empty)
            and all(map(is_, [look() for look in self._getters], self._got))
            and sum(map(len, iterables)) == len(self._flat)
            and all(map(is_, chain.from_iterable(iterables), self._flat))
            and [tensor._version for _, tensor in self._plain_tensors] == self._versions
        )

    def change(self) -> str | None:
        """The first place where something else is than was, or None. Equal numbers and strings are no change."""
        for name, value in zip(self._empty_names, self._empty, strict=True):
            if value:
                return f"{name} was empty and has {len(value)} items, the first {_show(next(iter(value)))}"
        for index, (name, look) in enumerate(zip(self._getter_names, self._getters, strict=True)):
            now = look()
            if not _is_equal(self._got[index], now):
                return f"{name} was {_show(self._got[index])} and is {_show(now)}"
            self._got[index] = now
        start = 0
        for index, iterable in enumerate(self._iterables):
            before = self._flat[start : start + self._sizes[index]]
            now = list(iterable)
            if len(now) != len(before):
                return f"{self._names[index][0]} had {len(before)} items and has {len(now)}"
            for place, (old, new) in enumerate(zip(before, now, strict=True)):
                if not _is_equal(old, new):
                    return f"{self._item_name(index, place)} was {_show(old)} and is {_show(new)}"
            self._flat[start : start + len(now)] = now
            start += len(now)
        for (name, tensor), version in zip(self._plain_tensors, self._versions, strict=True):
            if tensor._version != version:
                return f"{name}, a tensor of this process, was written to{_advice(name)}"
        return None

    def _item_name(self, index: int, place: int) -> str:
        name, container = self._names[index]
        if self._iterables[index] is container:
            return f"{name}[{place}]" if isinstance(container, list) else f"a key of {name}"
        return _part_name(self._forms[id(container)], name, list(container)[place])

    # ---- looking ----

    def _parts(self, name: str, value: Any) -> Iterable[Part]:
        """Remember what a value is made of, and give its parts."""
        if isinstance(value, torch.Tensor):
            self._tensor(name, value)
            return ()
        if isinstance(value, types.FunctionType):
            return self._function(name, value)
        if isinstance(value, types.MethodType):
            return [(name, value.__func__), (f"{name}.__self__", value.__self__)]
        if isinstance(value, functools.partial):
            return [(name, value.func), (f"{name}.args", value.args), (f"{name}.keywords", value.keywords)]
        if isinstance(value, type):
            return () if _is_library(value) else self._class(name, value)
        if isinstance(value, staticmethod | classmethod):
            return [(name, value.__func__)]
        if isinstance(value, property):
            return [(name, value.fget)]
        if isinstance(value, types.ModuleType):
            return ()
        is_own = type(value).__module__.partition(".")[0] in _OWN
        # Modules of dtorch.nn have parameters, and layers of caches have keys, as any other.
        has_parts = isinstance(value, torch.nn.Module) or getattr(value, "has_tensors", False)
        if is_own and not has_parts:
            return [(name, value.__wrapped__)] if hasattr(value, "__wrapped__") else ()
        if isinstance(value, dict):
            return self._dict(name, value, _ITEM)
        if isinstance(value, _SEQUENCES):
            return self._sequence(name, value)
        return self._object(name, value)

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        if hasattr(tensor, "_handle"):
            self.tensors.append((name, tensor))
        elif not tensor.is_inference():  # those have no version
            self._plain_tensors.append((name, tensor))
            self._versions.append(tensor._version)

    def _class(self, name: str, value: type) -> Iterable[Part]:
        yield from ((f"{name}.__bases__", base) for base in value.__bases__)
        yield from self._dict(name, vars(value), _ATTRIBUTE)

    def _object(self, name: str, value: Any) -> Iterable[Part]:
        yield f"{name}.__class__", type(value)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from self._dict(name, attributes, _ATTRIBUTE)

    def _dict(self, name: str, value: Any, form: str) -> Iterable[Part]:
        if value:
            self._forms[id(value)] = form
            self._add(name, value, value)
            self._add(name, value.values(), value)
        else:
            self._empty.append(value)
            self._empty_names.append(name)
        return [(_part_name(form, name, key), item) for key, item in value.items()]

    def _sequence(self, name: str, value: Any) -> Iterable[Part]:
        if value and not isinstance(value, tuple | frozenset):
            self._add(name, value, value)
        elif not value:
            self._empty.append(value)
            self._empty_names.append(name)
        return [(f"{name}[{index}]", item) for index, item in enumerate(value)]

    def _function(self, name: str, function: types.FunctionType) -> Iterable[Part]:
        code = function.__code__
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield self._single(variable, functools.partial(_contents, cell))
        if code.co_filename.startswith(_LIBRARIES):
            return  # a decorator of a library has the user's function in its closure, and that is all
        used = set(_names_in(code))
        for variable in sorted(used & function.__globals__.keys()):
            found = self._single(variable, functools.partial(function.__globals__.get, variable))
            yield found
            if isinstance(found[1], types.ModuleType) and not _is_library(found[1]):
                members = vars(found[1])
                for member in sorted(used & members.keys()):
                    yield self._single(f"{variable}.{member}", functools.partial(members.get, member))
        yield f"{name}.__defaults__", function.__defaults__
        yield f"{name}.__kwdefaults__", function.__kwdefaults__

    def _single(self, name: str, look: Callable[[], Any]) -> Part:
        value = look()
        self._getters.append(look)
        self._getter_names.append(name)
        self._got.append(value)
        return name, value

    def _add(self, name: str, iterable: Any, container: Any) -> None:
        self._names.append((name, container))
        self._iterables.append(iterable)
        self._sizes.append(len(iterable))
        self._flat.extend(iterable)


def function_name(function: Any) -> str:
    """What a function, or another callable, is called in messages."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NOTHING  # nothing was assigned yet


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_equal(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new) or not isinstance(old, PLAIN):
        return False
    return bool(old == new) and repr(old) == repr(new)  # -0.0 is another number than 0.0


def _part_name(form: str, name: str, key: Any) -> str:
    """What an item of a dict, or an attribute, is called. The ``repr`` of a tensor would fetch its value."""
    return form.format(name, key if form is _ATTRIBUTE else _show(key))


def _advice(name: str) -> str:
    return (
        " (an optimizer counts its steps on the cluster with fused=True or capturable=True)"
        if name.endswith("['step']")
        else ""
    )


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value) if isinstance(value, PLAIN) else f"{type(value).__qualname__} object"
    return text if len(text) <= 60 else f"{text[:57]}..."


_OWN = ("dtorch", "dtorch_runtime")
_LIBRARIES = tuple(
    os.path.join(os.path.abspath(folder), "")
    for folder in {
        *site.getsitepackages(),
        sysconfig.get_paths()["stdlib"],
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(__file__)),
    }
)


@functools.cache
def _is_library(value: Any) -> bool:
    """Whether a class or a module is not the user's."""
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(value.__module__)
    if module is None or module.__name__ == "__main__":
        return False
    file = getattr(module, "__file__", None)
    return file is None or os.path.abspath(file).startswith(_LIBRARIES)
