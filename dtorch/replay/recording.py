"""What a captured function issues while it runs for the first time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from dtorch.graph import Graph, recorded_here
from dtorch.location import capture, describe
from dtorch.replay.templates import Op
from dtorch_runtime.errors import CaptureError
from dtorch_runtime.ir.body import expand, parse_body
from dtorch_runtime.ir.stream import FREE, WidthsOf, walk


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
        widths = WidthsOf(templates)
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
