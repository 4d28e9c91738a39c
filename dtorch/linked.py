"""Views that cannot alias what they are of, because their part of it is on other devices.

Inside ``auto_redistribute()`` a view of a cut dim is made of a converted copy. The copy is a *mirror* of the tensor:
views that are made of it alias it on the workers, as any views do. What keeps both sides equal:

* before a linked view is used, the mirror is refreshed when something has been written to the tensor's memory since;
* after a write through a linked view, the mirror is brought back into the tensor, so that all its aliases see it.

Writes are known by the memory that they go to: the root of a handle has the number of the last write to it. (Torch's
version counters would miss those through ``x.data``, and there are none in inference mode.)

A linked view is of a class of its own, so that ops with one come to ``dispatch_linked``; other ops never know.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from dtorch import auto
from dtorch.auto import Moved
from dtorch.auto_issue import (
    converted,
    copy_into,
    is_whole_memory,
    mirrored,
    one_by_one,
    refuse_part_of_memory,
)
from dtorch.auto_plan import moved_bytes
from dtorch.dispatch import SPECIAL, dispatch, is_composite
from dtorch.graph import Handle
from dtorch.issue import make_symbol, new_symbol
from dtorch.location import capture
from dtorch.resize import resized
from dtorch.rules.call import Op, op_of
from dtorch.rules.whole import replicated
from dtorch.shapes import may_share_elements
from dtorch.spec import Spec, intern_spec
from dtorch.tensors import HANDLE, Tensor
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.layout import Layout

aten = torch.ops.aten


#: The mirrors of a value that are in use, by its spec and their layout.
_mirrors: weakref.WeakKeyDictionary[Handle, dict[tuple[Spec, Layout], weakref.ReferenceType[Mirror]]] = (
    weakref.WeakKeyDictionary()
)


class Mirror:
    """A converted copy of ``base``, which views alias in its place. All views that want the same copy share it.

    Attributes:
        base, copy: symbols of their own for the two values, so that nobody's history is kept alive.
        outer: the mirror that ``base`` aliases, when it is a linked view itself.
        seen: the last write to the memory of ``base`` that the copy has.
        name: the op that made the view, for the list of redistributions.
    """

    __slots__ = ("__weakref__", "base", "copy", "name", "outer", "seen")

    def __init__(self, base: Any, copy: Any, name: str) -> None:
        self.base = plain_symbol(base)
        self.copy = copy
        self.outer: Mirror | None = getattr(base, "_mirror", None)
        self.seen = last_write(base._handle)
        self.name = name
        _mirrors.setdefault(self.base._handle, {})[base._spec, copy._spec.layout] = weakref.ref(self)

    @staticmethod
    def of(base: Any, layout: Layout) -> Mirror | None:
        """The mirror with this layout that some view of ``base`` has, equal to the base now; None when none has."""
        handle = base._handle
        known = _mirrors.get(handle, {}).get((base._spec, layout))
        found = known() if known is not None else None
        if found is not None:
            found.refresh()
        return found

    def refresh(self) -> None:
        """Make the copy equal to the base, if that has been written to."""
        if self.outer is not None:
            self.outer.refresh()
        now = last_write(self.base._handle)
        if self.seen != now:
            self._copy(self.base, self.copy, "refreshed")
            self.seen = now

    def push(self) -> None:
        """Bring the copy, which was written to, back into the base."""
        self._copy(self.copy, self.base, "back")
        self.seen = last_write(self.base._handle)
        if self.outer is not None:
            self.outer.push()

    def _copy(self, source: Any, target: Any, what: str) -> None:
        spec, layout = source._spec, target._spec.layout
        location = capture(sys._getframe(1), source._handle.graph.thread_id)
        copy_into(Tensor, target, converted(Tensor, source, layout, location), location)
        num_bytes = moved_bytes(spec, layout)
        if num_bytes:
            move = Moved(self.name, f"self ({what})", spec.layout.placements, layout.placements, num_bytes)
            auto.log_auto([move], location)


def last_write(handle: Handle) -> int:
    """The number of the last write to the memory of a value; 0 when it has only been made."""
    return getattr(handle.root, "last_write", 0)


def link(spec: Spec, handle: Handle, mirror: Mirror, base: torch.Tensor) -> LinkedTensor:
    """The symbol of a view of a mirror: of a normal tensor a normal one, also in inference mode."""
    if torch.is_inference_mode_enabled() and not base.is_inference():
        with torch.inference_mode(False):
            return link(spec, handle, mirror, base)
    symbol = new_symbol(LinkedTensor, spec)
    symbol._mirror = mirror
    HANDLE.__set__(symbol, handle)
    return symbol  # type: ignore[no-any-return]  # made above


def link_results(result: Any, base: Any, mirror: Mirror) -> Any:
    """The views that an op made of the copy of ``mirror``, as views of ``base``."""
    if isinstance(result, list | tuple):
        return type(result)(link(item._spec, item._handle, mirror, base) for item in result)
    return link(result._spec, result._handle, mirror, base)


def dispatch_linked(
    cls: type[torch.Tensor],
    func: Any,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """``LinkedTensor.__torch_dispatch__``: as ``dispatch``, and keeps bases equal to their views.

    Raises:
        PlacementError: as ``dispatch``, or the call writes to linked views in a way that cannot be made right.
    """
    kwargs = kwargs or {}
    if is_composite(func) and func not in SPECIAL:
        return func.decompose(*args, **kwargs)
    op = op_of(func)
    if op.is_inplace_view or op.base in _OF_MEMORY:
        return SPECIAL[func](Tensor, func, args, kwargs, capture(sys._getframe(1)))
    if op.base == "aten::as_strided":
        _refuse_part_of_mirror(args[0]._mirror)
    written = _written(op, args, kwargs)
    if op.writes_lists and len(args[0]) > 1 and _is_entangled(written, (args, kwargs)):
        for part in one_by_one(args, kwargs):
            _again(func, *part)
        return None
    _check_independent(op, written)
    _check_own_memory(op, written)
    twins = _twins_of_bases(written, (args, kwargs))
    plain_args, plain_kwargs = _with_twins(args, twins), _with_twins(kwargs, twins)
    mirrors = {id(t._mirror): t._mirror for t, _ in twins.values() if type(t) is LinkedTensor}
    before = {key: last_write(mirror.copy._handle) for key, mirror in mirrors.items()}
    result = dispatch(Tensor, func, types, plain_args, plain_kwargs)
    for key, mirror in mirrors.items():
        if last_write(mirror.copy._handle) != before[key]:
            mirror.push()
    if op.is_view and type(args[0]) is LinkedTensor:
        return _mapped(result, lambda item: _relinked(item, args[0]))
    originals = {id(twin): given for given, twin in twins.values()}
    return _mapped(result, lambda item: originals.get(id(item), item))


def _twins_of_bases(written: Sequence[Any], arguments: Any) -> dict[int, tuple[Any, Any]]:
    """A target that is read through a linked view too is written in the mirror: what order shows, shows as in torch."""
    mirrors = [value._mirror for value in _flat(arguments) if type(value) is LinkedTensor]
    found: dict[int, tuple[Any, Any]] = {}
    for target in written:
        if type(target) is Tensor:
            same = (m for m in mirrors if m.base._handle is target._handle and m.base._spec is target._spec)
            mirror = next(same, None)
            if mirror is not None:
                found[id(target)] = (target, mirror.copy)
    return found


def _relinked(item: Any, source: LinkedTensor) -> Any:
    """A view of a linked view: of the same mirror, or of one whose base is that view."""
    if type(item) is not LinkedTensor:
        return link(item._spec, item._handle, source._mirror, source)
    item._mirror.outer = source._mirror
    return item


def _mapped(result: Any, function: Any) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(_mapped(item, function) for item in result)
    return function(result) if isinstance(result, Tensor) else result


def _with_twins(value: Any, twins: dict[int, tuple[Any, Any]]) -> Any:
    """The arguments with the twin that there is, or a plain symbol of the value as it is now for a linked view."""
    kind = type(value)
    if kind is LinkedTensor or kind is Tensor:
        found = twins.get(id(value))
        if found is None and kind is Tensor:
            return value
        if found is None:
            found = twins[id(value)] = (value, plain_symbol(value))
        return found[1]
    if kind is list or kind is tuple:
        return kind(_with_twins(item, twins) for item in value)
    if kind is dict:
        return {name: _with_twins(item, twins) for name, item in value.items()}
    return value


def plain_symbol(tensor: Any) -> Tensor:
    """Another symbol, without history, for the same value."""
    return make_symbol(Tensor, tensor._spec, tensor._handle)  # type: ignore[no-any-return]  # of a Tensor


def _written(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for name in op.writes:
        position = op.position[name]
        value = args[position] if position < len(args) else kwargs.get(name)
        found.extend(value if isinstance(value, list | tuple) else [value])
    return [value for value in found if isinstance(value, torch.Tensor)]


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One of several calls that torch sees as one, and counts as one write."""
    if any(type(value) is LinkedTensor for value in _flat((args, kwargs))):
        dispatch_linked(Tensor, func, (), args, kwargs)
    else:
        dispatch(Tensor, func, (), args, kwargs)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _flat(item)]
    return _flat(list(value.values())) if isinstance(value, dict) else [value]


def _is_entangled(written: Sequence[Any], arguments: Any) -> bool:
    """Whether memory that is written at one position of the lists is used at another one too."""
    roots = [_root(value) for value in _flat(arguments) if isinstance(value, Tensor)]
    return any(roots.count(_root(tensor)) > 1 for tensor in written)


def _check_independent(op: Op, written: Sequence[Any]) -> None:
    """A mirror is brought back as a whole: an op that also writes to its base in another way would be undone."""
    for one, other in itertools.combinations(written, 2):
        mirrors = {getattr(tensor, "_mirror", None) for tensor in (one, other)}
        if len(mirrors) > 1 and _root(one) is _root(other):
            raise PlacementError(
                f"{op} writes to several views of one tensor, which auto_redistribute() made on other devices; "
                f"write to them one after the other"
            )


def _check_own_memory(op: Op, written: Sequence[Any]) -> None:
    """A copy of a tensor whose elements share memory has an element of its own for each: only one would be written."""
    for tensor in written:
        mirror = getattr(tensor, "_mirror", None)
        if mirror is not None and may_share_elements(mirror.base._spec):
            spec: Spec = mirror.base._spec
            raise PlacementError(
                f"{op} writes to a view that auto_redistribute() made of a tensor whose elements share memory, of "
                f"shape {list(spec.shape)} with strides {list(spec.stride)}. Allowed are views of tensors with one "
                f"element at each place in memory; write to the tensor that this one is a view of"
            )


def _root(tensor: Any) -> Handle:
    """The value in whose memory a tensor is, or in whose memory it would be."""
    mirror: Mirror | None = getattr(tensor, "_mirror", None)
    if mirror is None:
        return tensor._handle.root  # type: ignore[no-any-return]  # of a Tensor
    while mirror.outer is not None:
        mirror = mirror.outer
    return mirror.base._handle.root


#: Calls that make a tensor stand for another value, or ask for what it stands; see ``dtorch.metadata``.
_OF_MEMORY = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_", "aten::is_set_to"})


def _refuse_part_of_mirror(mirror: Mirror) -> None:
    """``as_strided`` counts in the memory of the base, which the copy has when it is whole everywhere."""
    is_whole = (
        mirror.outer is None and mirror.copy._spec.layout.is_replicated and is_whole_memory(mirror.base)
    )
    if not is_whole:
        raise PlacementError(
            "as_strided cannot run on a view that auto_redistribute() made of a tensor on other devices: it has not "
            "the same memory around it; write x.clone() first, or index the tensor itself"
        )


def resized_copy(target: Any, shape: tuple[int, ...], stride: tuple[int, ...], location: int) -> LinkedTensor:
    """``resize_`` of a tensor whose elements move between devices by it: of a whole copy, linked to the tensor.

    Raises:
        PlacementError: the tensor is a part of its memory.
    """
    refuse_part_of_memory(target, "resize_")
    spec: Spec = target._spec
    whole = replicated(spec.layout.mesh)
    copy = mirrored(Tensor, target, whole, location)
    result = resized(copy, intern_spec(shape, spec.dtype, whole, stride, spec.is_conj, spec.is_neg), location)
    return link_results(result, target, Mirror(target, copy, "aten::resize_"))  # type: ignore[no-any-return]  # one view


class LinkedTensor(Tensor):
    """A view whose base is elsewhere. Users see a ``Tensor``."""

    __slots__ = ()

    __torch_dispatch__ = classmethod(dispatch_linked)

    @property
    def _handle(self) -> Handle:  # type: ignore[override]  # only ``HANDLE`` writes it
        self._mirror.refresh()
        return HANDLE.__get__(self)  # type: ignore[no-any-return]  # the view of the mirror's copy

    def _view_of_mine(self, view: Tensor) -> Tensor:
        return link(view._spec, view._handle, self._mirror, self)

    @property
    def data(self) -> torch.Tensor:
        """As ``Tensor.data``: another symbol of the view, linked as well."""
        with torch.inference_mode(self.is_inference()):
            return link(self._spec, self._handle, self._mirror, self)

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]  # a property
