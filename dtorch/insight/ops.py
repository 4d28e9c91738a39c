"""Ops as people read them: one line each, with the line of the program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dtorch.location import describe
from dtorch.meshes import mesh_of
from dtorch.replay.inner_ids import FIRST_INNER_ID
from dtorch_runtime.ir.body import expand, parse_body
from dtorch_runtime.ir.records import placement_from_record
from dtorch_runtime.ir.stream import FREE, WidthsOf, walk
from dtorch_runtime.wire.records import (
    Arg,
    DeviceArg,
    DTypeArg,
    LayoutArg,
    LayoutRecord,
    ListArg,
    LocalShape,
    LocalStart,
    MemoryFormatArg,
    ScalarSlot,
    Slot,
    TemplateRecord,
    TransferArg,
)


@dataclass(frozen=True, slots=True)
class ShownOp:
    """One op.

    Attributes:
        inputs, outputs: names of values, such as ``%12``; ``_`` for an output that nobody wants.
        group: the captured call that it is part of, as a number and a name.
    """

    template: TemplateRecord
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scalars: tuple[str, ...]
    location_id: int
    group: tuple[int, str] | None = None

    @property
    def devices(self) -> list[int]:
        """Those of its meshes."""
        return sorted({device for number in self.template.mesh_ids for device in mesh_of(number).devices})

    @property
    def call(self) -> str:
        """The op with its arguments."""
        texts = [_text(arg, self.inputs, self.scalars) for arg in self.template.args]
        texts += [
            f"{name}={_text(arg, self.inputs, self.scalars)}" for name, arg in self.template.kwargs.items()
        ]
        return f"{self.template.op}({', '.join(texts)})"

    @property
    def place(self) -> str:
        """The line of the program; empty where it is not known."""
        return describe(self.location_id) if self.location_id else ""

    def __str__(self) -> str:
        made = ", ".join(self.outputs)
        text = (f"{made} = " if made else "") + f"{self.call} on {self.devices}"
        return f"{text}    # {self.place}" if self.location_id else text


def shown_stream(
    words: Sequence[int], templates: Mapping[int, TemplateRecord], names: Mapping[int, str]
) -> Iterator[ShownOp]:
    """The ops of a stream; those of captured calls each, in a group.

    Args:
        names: of captured functions, by the template of their calls.
    """
    widths = WidthsOf(templates)
    num_calls = 0
    for start, stop in walk(words, widths):
        if words[start] == FREE:
            continue
        template = templates[words[start]]
        if template.body is None:
            yield _shown(template, words[start:stop], None)
            continue
        num_calls += 1
        group = num_calls, names.get(template.template_id, template.op)
        expanded, _, _ = expand(template, parse_body(template, templates), words, start)
        for first, last in walk(expanded, widths):
            if expanded[first] != FREE:
                yield _shown(templates[expanded[first]], expanded[first:last], group)


def _shown(template: TemplateRecord, record: Sequence[int], group: tuple[int, str] | None) -> ShownOp:
    first_output = 2 + template.num_inputs
    first_scalar = first_output + template.num_outputs
    return ShownOp(
        template,
        tuple(value_names(record[2:first_output])),
        tuple(value_names(record[first_output:first_scalar])),
        tuple(map(str, record[first_scalar:])),
        record[1],
        group,
    )


def value_names(value_ids: Iterable[int]) -> list[str]:
    """``%12`` for a value, ``%c3`` for one inside of captured calls, ``_`` for one that is not wanted."""
    return [
        f"%c{value_id - FIRST_INNER_ID}"
        if value_id >= FIRST_INNER_ID
        else f"%{value_id}"
        if value_id
        else "_"
        for value_id in value_ids
    ]


def _text(arg: Arg, inputs: Sequence[str], scalars: Sequence[str]) -> str:
    match arg:
        case Slot(index):
            return inputs[index]
        case ScalarSlot(index):
            return f"seed {scalars[index]}"
        case ListArg(items):
            return f"[{', '.join(_text(item, inputs, scalars) for item in items)}]"
        case DTypeArg(name) | LayoutArg(name) | MemoryFormatArg(name):
            return f"torch.{name}"
        case DeviceArg():
            return "device"
        case LocalShape(shape, layout):
            return f"local part of {shape} {_layout(layout)}"
        case LocalStart(shape, layout, dim):
            return f"start in dim {dim} of {shape} {_layout(layout)}"
        case TransferArg():
            source, target = _layout(arg.source), _layout(arg.target)
            elsewhere = (
                "" if arg.source.mesh_id == arg.target.mesh_id else f" on {mesh_of(arg.target.mesh_id)}"
            )
            return f"{arg.dtype}{list(arg.shape)} {source} -> {target}{elsewhere}"
        case _:
            return repr(arg)


def _layout(record: LayoutRecord) -> str:
    return f"[{', '.join(str(placement_from_record(p)) for p in record.placements)}]"
