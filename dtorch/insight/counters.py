"""``dtorch.counters``: how much the session of this process has done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtorch.cluster import session_if_open
from dtorch.replay.capture import count_calls
from dtorch_runtime.wire.records import AskCounts, CountsReply, ThreadsRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Since the session began.

    Attributes:
        ops: that were issued; those of captured calls count each.
        misses: calls that had to be planned, because the cache of calls did not have them.
        replays: calls of captured functions that issued one record.
        recordings: calls of captured functions that were recorded.
        auto_replays: runs of ops that ``auto_capture`` found to repeat, and that were sent as one record.
        batches: messages with ops.
        fetches: values that were asked for.
        link_bytes: bytes from one process to another: this session's between ``"client"`` and ``"controller"``, and
            the bytes of tensors between nodes since they joined, of all sessions, by the names of the nodes.
        threads: how each node divides its cores among its workers: ``num_threads`` for intra-op parallelism for each of
            the ``num_workers`` that were started, of ``num_cores``, its share of the machine; ``is_fixed`` when the
            setting ``num_threads`` says so.
        notes: what is missing, and why.
    """

    ops: int = 0
    misses: int = 0
    replays: int = 0
    recordings: int = 0
    auto_replays: int = 0
    batches: int = 0
    fetches: int = 0
    link_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    threads: Mapping[str, ThreadsRecord] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = ("ops", "misses", "replays", "recordings", "auto_replays", "batches", "fetches")
        lines = [f"{name:<12}{getattr(self, name):>14}" for name in counts]
        links = [(f"{source} -> {target}", count) for (source, target), count in self.link_bytes.items()]
        width = max((len(name) for name, _ in links), default=0)
        lines += [f"{name:<{width}}  {count} bytes" for name, count in links]
        lines += [f"{name}: {_divided(threads)}" for name, threads in self.threads.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _divided(threads: ThreadsRecord) -> str:
    why = "by DTORCH_NUM_THREADS" if threads.is_fixed else f"of {threads.num_cores} cores"
    return f"{threads.num_threads} intra-op threads for each of {threads.num_workers} workers, {why}"


def counters() -> Counters:
    """What the current session has done so far; ``print()`` shows a table. All 0 when none is open.

    Raises:
        ClusterTimeout, ControllerLost, SessionClosed: as for any wait: nodes are asked for the bytes they have sent.
    """
    session = session_if_open()
    if session is None:
        return Counters()
    answers = session.ask(AskCounts()).get()
    counts = session.counts
    links = {("client", "controller"): counts.sent_bytes, ("controller", "client"): counts.received_bytes}
    threads: dict[str, ThreadsRecord] = {}
    for node, reply in answers.replies.items():
        if isinstance(reply, CountsReply):
            if reply.threads is not None:
                threads[node] = reply.threads
            links |= {(node, other): count for other, count in reply.sent_bytes.items()}
    replays, recordings = count_calls(session)
    return Counters(
        ops=session.batches.num_issued_ops(),
        misses=counts.num_misses,
        replays=replays,
        recordings=recordings,
        auto_replays=session.batches.num_replays,
        batches=counts.num_batches,
        fetches=counts.num_fetches,
        link_bytes=links,
        threads=dict(sorted(threads.items())),
        notes=tuple(f"node {name} did not say what it sent: {why}" for name, why in answers.lost.items()),
    )
