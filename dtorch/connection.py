"""``Session``: the shell around ``SessionState``. One link, one thread; user threads send by themselves."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from dtorch.batches import Batches
from dtorch.definitions import Definitions
from dtorch.failures import check_devices, error_of, named
from dtorch.future import AnswerFuture, ClusterFuture, SyncFuture, TensorFuture
from dtorch.graph import DEFAULT_AXIS, Graph, Handle
from dtorch.insight.client_tape import ClientTape, Counts
from dtorch.location import describe
from dtorch.receiving import Receiver
from dtorch.replay.inner_ids import InnerIds
from dtorch.session import (
    Action,
    Answers,
    ControllerGone,
    FetchDone,
    FetchMissed,
    PeerLost,
    RoomFreed,
    SessionState,
    SyncReached,
)
from dtorch.spec import Spec
from dtorch.values import plan_gathering, upload_parts
from dtorch_runtime.errors import (
    ClusterTimeout,
    ControllerLost,
    DTorchError,
    InternalError,
    SessionClosed,
    TransportError,
)
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.settings import Settings
from dtorch_runtime.transport.base import ThreadLink
from dtorch_runtime.wire.codec import MalformedMessage, decode_to_client, encode
from dtorch_runtime.wire.messages import (
    Ask,
    ClientBye,
    DefineMesh,
    DefineTemplates,
    Fetch,
    NodeJoined,
    Ops,
    Welcome,
)
from dtorch_runtime.wire.records import FailureRecord, NodeRecord, Question

#: Longest sleep of the session's thread, in seconds: dropping a value wakes nobody, and an idle program may do it.
_IDLE_WAIT_S = 1.0
_logger = logging.getLogger(__name__)


class Session:
    """One client's work on one cluster. Made by ``dtorch.init`` and ``dtorch.connect``, not by hand.

    Args:
        link: connected, the handshake done; owned by the session from now on.
        address: for messages.
        shaped: whether the user said how many devices the cluster has.
    """

    def __init__(
        self, link: ThreadLink, welcome: Welcome, settings: Settings, address: str, *, shaped: bool = True
    ) -> None:
        self.settings = settings
        self.address = address
        self.number = welcome.session
        self._shaped = shaped
        self._link = link
        #: The cache of calls, shared by the graphs. Emptied when the session ends: then every call is a miss.
        self.entries: dict[Any, Any] = {}
        self.new_value_id: Callable[[], int] = itertools.count(1).__next__
        self.next_graph_id: Callable[[], int] = itertools.count(1).__next__
        #: Guards what follows, and the order of numbered messages on the link.
        self._changed = threading.Condition(threading.Lock())
        self._state = SessionState.with_settings(welcome.nodes, settings)
        self._waiting: dict[int, ClusterFuture[Any]] = {}
        definitions = Definitions(self)
        self.define_mesh = definitions.define_mesh
        self.define_template = definitions.define_template
        #: Every template by its number.
        self.templates = definitions.templates
        self.new_inner_ids = InnerIds().take
        self.names: dict[int, str] = {}  # of captured functions, by the template of their calls
        self.counts = Counts()
        self.tape: ClientTape | None = None  # while somebody profiles
        self._default_mesh: DeviceMesh | None = None
        #: Why the session is over: makes the error that every later use raises.
        self._end: Callable[[], DTorchError] | None = None
        self._local = threading.local()
        self._receiver = Receiver(link, self._receive_all)
        self.batches = Batches(self)
        #: Whether the I/O thread sleeps without watching the age of batches.
        self._is_idle = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="dtorch-session", daemon=True)
        self._thread.start()

    # ---- graphs ----

    def default_graph(self) -> Graph:
        """The current graph of this thread, made on first use."""
        graph: Graph | None = getattr(self._local, "graph", None)
        if graph is None:
            graph = self._local.graph = Graph(self)
        return graph

    def set_current_graph(self, graph: Graph | None) -> Graph | None:
        """Make it this thread's graph; returns the one before."""
        before: Graph | None = getattr(self._local, "graph", None)
        self._local.graph = graph
        return before

    def default_mesh(self) -> DeviceMesh:
        """The mesh of tensors made without one: all devices of the cluster, on an axis named "default".

        An embedded cluster that nobody shaped has more devices than the program asked for: then the first alone.
        Tensors on it follow those of their ops to other meshes.

        Raises:
            ClusterTimeout: no node has joined within ``start_timeout_s``.
        """
        if self._default_mesh is None:
            nodes = self.wait_for_nodes()
            device_type = nodes[0].device_type
            devices = sorted(d for node in nodes if node.device_type == device_type for d in node.devices)
            chosen = devices if self._shaped else devices[:1]
            self._default_mesh = DeviceMesh(device_type, chosen, mesh_dim_names=(DEFAULT_AXIS,))
        return self._default_mesh

    def wait_for_nodes(self, num_nodes: int = 1) -> list[NodeRecord]:
        """The nodes that are there, once they are so many. A node that a busy machine held up comes back.

        Raises:
            ClusterTimeout: not within ``start_timeout_s``.
        """
        limit_s, nodes = self.settings.start_timeout_s, self._state.nodes
        with self._changed:
            if not self._changed.wait_for(lambda: len(nodes) >= num_nodes or self._end is not None, limit_s):
                what = f"{num_nodes} node(s) to join the cluster at {self.address}"
                hint = f"There are: {', '.join(nodes)}" if nodes else "Start one: dtorch-launch agent"
                raise ClusterTimeout(what, limit_s, hint)
            self.check_open()
            return list(nodes.values())

    def devices(self) -> list[int]:
        """The ids of all devices of the cluster that are there."""
        return sorted(d for node in self.nodes() for d in node.devices)

    def nodes(self) -> list[NodeRecord]:
        """The nodes that are there."""
        with self._changed:
            return list(self._state.nodes.values())

    def lost_nodes(self) -> dict[str, str]:
        """Why each node that is gone is gone, by its name."""
        return {failure.node: failure.message for failure in list(self._state.lost.values())}

    # ---- definitions ----

    def check_mesh(self, mesh: DeviceMesh) -> None:
        """Raises MeshError or NodeLost when the cluster does not have all devices of a mesh."""
        with self._changed:
            self.check_open()
            check_devices(mesh, self._state.nodes, self._state.lost, self.address)

    def tell(self, message: DefineMesh | DefineTemplates) -> None:
        """Send what later messages refer to."""
        with self._changed:
            self.check_open()
            self._send(message)

    # ---- sending ----

    @property
    def is_open(self) -> bool:
        """Whether it can still be used."""
        return self._end is None

    def check_open(self) -> None:
        """Raises SessionClosed, ControllerLost or ForkError when the session is over."""
        if self._end is not None:
            raise self._end()

    def has_room(self, num_ops: int, graph_id: int = 0) -> bool:
        """Whether a batch may be sent without waiting."""
        return self._end is None and self._state.has_room(num_ops, 0, graph_id)

    def wait_for_room(self, num_ops: int, num_bytes: int, graph_id: int = 0) -> None:
        """Block while too much is outstanding.

        Raises:
            ClusterTimeout: no progress for ``wait_timeout_s``.
            ControllerLost, SessionClosed, ForkError: the session is over.
        """
        if self._end is None and self._state.has_room(num_ops, num_bytes, graph_id):
            return
        limit_s = self.settings.wait_timeout_s
        self._receiver.need()
        with self._changed:
            state = self._state
            seen, deadline_s = state.acknowledged_seq, time.monotonic() + limit_s
            while True:
                self.check_open()
                if state.has_room(num_ops, num_bytes, graph_id):
                    return
                if state.acknowledged_seq != seen:
                    seen, deadline_s = state.acknowledged_seq, time.monotonic() + limit_s
                if not self._changed.wait(max(0.0, deadline_s - time.monotonic())):
                    raise ClusterTimeout("room for more ops", limit_s, state.why_no_room())

    def batch_begun(self) -> None:
        """A graph has ops to send from now on."""
        if self._is_idle:
            self._is_idle = False
            self._link.wake()

    def send_ops(self, graph_id: int, frame: bytes, num_ops: int) -> int:
        """Send a batch; returns its number."""
        start_ns = time.monotonic_ns()
        with self._changed:
            self.check_open()
            seq = self._state.issue(num_ops, 0, graph_id)
            self._send(Ops(seq=seq, graph_id=graph_id, num_ops=num_ops), frame)
            self.counts.num_ops += num_ops
            self.counts.num_batches += 1
        if self.tape is not None:
            self.tape.add("batch", seq, start_ns, num_ops)
        return seq

    def upload(
        self,
        value_id: int,
        devices: Sequence[int],
        dtype: torch.dtype,
        shape: Sequence[int],
        blocks: Iterable[torch.Tensor],
    ) -> int:
        """Send the local piece of each of ``devices``, of local ``shape``; returns the number of the last message.

        ``blocks`` are contiguous CPU tensors that hold its elements in row-major order, one after the other.
        """
        seq = 0
        chunk_bytes = self.settings.chunk_bytes
        for message, chunk in upload_parts(value_id, devices, dtype, shape, blocks, chunk_bytes):
            self.wait_for_room(0, len(chunk))
            with self._changed:
                self.check_open()
                seq = self._state.issue(0, len(chunk))
                self._send(msgspec.structs.replace(message, seq=seq), chunk)
        return seq

    def _send(self, message: Any, *payload: bytes) -> None:
        """The lock is held."""
        frames = [encode(message), *payload]
        self.counts.sent_bytes += sum(map(len, frames))
        try:
            self._link.send(frames, self.settings.wait_timeout_s)
        except TransportError as error:
            self.check_open()
            raise ControllerLost(self.address, str(error)) from error

    # ---- waiting ----

    @property
    def wait_timeout_s(self) -> float:
        """The longest wait when none is given, in seconds."""
        return self.settings.wait_timeout_s

    def fetch(
        self,
        handle: Handle,
        spec: Spec,
        what: str = "value",
        convert: Callable[[torch.Tensor], Any] | None = None,
    ) -> TensorFuture:
        """Ask for a value, or for what ``convert`` makes of it. Everything that its graph has issued is sent first.

        Errors call it ``what``.

        Raises:
            CaptureError: a captured function that is being recorded asks for it.
        """
        if (recording := handle.graph.watching) is not None:
            recording.refuse(
                f"reads the {what} of a tensor, which {handle.origin} made: a replay issues everything at once and "
                f"knows no value. Return the tensor and read it outside"
            )
        handle.graph.flush()
        gathering = plan_gathering(spec)
        future = TensorFuture(
            spec,
            lambda: f"the {what} of {handle.origin} issued at {describe(handle.location)}",
            self,
            convert,
        )
        with self._changed:
            self.check_open()
            fetch_id, requests, actions = self._state.start_fetch(gathering.devices)
            self._waiting[fetch_id] = future
            self.counts.num_fetches += 1
            if self.tape is not None:
                self.tape.begin_fetch(fetch_id, future.what())
            for request_id, device in requests:
                self._send(Fetch(request_id=request_id, value_id=handle.value_id, device=device))
        self._carry_out(actions)
        return future

    def ask(self, question: Question) -> AnswerFuture:
        """Ask the controller and every node."""
        future = AnswerFuture(lambda: f"the cluster to answer {type(question).__name__}", self)
        with self._changed:
            self.check_open()
            request_id = self._state.start_question()
            self._waiting[request_id] = future
            self._send(Ask(request_id=request_id, question=question))
        return future

    def sync_after(self, seq: int, what: str) -> SyncFuture:
        """Ready when the messages up to ``seq`` have been run everywhere."""
        future = SyncFuture(lambda: what, self, self.raise_unfetched)
        with self._changed:
            self.check_open()
            sync_id, actions = self._state.start_sync(seq)
            self._waiting[sync_id] = future
        self._carry_out(actions)
        return future

    def sync_all(self, timeout_s: float | None = None) -> None:
        """Send what every graph holds, and wait until all of it has run; with ``timeout_s``, only for so long.

        Raises:
            ClusterTimeout, ControllerLost, SessionClosed: as for any wait.
        """
        if timeout_s is None:
            self.batches.flush_all()
        else:
            self.batches.flush_old(0.0)  # what there is room for: making room may take longer
        self.sync_after(self._state.seq, f"{self!r} to finish its ops").wait(timeout_s)

    def raise_unfetched(self) -> None:
        """Raise the oldest failure that nobody has seen, if there is one."""
        with self._changed:
            failure = self._state.take_unfetched()
        if failure is not None:
            raise error_of(failure)

    def unfetched_errors(self) -> list[DTorchError]:
        """The failures that nobody has seen; they count as seen from now on."""
        with self._changed:
            return [error_of(failure) for failure in iter(self._state.take_unfetched, None)]

    def _raised(self, failure: FailureRecord) -> DTorchError:
        with self._changed:
            self._state.mark_raised(failure.failure_id)
        return error_of(failure)

    # ---- the I/O thread ----

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._is_idle = not self.batches.flush_old(self.settings.batch_age_s)
                # Begun between the two, and nobody will wake us.
                if self._is_idle and self.batches.is_any_begun():
                    self._is_idle = False
                self._receiver.serve(_IDLE_WAIT_S if self._is_idle else self.settings.batch_age_s)
            except (TransportError, ControllerLost) as error:
                self.lost(str(error))
                return
            except DTorchError:
                return  # closed, by us or by the controller

    def _receive_all(self, messages: Sequence[Sequence[Any]]) -> None:
        for message in messages:
            try:
                self._receive(message)
            except Exception as error:  # noqa: BLE001  whatever broke, nobody may wait for the rest for ever
                self.end(partial(InternalError, f"reading failed: {error!r}\n{traceback.format_exc()}"))

    def help(self, future: ClusterFuture[Any], timeout_s: float) -> None:
        """A user's thread waits for ``future``: it reads the answer by itself if that comes soon."""
        try:
            self._receiver.help(future.is_ready, timeout_s)
        except TransportError as error:
            self.lost(str(error))

    def need_thread(self) -> None:
        """Somebody waits without reading."""
        self._receiver.need()

    def _receive(self, message: Sequence[Any]) -> None:
        try:
            event = named(decode_to_client(message[0]), self)
        except MalformedMessage as error:
            _logger.warning("dropped a message of the controller: %s", error)
            return
        payload = message[1] if len(message) > 1 else b""
        self.counts.received_bytes += sum(map(len, message))
        with self._changed:
            actions = self._state.handle(event, payload)
            if self.settings.check:
                self._state.validate()
            if isinstance(event, NodeJoined):
                self._changed.notify_all()
        self._carry_out(actions)

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case FetchDone():
                    future = self._pop_waiting(action.fetch_id)
                    if isinstance(future, TensorFuture):
                        future.deliver(action.pieces)
                case FetchMissed():
                    self._fail(action.fetch_id, action.failure)
                case SyncReached():
                    reached = self._pop_waiting(action.sync_id)
                    if reached is not None:
                        reached.finish()
                case Answers():
                    asked = self._pop_waiting(action.request_id)
                    if isinstance(asked, AnswerFuture):
                        asked.deliver(action)
                case RoomFreed():
                    with self._changed:
                        self._changed.notify_all()
                case ControllerGone():
                    self.end(partial(ControllerLost, self.address, action.reason))

    def _pop_waiting(self, number: int) -> ClusterFuture[Any] | None:
        if self.tape is not None:
            self.tape.end_fetch(number)
        with self._changed:
            return self._waiting.pop(number, None)

    def _fail(self, fetch_id: int, failure: FailureRecord) -> None:
        future = self._pop_waiting(fetch_id)
        if future is not None:
            future.finish(lambda: self._raised(failure))

    # ---- the end ----

    def lost(self, reason: str) -> None:
        """The controller is gone; for any thread. Every wait, and every later use, raises ControllerLost."""
        with self._changed:
            actions = self._state.handle(PeerLost(reason))
        self._carry_out(actions)

    def end(self, make_error: Callable[[], DTorchError]) -> None:
        """Nothing is sent any more; every wait, and every later use, raises what ``make_error`` makes."""
        with self._changed:
            if self._end is None:
                self._end = make_error
            waiting, self._waiting = self._waiting, {}
            self.entries.clear()
            self._changed.notify_all()
        for future in waiting.values():
            future.finish(self._end)

    def close(self) -> None:
        """Say goodbye, end the thread, close the link. May be called twice."""
        with self._changed:
            is_open = self._end is None
            if is_open:
                self._link.send([encode(ClientBye())], self.settings.stop_timeout_s)
        self.end(
            lambda: SessionClosed(
                "the session of this tensor was closed by dtorch.shutdown() or the end of dtorch.connect(); "
                "fetch values before that, or keep the session open"
            )
        )
        self._is_stopping = True
        self._link.close(flush_s=self.settings.stop_timeout_s if is_open else 0.0)
        if threading.current_thread() is not self._thread:
            self._thread.join(self.settings.stop_timeout_s)

    def abandon(self, make_error: Callable[[], DTorchError]) -> None:
        """In a forked child: the thread and the link are the parent's. Touch neither, take no lock."""
        self._end = make_error
        self.entries.clear()

    def __repr__(self) -> str:
        return f"<Session {self.number} at {self.address}>"
