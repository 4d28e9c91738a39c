"""What this process does for a session: always counted, and noted span by span while somebody profiles."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic_ns

from dtorch_runtime.tape import Tape
from dtorch_runtime.wire.records import LaneRecord


@dataclass(slots=True)
class Counts:
    """Since the session began. Changed under the lock of the session, or by the one thread that reads its link."""

    #: Ops that were sent; those of captured calls count each.
    num_ops: int = 0
    num_batches: int = 0
    num_fetches: int = 0
    #: Calls that were planned, because the cache of calls did not have them.
    num_misses: int = 0
    #: To the controller, and from it.
    sent_bytes: int = 0
    received_bytes: int = 0


class ClientTape:
    """Spans of every thread that uses a session, and its fetches, which overlap.

    Args:
        max_spans: how many are kept of each thread, and of the fetches.
    """

    def __init__(self, max_spans: int) -> None:
        self._max_spans = max_spans
        self._lock = threading.Lock()
        #: By the ident of the thread: its name and its spans.
        self._threads: dict[int, tuple[str, Tape]] = {}
        self._fetches = Tape(max_spans)
        #: Fetch id -> what it is of, and when it began.
        self._begun: dict[int, tuple[str, int]] = {}

    def add(self, name: str, detail: int, start_ns: int, extra: int = 0) -> None:
        """A span of this thread that ends now."""
        self._tape().add_named(name, detail, start_ns, extra)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What is done inside is a span of this thread."""
        start_ns = monotonic_ns()
        try:
            yield
        finally:
            self.add(name, 0, start_ns)

    def begin_fetch(self, fetch_id: int, what: str) -> None:
        """A value was asked for."""
        self._begun[fetch_id] = what, monotonic_ns()

    def end_fetch(self, fetch_id: int) -> None:
        """It is here, or never will be. Other waits that end are of no interest."""
        begun = self._begun.pop(fetch_id, None)
        if begun is not None:
            what, start_ns = begun
            self._fetches.add_named(what, fetch_id, start_ns)

    def lanes(self) -> list[tuple[str, LaneRecord]]:
        """The spans of each thread, by its name; those of the fetches last."""
        with self._lock:
            threads = list(self._threads.values())
        return [
            *((name, tape.lane("client")) for name, tape in threads),
            ("fetches", self._fetches.lane("fetches")),
        ]

    def _tape(self) -> Tape:
        ident = threading.get_ident()
        found = self._threads.get(ident)
        if found is None:
            with self._lock:
                found = self._threads[ident] = (threading.current_thread().name, Tape(self._max_spans))
        return found[1]
