"""The body of a template: the ops of a captured call. Checked when defined, expanded where it cannot run as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from dtorch_runtime.ir.graph import GraphError
from dtorch_runtime.ir.stream import FREE, WidthsOf, walk
from dtorch_runtime.wire.records import TemplateRecord

#: The op of a template with a body: a call of a captured function, which passes may round otherwise than its
#: ops one by one, or a run of ops that an eager program repeats, which gives the same bits.
CAPTURED: Final = "dtorch::captured"
REPEATED: Final = "dtorch::repeated"


@dataclass(frozen=True, slots=True)
class BodyOp:
    """One op of a body. Values are numbers of the body (0: not wanted), scalars indices of the template's."""

    template: TemplateRecord
    location_id: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scalars: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BodyFree:
    """Inner values that no later op of the body uses."""

    values: tuple[int, ...]


Step: TypeAlias = BodyOp | BodyFree


def parse_body(record: TemplateRecord, templates: Mapping[int, TemplateRecord]) -> list[Step]:
    """The steps of a template's body, in order.

    Raises:
        GraphError: it is not whole records of known templates without bodies, a number is out of range, a value is
            used before it is made, or a device takes part in an op and not in the template.
    """
    body = record.body
    if body is None:
        raise GraphError(f"template {record.template_id} ({record.op}) has no body")
    name = f"the body of template {record.template_id} ({record.op})"
    num_outer = record.num_inputs + record.num_outputs
    steps: list[Step] = []
    made = {0, *range(1, record.num_inputs + 1)}
    widths = WidthsOf(templates)
    try:
        for start, stop in walk(body.words, widths):
            step = _step(body.words[start:stop], templates)
            if isinstance(step, BodyFree):
                if not all(num_outer < value and value in made for value in step.values):
                    raise GraphError(f"{name} frees {step.values}, which are not inner values made before")
            else:
                _check_op(record, step, made, name)
                made.update(step.outputs)
            steps.append(step)
    except GraphError:
        raise
    except ValueError as error:
        raise GraphError(f"{name}: {error}") from None
    missing = set(range(record.num_inputs + 1, num_outer + 1)) - made
    if missing or max(made) > num_outer + body.num_inner:
        raise GraphError(
            f"{name} makes {sorted(made)}, and should make its outputs and {body.num_inner} inner values"
        )
    return steps


def _step(words: Sequence[int], templates: Mapping[int, TemplateRecord]) -> Step:
    if words[0] == FREE:
        return BodyFree(tuple(words[2:]))
    template = templates[words[0]]
    first_output = 2 + template.num_inputs
    first_scalar = first_output + template.num_outputs
    return BodyOp(
        template,
        words[1],
        tuple(words[2:first_output]),
        tuple(words[first_output:first_scalar]),
        tuple(words[first_scalar:]),
    )


def _check_op(record: TemplateRecord, step: BodyOp, made: set[int], name: str) -> None:
    op = step.template.op
    if step.template.body is not None:
        raise GraphError(f"{name} contains another body")
    if not set(step.inputs) <= made - {0}:
        raise GraphError(f"{name}: {op} uses values {step.inputs}, not all of which were made before")
    new = [value for value in step.outputs if value]
    if any(value <= record.num_inputs or value in made for value in new) or len(set(new)) != len(new):
        raise GraphError(f"{name}: {op} makes values {step.outputs}, which exist or cannot be")
    if not all(0 < index < record.num_scalars for index in step.scalars):
        raise GraphError(f"{name}: {op} takes scalars {step.scalars} of {record.num_scalars}")
    if not set(step.template.mesh_ids) <= set(record.mesh_ids):
        raise GraphError(
            f"{name}: {op} runs on meshes {step.template.mesh_ids}, the template on {record.mesh_ids}"
        )


def expand(
    record: TemplateRecord, steps: Sequence[Step], words: Sequence[int], start: int
) -> tuple[list[int], list[int], list[int]]:
    """The op records that one record of a template with a body stands for.

    Args:
        words, start: the op stream, and where the record stands in it.

    Returns:
        The records; where each step begins in them; the id of each value of the body, by its number.
    """
    assert record.body is not None
    num_outer = record.num_inputs + record.num_outputs
    scalars = words[start + 2 + num_outer : start + record.width]
    inner = range(scalars[0], scalars[0] + record.body.num_inner)
    ids = [0, *words[start + 2 : start + 2 + num_outer], *inner]
    expanded: list[int] = []
    starts: list[int] = []
    for step in steps:
        starts.append(len(expanded))
        if isinstance(step, BodyFree):
            expanded += (FREE, len(step.values), *(ids[value] for value in step.values))
        else:
            expanded += (step.template.template_id, step.location_id)
            expanded += (ids[value] for value in (*step.inputs, *step.outputs))
            expanded += (scalars[index] for index in step.scalars)
    return expanded, starts, ids
