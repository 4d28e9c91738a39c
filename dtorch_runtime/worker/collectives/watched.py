"""What a meeting of threads orders, and what they read of one another in it, told to the race detector."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from dtorch_runtime.worker.races import Point
from dtorch_runtime.worker.watch import Watch


class MeetingWatch:
    """Of one meeting. A stream has the name of its thread, which calls."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._came: list[Point] = []
        self._left: list[Point] = []

    def come(self) -> None:
        """The thread brings something: all that it did before."""
        self._came.append(self._watch.record(_stream()))

    def begin(self) -> None:
        """The thread was told that all have come."""
        for point in self._came:
            self._watch.wait_for(_stream(), point)

    def use(self, reads: Iterable[object], writes: Iterable[object]) -> None:
        """The thread has read what was brought, and made something of it.

        Raises:
            DataRace: nothing orders this and what another thread does with the same memory.
        """
        self._watch.uses(_stream(), reads, writes)

    def leave(self) -> None:
        """The thread reads nothing any more, or has built for others."""
        self._left.append(self._watch.record(_stream()))

    def end(self) -> None:
        """The thread was told that all who read have left, or that its piece was built."""
        for point in self._left:
            self._watch.wait_for(_stream(), point)


def _stream() -> str:
    return threading.current_thread().name
