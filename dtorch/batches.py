"""The graphs of a session: which hold ops that are old enough to be sent, and what dead ones have left."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from dtorch_runtime.ir.stream import FREE, pack

if TYPE_CHECKING:  # a session makes graphs
    from dtorch.connection import Session
    from dtorch.graph import Graph

#: For so long issued ops are counted again, and a graph is waited for that sends a batch.
_COUNTS_FOR_S = 0.2


class Batches:
    """Knows the graphs of one session, without keeping them alive."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        #: Guarded by the lock: graph id -> graph.
        self._graphs: WeakValueDictionary[int, Graph] = WeakValueDictionary()
        #: What graphs had not sent when they died: graph id, words, number of ops, dropped values.
        self.orphans: list[tuple[int, list[int], int, list[int]]] = []
        #: Guarded by the lock: runs of ops that were found to repeat, and sent as one record.
        self.num_replays = 0

    def add(self, graph: Graph) -> None:
        """Watch a graph."""
        with self._lock:
            self._graphs[graph.graph_id] = graph

    def count_replays(self, count: int) -> None:
        """So many runs of ops were sent as one record each."""
        if count:
            with self._lock:
                self.num_replays += count

    def is_any_begun(self) -> bool:
        """Whether some graph has ops to send."""
        return any(graph.words for graph in self._live())

    def num_issued_ops(self) -> int:
        """Ops that were issued, sent or not.

        A batch that is being sent may be in both counts, or in neither, so they are taken again for a while; for no
        longer, because the thread of a graph may wait for room.
        """
        counts, deadline_s = self._session.counts, time.monotonic() + _COUNTS_FOR_S
        while True:
            num_batches, num_sent = counts.num_batches, counts.num_ops
            unsent = sum(orphan[2] for orphan in self.orphans)
            is_still = True
            for graph in self._live():
                # A batch is sent and taken off the graph under its lock.
                is_free = graph.lock.acquire(timeout=max(0.0, deadline_s - time.monotonic()))
                unsent += graph.num_ops + graph.num_held
                if is_free:
                    graph.lock.release()
                is_still &= is_free
            if (is_still and counts.num_batches == num_batches) or time.monotonic() >= deadline_s:
                break
        return num_sent + unsent

    def flush_all(self) -> int:
        """Send everything; returns the number of the last message. Raises as ``Graph.flush``."""
        return max((graph.flush() for graph in self._live()), default=0)

    def flush_old(self, age_s: float) -> bool:
        """Send the batches of that age, if there is room. False when no graph has ops to send."""
        limit_s = time.monotonic() - age_s
        is_busy = False
        for graph in self._live():
            is_busy |= graph.flush_if_older(limit_s, keeps=age_s > 0)
        while self.orphans and self._session.has_room(self.orphans[0][2]):
            graph_id, words, num_ops, dropped = self.orphans[0]
            self._session.send_ops(graph_id, pack([*words, FREE, len(dropped), *dropped]), num_ops)
            del self.orphans[0]  # only now: it is counted in one place or the other
        return is_busy

    def _live(self) -> list[Graph]:
        with self._lock:
            return list(self._graphs.values())
