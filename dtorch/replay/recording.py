"""What a captured function issues while it runs for the first time, and the template that is made of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dtorch.graph import Graph, recorded_here
from dtorch.location import capture, describe
from dtorch_runtime.errors import CaptureError
from dtorch_runtime.ir.body import expand, parse_body
from dtorch_runtime.ir.stream import FREE, walk
from dtorch_runtime.wire.records import BodyRecord, TemplateRecord


class Recording:
    """Everything that a graph issues inside ``with``.

    Attributes:
        words: the op stream so far.
        draws: what gave the seed of each random op, in order.
        refusal: why it cannot be replayed, and where; None while it can.
    """

    def __init__(self, graph: Graph, name: str, *, raises: bool) -> None:
        """``raises``: whether what cannot be replayed raises, or goes on without a recording."""
        self.graph = graph
        self.words: list[int] = []
        self.draws: list[Callable[[], int]] = []
        self.refusal: str | None = None
        self._name = name
        self._raises = raises
        self._freed: set[int] = set()
        self._outer: Recording | None = None

    def __enter__(self) -> Recording:
        graph = self.graph
        graph.flush()
        graph.recording = self
        graph.freed = self._freed
        self._outer = getattr(recorded_here, "recording", None)
        recorded_here.recording = self
        return self

    def __exit__(self, *_: object) -> None:
        graph = self.graph
        recorded_here.recording = self._outer
        if graph.recording is not self:
            return
        with graph.lock:
            graph.recording = None
            self.words += graph.words

    def close(self) -> None:
        """Stop to note what is freed."""
        self.graph.freed = None

    def refuse(self, reason: str) -> None:
        """Something cannot be replayed.

        Raises:
            CaptureError: unless recordings may end quietly.
        """
        place = describe(capture(sys._getframe()))
        self.refusal = f"it {reason} ({place})"
        self.graph.recording = None
        recorded_here.recording = self._outer
        if self._raises:
            raise CaptureError(
                f"{self._name} cannot be captured: it {reason}; or write @dtorch.capture(fallback=True) to run such "
                f"calls as they are\n  at {place}"
            )

    # ---- afterwards ----

    def ops(self) -> list[Op]:
        """The ops in order; those of captured calls in it among them."""
        return list(self._ops(self.words, iter(self.draws)))

    def _ops(self, words: Sequence[int], draws: Iterator[Callable[[], int]]) -> Iterator[Op]:
        templates = self.graph.session.templates
        widths = {number: template.width for number, template in templates.items()}
        for start, _ in walk(words, widths):
            if words[start] == FREE:
                continue
            template = templates[words[start]]
            if template.body is not None:
                expanded, _, _ = expand(template, parse_body(template, templates), words, start)
                yield from self._ops(expanded, draws)
                continue
            first_output = start + 2 + template.num_inputs
            first_scalar = first_output + template.num_outputs
            yield Op(
                template,
                words[start + 1],
                tuple(words[start + 2 : first_output]),
                tuple(words[first_output:first_scalar]),
                tuple(next(draws) for _ in range(template.num_scalars)),
            )

    def still_held(self, value_ids: Iterable[int]) -> set[int]:
        """Those of the values that a symbol stands for still. Only before ``close``."""
        with self.graph.lock:
            return set(value_ids) - self._freed - set(self.graph.dropped)


@dataclass(frozen=True, slots=True)
class Op:
    """One op that was recorded. Values by their ids; ``draws`` gave its seeds."""

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
        op="dtorch::captured",
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
