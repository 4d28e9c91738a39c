"""``dtorch.profile``: what client, controller, nodes and workers did and when, as a trace and as a table."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dtorch.cluster import current_session
from dtorch.insight.chrome import chrome_trace
from dtorch.insight.client_tape import ClientTape
from dtorch.insight.spans import CLIENT, CONTROLLER, Clock, Span, dropped_note, lane_name, spans_of
from dtorch.insight.table import table_of
from dtorch.keywords import teaches_keywords
from dtorch.session import Answers
from dtorch_runtime.errors import DTorchError, SettingError
from dtorch_runtime.wire.records import (
    AskClock,
    ClockReply,
    LaneRecord,
    NodeRecord,
    StartTrace,
    StopTrace,
    TraceReply,
)

if TYPE_CHECKING:
    from dtorch.connection import Session

#: Questions for the time at the start; the quickest answer counts.
_NUM_PINGS: Final = 8
_DEFAULT_MAX_SPANS: Final = 100_000
#: More than this takes 200 MB of every thread, and a node's lanes travel in one message.
_MAX_MAX_SPANS: Final = 1_000_000
_starting = threading.Lock()


class Profile:
    """What ``dtorch.profile`` gives. Complete after the ``with``.

    Attributes:
        spans: everything that took time, on the client's clock; see ``dtorch.insight.spans.Span``.
        notes: what is missing from it, and why.
        clocks: of each process, how far its clock was ahead at the start, and by how much that may be wrong.
    """

    def __init__(self, path: Path | None, max_spans: int) -> None:
        self.spans: Sequence[Span] = ()
        self.notes: list[str] = []
        self.clocks: dict[str, Clock] = {}
        self._path = path
        self._max_spans = max_spans
        self._session: Session | None = None
        self._tape = ClientTape(max_spans)
        self._nodes: list[NodeRecord] = []
        self._start_ns = self._end_ns = 0
        self._lost: dict[str, str] = {}
        self._processes: list[tuple[str, list[str]]] = []

    # ---- the scope ----

    def __enter__(self) -> Profile:
        if self._session is not None:
            raise SettingError("this profile was used already; call dtorch.profile() again for another one")
        session = current_session()
        session.batches.flush_all()
        with _starting:
            if session.tape is not None:
                raise SettingError(
                    "a profile of this session runs already; end it first, or put both parts under one"
                )
            self._measure_clocks(session)
            self._nodes = sorted(session.nodes(), key=lambda node: node.devices)
            self._note_lost(session.ask(StartTrace(self._max_spans)).get())
            self._start_ns = time.monotonic_ns()
            self._session, session.tape = session, self._tape
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self._session
        assert session is not None
        answers: Answers | None = None
        try:
            answers = self._stop(session)
        finally:
            session.tape = None
        self._end_ns = time.monotonic_ns()
        self._put_together(session, answers)
        if self._path is not None:
            self._path.write_bytes(msgspec.json.encode(self.trace()))

    def _stop(self, session: Session) -> Answers | None:
        """End the traces of all processes behind the work that was issued; None when the cluster does not say."""
        is_done = False
        try:
            session.sync_all()
            is_done = True
            session.tape = None
            answers = session.ask(StopTrace()).get()
        except DTorchError as error:
            self.notes.append(f"lanes of the cluster are missing: {error}")
            if not is_done:
                with suppress(DTorchError):
                    session.ask(StopTrace())  # nobody waits for the answer
            return None
        self._note_lost(answers)
        return answers

    def _note_lost(self, answers: Answers) -> None:
        self._lost.update(answers.lost)

    def _measure_clocks(self, session: Session) -> None:
        """See docs/profiling.md for what is measured, and how wrong it can be."""
        for _ in range(_NUM_PINGS):
            before_ns = time.monotonic_ns()
            answers = session.ask(AskClock()).get()
            after_ns = time.monotonic_ns()
            self._note_lost(answers)
            for name, reply in answers.replies.items():
                assert isinstance(reply, ClockReply)
                clock = clock_of(before_ns, after_ns, reply.clock_ns)
                known = self.clocks.get(name)
                if known is None or clock.error_ns < known.error_ns:
                    self.clocks[name] = clock

    # ---- afterwards ----

    def _put_together(self, session: Session, answers: Answers | None) -> None:
        lanes = [(CLIENT, name, lane) for name, lane in self._tape.lanes()]
        lanes += self._lanes_of_cluster(answers.replies if answers is not None else {})
        spans: list[Span] = []
        shown: dict[str, dict[str, None]] = {CLIENT: {}, CONTROLLER: {}}
        for process, name, lane in lanes:
            clock = self.clocks.get(_name_of(process), Clock())
            found = spans_of(lane, process, name, clock, session.templates, session.names)
            spans += found
            shown.setdefault(process, {})[name] = None
        spans = [span for span in spans if span.end_ns > self._start_ns]
        self.spans = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
        self._processes = [(process, list(names)) for process, names in shown.items()]
        self.notes += dropped_note([(f"{process}, {name}", lane) for process, name, lane in lanes])
        traced = {process for process, _, _ in lanes}
        if answers is not None:
            why = session.lost_nodes()
            absent = [node.name for node in self._nodes] + [name for name in answers.replies if name]
            for name in dict.fromkeys(absent):
                if f"node {name}" not in traced:
                    reason = why.get(name, "it joined after the profile had begun")
                    self._lost.setdefault(name, reason)
        self.notes += [f"node {name} has no lane: {reason}" for name, reason in self._lost.items()]

    def _lanes_of_cluster(self, replies: Mapping[str, Any]) -> list[tuple[str, str, LaneRecord]]:
        order = {node.name: index for index, node in enumerate(self._nodes)}
        found = []
        for name, reply in sorted(replies.items(), key=lambda item: order.get(item[0], -1)):
            assert isinstance(reply, TraceReply)
            process = f"node {name}" if name else CONTROLLER
            for lane in reply.lanes:
                text = "messages" if lane.device < 0 else lane_name(lane)
                found.append((process, text, lane))
        return found

    def trace(self) -> dict[str, Any]:
        """The trace as an object for JSON, in the trace event format of Chrome and Perfetto."""
        return chrome_trace(
            self._processes,
            self.spans,
            self._start_ns,
            {f"node {name}": reason for name, reason in self._lost.items()},
            {
                "notes": self.notes,
                "clock_error_us": {name or CONTROLLER: c.error_ns / 1000 for name, c in self.clocks.items()},
            },
        )

    def table(self) -> str:
        """Ops by total time: on each device how often, how long, and how many bytes it received."""
        return table_of(self.spans, self._end_ns - self._start_ns, self.notes)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Profile with {len(self.spans)} spans>"


def clock_of(before_ns: int, after_ns: int, clock_ns: int) -> Clock:
    """How far a clock was ahead that showed ``clock_ns`` somewhen between two times of ours.

    Processes of one machine share a clock, and no two machines do: what may be 0 is 0.
    """
    offset_ns, error_ns = clock_ns - (before_ns + after_ns) // 2, (after_ns - before_ns + 1) // 2
    return Clock(0, 0) if abs(offset_ns) <= error_ns else Clock(offset_ns, error_ns)


def _name_of(process: str) -> str:
    """The name under which a process answers."""
    return process.removeprefix("node ") if process.startswith("node ") else ""


@teaches_keywords
def profile(path: str | os.PathLike[str] | None = None, *, max_spans: int = _DEFAULT_MAX_SPANS) -> Profile:
    """Note what the cluster does inside ``with dtorch.profile("trace.json") as p:``.

    The file opens in https://ui.perfetto.dev and chrome://tracing; ``print(p)`` shows a table. The end of the scope
    waits for what was issued inside. Captured calls run op by op meanwhile, so that each op is seen. Nothing is
    noted, and nothing is slower, outside of the scope.

    Args:
        path: of the file to write, as JSON; None writes none.
        max_spans: how many are kept of each thread; the oldest are dropped, and the trace says how many.

    Raises:
        SettingError: the folder of ``path`` does not exist, ``max_spans`` is no such number, or a profile of the
            session runs already.
        ClusterTimeout, ControllerLost, SessionClosed: as for any wait, at the beginning. At the end, what the cluster
            did not say is missing from the trace, with a note.
    """
    if not isinstance(max_spans, int) or not 0 < max_spans <= _MAX_MAX_SPANS:
        raise SettingError(f"max_spans takes an integer from 1 to {_MAX_MAX_SPANS}, got {max_spans!r}")
    if path is not None and not isinstance(path, str | os.PathLike):
        raise SettingError(f"profile takes the path of a file to write, got {path!r}; write 'trace.json'")
    target = None if path is None else Path(path)
    if target is not None and (target.is_dir() or not target.parent.is_dir()):
        raise SettingError(f"profile writes a file in a folder that exists, got {str(target)!r}")
    return Profile(target, max_spans)
