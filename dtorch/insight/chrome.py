"""Spans as a trace that chrome://tracing and https://ui.perfetto.dev open: the JSON trace event format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dtorch.insight.spans import Span

_Event = dict[str, Any]


class _Places:
    """Numbers for processes and lanes, in the order in which they are met."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._lanes: dict[tuple[str, str], int] = {}

    def of(self, process: str, lane: str) -> dict[str, int]:
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        tid = self._lanes.setdefault((process, lane), len(self._lanes) + 1)
        return {"pid": pid, "tid": tid}

    def metadata(self) -> Iterable[_Event]:
        for process, pid in self._processes.items():
            yield _meta("process_name", pid, 0, name=process)
            yield _meta("process_sort_index", pid, 0, sort_index=pid)
        for (process, lane), tid in self._lanes.items():
            yield _meta("thread_name", self._processes[process], tid, name=lane)
            yield _meta("thread_sort_index", self._processes[process], tid, sort_index=tid)


def chrome_trace(
    processes: Sequence[tuple[str, Sequence[str]]],
    spans: Sequence[Span],
    start_ns: int,
    lost: Mapping[str, str],
    other: Mapping[str, Any],
) -> dict[str, Any]:
    """The trace as an object for JSON.

    Args:
        processes: in the order in which they are shown, with their lanes.
        start_ns: what becomes time 0.
        lost: processes that have no lanes, and why.
        other: what else is to be kept with the trace.
    """
    places = _Places()
    for process, lanes in processes:
        for lane in lanes:
            places.of(process, lane)
    events: list[_Event] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        events += _events_of(span, places.of(span.process, span.lane), start_ns)
    events += _flows(spans, places, start_ns)
    end_us = max((span.end_ns - start_ns for span in spans), default=0) / 1000
    for process, reason in lost.items():
        place = places.of(process, "lost")
        events.append({"ph": "i", "s": "p", "name": f"no lane: {reason}", "ts": end_us, **place})
    return {
        "traceEvents": [*places.metadata(), *events],
        "displayTimeUnit": "ns",
        "otherData": dict(other),
    }


def _meta(what: str, pid: int, tid: int, **args: Any) -> _Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _events_of(span: Span, place: Mapping[str, int], start_ns: int) -> list[_Event]:
    begin_us, end_us = (span.start_ns - start_ns) / 1000, (span.end_ns - start_ns) / 1000
    event: _Event = {"name": span.name, "cat": span.category, "ts": begin_us, **place}
    if span.is_async:
        event["id"] = span.args["fetch"]
        return [{"ph": "b", **event}, {"ph": "e", **event, "ts": end_us}]
    return [{"ph": "X", **event, "dur": end_us - begin_us, "args": dict(span.args)}]


def _flows(spans: Sequence[Span], places: _Places, start_ns: int) -> list[_Event]:
    """An arrow for each batch and device: from the client through controller and node to the worker."""
    by_batch: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.batch is not None:
            by_batch[span.batch].append(span)
    events: list[_Event] = []
    for batch, members in by_batch.items():
        sent = [span for span in members if span.category == "client"]
        carried = [span for span in members if span.category == "message"]
        for worker in members:
            if worker.category != "batch" or not sent:
                continue
            ways = [
                span
                for span in carried
                if not span.process.startswith("node") or span.process == worker.process
            ]
            path = [*sent[:1], *sorted(ways, key=lambda span: span.process != "controller"), worker]
            for index, span in enumerate(path):
                phase = "s" if index == 0 else "f" if span is worker else "t"
                event: _Event = {"ph": phase, "name": "batch", "cat": "flow", "id": f"{batch}:{worker.lane}"}
                if phase == "f":
                    event["bp"] = "e"
                event["ts"] = (span.start_ns - start_ns) / 1000
                events.append({**event, **places.of(span.process, span.lane)})
    return events
