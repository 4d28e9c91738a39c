"""From ops that were issued one by one to one template with a body. Decisions only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dtorch_runtime.ir.body import CAPTURED
from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.wire.records import BodyRecord, TemplateRecord


@dataclass(frozen=True, slots=True)
class Op:
    """One op that was issued. Values by their ids; ``draws`` gave its seeds."""

    template: TemplateRecord
    location_id: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    draws: tuple[Callable[[], int], ...]


def free_inputs(ops: Sequence[Op]) -> list[int]:
    """The values that ops read and that none of them made, in the order of their first use."""
    made: set[int] = set()
    found: dict[int, None] = {}
    for op in ops:
        found.update(dict.fromkeys(value for value in op.inputs if value not in made))
        made.update(op.outputs)
    return list(found)


def num_to_spare(names: Iterable[str]) -> int:
    """How many inner values a body keeps back for passes: two redistributions may become one, of a value of its own."""
    return sum(name == "dtorch::redistribute" for name in names)


def make_template(
    ops: Sequence[Op], inputs: Sequence[int], outputs: Sequence[int], written: Iterable[int]
) -> tuple[TemplateRecord, list[Callable[[], int]]]:
    """One template for all the ops, and what gives its seeds.

    Args:
        ops: none of them dead; they make every output and no input.
        inputs, outputs: ids of values.
        written: those inputs whose memory the ops write to.
    """
    number = {value: index for index, value in enumerate((*inputs, *outputs), 1)}
    num_outer = len(number)
    last_use = {value: index for index, op in enumerate(ops) for value in op.inputs}
    words: list[int] = []
    draws: list[Callable[[], int]] = []
    meshes: dict[int, None] = {}
    for index, op in enumerate(ops):
        for value in op.outputs:
            if value and value in last_use and value not in number:
                number[value] = len(number) + 1
        words += (op.template.template_id, op.location_id, *(number[value] for value in op.inputs))
        words += (number.get(value, 0) for value in op.outputs)
        words += range(1 + len(draws), 1 + len(draws) + len(op.draws))
        draws += op.draws
        meshes.update(dict.fromkeys(op.template.mesh_ids))
        dead = [number[v] for v in dict.fromkeys(op.inputs) if last_use[v] == index and number[v] > num_outer]
        if dead:
            words += (FREE, len(dead), *dead)
    written = set(written)
    record = TemplateRecord(
        template_id=0,
        op=CAPTURED,
        args=[],
        kwargs={},
        num_inputs=len(inputs),
        num_outputs=len(outputs),
        num_scalars=1 + len(draws),
        mesh_ids=list(meshes),
        mutates=[index for index, value in enumerate(inputs) if value in written],
        body=BodyRecord(words, len(number) - num_outer + num_to_spare(op.template.op for op in ops)),
    )
    return record, draws
