"""Pass "tile": neighbouring ops on the same lists of tensors become one, which goes through the lists once.

Optimizers call ``_foreach_*`` ops one after the other, each for all parameters: what one has written has left the cache
when the next one reads it. Done for a few tensors at a time, memory is read once for all of them (Lam, Rothberg and
Wolf 1991, "The cache performance and optimizations of blocked algorithms").
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Final, TypeAlias

from dtorch_runtime.ir.body import BodyOp
from dtorch_runtime.passes.body import Body
from dtorch_runtime.wire.records import (
    Arg,
    ListArg,
    RegionStep,
    ScalarSlot,
    Slot,
    TemplateRecord,
    TilesArg,
)

TILES: Final = "dtorch::tiles"
_FOREACH: Final = "aten::_foreach_"
#: Their argument ``scalars`` is a tensor with a number for each position of the lists.
_NOT_BY_POSITION: Final = frozenset(
    f"{_FOREACH}{name}.Tensor" for name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_")
)

#: A list by the values at its positions.
_Values: TypeAlias = tuple[int, ...]
#: An argument for all positions: a value of the call, or one of its scalars, by its number there.
_Single: TypeAlias = Slot | ScalarSlot


def form_tiles(body: Body) -> Body:
    """The body with each run of two or more ops on lists of as many tensors, on the same CPU devices, as one op.

    Whether lists share memory at different positions is found where it runs. On CUDA devices such an op is one kernel
    for all tensors, and stays that.
    """
    ops: list[BodyOp] = []
    run = _Run()
    last_uses = body.last_uses()

    def close(stop: int) -> None:
        if len(run.ops) > 1:
            ops.append(run.joined(lambda value: value <= body.num_outer or last_uses.get(value, -1) >= stop))
        else:
            ops.extend(run.ops)

    for index, op in enumerate(body.ops):
        devices = _devices_of_lists(op, body)
        if devices is None or not run.add(op, devices):
            close(index)
            run = _Run()
            if devices is None or not run.add(op, devices):
                ops.append(op)
    close(len(body.ops))
    return body.with_ops(ops)


def num_tiled(before: Body, after: Body) -> int:
    """How many ops of a body are in tiles of the other."""
    del before
    found = (arg for op in after.ops for arg in op.template.args if isinstance(arg, TilesArg))
    return sum(len(arg.steps) for arg in found)


def _devices_of_lists(op: BodyOp, body: Body) -> frozenset[int] | None:
    """Where an op runs that does the same at each position of lists; None for others."""
    template = op.template
    if (
        not template.op.startswith(_FOREACH)
        or template.op in _NOT_BY_POSITION
        or 0 in op.outputs
        or (op.outputs and template.views != [-1] * len(op.outputs))
        or not all(
            isinstance(item, Slot)
            for arg in (*template.args, *template.kwargs.values())
            if isinstance(arg, ListArg)
            for item in arg.items
        )
    ):
        return None
    meshes = [body.meshes[mesh_id] for mesh_id in template.mesh_ids]
    devices = {frozenset(mesh.devices) for mesh in meshes}
    return devices.pop() if len(devices) == 1 and all(mesh.device_type == "cpu" for mesh in meshes) else None


class _Run:
    """Ops that may become one.

    Attributes:
        ops: in order.
    """

    def __init__(self) -> None:
        self.ops: list[BodyOp] = []
        self._devices: frozenset[int] = frozenset()
        self._num_positions = 0
        #: What comes from outside, in the order of its numbers in ``TilesArg``.
        self._lists: dict[_Values, None] = {}
        self._singles: dict[_Single, None] = {}
        #: Lists that ops of the run make, and the indices of these.
        self._made: dict[_Values, int] = {}

    def add(self, op: BodyOp, devices: frozenset[int]) -> bool:
        """Whether the op may join; it has, then."""
        args = (*op.template.args, *op.template.kwargs.values())
        lists = [_values(arg, op) for arg in args if isinstance(arg, ListArg)]
        singles = [_single(arg, op) for arg in args if isinstance(arg, Slot | ScalarSlot)]
        sizes = set(map(len, filter(None, (*lists, op.outputs))))
        if len(sizes) != 1 or (self.ops and (sizes, devices) != ({self._num_positions}, self._devices)):
            return False
        new = [values for values in lists if values not in self._made]
        read = {*chain(*new), *(single.index for single in singles if isinstance(single, Slot))}
        if not read.isdisjoint(chain(*self._made)):
            return False  # a part of a list that the run makes
        [self._num_positions] = sizes
        self._devices = devices
        self._lists.update(dict.fromkeys(new))
        self._singles.update(dict.fromkeys(singles))
        if op.outputs:
            self._made[op.outputs] = len(self.ops)
        self.ops.append(op)
        return True

    def joined(self, is_seen: Callable[[int], bool]) -> BodyOp:
        """All in one op, which makes what is seen behind it."""
        seen = [values for values in self._made if any(map(is_seen, values))]
        arg = TilesArg(
            self._num_positions,
            len(self._lists),
            list(map(self._step, self.ops)),
            list(map(self._number, seen)),
        )
        inputs = {value: place for place, value in enumerate(dict.fromkeys(chain(*self._lists)))}
        scalars: dict[int, int] = {}
        flat: list[Arg] = [Slot(inputs[value]) for value in chain(*self._lists)]
        for single in self._singles:
            if isinstance(single, Slot):
                flat.append(Slot(inputs.setdefault(single.index, len(inputs))))
            else:
                flat.append(ScalarSlot(scalars.setdefault(single.index, len(scalars))))
        outputs = tuple(chain(*seen))
        written = {op.inputs[place] for op in self.ops for place in op.template.mutates}
        template = TemplateRecord(
            0,
            TILES,
            [arg, *flat],
            {},
            len(inputs),
            len(outputs),
            len(scalars),
            list(dict.fromkeys(mesh_id for op in self.ops for mesh_id in op.template.mesh_ids)),
            [place for value, place in inputs.items() if value in written],
            views=[-1] * len(outputs),
        )
        return BodyOp(template, self.ops[0].location_id, tuple(inputs), outputs, tuple(scalars))

    def _step(self, op: BodyOp) -> RegionStep:
        inputs: dict[int, int] = {}

        def own(arg: Arg) -> Arg:
            if not isinstance(arg, ListArg | Slot | ScalarSlot):
                return arg
            number = self._number(_values(arg, op) if isinstance(arg, ListArg) else _single(arg, op))
            return Slot(inputs.setdefault(number, len(inputs)))

        template = op.template
        args, kwargs = (
            list(map(own, template.args)),
            {name: own(arg) for name, arg in template.kwargs.items()},
        )
        return RegionStep(template.op, args, kwargs, list(inputs))

    def _number(self, found: _Values | _Single) -> int:
        """As ``TilesArg`` numbers lists, then what is for all positions, then what the steps make."""
        if not isinstance(found, tuple):
            return len(self._lists) + list(self._singles).index(found)
        if found in self._made:
            return len(self._lists) + len(self._singles) + self._made[found]
        return list(self._lists).index(found)


def _values(arg: ListArg, op: BodyOp) -> _Values:
    return tuple(op.inputs[item.index] for item in arg.items if isinstance(item, Slot))


def _single(arg: _Single, op: BodyOp) -> _Single:
    return Slot(op.inputs[arg.index]) if isinstance(arg, Slot) else ScalarSlot(op.scalars[arg.index])
