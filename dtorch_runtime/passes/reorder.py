"""Pass "reorder": a redistribution begins early, and what needs it comes late, so that other ops run meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dtorch_runtime.ir.body import BodyOp
from dtorch_runtime.passes.body import Body
from dtorch_runtime.passes.memory import Memory
from dtorch_runtime.passes.transfers import transfer_arg

#: A redistribution is brought forward by at most so many ops: from then on there are two tensors instead of one.
_MAX_AHEAD_OPS: Final = 16
#: So many ops between a redistribution and its first reader are enough.
_MAX_BETWEEN_OPS: Final = 8
#: So far behind the first reader are ops looked for that can come before it.
_WINDOW_OPS: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """An op, and the areas of memory that it writes to, and those that it writes to or reads or makes."""

    op: BodyOp
    written: frozenset[int]
    touched: frozenset[int]
    is_transfer: bool

    def must_follow(self, other: _Node) -> bool:
        """Whether it cannot come before an op that stands before it. Ops with random numbers keep their order."""
        return (
            not set(self.op.inputs).isdisjoint(other.op.outputs)
            or not self.written.isdisjoint(other.touched)
            or not other.written.isdisjoint(self.touched)
            or bool(self.op.scalars and other.op.scalars)
        )


def reorder_transfers(body: Body) -> Body:
    """The body in another order, which is the same on all devices.

    What an op reads has been made, and written to by the same ops, as before; a bound keeps memory near what it was.
    """
    memory = Memory(body)
    nodes: list[_Node] = []
    for op in body.ops:
        written = frozenset(memory.area(op.inputs[place]) for place in op.template.mutates)
        touched = frozenset(memory.area(value) for value in (*op.inputs, *op.outputs) if value)
        nodes.append(_Node(op, written, touched, transfer_arg(op.template) is not None))
    if not any(node.is_transfer for node in nodes):
        return body
    return body.with_ops([node.op for node in _readers_late(_transfers_early(nodes))])


def num_moved(before: Body, after: Body) -> int:
    """How many ops come earlier among those of the other body."""
    places = {id(op): place for place, op in enumerate(before.ops)}
    return sum(places[id(op)] > place for place, op in enumerate(after.ops))


def _transfers_early(nodes: list[_Node]) -> list[_Node]:
    found: list[_Node] = []
    for node in nodes:
        place = len(found)
        if node.is_transfer:
            first = max(0, place - _MAX_AHEAD_OPS)
            while place > first and not node.must_follow(found[place - 1]):
                place -= 1
            while place < len(found) and found[place].is_transfer:  # what was asked for first comes first
                place += 1
        found.insert(place, node)
    return found


def _readers_late(nodes: list[_Node]) -> list[_Node]:
    """With ops that need none of it between each redistribution and its first reader."""
    found = list(nodes)
    moved = {node.op.outputs[0] for node in nodes if node.is_transfer}
    for node in nodes:
        if not node.is_transfer:
            continue
        start = found.index(node)
        stop = min(len(found), start + 1 + _MAX_BETWEEN_OPS)
        [value] = node.op.outputs
        reader = next((place for place in range(start + 1, stop) if value in found[place].op.inputs), None)
        if reader is None:
            continue
        behind = [found[reader]]
        for place in range(reader + 1, min(len(found), reader + 1 + _WINDOW_OPS)):
            if reader - start > _MAX_BETWEEN_OPS:
                break
            other = found[place]
            if (
                other.is_transfer
                or not moved.isdisjoint(other.op.inputs)
                or any(map(other.must_follow, behind))
            ):
                behind.append(other)
            else:
                found.insert(reader, found.pop(place))
                reader += 1
    return found
