"""What a thread did and when: spans, kept in memory and bounded. Only while somebody profiles."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping
from itertools import chain
from time import monotonic_ns
from typing import Final

from dtorch_runtime.wire.records import LaneRecord, TemplateRecord

#: int64 of one span: what, detail, start, end, extra. See ``LaneRecord``.
SPAN_WORDS: Final = 5
#: What a span of a whole batch is in the lane of a worker, where ops are template ids.
BATCH: Final = -1
#: What a span is in which a device waited for the input of an op, or for who reads what it writes to.
WAIT: Final = -2
#: What spans of a copy worker are: a value that comes from the client, and one that goes to it.
UPLOAD: Final = -3
FETCH: Final = -4


class Tape:
    """Spans of one thread, in the order in which they ended. The oldest fall off.

    Args:
        max_spans: how many are kept.
    """

    def __init__(self, max_spans: int) -> None:
        self._spans: deque[tuple[int, int, int, int, int]] = deque(maxlen=max_spans)
        self._num_added = 0
        #: Texts that spans name by their index.
        self.names: dict[str, int] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to note."""
        return self._num_added == 0

    def add(self, what: int, detail: int, start_ns: int, extra: int = 0) -> None:
        """A span that ends now."""
        self._num_added += 1
        self._spans.append((what, detail, start_ns, monotonic_ns(), extra))

    def add_named(self, name: str, detail: int, start_ns: int, extra: int = 0) -> None:
        """The same, of something that has no number."""
        self.add(self.names.setdefault(name, len(self.names)), detail, start_ns, extra)

    def lane(
        self, kind: str, device: int = -1, templates: Mapping[int, TemplateRecord] | None = None
    ) -> LaneRecord:
        """All of it, as it crosses a process, with those of the templates that it names."""
        spans = array("q", chain.from_iterable(self._spans)).tobytes()
        num_dropped = self._num_added - len(self._spans)
        # Looked up one by one: the agent's loop adds templates meanwhile.
        found = [(templates or {}).get(what) for what in sorted({span[0] for span in self._spans})]
        named = [template for template in found if template is not None and template.body is None]
        return LaneRecord(kind, device, list(self.names), num_dropped, spans, named)


class SessionTapes:
    """What an event loop does, for each session that profiles. Sessions see only how long another's message took."""

    def __init__(self) -> None:
        self._tapes: dict[int, Tape] = {}

    def __bool__(self) -> bool:
        return bool(self._tapes)

    def start(self, session: int, max_spans: int) -> None:
        """Keep spans for a session from now on."""
        self._tapes[session] = Tape(max_spans)

    def stop(self, session: int) -> Tape | None:
        """Keep none any more; what there is."""
        return self._tapes.pop(session, None)

    def add(self, session: int | None, name: str, detail: int, start_ns: int, num_bytes: int) -> None:
        """Something that ends now, on behalf of a session or, with None, of no one."""
        for number, tape in self._tapes.items():
            if session is None or session == number:
                tape.add_named(name, detail, start_ns, num_bytes)
            else:
                tape.add_named("work for another session", 0, start_ns)

    def keep(self, is_live: Callable[[int], bool]) -> None:
        """Forget sessions that have ended."""
        for session in [session for session in self._tapes if not is_live(session)]:
            del self._tapes[session]
