"""Pass "redistribute": one redistribution in place of several, none where nothing would move.

A -> B -> C becomes A -> C where that moves no more bytes: there and back again is a copy, a gather of which a slice
is taken a slice. Where each device keeps what it has, as on axes of one device, nothing is copied.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

import msgspec

from dtorch_runtime.ir.body import BodyOp
from dtorch_runtime.ir.transfer_cost import moves_nothing
from dtorch_runtime.passes.body import MAX_KEPT_OPS, Body
from dtorch_runtime.passes.memory import Memory
from dtorch_runtime.passes.transfers import Transfer, read_transfer, transfer_arg, transfer_template
from dtorch_runtime.wire.records import Slot, TemplateRecord, TransferArg

#: Gives what it was given, if its strides are those that a redistribution's result has; else a copy that has them.
_CONTIGUOUS: Final = "aten::contiguous.default"


def fuse_redistributes(body: Body) -> Body:
    """The body with chains of redistributions fused.

    Never across a write to a link of the chain, nor where partial terms would be kept that the program reduces.
    """
    return _Fusing(body).run()


def num_fused(before: Body, after: Body) -> int:
    """How many redistributions fewer there are."""
    first, second = (
        sum(transfer_arg(op.template) is not None for op in body.ops) for body in (before, after)
    )
    return first - second


class _Fusing:
    """The state of the pass.

    Attributes:
        makers: for a value that a redistribution makes, the op and its index.
        num_uses: of each value; results of the call are used outside, too.
        name_of: for a value that is not made any more, the one that it is.
    """

    def __init__(self, body: Body) -> None:
        self._body = body
        self._memory = Memory(body)
        self._last_use = body.last_uses()
        self._makers: dict[int, tuple[int, BodyOp]] = {}
        self._num_uses = Counter(value for op in body.ops for value in op.inputs)
        self._num_uses.update(body.outputs)
        self._name_of: dict[int, int] = {}
        #: The templates of redistributions by what they do.
        self._templates: dict[bytes, TemplateRecord] = {}
        #: For each mesh, what is done there in place of a redistribution that moves nothing.
        self._stays: dict[int, TemplateRecord] = {}
        for op in body.ops:
            arg = transfer_arg(op.template)
            if arg is not None:
                self._templates.setdefault(msgspec.msgpack.encode(arg), op.template)

    def run(self) -> Body:
        kept: list[BodyOp] = []
        for index, op in enumerate(self._body.ops):
            op = replace(op, inputs=tuple(self._name_of.get(value, value) for value in op.inputs))
            transfer = read_transfer(op, self._body.meshes)
            if transfer is not None:
                op = self._fused(op, index, transfer)
                if not self._keeps(op, index):
                    self._makers[op.outputs[0]] = (index, op)
                elif self._is_contiguous(op):
                    self._replace(op.outputs[0], op.inputs[0])
                    continue
                else:
                    self._memory.unite(op.inputs[0], op.outputs[0])
                    op = replace(op, template=self._stay(op))
            kept.append(op)
        return self._body.with_ops(self._without_unread(kept))

    def _fused(self, op: BodyOp, index: int, second: Transfer) -> BodyOp:
        """A redistribution that makes the same of what the one before it was given, while that is better."""
        while (maker := self._makers.get(op.inputs[0])) is not None:
            first = read_transfer(maker[1], self._body.meshes)
            if first is None or not self._may_fuse(maker, index, first, second):
                break
            old, new = op.inputs[0], maker[1].inputs[0]
            template = self._template(first.arg, second.arg)
            op = BodyOp(template, op.location_id, (new,), op.outputs, ())
            self._num_uses[old] -= 1
            self._num_uses[new] += 1
            self._last_use[new] = max(self._last_use[new], index)
            second = replace(second, source=first.source)
        return op

    def _may_fuse(self, maker: tuple[int, BodyOp], index: int, first: Transfer, second: Transfer) -> bool:
        made, op = maker
        [source], [middle] = op.inputs, op.outputs
        memory = self._memory
        if first.arg.shape != second.arg.shape or first.arg.dtype != second.arg.dtype:
            return False
        # Terms are reduced in the middle: the same terms kept would be rounded elsewhere.
        if first.target.is_partial or second.target.is_partial:
            return False
        if any(memory.is_written_between(value, made, index) for value in (source, middle)):
            return False
        is_held = source <= self._body.num_outer or self._last_use[source] >= index - MAX_KEPT_OPS
        if not is_held:
            return False
        try:
            direct, rest = second.bytes_from(first.source), second.bytes_from(second.source)
            saved = first.bytes_from(first.source) if self._num_uses[middle] == 1 else 0
        except (ValueError, IndexError):
            return False  # it does not fit the tensor's shape
        return direct <= rest + saved

    def _template(self, first: TransferArg, second: TransferArg) -> TemplateRecord:
        arg = TransferArg(first.shape, first.dtype, first.source, second.target)
        key = msgspec.msgpack.encode(arg)
        found = self._templates.get(key)
        if found is None:
            found = self._templates[key] = transfer_template(arg)
        return found

    def _keeps(self, op: BodyOp, index: int) -> bool:
        """Whether each device may keep what it has: nothing moves, and nobody can tell that memory is shared."""
        transfer = read_transfer(op, self._body.meshes)
        [value], [output] = op.inputs, op.outputs
        memory = self._memory
        if (
            transfer is None
            or memory.is_written_between(value, index, len(self._body.ops))
            or memory.is_written(output)
            or (memory.is_outer(value) and memory.is_outer(output))
        ):
            return False
        try:
            return moves_nothing(tuple(transfer.arg.shape), transfer.source, transfer.target)
        except (ValueError, IndexError):
            return False  # it does not fit the tensor's shape

    def _is_contiguous(self, op: BodyOp) -> bool:
        """Whether the input surely is, as the output would be, and need not have the output's number."""
        [value], [output] = op.inputs, op.outputs
        arg = transfer_arg(op.template)
        is_sure = value in self._makers or (arg is not None and not arg.shape)
        return is_sure and output > self._body.num_outer

    def _stay(self, op: BodyOp) -> TemplateRecord:
        mesh_id = op.template.mesh_ids[-1]
        found = self._stays.get(mesh_id)
        if found is None:
            found = TemplateRecord(0, _CONTIGUOUS, [Slot(0)], {}, 1, 1, 0, [mesh_id], views=[0])
            self._stays[mesh_id] = found
        return found

    def _replace(self, output: int, value: int) -> None:
        self._name_of[output] = value
        self._num_uses[value] += self._num_uses[output] - 1
        self._last_use[value] = max(self._last_use[value], self._last_use.get(output, 0))
        self._memory.unite(value, output)

    def _without_unread(self, ops: list[BodyOp]) -> list[BodyOp]:
        """Without the redistributions whose results all went into others."""
        kept: list[BodyOp] = []
        for op in reversed(ops):
            if transfer_arg(op.template) is not None and not self._num_uses[op.outputs[0]]:
                self._num_uses[op.inputs[0]] -= 1
            else:
                kept.append(op)
        kept.reverse()
        return kept
