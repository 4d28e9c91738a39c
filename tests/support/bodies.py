"""Bodies of captured calls for tests of passes: written by hand or at random, and run on devices of this process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dtorch_runtime.ir.layout import Layout, all_boxes
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from dtorch_runtime.ir.records import layout_to_record
from dtorch_runtime.passes.rewrite import OwnTemplates, Rewritten, rewrite
from dtorch_runtime.wire.records import (
    Arg,
    BodyRecord,
    ListArg,
    ScalarSlot,
    Slot,
    TemplateRecord,
    TransferArg,
)
from tests.support.executors import SESSION, Rig

SHAPE = (4, 4)
#: By the ids that a ``Rig`` gives them when it is asked in this order.
MESHES = {1: DeviceMesh("cpu", [0, 1]), 2: DeviceMesh("cpu", [1, 2]), 3: DeviceMesh("cpu", [[0], [1]])}
_MESH_OF = {"'": 2, "|": 3, "!": 3}
_PLACEMENTS: dict[str, Placement] = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}
_ELEMENTWISE = frozenset({"neg", "relu", "add", "random"})
_CALL = 1000


def layout(name: str) -> Layout:
    """``R``, ``S0``, ``S1`` or ``P`` on the first mesh; ``R'`` and so on on the second.

    ``R|`` and so on are on the third, whose other axis has one device, and terms there; ``R!`` is replicated there.
    """
    mesh = MESHES[mesh_of(name)]
    on_other = Replicate() if name.endswith("!") else Partial()
    return Layout(mesh, (_PLACEMENTS[name.rstrip("'|!")], on_other)[: mesh.ndim])


def mesh_of(name: str) -> int:
    return _MESH_OF.get(name[-1], 1)


def _view(op: str, *args: Arg, knows: bool = True) -> tuple[str, list[Arg], list[int] | None]:
    return op, [Slot(0), *args], [0] if knows else None


_SIZES = {"flat": ListArg([2, 8]), "square": ListArg([4, 4])}
#: Name -> op, arguments, and ``views``.
_OPS: dict[str, tuple[str, list[Arg], list[int] | None]] = {
    "neg": ("aten::neg", [Slot(0)], [-1]),
    "relu": ("aten::relu", [Slot(0)], [-1]),
    "add": ("aten::add.Tensor", [Slot(0), Slot(1)], [-1]),
    "neg_": ("aten::neg_", [Slot(0)], []),
    "max": ("aten::max.dim", [Slot(0), 0, True], [-1, -1]),
    "t": _view("aten::t"),
    "alias": _view("aten::alias"),
    "unknown": _view("aten::alias", knows=False),
    "flat": _view("aten::view", _SIZES["flat"]),
    "square": _view("aten::view", _SIZES["square"]),
    "random": ("aten::add.Scalar", [Slot(0), ScalarSlot(0)], [-1]),
}


@dataclass
class BodyWriter:
    """Writes a body op by op. Values are numbered as in ``BodyRecord``; inputs are of the layouts given."""

    inputs: Sequence[str]
    num_outputs: int
    words: list[int] = field(default_factory=list)
    templates: dict[int, TemplateRecord] = field(default_factory=dict)
    num_scalars: int = 1
    _ids: dict[object, int] = field(default_factory=dict)
    num_inner: int = 0
    num_moves: int = 0
    shape: tuple[int, ...] = SHAPE
    dtype: str = "float64"
    made: set[int] = field(default_factory=set)
    node_of: dict[int, str] = field(default_factory=dict)

    def inner(self) -> int:
        self.num_inner += 1
        return len(self.inputs) + self.num_outputs + self.num_inner

    def op(
        self,
        name: str,
        *inputs: int,
        out: int | tuple[int, ...] | None = None,
        mesh: int = 1,
        fits: bool = True,
    ) -> int:
        """One op; returns its first output, an inner value unless it is given.

        Args:
            fits: whether all tensors of an elementwise op are row by row in memory.
        """
        op, args, views = _OPS[name]
        mutates = [0] if name == "neg_" else []
        num_outputs = 2 if name == "max" else 1 - len(mutates)
        scalars = range(self.num_scalars, self.num_scalars + (name == "random"))
        self.num_scalars += len(scalars)
        record = TemplateRecord(
            0,
            op,
            args,
            {},
            len(inputs),
            num_outputs,
            len(scalars),
            [mesh],
            mutates,
            views=views,
            fits=[place for place in range(len(inputs)) if fits and name in _ELEMENTWISE],
        )
        if out is None:
            out = tuple(self.inner() for _ in range(num_outputs))
        outputs = (out,) if isinstance(out, int) else out
        self._add((name, mesh, fits), record, inputs, outputs[:num_outputs], tuple(scalars))
        return outputs[0] if outputs else 0

    def move(self, value: int, source: str, target: str, out: int | None = None) -> int:
        """A redistribution."""
        ends = [layout_to_record(layout(name), mesh_of(name)) for name in (source, target)]
        self.num_moves += 1
        arg = TransferArg(list(self.shape), self.dtype, *ends)
        meshes = list(dict.fromkeys(map(mesh_of, (source, target))))
        record = TemplateRecord(0, "dtorch::redistribute", [Slot(0), arg], {}, 1, 1, 0, meshes, views=[-1])
        out = self.inner() if out is None else out
        self._add((source, target, self.shape, self.dtype), record, (value,), (out,), ())
        return out

    def _add(
        self,
        key: object,
        record: TemplateRecord,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        scalars: tuple[int, ...],
    ) -> None:
        self.made.update(outputs)
        number = self._ids.setdefault(key, len(self._ids) + 1)
        fields = {name: getattr(record, name) for name in record.__struct_fields__}
        self.templates[number] = TemplateRecord(**(fields | {"template_id": number}))
        self.words += (number, 100 + len(self.words), *inputs, *outputs, *scalars)

    def record(self) -> TemplateRecord:
        return TemplateRecord(
            _CALL,
            "dtorch::captured",
            [],
            {},
            len(self.inputs),
            self.num_outputs,
            self.num_scalars,
            sorted({1, 2, *(mesh_id for made in self.templates.values() for mesh_id in made.mesh_ids)}),
            [],
            BodyRecord(self.words, self.num_inner + self.num_moves),
        )

    def rewritten(self, *passes: str) -> Rewritten:
        """After these passes; the body is checked after each."""
        node_of = self.node_of
        return rewrite(
            self.record(), self.templates, MESHES, passes, OwnTemplates(), node_of=node_of, check=True
        )

    def shown(self, *passes: str) -> list[str]:
        """The ops after these passes, one line each."""
        found = self.rewritten(*passes)
        names = {number: _name(key) for key, number in self._ids.items()}
        known = {**self.templates, **{record.template_id: record for record in found.made}}
        lines = []
        assert found.record.body is not None
        words, start = found.record.body.words, 0
        while start < len(words):
            if not words[start]:
                start += 2 + words[start + 1]
                continue
            record = known[words[start]]
            first = start + 2 + record.num_inputs
            name = names.get(record.template_id) or _made_name(record)
            outputs = words[first : first + record.num_outputs]
            values = " ".join(map(str, words[start + 2 : first]))
            lines.append((f"{' '.join(map(str, outputs))} = " if outputs else "") + f"{name} {values}")
            start += record.width
        return lines


def _name(key: object) -> str:
    assert isinstance(key, tuple)
    name, other, *_ = key
    return f"{name}->{other}" if isinstance(other, str) else str(name)


def _made_name(record: TemplateRecord) -> str:
    """Of a template that a pass has made."""
    arg = next((arg for arg in record.args if isinstance(arg, TransferArg)), None)
    if arg is None:
        return record.op.removeprefix("dtorch::").removeprefix("aten::")
    ends = []
    for end in (arg.source, arg.target):
        placement = end.placements[0]
        dim = str(placement.dim) if placement.kind == "S" else ""
        ends.append(placement.kind + dim + " '|"[end.mesh_id - 1].strip())
    return "->".join(ends)


class BodyRunner:
    """Runs bodies on three devices, each time on new copies of the same inputs."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        for mesh in MESHES.values():
            rig.mesh_id(mesh)
        self._next_inner = 1 << 48
        self._adders = {
            (number, mesh_id): rig.template(
                "aten::add_.Scalar", Slot(0), number, inputs=1, outputs=0, meshes=[mesh], mutates=[0]
            )
            for number in range(1, 10)
            for mesh_id, mesh in MESHES.items()
        }
        self._next_template = len(self._adders) + 1

    def run(self, writer: BodyWriter, outputs: Sequence[str], *passes: str) -> list[torch.Tensor]:
        """The piece of each device: of the inputs and of the outputs, by their layouts, each written to at the end."""
        rig = self._rig
        found = writer.rewritten(*passes)
        record = self._define([*writer.templates.values(), *found.made], found.record)
        values = [rig.put(_pieces(seed, name)) for seed, name in enumerate(writer.inputs)]
        made = [rig.new_value() for _ in outputs]
        scalars = [self._next_inner, *range(1, writer.num_scalars)]
        self._next_inner += writer.num_inner + writer.num_moves
        rig.run(record, 0, *values, *made, *scalars)
        for number, (value, name) in enumerate(zip((*values, *made), (*writer.inputs, *outputs)), 1):
            rig.run(self._adders[number, mesh_of(name)], 0, value)  # seen by all that share memory
        return [
            piece
            for value, name in zip((*values, *made), (*writer.inputs, *outputs), strict=True)
            for piece in rig.get(value, layout(name).mesh.devices).values()
        ]

    def _define(self, templates: Sequence[TemplateRecord], call: TemplateRecord) -> int:
        """Under ids of their own; returns that of the call."""
        first = self._next_template
        self._next_template += len(templates) + 1
        number = {record.template_id: first + index for index, record in enumerate(templates)}
        width = {record.template_id: record.width for record in templates}
        assert call.body is not None
        words, start = list(call.body.words), 0
        while start < len(words):
            old = words[start]
            words[start] = number.get(old, 0)
            start += width[old] if old else 2 + words[start + 1]
        renumbered = [_with(record, template_id=number[record.template_id]) for record in templates]
        body = BodyRecord(words, call.body.num_inner)
        last = _with(call, template_id=first + len(templates), body=body)
        for node in self._rig.nodes:
            node.executor.define_templates(SESSION, [*renumbered, last])
        return last.template_id


def _with(record: TemplateRecord, **changes: object) -> TemplateRecord:
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return TemplateRecord(**(fields | changes))


def _pieces(seed: int, name: str) -> dict[int, torch.Tensor]:
    whole = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    where = layout(name)
    pieces = {}
    for device, box in zip(where.mesh.devices, all_boxes(SHAPE, where), strict=True):
        pieces[device] = whole[tuple(slice(start, stop) for start, stop in box)].contiguous()
    return pieces


@dataclass
class RandomBody:
    """A body of random ops.

    Attributes:
        writer: the body.
        outputs: the layouts of what it makes.
    """

    writer: BodyWriter
    outputs: list[str]


class _Choice(NamedTuple):
    """An op: its kind, what it reads, and for a redistribution the layout that it goes to."""

    kind: str
    value: int
    other: int = 0
    target: str = ""


@dataclass(frozen=True)
class _Made:
    """A value: its layout, and whether its pieces are contiguous for sure."""

    layout: str
    is_contiguous: bool


def random_body(rng: random.Random, num_ops: int) -> RandomBody:
    """Elementwise ops, views, writes through views, seeds, redistributions; many of them done before."""
    inputs = [rng.choice(["R", "S0", "P", "R'", "S0|"]) for _ in range(2)]
    num_outputs = rng.randint(2, 6)
    writer = BodyWriter(inputs, num_outputs)
    values = {number: _Made(name, True) for number, name in enumerate(inputs, 1)}
    candidates = list(range(len(inputs) + 1, len(inputs) + num_outputs + 1))
    outputs: list[str] = []
    chosen: list[_Choice] = []
    writes = rng.random() < 0.5
    while candidates or num_ops > 0:
        num_ops -= 1
        unread = values.keys() - {value for choice in chosen for value in (choice.value, choice.other)}
        if chosen and rng.random() < 0.4:
            choice = rng.choice(chosen[-12:])
        else:
            choice = _choose(rng, values, sorted(unread), writes)
        chosen.append(choice)
        # The last ops make the outputs that are left, and some make theirs early.
        is_output = candidates and (num_ops < len(candidates) or rng.random() < 0.04)
        if is_output and choice.kind != "neg_":
            out = candidates.pop(0)
            values[out] = _write(writer, values, choice, out)
            outputs.append(values[out].layout)
        elif choice.kind == "neg_":
            writer.op("neg_", choice.value, mesh=mesh_of(values[choice.value].layout))
        else:
            made = _write(writer, values, choice, None)
            values[len(inputs) + num_outputs + writer.num_inner] = made
    return RandomBody(writer, outputs)


def _choose(rng: random.Random, values: dict[int, _Made], unread: list[int], writes: bool) -> _Choice:
    value = rng.choice(unread if unread and rng.random() < 0.8 else list(values))
    name, is_contiguous = values[value].layout, values[value].is_contiguous
    others = [other for other, made in values.items() if made.layout == name]
    kinds = {"move": 8, "add": 3, "alias": 1, "neg_": int(writes)}
    if not name.startswith("P"):
        kinds |= {"neg": 2, "relu": 2, "t": 2, "unknown": 1, "random": 1}
        if name.startswith("R") and is_contiguous:
            kinds["regroup"] = 3
    [kind] = rng.choices(list(kinds), list(kinds.values()))
    targets = [
        other for other in ("R", "R", "S0", "S1", "R'", "S0'", "P", "R|", "S0|", "P|") if other != name
    ]
    return _Choice(kind, value, rng.choice(others), rng.choice(targets))


def _write(writer: BodyWriter, values: dict[int, _Made], choice: _Choice, out: int | None) -> _Made:
    """Write an op that makes one value."""
    kind, value = choice.kind, choice.value
    name = values[value].layout
    mesh = mesh_of(name)
    if kind == "move":
        writer.move(value, name, choice.target, out)
        return _Made(choice.target, True)
    if kind == "add":
        fits = values[value].is_contiguous and values[choice.other].is_contiguous
        writer.op("add", value, choice.other, out=out, mesh=mesh, fits=fits)
        return _Made(name, fits)
    if kind == "regroup":
        writer.op("square", writer.op("flat", value, mesh=mesh), out=out, mesh=mesh)
        return _Made(name, True)
    fits = values[value].is_contiguous
    writer.op(kind, value, out=out, mesh=mesh, fits=fits)
    if kind == "t":
        return _Made(name.translate(str.maketrans("01", "10")), False)
    return _Made(name, kind != "unknown" and fits)
