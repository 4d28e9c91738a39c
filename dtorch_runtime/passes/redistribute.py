"""Pass "redistribute": one redistribution in place of several, none where nothing would move.

A -> B -> C becomes A -> C where that moves no more bytes: there and back again is a copy, a gather of which a slice
is taken a slice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec

from dtorch_runtime.ir.body import BodyOp
from dtorch_runtime.passes.body import MAX_KEPT_OPS, Body
from dtorch_runtime.passes.memory import Memory
from dtorch_runtime.passes.transfers import Transfer, read_transfer, transfer_arg, transfer_template
from dtorch_runtime.wire.records import TemplateRecord, TransferArg


def fuse_redistributes(body: Body) -> Body:
    """The body with chains of redistributions fused.

    Never across a write to a link of the chain, nor where partial terms would be kept that the program reduces.
    """
    return _Fusing(body).run()


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
                if self._is_needless(op):
                    self._replace(op.outputs[0], op.inputs[0])
                    continue
                self._makers[op.outputs[0]] = (index, op)
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

    def _is_needless(self, op: BodyOp) -> bool:
        """Whether it copies what need not be copied.

        Its input must be contiguous, as its output would be: the result of another redistribution is.
        """
        arg = transfer_arg(op.template)
        [value], [output] = op.inputs, op.outputs
        if arg is None or arg.source != arg.target or output <= self._body.num_outer:
            return False
        memory = self._memory
        return (
            value in self._makers
            and not memory.is_written(value)
            and not memory.is_written(output)
            and not (memory.is_outer(value) and memory.is_outer(output))
        )

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
