"""Pass "dead": ops that nobody needs are left out.

What such an op would have raised on a worker is not raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from dtorch_runtime.passes.body import Body
from dtorch_runtime.wire.records import TemplateRecord


class _Op(Protocol):
    @property
    def template(self) -> TemplateRecord: ...
    @property
    def inputs(self) -> tuple[int, ...]: ...
    @property
    def outputs(self) -> tuple[int, ...]: ...


_AnyOp = TypeVar("_AnyOp", bound=_Op)


def without_dead(
    ops: Sequence[_AnyOp], wanted: Iterable[int], must_stay: Callable[[_AnyOp], bool] | None = None
) -> list[_AnyOp]:
    """The ops that something wanted depends on, that write, that make nothing, or that must stay; in order."""
    needed = set(wanted)
    kept: list[_AnyOp] = []
    for op in reversed(ops):
        if (
            op.template.mutates
            or not op.outputs
            or needed.intersection(op.outputs)
            or (must_stay is not None and must_stay(op))
        ):
            needed.update(op.inputs)
            kept.append(op)
    kept.reverse()
    return kept


def remove_dead(body: Body) -> Body:
    """The body without dead ops; outputs that nobody reads are not wanted."""
    ops = without_dead(body.ops, body.outputs)
    used = {*body.outputs, *(value for op in ops for value in op.inputs)}
    return body.with_ops(
        [
            op
            if used.issuperset(op.outputs)
            else replace(op, outputs=tuple(value if value in used else 0 for value in op.outputs))
            for op in ops
        ]
    )
