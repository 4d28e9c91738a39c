"""A body as passes see it: its ops without FREE records, which follow from them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from dtorch_runtime.ir.body import BodyOp, parse_body
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.wire.records import BodyRecord, TemplateRecord

#: So many ops longer may a pass keep a value. What is computed or gathered anew much later was dropped on purpose:
#: ``torch.utils.checkpoint`` and sharded parameters save memory so.
MAX_KEPT_OPS: Final = 32


@dataclass(frozen=True, slots=True)
class Body:
    """The ops of a captured call, in order.

    Values are numbers: the inputs of the call from 1, its outputs, then inner ones. A pass leaves inputs and outputs
    as they are, and gives what it makes numbers that are to spare. Templates that a pass makes have the id 0.

    Attributes:
        record: the template whose body it is.
        meshes: those that its templates name.
        node_of: the node of each device, as far as that is known.
    """

    record: TemplateRecord
    ops: tuple[BodyOp, ...]
    meshes: Mapping[int, DeviceMesh]
    node_of: Mapping[int, Hashable]

    @property
    def num_outer(self) -> int:
        """Values up to this number are seen outside."""
        return self.record.num_inputs + self.record.num_outputs

    @property
    def outputs(self) -> range:
        """What the call makes for others."""
        return range(self.record.num_inputs + 1, self.num_outer + 1)

    def with_ops(self, ops: Sequence[BodyOp]) -> Body:
        """The same call with other ops."""
        return replace(self, ops=tuple(ops))

    def spare_values(self) -> range:
        """Numbers of inner values that no op uses: the client keeps some back for passes."""
        record = self.record
        assert record.body is not None
        used = max((value for op in self.ops for value in op.outputs), default=0)
        return range(max(used, self.num_outer) + 1, self.num_outer + record.body.num_inner + 1)

    def last_uses(self) -> dict[int, int]:
        """For each value, the index of the last op that reads it."""
        return {value: index for index, op in enumerate(self.ops) for value in op.inputs}


def read_body(
    record: TemplateRecord,
    templates: Mapping[int, TemplateRecord],
    meshes: Mapping[int, DeviceMesh],
    node_of: Mapping[int, Hashable],
) -> Body:
    """The body of a template.

    Raises:
        GraphError: it cannot be; see ``parse_body``.
    """
    steps = parse_body(record, templates)
    return Body(record, tuple(step for step in steps if isinstance(step, BodyOp)), meshes, node_of)


def write_body(body: Body) -> TemplateRecord:
    """The template with this body; inner values are freed after their last use."""
    words: list[int] = []
    last_uses = body.last_uses()
    for index, op in enumerate(body.ops):
        words += (op.template.template_id, op.location_id, *op.inputs, *op.outputs, *op.scalars)
        dead = [v for v in dict.fromkeys(op.inputs) if last_uses[v] == index and v > body.num_outer]
        if dead:
            words += (FREE, len(dead), *dead)
    before = body.record.body
    assert before is not None
    return msgspec.structs.replace(body.record, body=BodyRecord(words, before.num_inner))
