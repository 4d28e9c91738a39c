"""``dtorch.explain``: what a captured call issued when it was recorded, and what is left of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtorch.cluster import session_if_open
from dtorch.insight.ops import ShownOp, value_names
from dtorch.meshes import mesh_of, node_of_devices
from dtorch_runtime.ir.body import BodyOp, parse_body
from dtorch_runtime.passes.rewrite import OwnTemplates, rewrite
from dtorch_runtime.wire.records import TemplateRecord

if TYPE_CHECKING:  # recordings keep one of these
    from dtorch.replay.templates import Op


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """The ops of a captured call, without its tensors.

    Attributes:
        name: of the function.
        recorded: what it issued.
        kept: those of them that are issued again: without dead values.
        position: the index of each value among the inputs and outputs of the call.
        num_inputs: how many of them are inputs.
        record: the template of the call.
    """

    name: str
    recorded: Sequence[Op]
    kept: Sequence[Op]
    position: Mapping[int, int]
    num_inputs: int
    record: TemplateRecord

    def numbers(self) -> dict[int, str]:
        """The name of each value: its number in the body of the call, where it has one."""
        number = {value: index + 1 for value, index in self.position.items()}
        used = {value for op in self.kept for value in op.inputs}
        for ops in (self.kept, self.recorded):
            for op in ops:
                for value in op.outputs:
                    if value and value not in number and (value in used or ops is self.recorded):
                        number[value] = len(number) + 1
        return {0: "_"} | dict(zip(number, value_names(number.values()), strict=True))

    def shown(self, ops: Sequence[Op]) -> Iterator[ShownOp]:
        """Ops as people read them."""
        names = self.numbers()
        num_seeds = 0
        for op in ops:
            seeds = tuple(str(num_seeds + index) for index in range(len(op.draws)))
            num_seeds += len(seeds)
            yield ShownOp(
                op.template,
                tuple(names[value] for value in op.inputs),
                tuple(names[value] for value in op.outputs),
                seeds,
                op.location_id,
            )

    def __str__(self) -> str:
        names = self.numbers()
        outer = [names[value] for value in self.position]
        inputs, outputs = ", ".join(outer[: self.num_inputs]), ", ".join(outer[self.num_inputs :])
        kept = {id(op) for op in self.kept}
        lines = [
            f"{self.name}({inputs}) -> {outputs or 'nothing'}",
            f"as recorded, {len(self.recorded)} ops:",
        ]
        for op, shown in zip(self.recorded, self.shown(self.recorded), strict=True):
            lines.append(f"  {' ' if id(op) in kept else '-'} {shown}")
        lines.append(f"without dead values, {len(self.kept)} ops:")
        lines += [f"    {shown}" for shown in self.shown(self.kept)]
        return "\n".join(lines)


def after_passes(
    record: TemplateRecord,
    templates: Mapping[int, TemplateRecord],
    passes: Sequence[str],
    node_of: Mapping[int, str],
) -> list[ShownOp]:
    """The ops of a call as the passes of the controller leave them: they are pure, and give the same here."""
    meshes = {number: mesh_of(number) for number in record.mesh_ids}
    found = rewrite(record, templates, meshes, passes, OwnTemplates(), node_of=node_of)
    known = {**templates, **{made.template_id: made for made in found.made}}
    return [
        ShownOp(
            step.template,
            tuple(value_names(step.inputs)),
            tuple(value_names(step.outputs)),
            tuple(str(index - 1) for index in step.scalars),
            step.location_id,
        )
        for step in parse_body(found.record, known)
        if isinstance(step, BodyOp)
    ]


def explain() -> None:
    """Print the last captured call of this thread's graph: as it was recorded, and what is left of it.

    First its ops as they were recorded: ``-`` marks those that are not issued again, because nothing depends on what
    they make. Then the others, and at last what the passes of the controller make of them, which is what workers run.
    ``%1`` and so on are the inputs of the call, then its outputs, then values inside.

    ``dtorch.capture.explain(function)`` tells how often a function was replayed, and why it was recorded anew.
    """
    session = session_if_open()
    call = session.default_graph().last_call if session is not None else None
    if session is None or call is None:
        print("no captured function was called on this thread's graph")
        return
    print(call)
    passes = session.settings.pass_names
    if call.kept and passes:
        left = after_passes(call.record, session.templates, passes, node_of_devices(session.nodes()))
        print(f"after the passes {', '.join(passes)}, {len(left)} ops:")
        for op in left:
            print(f"    {op}")
