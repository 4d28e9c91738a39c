"""``WorkerExecutor``: the port of ``node.executor`` carried out with torch, one thread a device."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from dtorch_runtime.errors import ClusterTimeout, InternalError
from dtorch_runtime.ir.records import mesh_from_record
from dtorch_runtime.node.executor import (
    Completed,
    OpRaised,
    Replied,
    ReportEvent,
    ValueMissing,
    ValueReady,
)
from dtorch_runtime.settings import Settings
from dtorch_runtime.transport.security import CurveKeys
from dtorch_runtime.transport.segments import SegmentPool
from dtorch_runtime.wire.messages import Upload
from dtorch_runtime.wire.records import (
    AskCounts,
    AskMemory,
    ClockReply,
    CountsReply,
    DeviceMemoryRecord,
    FailureRecord,
    LaneRecord,
    MemoryReply,
    MeshRecord,
    NodeRecord,
    Question,
    Reply,
    StartTrace,
    StopTrace,
    TemplateRecord,
    TraceReply,
)
from dtorch_runtime.worker.blobs import Blob, ChunkedTensor, Poison, bytes_of, name_of
from dtorch_runtime.worker.collectives.base import Network
from dtorch_runtime.worker.collectives.run_ahead import RunAhead
from dtorch_runtime.worker.collectives.threads import ThreadExchange
from dtorch_runtime.worker.collectives.zeromq import ZmqNetwork
from dtorch_runtime.worker.copies import COPY_FACTOR, is_quick_to_read
from dtorch_runtime.worker.failures import InternalFailure, SessionEnded, asked_bytes_of
from dtorch_runtime.worker.first_calls import make_first_calls
from dtorch_runtime.worker.ledger import DeviceTotal
from dtorch_runtime.worker.open_session import OpenSession
from dtorch_runtime.worker.redistribute import Redistributor, TransferPlanner
from dtorch_runtime.worker.session import DeviceSession, Session
from dtorch_runtime.worker.streams.base import Stream
from dtorch_runtime.worker.streams.cpu import CpuStream
from dtorch_runtime.worker.streams.watched import WatchedStream
from dtorch_runtime.worker.thread import LazyWorker, ThreadShare, Ticket, Worker
from dtorch_runtime.worker.tickets import take_answer
from dtorch_runtime.worker.transfers import COMMUNICATION, COPY, Side, Transfers
from dtorch_runtime.worker.uploads import SharedUpload, place, refuse, upload_key
from dtorch_runtime.worker.watch import StreamWatch, Watch

_T = TypeVar("_T")


class WorkerExecutor:
    """Implements ``dtorch_runtime.node.executor.Executor``.

    Args:
        node_name: the agent's name.
        device_type: ``"cpu"`` or ``"cuda"``.
        report: takes ``ExecutorEvent``s; called from worker threads.
        host: the name of this machine as ``NodeRecord.host`` has it.
        data_endpoint: where to bind the data plane to other agents; empty for an agent that is alone.
        keys: for a data plane that strangers can reach.
        session_key: what messages on the data plane must carry.
        shares_memory: whether agents of one machine exchange large pieces through shared memory.

    Raises:
        UnsupportedError: CUDA devices are asked for, and there is no CuPy or no GPU.
        SecurityError: strangers can reach ``data_endpoint`` and there are no keys.
        TransportError: it cannot be bound.
    """

    def __init__(
        self,
        settings: Settings,
        node_name: str,
        device_type: str,
        report: ReportEvent,
        *,
        host: str | None = None,
        data_endpoint: str = "",
        keys: CurveKeys | None = None,
        session_key: bytes = b"",
        shares_memory: bool = True,
    ) -> None:
        if device_type == "cuda":
            # Loads CuPy, which is optional and heavy.
            from dtorch_runtime.worker.streams.cuda import CudaStream, require_cuda

            require_cuda()
            self._new_stream: Callable[[torch.device], Stream] = CudaStream
        else:
            self._new_stream = partial(CpuStream, settings.collective_timeout_s)
        make_first_calls()
        self._settings = settings
        #: From how many bytes on a copy worker brings values to the host and from it.
        self._copy_bytes = COPY_FACTOR * settings.beside_bytes
        self._node = node_name
        self._device_type = device_type
        self._report = report
        self._host = host or socket.gethostname()
        run_ahead = RunAhead(settings.max_outstanding_bytes, settings.collective_timeout_s)
        self._watch = Watch() if settings.check else None
        self._exchange = ThreadExchange(settings.collective_timeout_s, run_ahead, self._watch)
        self._network: Network | None = None
        if data_endpoint:
            self._network = ZmqNetwork(
                node_name,
                self._host,
                data_endpoint,
                self._exchange.deposit,
                keys=keys,
                session_key=session_key,
                chunk_bytes=settings.chunk_bytes,
                timeout_s=settings.collective_timeout_s,
                pool=SegmentPool() if shares_memory else None,
                run_ahead=run_ahead,
            )
            self._exchange.mail = self._network.mail
        self._local: dict[int, torch.device] = {}
        self._node_of: dict[int, str] = {}
        self._neighbours: set[str] = set()
        self._share = ThreadShare(settings.num_threads, _num_cores())
        self._redistributor = Redistributor(
            TransferPlanner(node_name, self._local, self._node_of, settings.beside_bytes),
            self._exchange,
            self._network,
            run_ahead,
        )
        self._workers: dict[int, Worker] = {}
        #: Of the same devices, for redistributions and for copies beside their ops.
        self._communication: dict[int, LazyWorker] = {}
        self._copying: dict[int, LazyWorker] = {}
        #: What the sessions hold, by device.
        self._totals: dict[int, DeviceTotal] = {}
        self._sessions: dict[int, OpenSession] = {}
        self._failures_lock = threading.Lock()
        self._reported: dict[int, set[str]] = {}

    @property
    def data_endpoint(self) -> str:
        """Where other agents reach this one's data plane; empty when it has none."""
        return "" if self._network is None else self._network.endpoint

    def start(self, devices: Sequence[int], nodes: Sequence[NodeRecord]) -> None:
        for index, device in enumerate(devices):
            self._local[device] = _torch_device(self._device_type, index)
            self._node_of[device] = self._node
        for node in nodes:
            self.node_joined(node)

    def node_joined(self, node: NodeRecord) -> None:
        if node.name == self._node:
            return
        self._node_of.update(dict.fromkeys(node.devices, node.name))
        if node.host == self._host:
            self._neighbours.add(node.name)
            self._share_cores()
        if self._network is not None and node.data_endpoint:
            self._network.connect(node)

    def node_lost(self, name: str, devices: Sequence[int], reason: str) -> None:
        if name in self._neighbours:
            self._neighbours.remove(name)
            self._share_cores()
        if self._network is not None:
            self._network.disconnect(name)
        self._exchange.lose(name, devices, reason)

    def _share_cores(self) -> None:
        self._share.set_cores(max(1, _num_cores() // (1 + len(self._neighbours))))

    def open_session(self, session: int) -> None:
        self._sessions[session] = OpenSession(session, self._settings.collective_timeout_s, self._share)
        self._exchange.begin(session)

    def end_session(self, session: int) -> None:
        entry = self._sessions.pop(session, None)
        if entry is None:
            return
        entry.shared.is_ended = True
        for _, values in entry.devices.values():
            values.end()
        self._exchange.abort(session)
        for worker, values in entry.devices.values():
            worker.submit(values.clear)
        with self._failures_lock:
            self._reported.pop(session, None)

    def define_mesh(self, session: int, record: MeshRecord) -> None:
        entry = self._open(session)
        mesh = mesh_from_record(record)
        entry.shared.meshes[record.mesh_id] = mesh
        for device in mesh.devices:
            if device in self._local:
                self._add_device(entry, device)

    def define_templates(self, session: int, records: Sequence[TemplateRecord]) -> None:
        self._open(session).shared.templates.update((record.template_id, record) for record in records)

    def run(self, session: int, seq: int, words: list[int]) -> None:
        entry = self._open(session)
        entry.run(seq, words, partial(self._report_completed, entry.shared, seq))

    def upload(self, message: Upload, data: Any) -> None:
        entry = self._open(message.session)
        devices = [device for device in message.devices if device in self._local]
        for device in devices:
            self._add_device(entry, device)
        try:
            tensor = self._collect(entry, message, memoryview(data)) if devices else None
        except (ValueError, RuntimeError) as error:  # RuntimeError: torch has no room for it
            entry.uploads.pop(upload_key(message), None)
            self._refuse_upload(entry, message, devices, error)
            tensor = None
        if tensor is not None:
            shared = SharedUpload(tensor, len(devices))
            for device in devices:
                worker, values = entry.devices[device]
                worker.submit(partial(place, values, message.value_id, shared, self._local[device]))
        ticket = self._ticket(entry, message.seq)
        for worker, values in entry.devices.values():
            worker.submit(partial(values.call_behind, ticket.done))

    def _collect(self, entry: OpenSession, message: Upload, data: memoryview) -> torch.Tensor | None:
        """Take a chunk in; the tensor once it is whole."""
        key = upload_key(message)
        buffer = entry.uploads.get(key)
        if buffer is None:
            buffer = ChunkedTensor(message.dtype, message.shape, message.total_bytes)
            entry.uploads[key] = buffer
        buffer.room(message.offset_bytes, data.nbytes)[:] = data.cast("B")
        if not buffer.is_full:
            return None
        del entry.uploads[key]
        return buffer.tensor

    def _refuse_upload(
        self, entry: OpenSession, message: Upload, devices: Sequence[int], error: Exception
    ) -> None:
        if asked_bytes_of(error) is None:
            error = InternalFailure(str(error))
        for device in devices:
            worker, values = entry.devices[device]
            worker.submit(partial(refuse, values, message.value_id, error))

    def fetch(self, session: int, request_id: int, value_id: int, device: int) -> None:
        entry = self._open(session)
        if device not in self._local:
            error = InternalFailure(f"device {device} is not of node {self._node}")
            site_of = DeviceSession(
                entry.shared,
                device,
                torch.device("cpu"),
                self._node,
                self._redistributor,
                self._report_failure,
            )
            self._report_missing(session, request_id, device, site_of.fail("fetch", error, value_id))
            return
        self._add_device(entry, device)
        worker, values = entry.devices[device]
        if worker.is_idle and is_quick_to_read(values.blobs.get(value_id), self._copy_bytes):
            # The way to the worker's thread and back takes 100 us, and the worker has nothing to do.
            self._fetch(values, request_id, value_id, device)
        else:
            worker.submit(partial(self._fetch, values, request_id, value_id, device))

    def _fetch(self, values: DeviceSession, request_id: int, value_id: int, device: int) -> None:
        if values.session.is_ended:
            return
        try:
            values.read(value_id, partial(self._deliver, values, request_id, value_id, device))
        except SessionEnded:
            return
        except Exception as error:  # noqa: BLE001  the one who fetches gets it
            self._report_missing(
                values.session.number, request_id, device, values.fail("fetch", error, value_id)
            )

    def _deliver(
        self,
        values: DeviceSession,
        request_id: int,
        value_id: int,
        device: int,
        blob: Blob | Exception | None,
    ) -> None:
        """Report a value. On a worker's thread, or in the loop."""
        session = values.session.number
        if isinstance(blob, SessionEnded):
            return
        if isinstance(blob, Poison):
            self._report_missing(session, request_id, device, blob.failure)
            return
        try:
            if isinstance(blob, Exception):
                raise blob
            if blob is None:
                raise InternalFailure(f"device {device} does not hold value {value_id}")
            data = bytes_of(blob)
        except Exception as error:  # noqa: BLE001  the one who fetches gets it
            self._report_missing(session, request_id, device, values.fail("fetch", error, value_id))
            return
        dtype, shape = name_of(blob.dtype), tuple(blob.shape)
        self._report(
            ValueReady(
                session=session, request_id=request_id, device=device, dtype=dtype, shape=shape, data=data
            )
        )

    def ask(self, session: int, request_id: int, question: Question) -> None:
        entry = self._open(session)
        reply: Reply = ClockReply(time.monotonic_ns())
        if isinstance(question, StartTrace):
            entry.max_spans = question.max_spans
            for worker, values in entry.devices.values():
                worker.submit(partial(values.start_trace, question.max_spans))
        elif isinstance(question, StopTrace):
            entry.max_spans = None
            self._ask_devices(entry, request_id, DeviceSession.stop_trace, _trace_reply)
            return
        elif isinstance(question, AskMemory):
            self._ask_memory(entry, request_id, question)
            return
        elif isinstance(question, AskCounts):
            sent_bytes = {} if self._network is None else self._network.sent_bytes()
            reply = CountsReply(sent_bytes, self._share.record())
        self._report(Replied(session=session, request_id=request_id, reply=reply))

    def _ask_memory(self, entry: OpenSession, request_id: int, question: AskMemory) -> None:
        if question.peak != "keep":
            entry.shared.is_measured = question.peak == "reset"
        limit_bytes = self._settings.device_memory_bytes
        peak_bytes = 0 if entry.shared.is_measured or limit_bytes else -1
        unused = [
            DeviceMemoryRecord(device, 0, peak_bytes, limit_bytes, 0, [])
            for device in self._local
            if device not in entry.devices
        ]

        def reply(records: list[DeviceMemoryRecord]) -> Reply:
            return MemoryReply(sorted([*unused, *records], key=lambda record: record.device))

        self._ask_devices(
            entry, request_id, lambda values: values.memory(question.num_largest, question.peak), reply
        )

    def _ask_devices(
        self,
        entry: OpenSession,
        request_id: int,
        ask: Callable[[DeviceSession], _T | None],
        reply: Callable[[list[_T]], Reply],
    ) -> None:
        """Reply with what each device that takes part answers, behind the work that it has."""
        answers: list[_T] = []

        def report() -> None:
            self._report(Replied(session=entry.shared.number, request_id=request_id, reply=reply(answers)))

        ticket = Ticket(len(entry.devices), report)
        for worker, values in entry.devices.values():
            worker.submit(partial(take_answer, values, ask, answers, ticket))
        if not entry.devices:
            report()

    def close(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for session in list(self._sessions):
            self.end_session(session)
        try:
            # The compute workers first: they give jobs to the others.
            for workers in (self._workers, self._communication, self._copying):
                _stop_all(workers.values(), timeout_s, deadline_s)
        finally:
            if self._network is not None:
                self._network.close(max(0.1, deadline_s - time.monotonic()))

    def _open(self, session: int) -> OpenSession:
        entry = self._sessions.get(session)
        if entry is None:
            raise InternalError(f"session {session} is not open on node {self._node}")
        return entry

    def _add_device(self, entry: OpenSession, device: int) -> None:
        if device in entry.devices:
            return
        torch_device = self._local[device]
        worker = self._workers.get(device)
        if worker is None:
            worker = self._start_device(device, torch_device)
        values = DeviceSession(
            entry.shared,
            device,
            torch_device,
            self._node,
            self._redistributor,
            self._report_failure,
            self._totals[device],
            self._transfers(worker, device),
            self._watch_of(worker.name),
        )
        if entry.max_spans is not None:
            values.start_trace(entry.max_spans)
        entry.devices[device] = (worker, values)
        entry.shared.devices[device] = values

    def _start_device(self, device: int, torch_device: torch.device) -> Worker:
        name = f"dtorch-{self._node}-{device}"
        new_stream = partial(self._make_stream, torch_device, name)
        worker = self._workers[device] = Worker(name, new_stream, self._share)
        self._communication[device] = self._beside(f"{name}-{COMMUNICATION}", torch_device)
        self._copying[device] = self._beside(f"{name}-{COPY}", torch_device)
        self._totals[device] = DeviceTotal(self._settings.device_memory_bytes)
        return worker

    def _beside(self, name: str, torch_device: torch.device) -> LazyWorker:
        new_stream = partial(self._make_stream, torch_device, name)
        return LazyWorker(name, partial(Worker, name, new_stream, self._share, divides=False))

    def _transfers(self, worker: Worker, device: int) -> Transfers | None:
        if not self._settings.beside_bytes:
            return None
        communication, copying = (
            Side(kind, workers[device], self._watch_of(workers[device].name))
            for kind, workers in ((COMMUNICATION, self._communication), (COPY, self._copying))
        )
        timeout_s = self._settings.collective_timeout_s
        return Transfers(worker, communication, copying, timeout_s, self._copy_bytes)

    def _make_stream(self, torch_device: torch.device, worker: str) -> Stream:
        stream, watch = self._new_stream(torch_device), self._watch_of(worker)
        return stream if watch is None else WatchedStream(stream, watch)

    def _watch_of(self, worker: str) -> StreamWatch | None:
        return None if self._watch is None else StreamWatch(self._watch, worker)

    def _ticket(self, entry: OpenSession, seq: int) -> Ticket:
        report = partial(self._report_completed, entry.shared, seq)
        if not entry.devices:
            report()
        return Ticket(len(entry.devices), report)

    def _report_completed(self, session: Session, seq: int) -> None:
        if not session.is_ended:
            self._report(Completed(session=session.number, seq=seq))

    def _report_failure(self, session: int, failure: FailureRecord) -> None:
        with self._failures_lock:
            reported = self._reported.setdefault(session, set())
            if failure.failure_id in reported:
                return
            reported.add(failure.failure_id)
        self._report(OpRaised(session=session, failure=failure))

    def _report_missing(self, session: int, request_id: int, device: int, failure: FailureRecord) -> None:
        self._report(ValueMissing(session=session, request_id=request_id, device=device, failure=failure))


def _stop_all(workers: Collection[Worker | LazyWorker], timeout_s: float, deadline_s: float) -> None:
    for worker in workers:
        worker.stop()
    for worker in workers:
        if not worker.join(max(0.0, deadline_s - time.monotonic())):
            raise ClusterTimeout(f"worker {worker.name} to stop", timeout_s, "It is inside a kernel")


def _trace_reply(lanes: list[list[LaneRecord]]) -> Reply:
    return TraceReply([lane for of_device in sorted(lanes, key=_device_of) for lane in of_device])


def _device_of(lanes: list[LaneRecord]) -> int:
    return lanes[0].device


def _torch_device(device_type: str, index: int) -> torch.device:
    return torch.device("cpu") if device_type == "cpu" else torch.device(device_type, index)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
