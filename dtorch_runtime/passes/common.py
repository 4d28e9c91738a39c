"""Pass "common": an op that was done before, on the same values, is not done again."""

from __future__ import annotations

from dataclasses import replace

from dtorch_runtime.ir.body import BodyOp
from dtorch_runtime.passes.body import MAX_KEPT_OPS, Body
from dtorch_runtime.passes.memory import Memory


def share_common(body: Body) -> Body:
    """The body with each common subexpression once.

    Never ops that draw random numbers or write, nor across a write to what they read, nor where their results are
    written to, or may be, because both are seen outside.
    """
    return _Sharing(body).run()


class _Sharing:
    """The state of the pass.

    Attributes:
        first_of: for a value that is not made any more, the one that was made first.
        name_of: for a value made first, the number that it gets, where that is another.
        last_use: the last op that reads a value, or one that became the same.
    """

    def __init__(self, body: Body) -> None:
        self._body = body
        self._memory = Memory(body)
        self._last_use = body.last_uses()
        self._first_of: dict[int, int] = {}
        self._name_of: dict[int, int] = {}
        #: Template and inputs -> the op that came last with these, and its index.
        self._seen: dict[tuple[int, tuple[int, ...]], tuple[int, BodyOp]] = {}

    def run(self) -> Body:
        kept: dict[int, BodyOp] = {}
        for index, op in enumerate(self._body.ops):
            op = replace(op, inputs=tuple(self._first_of.get(value, value) for value in op.inputs))
            if op.scalars or op.template.mutates or not op.outputs:
                kept[index] = op
                continue
            # Templates that a pass has made have no id yet; equal ones of them are one object.
            key = (op.template.template_id or -id(op.template), op.inputs)
            before = self._seen.get(key)
            if before is not None and self._is_same(*before, index, op):
                kept[before[0]] = merged = self._merge(kept[before[0]], op)
                self._seen[key] = (before[0], merged)
            else:
                kept[index] = op
                self._seen[key] = (index, op)
        return self._body.with_ops([self._renamed(op) for op in kept.values()])

    def _is_same(self, first: int, before: BodyOp, second: int, op: BodyOp) -> bool:
        memory, num_outer = self._memory, self._body.num_outer
        if any(memory.is_written_between(value, first, second) for value in op.inputs):
            return False
        views = op.template.views
        for place, (a, b) in enumerate(zip(before.outputs, op.outputs, strict=True)):
            a_name = self._name_of.get(a, a)
            if b and 0 < a_name <= num_outer and b <= num_outer:
                return False  # two results of the call
            if any(value and memory.is_written(value) for value in (a, b)):
                return False
            is_view = views is not None and views[place] >= 0
            if a and b and not is_view and memory.is_outer(a) and memory.is_outer(b):
                return False  # the caller may write to one of them
        return max(self._last_need(value, first) for value in before.outputs) >= second - MAX_KEPT_OPS

    def _last_need(self, value: int, made: int) -> int:
        name = self._name_of.get(value, value)
        return len(self._body.ops) if 0 < name <= self._body.num_outer else self._last_use.get(value, made)

    def _merge(self, before: BodyOp, op: BodyOp) -> BodyOp:
        """The first op, with what is wanted of either."""
        outputs = list(before.outputs)
        for place, (a, b) in enumerate(zip(before.outputs, op.outputs, strict=True)):
            if not b:
                continue
            if not a:
                outputs[place] = b
                continue
            self._first_of[b] = a
            self._last_use[a] = max(self._last_use.get(a, 0), self._last_use.get(b, 0))
            self._memory.unite(a, b)
            if b <= self._body.num_outer:
                self._name_of[a] = b
        return replace(before, outputs=tuple(outputs))

    def _renamed(self, op: BodyOp) -> BodyOp:
        name = self._name_of
        return replace(
            op,
            inputs=tuple(name.get(value, value) for value in op.inputs),
            outputs=tuple(name.get(value, value) for value in op.outputs),
        )
