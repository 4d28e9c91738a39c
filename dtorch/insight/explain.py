"""``dtorch.explain``: what a captured call issued when it was recorded, and what is left of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtorch.cluster import session_if_open
from dtorch.insight.ops import ShownOp, value_names

if TYPE_CHECKING:  # recordings keep one of these
    from dtorch.replay.recording import Op


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """The ops of a captured call, without its tensors.

    Attributes:
        name: of the function.
        recorded: what it issued.
        kept: those of them that are issued again: without dead values.
        position: the index of each value among the inputs and outputs of the call.
        num_inputs: how many of them are inputs.
    """

    name: str
    recorded: Sequence[Op]
    kept: Sequence[Op]
    position: Mapping[int, int]
    num_inputs: int

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


def explain() -> None:
    """Print the last captured call of this thread's graph: its ops as they were recorded, and what is left of them.

    ``-`` marks ops that are not issued again, because nothing depends on what they make. ``%1`` and so on are the
    inputs of the call, then its outputs, then values inside. See ``dtorch.capture.explain(function)`` for how often
    a function was replayed, and why it was recorded anew.
    """
    session = session_if_open()
    call = session.default_graph().last_call if session is not None else None
    print("no captured function was called on this thread's graph" if call is None else call)
