"""``Graph``: one stream of ops, its default mesh, and the life of the values that it makes."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dtorch.future import SyncFuture
from dtorch.insight.drawing import dump
from dtorch.insight.ops import shown_stream
from dtorch.replay.automatic import AWAITED, PAUSED, Replayer, with_frees
from dtorch_runtime.errors import MeshError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.stream import FREE, pack, unpack
from dtorch_runtime.transport.interrupts import DeferredInterrupts

if TYPE_CHECKING:  # a session makes graphs; a recording is of one
    from dtorch.connection import Session
    from dtorch.insight.explain import RecordedCall
    from dtorch.replay.recording import Recording
    from dtorch_runtime.wire.records import TemplateRecord

#: Ops of the first batch after a wait; each next one has twice as many, up to the setting ``batch_ops``.
FIRST_BATCH_OPS = 16
#: Dropped values are told to the cluster when so many are pending, or with the next batch.
FREE_BATCH = 16


#: Batches that were sent and are kept for ``Graph.dump``.
_NUM_RECENT = 8

#: So often, a batch's age each time, the beginning of a run waits for the rest of it; half as often for a program
#: that issues nothing meanwhile.
_MAX_WAITS = 6

#: The name of the one axis of the mesh that tensors get when nobody names one.
DEFAULT_AXIS = "default"


def is_default_mesh(mesh: DeviceMesh) -> bool:
    """Whether a tensor is on this mesh only because nobody named one: then it follows those of its ops."""
    return mesh.mesh_dim_names == (DEFAULT_AXIS,)


def guard_mesh_of(tensor: Any) -> AbstractContextManager[DeviceMesh]:
    """Inside, what this thread makes without a mesh lives on that of ``tensor``, whatever graph the tensor is of."""
    graph: Graph = tensor.graph.session.default_graph()
    return graph.device_mesh_guard(tensor.device_mesh)


#: What this thread records, of whichever graph.
recorded_here = threading.local()
#: Numbers of writes, all different.
next_write = itertools.count(1).__next__


class Handle:
    """One value on the cluster. Symbols that stand for the same value share it; with the last one it is freed."""

    __slots__ = (
        "__weakref__",
        "graph",
        "last_write",
        "location",
        "num_bytes",
        "origin",
        "storage",
        "value_id",
    )

    #: Where the value begins in the memory of ``root``.
    offset_bytes = 0
    #: What ``untyped_storage()`` gives for tensors with this root, once somebody has asked.
    storage: Any
    #: Of a root: the number of the last write to its memory, once there was one.
    last_write: int
    #: Of a root: the size of its memory, of the global tensor, where its origin does not say it.
    num_bytes: int

    def __init__(self, graph: Graph, value_id: int, origin: Any, location: int) -> None:
        self.graph = graph
        self.value_id = value_id
        #: What made it; ``str()`` of it is the name of the op.
        self.origin = origin
        self.location = location

    @property
    def root(self) -> Handle:
        """The value whose memory this one shares: values with the same root see each other's writes."""
        return self

    def __del__(self) -> None:
        # May run at any point of any thread, also inside the methods of Graph: it takes no lock.
        try:
            graph = self.graph
        except AttributeError:
            return  # made without __init__, by a copy or a compiler: it holds nothing
        graph.dropped.append(self.value_id)


class ViewHandle(Handle):
    """A value that shares the memory of another one, ``offset_bytes`` (of the global tensor) behind its start."""

    __slots__ = ("offset_bytes", "root")

    def __init__(
        self, graph: Graph, value_id: int, origin: Any, location: int, root: Handle, offset_bytes: int
    ) -> None:
        self.graph = graph
        self.value_id = value_id
        self.origin = origin
        self.location = location
        self.root = root  # type: ignore[misc]  # a slot in place of the property
        self.offset_bytes = offset_bytes


def _define_run(session: Session, record: TemplateRecord) -> int:
    number = session.define_template(record)
    session.names.setdefault(number, "a run that repeats")
    return number


class Graph:
    """An independent stream of ops. Ops of one graph run in order; graphs run concurrently.

    An op belongs to the graph of its tensors, or, when it has none, to the current graph of the thread:
    the innermost ``with graph:``, else ``Graph.default_graph()``. Any thread may issue on any graph.

    Args:
        session: the current one when None.
        auto_capture: find runs of ops that repeat, and send each as one record; the setting when None.
    """

    def __init__(self, session: Session | None = None, *, auto_capture: bool | None = None) -> None:
        #: Guarded by the lock: the batch to come, and the ops in it.
        self.words: list[int] = []
        self.num_ops = 0
        #: Ops of ``words`` that were looked at, and held back for a run that they may begin; not in ``num_ops``.
        self.num_held = 0
        #: Ids of values without a symbol, which the cluster still holds.
        self.dropped: list[int] = []
        #: Used by the replayer alone: what is freed before which of the words.
        self._frees: list[tuple[int, list[int]]] = []  # before what may raise: `__del__` reads these three
        if isinstance(session, DeviceMesh):
            raise MeshError(
                f"Graph() takes no mesh, got {session!r}: a graph is a stream of ops. Write graph = dtorch.Graph(), "
                f"and with graph, graph.device_mesh_guard(mesh): for its default mesh"
            )
        if session is None:
            from dtorch.cluster import current_session  # a session makes graphs

            session = current_session()
        self.session = session
        self.graph_id = session.next_graph_id()
        #: The session's cache: key of a call -> what to do. Empty once the session is over.
        self.entries = session.entries
        self.new_value_id = session.new_value_id
        self.lock = threading.Lock()
        #: As many ops are a batch: few at first after a wait, when workers have nothing to do, then ever more.
        self.max_ops = self._first_ops = min(FIRST_BATCH_OPS, session.settings.batch_ops)
        #: When the oldest op of the batch was issued, and by which thread.
        self.started_s = 0.0
        self.thread_id = threading.get_ident()
        #: The number of the last message sent.
        self.last_seq = 0
        #: Replaces runs of ops that repeat, or None; guarded by the lock, as what it alone uses: how often the end of a
        #: batch has waited, with how many ops, to become a run.
        self.replayer: Replayer | None = None
        self._num_waits = 0
        if session.settings.auto_capture if auto_capture is None else auto_capture:
            define = partial(_define_run, session)  # nothing of the graph, which ends with its last symbol
            # Runs are found in whole batches: they are as long from the first on.
            self.max_ops = self._first_ops = session.settings.batch_ops
            self.replayer = Replayer(session.templates, define, session.new_inner_ids, self.max_ops // 2)
        #: What keeps the ops that are issued, while a captured function runs for the first time.
        self.recording: Recording | None = None
        #: Collects the values that are freed, while somebody wants to know.
        self.freed: set[int] | None = None
        #: The last batches, packed, and the last captured call, for people.
        self.recent: deque[bytes] = deque(maxlen=_NUM_RECENT)
        self.last_call: RecordedCall | None = None
        self._meshes: list[DeviceMesh] = []
        self._outer: list[Graph | None] = []
        session.check_open()
        session.batches.add(self)

    @staticmethod
    def default_graph() -> Graph:
        """The graph of this thread in the current session; the first use starts one."""
        from dtorch.cluster import current_session  # a session makes graphs

        return current_session().default_graph()

    @property
    def default_mesh(self) -> DeviceMesh:
        """The mesh of tensors made without one: the innermost guard's, else ``Session.default_mesh``."""
        return self._meshes[-1] if self._meshes else self.session.default_mesh()

    @property
    def is_guarded(self) -> bool:
        """Whether a ``device_mesh_guard`` is open."""
        return bool(self._meshes)

    @property
    def watching(self) -> Recording | None:
        """The recording that must know of what is read and sent: of this graph, or of another one on this thread."""
        found: Recording | None = self.recording or getattr(recorded_here, "recording", None)
        return found

    @contextmanager
    def device_mesh_guard(self, mesh: DeviceMesh) -> Iterator[DeviceMesh]:
        """Inside, tensors made without a mesh live on ``mesh``.

        Raises:
            MeshError: it is not a mesh, or names devices that the cluster does not have.
        """
        if not isinstance(mesh, DeviceMesh):
            raise MeshError(
                f"device_mesh_guard takes a DeviceMesh, got {mesh!r}; write e.g. dtorch.DeviceMesh('cpu', [0, 1])"
            )
        self.session.define_mesh(mesh)
        self._meshes.append(mesh)
        try:
            yield mesh
        finally:
            self._meshes.pop()

    def __enter__(self) -> Graph:
        self._outer.append(self.session.set_current_graph(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.set_current_graph(self._outer.pop())

    # ---- issuing ----

    def append(
        self,
        template: int,
        location: int,
        inputs: Sequence[int],
        num_outputs: int,
        scalars: Sequence[int] = (),
        num_ops: int = 1,
    ) -> list[int]:
        """Issue one op; returns the ids of its outputs. May block, when too much is outstanding.

        Args:
            num_ops: as how many ops it counts.

        Raises:
            ClusterTimeout: there was no room for more ops and no progress.
            ControllerLost, SessionClosed: the session is over.
        """
        outputs = [self.new_value_id() for _ in range(num_outputs)]
        with self.lock:
            if not self.words:
                self.begin_batch()
            if len(self.dropped) >= FREE_BATCH or (num_ops > 1 and self.dropped):
                self.free_dropped()  # before a captured call each time: it may be long, and need the memory
            self.words.extend((template, location, *inputs, *outputs, *scalars))
            self.num_ops += num_ops
            if self.num_ops >= self.max_ops:
                self.send_batch()
        return outputs

    def begin_batch(self) -> None:
        """The first op of a batch is about to be appended. The lock is held."""
        self.started_s = time.monotonic()
        self.thread_id = threading.get_ident()
        self.session.batch_begun()

    def free_dropped(self) -> None:
        """Append a FREE record. The lock is held."""
        count = len(self.dropped)
        if self.freed is not None:
            self.freed.update(self.dropped[:count])
        if self.replayer is not None:
            self._frees.append((len(self.words), self.dropped[:count]))
        else:
            self.words.append(FREE)
            self.words.append(count)
            self.words.extend(self.dropped[:count])
        del self.dropped[:count]

    def free_soon(self) -> None:
        """Have what was dropped freed before the next op, not some ops later: for who drops what is large."""
        with self.lock:
            if self.words and self.dropped:
                self.free_dropped()

    def send_batch(self, why: str | None = None) -> None:
        """Send what was appended, after waiting for room. The lock is held.

        Args:
            why: what all of it is sent for; None when it is enough for a batch.
        """
        if self.dropped:
            self.free_dropped()
        if not self.words and not self._frees:
            if self.replayer is not None:
                self.replayer.rewrite([], (), why)
            return
        self._num_waits = 0
        self.session.wait_for_room(self.num_ops + self.num_held, 0, self.graph_id)
        with DeferredInterrupts():
            self._send_now(why)

    def _send_now(self, why: str | None) -> None:
        words, self.words = self.words, []
        num_ops, self.num_ops, self.num_held = self.num_ops + self.num_held, 0, 0
        if self.recording is not None:
            self.recording.words += words
        self.max_ops = min(2 * self.max_ops, self.session.settings.batch_ops)
        if self.replayer is not None:
            words, num_ops = self._replayed(self.replayer, words, num_ops, why)
        if not words:
            return
        frame = pack(words)
        self.recent.append(frame)
        self.last_seq = self.session.send_ops(self.graph_id, frame, num_ops)

    def _replayed(
        self, replayer: Replayer, words: list[int], num_ops: int, why: str | None
    ) -> tuple[list[int], int]:
        """What is sent of these words, and as how many ops it counts; the rest begins the next batch."""
        frees, self._frees = self._frees, []
        if self.recording is not None:
            return with_frees(words, frees), num_ops
        found = replayer.rewrite(words, frees, why)
        self.session.batches.count_replays(found.num_replays)
        self.words, self._frees = words[found.rest :], found.rest_frees
        self.num_held = found.num_rest_ops
        if self.words:
            self.begin_batch()
        return found.words, num_ops - found.num_rest_ops

    def flush(self) -> int:
        """Send what was appended; returns the number of the last message.

        Raises:
            ClusterTimeout, ControllerLost, SessionClosed: as ``append``.
        """
        self.session.check_open()  # before the lock: in a forked child another thread may have held it
        with self.lock:
            self.send_batch(AWAITED)
            self.max_ops = self._first_ops
            return self.last_seq

    def flush_if_older(self, than_s: float, *, keeps: bool) -> bool:
        """Send a batch begun before ``than_s``, or what was dropped since, if that needs no waiting.

        False when no op is left to send.

        Args:
            keeps: whether the beginning of a run may wait for the rest of it, while its thread goes on.
        """
        if not self.lock.acquire(blocking=False):
            return True  # its thread is issuing right now
        try:
            is_due = self.started_s <= than_s if self.words else bool(self.dropped or self._frees)
            if is_due and self.session.has_room(self.num_ops + self.num_held, self.graph_id):
                if self.dropped:
                    self.free_dropped()
                self._num_waits += 1 if self.num_ops else _MAX_WAITS // 2
                self._send_now(None if keeps and self._num_waits < _MAX_WAITS else PAUSED)
                if not self.words:
                    self._num_waits = 0
            return bool(self.words)
        finally:
            self.lock.release()

    def __del__(self) -> None:
        # A graph outlives its values; what it has not sent yet is left to the session's thread.
        if self.words or self.dropped or self._frees:
            dropped = [*(value for _, ids in self._frees for value in ids), *self.dropped]
            num_ops = self.num_ops + self.num_held
            self.session.batches.orphans.append((self.graph_id, self.words, num_ops, dropped))

    # ---- for people ----

    def dump(self, path: str | os.PathLike[str] | None = None) -> str:
        """Draw the ops that were issued last, up to some thousand; those of captured calls in a frame each.

        Args:
            path: ``"g.mmd"`` for mermaid text, ``"g.dot"`` for graphviz text, ``"g.svg"`` for a picture, which the
                program ``dot`` draws. None writes nothing.

        Returns:
            The text that was drawn; for None a line for each op, with its line in the program.

        Raises:
            SettingError: another suffix, or ``dot`` is not installed.
        """
        with self.lock:
            batches = [*map(unpack, self.recent), list(self.words)]
        words = [word for batch in batches for word in batch]
        return dump(list(shown_stream(words, self.session.templates, self.session.names)), path)

    # ---- waiting ----

    def sync(self, timeout_s: float | None = None) -> None:
        """Wait until every op of this graph has run.

        Args:
            timeout_s: longest wait in seconds; the setting ``wait_timeout_s`` when None.

        Raises:
            RemoteOpError: an op failed and nobody has fetched what depends on it; the oldest such failure.
            NodeLost: a node was lost and no fetch has said so.
            ClusterTimeout, ControllerLost, SessionClosed: as for any wait.
        """
        self.sync_async().get(timeout_s)

    def sync_async(self) -> SyncFuture:
        """As ``sync``, to be awaited (or ``.get()``)."""
        return self.session.sync_after(self.flush(), f"graph {self.graph_id} to finish its ops")

    def __repr__(self) -> str:
        return f"<Graph {self.graph_id} of {self.session!r}>"
