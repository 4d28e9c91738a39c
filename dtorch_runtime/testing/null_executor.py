"""An executor that computes nothing: for simulations of the control plane, and to measure it alone.

Every op "makes" its outputs at once, or when a gate lets it. An int64 with the value's own id is what a fetch gives;
an uploaded value gives what was uploaded. Failures are scripted by op name, and spread as a worker would spread them.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtorch_runtime.ir.stream import FREE, walk
from dtorch_runtime.node.executor import (
    Completed,
    ExecutorEvent,
    OpRaised,
    Replied,
    ReportEvent,
    ValueMissing,
    ValueReady,
)
from dtorch_runtime.wire.messages import Upload
from dtorch_runtime.wire.records import (
    AskCounts,
    AskMemory,
    ClockReply,
    CountsReply,
    DeviceMemoryRecord,
    FailureRecord,
    LiveValueRecord,
    MemoryReply,
    MeshRecord,
    NodeRecord,
    Question,
    Reply,
    StopTrace,
    TemplateRecord,
    TraceReply,
)

#: Ops of this namespace exchange data among all devices of their meshes.
_EXCHANGING = "dtorch::"


@dataclass(slots=True)
class _Value:
    dtype: str
    shape: tuple[int, ...]
    data: bytearray
    failure: FailureRecord | None = None


@dataclass(slots=True)
class _Session:
    templates: dict[int, TemplateRecord] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)
    meshes: dict[int, MeshRecord] = field(default_factory=dict)
    #: value id -> what a fetch gives, or why it fails. Removed by FREE.
    values: dict[int, _Value] = field(default_factory=dict)
    #: The most that the values held since a peak was asked for; -1 before.
    peak_bytes: int = -1

    def held_bytes(self) -> int:
        """Of the values that exist."""
        return sum(len(value.data) for value in self.values.values() if value.failure is None)

    def note_peak(self) -> None:
        """Values were made."""
        if self.peak_bytes >= 0:
            self.peak_bytes = max(self.peak_bytes, self.held_bytes())

    def memory(self, device: int, question: AskMemory) -> DeviceMemoryRecord:
        """The answer of a device; each holds every value."""
        if question.peak != "keep":
            self.peak_bytes = self.held_bytes() if question.peak == "reset" else -1
        values = [
            LiveValueRecord(value_id, len(value.data), 1)
            for value_id, value in self.values.items()
            if value.failure is None
        ]
        largest = sorted(values, key=lambda value: (-value.num_bytes, value.value_id))
        return DeviceMemoryRecord(
            device, self.held_bytes(), self.peak_bytes, 0, len(values), largest[: question.num_largest]
        )


class NullExecutor:
    """Conforms to ``Executor``. Use from one thread.

    Args:
        report: where events go, at once or from ``release``.
        is_gated: hold all work back until ``release``.
        raising_ops: names of ops that raise instead of making their outputs.
        settings, device_type, data_endpoint, keys, session_key: taken as the real executor takes them, and not needed.
    """

    def __init__(
        self,
        *,
        report: ReportEvent,
        node_name: str = "node0",
        is_gated: bool = False,
        raising_ops: Sequence[str] = (),
        settings: object = None,
        device_type: str = "cpu",
        data_endpoint: str = "",
        keys: object = None,
        session_key: bytes = b"",
    ) -> None:
        self._report = report
        self._node_name = node_name
        self._is_gated = is_gated
        self._raising_ops = frozenset(raising_ops)
        self._sessions: dict[int, _Session] = {}
        self._devices: frozenset[int] = frozenset()
        #: device -> failure, for devices of nodes that are lost.
        self._lost: dict[int, FailureRecord] = {}
        #: (session, work) held back by the gate, in order.
        self._held: deque[tuple[int, Callable[[_Session], None]]] = deque()
        self._num_raised = 0
        self.is_closed = False

    @property
    def num_held(self) -> int:
        """Pieces of work that the gate holds back."""
        return len(self._held)

    @property
    def num_values(self) -> int:
        """Values of all sessions."""
        return sum(len(session.values) for session in self._sessions.values())

    def release(self, count: int | None = None) -> None:
        """Do the next ``count`` pieces of held work, or all of it."""
        for _ in range(len(self._held) if count is None else min(count, len(self._held))):
            session, work = self._held.popleft()
            self._do(session, work)

    # ---- Executor ----

    def start(self, devices: Sequence[int], nodes: Sequence[NodeRecord]) -> None:
        self._devices = frozenset(devices)

    def node_joined(self, node: NodeRecord) -> None:
        for device in node.devices:
            self._lost.pop(device, None)

    def node_lost(self, name: str, devices: Sequence[int], reason: str) -> None:
        for device in devices:
            self._lost[device] = self._failure("node", f"node:{name}", name, device, "NodeLost", reason)

    def open_session(self, session: int) -> None:
        self._sessions[session] = _Session()

    def end_session(self, session: int) -> None:
        del self._sessions[session]
        self._held = deque(item for item in self._held if item[0] != session)

    def define_mesh(self, session: int, record: MeshRecord) -> None:
        self._sessions[session].meshes[record.mesh_id] = record

    def define_templates(self, session: int, records: Sequence[TemplateRecord]) -> None:
        state = self._sessions[session]
        for record in records:
            state.templates[record.template_id] = record
            state.widths[record.template_id] = record.width

    def run(self, session: int, seq: int, words: list[int]) -> None:
        def work(state: _Session) -> None:
            for start, stop in walk(words, state.widths):
                if words[start] == FREE:
                    for value_id in words[start + 2 : stop]:
                        state.values.pop(value_id, None)
                else:
                    self._run_op(session, state, words[start:stop])
            self._report(Completed(session=session, seq=seq))

        self._start(session, work)

    def upload(self, message: Upload, data: Any) -> None:
        chunk = bytes(data)

        def work(state: _Session) -> None:
            value = state.values.get(message.value_id)
            if value is None or message.offset_bytes == 0:
                value = _Value(message.dtype, tuple(message.shape), bytearray(message.total_bytes))
                state.values[message.value_id] = value
            value.data[message.offset_bytes : message.offset_bytes + len(chunk)] = chunk
            state.note_peak()
            self._report(Completed(session=message.session, seq=message.seq))

        self._start(message.session, work)

    def fetch(self, session: int, request_id: int, value_id: int, device: int) -> None:
        def work(state: _Session) -> None:
            value = state.values.get(value_id)
            failure = value.failure if value is not None else self._missing(value_id, device)
            if device not in self._devices:
                failure = self._missing(value_id, device)
            event: ExecutorEvent
            if value is None or failure is not None:
                assert failure is not None
                event = ValueMissing(session=session, request_id=request_id, device=device, failure=failure)
            else:
                event = ValueReady(
                    session=session,
                    request_id=request_id,
                    device=device,
                    dtype=value.dtype,
                    shape=value.shape,
                    data=memoryview(bytes(value.data)),
                )
            self._report(event)

        self._start(session, work)

    def ask(self, session: int, request_id: int, question: Question) -> None:
        def work(state: _Session) -> None:
            reply: Reply = ClockReply(time.monotonic_ns())
            if isinstance(question, StopTrace):
                reply = TraceReply([])
            elif isinstance(question, AskCounts):
                reply = CountsReply({})
            elif isinstance(question, AskMemory):
                records = [state.memory(device, question) for device in sorted(self._devices)]
                reply = MemoryReply(records)
            self._report(Replied(session=session, request_id=request_id, reply=reply))

        self._start(session, work)

    def close(self, timeout_s: float) -> None:
        self.is_closed = True
        self._held.clear()
        self._sessions.clear()

    # ---- inside ----

    def _start(self, session: int, work: Callable[[_Session], None]) -> None:
        if self._is_gated:
            self._held.append((session, work))
        else:
            self._do(session, work)

    def _do(self, session: int, work: Callable[[_Session], None]) -> None:
        state = self._sessions.get(session)
        if state is not None:
            work(state)

    def _run_op(self, session: int, state: _Session, record: list[int]) -> None:
        template = state.templates[record[0]]
        first_output = 2 + template.num_inputs
        outputs = [v for v in record[first_output : first_output + template.num_outputs] if v]
        failure = self._inherited_failure(state, template, record[2:first_output])
        if failure is None and template.op in self._raising_ops:
            self._num_raised += 1
            failure_id = f"{self._node_name}:{self._num_raised}"
            failure = self._failure(
                "op", failure_id, self._node_name, min(self._devices), "RuntimeError", "scripted"
            )
            self._report(OpRaised(session=session, failure=failure))
        for value_id in outputs:
            state.values[value_id] = _Value("int64", (), bytearray(array("q", [value_id]).tobytes()), failure)
        state.note_peak()

    def _inherited_failure(
        self, state: _Session, template: TemplateRecord, inputs: Sequence[int]
    ) -> FailureRecord | None:
        is_exchange = template.op.startswith(_EXCHANGING)
        for value_id in inputs:
            value = state.values.get(value_id)
            if value is not None and value.failure is not None:
                return value.failure
            if value is None and not is_exchange:  # of an exchange, another node may hold it
                return self._missing(value_id, min(self._devices))
        if is_exchange:
            devices = [device for mesh_id in template.mesh_ids for device in state.meshes[mesh_id].devices]
            return next((self._lost[device] for device in devices if device in self._lost), None)
        return None

    def _missing(self, value_id: int, device: int) -> FailureRecord:
        text = f"value {value_id} does not exist on device {device}"
        return self._failure("internal", f"value:{value_id}", self._node_name, device, "InternalError", text)

    def _failure(
        self, kind: str, failure_id: str, node: str, device: int, error_type: str, message: str
    ) -> FailureRecord:
        return FailureRecord(
            kind=kind,
            failure_id=failure_id,
            op="",
            location_id=0,
            device=device,
            node=node,
            error_type=error_type,
            message=message,
            traceback="",
        )
