"""What a client decides about its connection: room for more ops, fetches in flight, failures seen. No I/O here.

``SessionState.handle`` takes what the controller said and returns what to do about it; ``dtorch.connection`` does it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dtorch_runtime.settings import Settings
from dtorch_runtime.wire.messages import (
    Answer,
    Asked,
    ClusterClosing,
    Credit,
    FetchFailed,
    NodeDown,
    NodeJoined,
    OpFailed,
    Refused,
    Status,
    ToClient,
    ValueData,
    Welcome,
)
from dtorch_runtime.wire.records import FailureRecord, NodeRecord, Reply


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """The local piece of a value on one device: its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: Any


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Event: the controller went silent, its process ended, or the link broke."""

    reason: str


@dataclass(frozen=True, slots=True)
class FetchDone:
    """Action: every piece of a fetch is there, by device."""

    fetch_id: int
    pieces: Mapping[int, LocalPiece]


@dataclass(frozen=True, slots=True)
class FetchMissed:
    """Action: a fetch has no value."""

    fetch_id: int
    failure: FailureRecord


@dataclass(frozen=True, slots=True)
class SyncReached:
    """Action: everything that a sync waits for has been run."""

    sync_id: int


@dataclass(frozen=True, slots=True)
class Answers:
    """Action: the controller and every node that still lives have answered a question.

    Attributes:
        replies: by the name of the node; that of the controller is empty.
        lost: why other nodes did not answer.
    """

    request_id: int
    replies: Mapping[str, Reply]
    lost: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RoomFreed:
    """Action: whoever waits for room may look again."""


@dataclass(frozen=True, slots=True)
class ControllerGone:
    """Action: the session is over; every wait fails."""

    reason: str


Event: TypeAlias = ToClient | PeerLost
Action: TypeAlias = FetchDone | FetchMissed | SyncReached | Answers | RoomFreed | ControllerGone


@dataclass(slots=True)
class _Fetch:
    fetch_id: int
    #: Devices whose piece is still to come.
    missing: set[int]
    pieces: dict[int, LocalPiece] = field(default_factory=dict)


@dataclass(slots=True)
class _Question:
    #: Who is still to answer; the controller has no name.
    missing: set[str]
    #: Whether the controller has said which nodes it asked.
    is_asked: bool = False
    replies: dict[str, Reply] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Incoming:
    """A piece that comes in several chunks."""

    data: bytearray
    num_received_bytes: int = 0


#: A graph that has sent nothing among so many messages shares the room for ops with no other.
_RECENT_MESSAGES = 1024
#: From so many graphs on, those that are not recent are forgotten.
_MAX_LAST = 2 * _RECENT_MESSAGES


class SessionState:
    """Credits, fetches, syncs, failures and the node table of one session."""

    def __init__(
        self, nodes: Sequence[NodeRecord], *, max_ops: int, max_bytes: int, shared_window_ops: int = 2_048
    ) -> None:
        self._max_ops = max_ops
        self._max_bytes = max_bytes
        self._shared_window_ops = shared_window_ops
        #: Last message that was numbered. #: acknowledged_seq <= seq
        self.seq = 0
        self.acknowledged_seq = 0
        #: (seq, ops, bytes, graph) of numbered messages without a credit, seqs rising. Uploads are of graph 0.
        self._outstanding: deque[tuple[int, int, int, int]] = deque()
        #: Sums over ``_outstanding``; the ops also by graph, of those that have any.
        self.num_ops = 0
        self.num_bytes = 0
        self._ops_of_graph: dict[int, int] = {}
        #: graph -> its last message; some graphs that are not recent are among them.
        self._last_of_graph: dict[int, int] = {}
        self.nodes: dict[str, NodeRecord] = {node.name: node for node in nodes}
        #: Why each device of a lost node is gone.
        self.lost: dict[int, FailureRecord] = {}
        self._next_id = 0
        #: Request id -> (its fetch, the device asked). Every fetch with a missing device is in here.
        self._requests: dict[int, tuple[_Fetch, int]] = {}
        self._incoming: dict[int, _Incoming] = {}
        #: Those that somebody is still to answer, by request id.
        self._questions: dict[int, _Question] = {}
        #: (seq that must be acknowledged, sync id).
        self._syncs: list[tuple[int, int]] = []
        #: Failures that no fetch and no sync has raised, by failure id, in order of arrival.
        self.unfetched: dict[str, FailureRecord] = {}
        self._raised: set[str] = set()
        #: Why the session is over, or None.
        self.gone: str | None = None

    @classmethod
    def with_settings(cls, nodes: Sequence[NodeRecord], settings: Settings) -> SessionState:
        """A new one, with the bounds that the settings name."""
        return cls(
            nodes,
            max_ops=settings.max_outstanding_ops,
            max_bytes=settings.max_outstanding_bytes,
            shared_window_ops=settings.shared_window_ops,
        )

    # ---- what the client does ----

    def has_room(self, num_ops: int, num_bytes: int, graph_id: int = 0) -> bool:
        """Whether a message with so much work may be sent now. A single too large one may go alone.

        Everything is run in the order in which it is sent. So while several graphs issue ops, each is held to a
        smaller number of its own: what one of them waits for are the others' ops that are under way.
        """
        if not self._outstanding:
            return True
        of_graph = self._ops_of_graph.get(graph_id, 0) if graph_id else 0
        if of_graph and of_graph + num_ops > self._shared_window_ops and self._has_company(graph_id):
            return False
        return self.num_ops + num_ops <= self._max_ops and self.num_bytes + num_bytes <= self._max_bytes

    def why_no_room(self) -> str:
        """What takes the room, for people."""
        return f"{self.num_ops} ops and {self.num_bytes} bytes are outstanding, and none finished"

    def _has_company(self, graph_id: int) -> bool:
        oldest = self.seq - _RECENT_MESSAGES
        # A copy: another thread may issue meanwhile.
        return any(graph != graph_id and seq > oldest for graph, seq in list(self._last_of_graph.items()))

    def issue(self, num_ops: int, num_bytes: int, graph_id: int = 0) -> int:
        """Number a message that is about to be sent."""
        self.seq += 1
        self._outstanding.append((self.seq, num_ops, num_bytes, graph_id))
        self.num_ops += num_ops
        self.num_bytes += num_bytes
        if graph_id:
            self._last_of_graph[graph_id] = self.seq
            if len(self._last_of_graph) > _MAX_LAST:
                oldest = self.seq - _RECENT_MESSAGES
                self._last_of_graph = {
                    graph: seq for graph, seq in self._last_of_graph.items() if seq > oldest
                }
            self._ops_of_graph[graph_id] = self._ops_of_graph.get(graph_id, 0) + num_ops
        return self.seq

    def start_fetch(self, devices: Sequence[int]) -> tuple[int, list[tuple[int, int]], list[Action]]:
        """A new fetch: its id, the (request id, device) to ask for, and what is known at once."""
        fetch = _Fetch(self._new_id(), set(devices))
        for device in devices:
            if device in self.lost:
                return fetch.fetch_id, [], [FetchMissed(fetch.fetch_id, self.lost[device])]
        requests = []
        for device in devices:
            request_id = self._new_id()
            self._requests[request_id] = (fetch, device)
            requests.append((request_id, device))
        return fetch.fetch_id, requests, []

    def start_question(self) -> int:
        """The request id of a question that is about to be sent."""
        request_id = self._new_id()
        self._questions[request_id] = _Question({""})
        return request_id

    def start_sync(self, seq: int) -> tuple[int, list[Action]]:
        """A new wait for everything up to ``seq``: its id, and what is known at once."""
        sync_id = self._new_id()
        if seq <= self.acknowledged_seq:
            return sync_id, [SyncReached(sync_id)]
        self._syncs.append((seq, sync_id))
        return sync_id, []

    def mark_raised(self, failure_id: str) -> None:
        """The user has seen this failure."""
        self._raised.add(failure_id)
        self.unfetched.pop(failure_id, None)

    def take_unfetched(self) -> FailureRecord | None:
        """The oldest failure that nobody has seen; it counts as seen from now on."""
        for failure in self.unfetched.values():
            self.mark_raised(failure.failure_id)
            return failure
        return None

    # ---- what the controller says ----

    def handle(self, event: Event, payload: Any = None) -> list[Action]:
        """Take an event. ``payload`` is the payload frame of a ``ValueData``."""
        match event:
            case Credit():
                return self._credit(event.seq)
            case ValueData():
                return self._value_data(event, payload)
            case FetchFailed():
                return self._fetch_failed(event.request_id, event.failure)
            case OpFailed():
                self._note_failure(event.failure)
                return []
            case Asked():
                return self._asked(event)
            case Answer():
                return self._answer(event)
            case NodeJoined():
                self.nodes[event.node.name] = event.node
                return []
            case NodeDown():
                return self._node_down(event)
            case ClusterClosing() | Refused() | PeerLost():
                return self._end(event.reason)
            case Welcome() | Status():
                return self._end(f"it sent {type(event).__name__} in the middle of a session")

    def _credit(self, seq: int) -> list[Action]:
        self.acknowledged_seq = max(self.acknowledged_seq, seq)
        outstanding = self._outstanding
        while outstanding and outstanding[0][0] <= seq:
            _, num_ops, num_bytes, graph_id = outstanding.popleft()
            self.num_ops -= num_ops
            self.num_bytes -= num_bytes
            if graph_id:
                left = self._ops_of_graph.pop(graph_id, 0) - num_ops
                if left > 0:
                    self._ops_of_graph[graph_id] = left
        reached: list[Action] = [SyncReached(sync_id) for wanted, sync_id in self._syncs if wanted <= seq]
        if reached:
            self._syncs = [item for item in self._syncs if item[0] > seq]
        return [RoomFreed(), *reached]

    def _value_data(self, message: ValueData, payload: Any) -> list[Action]:
        found = self._requests.get(message.request_id)
        if found is None:
            return []  # its fetch failed already, through another device
        num_bytes = len(payload)
        if message.offset_bytes == 0 and num_bytes == message.total_bytes:
            return self._piece(message, payload)
        incoming = self._incoming.get(message.request_id)
        if incoming is None:
            incoming = self._incoming[message.request_id] = _Incoming(bytearray(message.total_bytes))
        start, stop = message.offset_bytes, message.offset_bytes + num_bytes
        if start != incoming.num_received_bytes or stop > len(incoming.data):
            return self._fetch_failed(message.request_id, _broken_chunk(message, incoming.num_received_bytes))
        incoming.data[start:stop] = payload
        incoming.num_received_bytes = stop
        return [] if stop < message.total_bytes else self._piece(message, incoming.data)

    def _piece(self, message: ValueData, data: Any) -> list[Action]:
        self._incoming.pop(message.request_id, None)
        fetch, device = self._requests.pop(message.request_id)
        fetch.pieces[device] = LocalPiece(message.dtype, tuple(message.shape), data)
        fetch.missing.discard(device)
        return [] if fetch.missing else [FetchDone(fetch.fetch_id, fetch.pieces)]

    def _fetch_failed(self, request_id: int, failure: FailureRecord) -> list[Action]:
        found = self._requests.get(request_id)
        if found is None:
            return []
        self._forget(found[0])
        return [FetchMissed(found[0].fetch_id, failure)]

    def _forget(self, fetch: _Fetch) -> None:
        for request_id in [number for number, (other, _) in self._requests.items() if other is fetch]:
            del self._requests[request_id]
            self._incoming.pop(request_id, None)

    def _asked(self, message: Asked) -> list[Action]:
        question = self._questions.get(message.request_id)
        if question is None:
            return []
        question.is_asked = True
        question.missing.update(message.nodes)
        return self._if_answered(message.request_id, question)

    def _answer(self, message: Answer) -> list[Action]:
        question = self._questions.get(message.request_id)
        if question is None or message.node not in question.missing:
            return []
        question.missing.remove(message.node)
        question.replies[message.node] = message.reply
        return self._if_answered(message.request_id, question)

    def _if_answered(self, request_id: int, question: _Question) -> list[Action]:
        if question.missing or not question.is_asked:
            return []
        del self._questions[request_id]
        return [Answers(request_id, question.replies, question.lost)]

    def _note_failure(self, failure: FailureRecord) -> None:
        if failure.failure_id not in self._raised:
            self.unfetched.setdefault(failure.failure_id, failure)

    def _node_down(self, message: NodeDown) -> list[Action]:
        self.nodes.pop(message.name, None)
        for device in message.devices:
            self.lost[device] = _node_failure(message, device)
        touched: dict[int, tuple[_Fetch, int]] = {}
        for fetch, device in self._requests.values():
            if device in self.lost:
                touched.setdefault(fetch.fetch_id, (fetch, device))
        actions: list[Action] = []
        for fetch, device in touched.values():
            self._forget(fetch)
            actions.append(FetchMissed(fetch.fetch_id, self.lost[device]))
        for request_id, question in list(self._questions.items()):
            if message.name in question.missing:
                question.missing.remove(message.name)
                question.lost[message.name] = message.reason
                actions += self._if_answered(request_id, question)
        if message.devices:
            self._note_failure(self.lost[message.devices[0]])
        return actions

    def _end(self, reason: str) -> list[Action]:
        if self.gone is not None:
            return []
        self.gone = reason
        self._requests.clear()
        self._incoming.clear()
        self._questions.clear()
        self._syncs.clear()
        return [ControllerGone(reason), RoomFreed()]

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def validate(self) -> None:
        """Check the invariants that the fields state."""
        assert 0 <= self.acknowledged_seq <= self.seq, (self.acknowledged_seq, self.seq)
        assert self.num_ops == sum(item[1] for item in self._outstanding)
        assert self.num_bytes == sum(item[2] for item in self._outstanding)
        assert sum(self._ops_of_graph.values()) == sum(item[1] for item in self._outstanding if item[3])
        seqs = [item[0] for item in self._outstanding]
        assert seqs == sorted(set(seqs)), "outstanding messages are numbered in rising order"
        assert all(seq > self.acknowledged_seq for seq in seqs)
        assert all(device in fetch.missing for fetch, device in self._requests.values())
        assert set(self._incoming) <= set(self._requests)
        assert all(question.missing or not question.is_asked for question in self._questions.values())
        assert not self._raised & set(self.unfetched)


def _broken_chunk(message: ValueData, num_received_bytes: int) -> FailureRecord:
    return FailureRecord(
        "internal",
        f"chunk:{message.request_id}",
        "fetch",
        0,
        message.device,
        "",
        "InternalError",
        f"a chunk at byte {message.offset_bytes} of {message.total_bytes} came when {num_received_bytes} had arrived",
        "",
    )


def _node_failure(message: NodeDown, device: int) -> FailureRecord:
    return FailureRecord(
        "node", f"node:{message.name}", "", 0, device, message.name, "NodeLost", message.reason, ""
    )
