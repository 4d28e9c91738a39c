"""What was noted while somebody profiled, put together from all processes on the client's clock."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from dtorch.location import describe
from dtorch.meshes import mesh_of
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.records import placement_from_record
from dtorch_runtime.ir.transfer import plan_redistribute
from dtorch_runtime.tape import BATCH, FETCH, SPAN_WORDS, UPLOAD, WAIT
from dtorch_runtime.wire.records import LaneRecord, LayoutRecord, TemplateRecord, TransferArg
from dtorch_runtime.worker.blobs import dtype_of

Category: TypeAlias = Literal["op", "captured call", "copy", "wait", "batch", "message", "client", "fetch"]

CLIENT = "client"
CONTROLLER = "controller"
_FETCHES = "fetches"
#: The two workers of a device.
WORKER = "worker"
COMMUNICATION = "communication"
COPY = "copy"
_COPIES = {UPLOAD: "upload", FETCH: "fetch"}
#: The messages that carry a batch on its way to the workers, and what the client calls it.
_CARRIES_BATCH = frozenset(("batch", "ops", "subgraph"))


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        process: the client, the controller, or ``node NAME``.
        lane: the thread in it. Spans of a lane follow one another or lie in one another; those of ``fetches`` overlap.
        start_ns, end_ns: on the clock of the client, ``time.monotonic_ns()``.
        batch: the number of the batch that it is the transport or the work of.
        num_bytes: of an op, what its device received for it.
        args: what else is known.
    """

    process: str
    lane: str
    category: Category
    name: str
    start_ns: int
    end_ns: int
    batch: int | None = None
    num_bytes: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_async(self) -> bool:
        """Whether it may overlap with others of its lane."""
        return self.category == "fetch"


@dataclass(frozen=True, slots=True)
class Clock:
    """How far the clock of a process is ahead of the client's, and by how much that may be wrong."""

    offset_ns: int = 0
    error_ns: int = 0


def spans_of(
    lane: LaneRecord,
    process: str,
    name: str,
    clock: Clock,
    templates: Mapping[int, TemplateRecord],
    names: Mapping[int, str],
) -> Iterator[Span]:
    """The spans of one lane.

    Args:
        name: of a thread of the client.
        templates: of the session.
        names: of captured functions, by the template of their calls.
    """
    templates = {record.template_id: record for record in lane.templates} | dict(templates)
    words = array("q")
    words.frombytes(lane.spans)
    for i in range(0, len(words), SPAN_WORDS):
        what, detail, start_ns, end_ns, extra = words[i : i + SPAN_WORDS]
        start_ns, end_ns = start_ns - clock.offset_ns, end_ns - clock.offset_ns
        if lane.kind in (WORKER, COMMUNICATION, COPY):
            place = lane_name(lane)
            yield _span_of_worker(
                process, place, lane.device, what, detail, (start_ns, end_ns), extra, templates, names
            )
            continue
        text = lane.names[what]
        batch = detail if text in _CARRIES_BATCH else None
        if lane.kind == CLIENT:
            args = {"seq": detail, "ops": extra} if batch else {}
            yield Span(process, name, "client", text, start_ns, end_ns, batch, args=args)
        elif lane.kind == _FETCHES:
            yield Span(process, name, "fetch", text, start_ns, end_ns, args={"fetch": detail})
        else:
            args = {"number": detail, "bytes": extra}
            yield Span(process, "messages", "message", text, start_ns, end_ns, batch, args=args)


def lane_name(lane: LaneRecord) -> str:
    """Of a worker, within its node."""
    return f"device {lane.device}" + ("" if lane.kind == WORKER else f", {lane.kind}")


def _span_of_worker(
    process: str,
    lane: str,
    device: int,
    template_id: int,
    detail: int,
    when_ns: tuple[int, int],
    extra: int,
    templates: Mapping[int, TemplateRecord],
    names: Mapping[int, str],
) -> Span:
    if template_id == WAIT:
        return Span(process, lane, "wait", "wait for transfers", *when_ns, args={"line": describe(detail)})
    if template_id == BATCH:
        return Span(process, lane, "batch", f"batch {detail}", *when_ns, detail)
    if template_id in _COPIES:
        return Span(
            process, lane, "copy", _COPIES[template_id], *when_ns, args={"failed": True} if extra else {}
        )
    record = templates.get(template_id)
    args: dict[str, Any] = {"template": template_id}
    if detail:
        args["line"] = describe(detail)
    if extra:
        args["failed"] = True
    if record is None:
        return Span(process, lane, "op", f"template {template_id}", *when_ns, args=args)
    if record.body is not None:
        name = names.get(template_id, record.op)
        return Span(process, lane, "captured call", name, *when_ns, args=args)
    transfer = next((arg for arg in record.args if isinstance(arg, TransferArg)), None)
    if transfer is None:
        return Span(process, lane, "op", record.op, *when_ns, args=args)
    source, target = _layout(transfer.source), _layout(transfer.target)
    num_bytes = received_bytes(tuple(transfer.shape), transfer.dtype, source, target).get(device, 0)
    args |= {"bytes": num_bytes, "shape": transfer.shape, "from": str(source), "to": str(target)}
    return Span(process, lane, "op", record.op, *when_ns, num_bytes=num_bytes, args=args)


@lru_cache(maxsize=4096)
def received_bytes(shape: tuple[int, ...], dtype: str, source: Layout, target: Layout) -> Mapping[int, int]:
    """Bytes that each device receives from others when a tensor of global ``shape`` is redistributed."""
    itemsize_bytes = dtype_of(dtype).itemsize
    received: dict[int, int] = {}
    for step in plan_redistribute(shape, source, target, itemsize_bytes=itemsize_bytes):
        for (_, device), num_bytes in step.bytes_by_link(itemsize_bytes).items():
            received[device] = received.get(device, 0) + num_bytes
    return received


def _layout(record: LayoutRecord) -> Layout:
    return Layout(mesh_of(record.mesh_id), tuple(map(placement_from_record, record.placements)))


def dropped_note(lanes: Sequence[tuple[str, LaneRecord]]) -> list[str]:
    """What fell off, for people."""
    return [
        f"{place}: the oldest {lane.num_dropped} spans were dropped; profile less, or give max_spans"
        for place, lane in lanes
        if lane.num_dropped
    ]
