"""What a node agent decides: one event in, actions out. No sockets, no clock, no asyncio.

Lives from one hello to the controller's end; an agent that joins again begins with a new state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dtorch_runtime.node.events import (
    Action,
    AddMesh,
    AddTemplates,
    CloseAsked,
    Connected,
    ConnectionLost,
    EndSession,
    Event,
    ExecutorBroke,
    Joined,
    Leave,
    OpenSession,
    PeerNodeJoined,
    PeerNodeLost,
    Received,
    Reported,
    RunOps,
    Send,
    StartFetch,
    TakeQuestion,
    TakeUpload,
)
from dtorch_runtime.node.executor import Completed, ExecutorEvent, OpRaised, Replied, ValueMissing, ValueReady
from dtorch_runtime.wire.messages import (
    PROTOCOL_VERSION,
    Answer,
    Ask,
    ClusterClosing,
    DefineMesh,
    DefineTemplates,
    Done,
    Fetch,
    FetchFailed,
    Message,
    NodeBye,
    NodeDown,
    NodeHello,
    NodeJoined,
    NodeWelcome,
    OpFailed,
    Refused,
    SessionEnded,
    SessionOpened,
    Subgraph,
    Upload,
    ValueData,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Who this node is. ``data_endpoint`` is where other nodes reach its data plane."""

    name: str
    host: str
    pid: int
    device_type: str
    num_devices: int
    data_endpoint: str
    session_key: bytes = field(repr=False)
    chunk_bytes: int
    check: bool = False


class _Broken(Exception):
    """The controller sent what the protocol does not allow."""


#: Messages that are done and that the controller was not told of, at most, while there is more to do.
_MAX_UNTOLD = 32


class _SessionWork:
    """What one session has under way on this node."""

    __slots__ = ("completed", "done", "fetches", "num_untold", "outstanding")

    def __init__(self) -> None:
        #: Seqs that the executor was given and that are above ``done``, rising.
        self.outstanding: deque[int] = deque()
        #: Those of them that it has completed; never the first one.
        self.completed: set[int] = set()
        #: Everything up to here is done; and so many messages of that the controller was not told of.
        self.done = 0
        self.num_untold = 0
        #: request id -> device, asked of the executor and not answered.
        self.fetches: dict[int, int] = {}

    def start(self, seq: int) -> None:
        last = self.outstanding[-1] if self.outstanding else self.done
        if seq <= last:
            raise _Broken(f"message {seq} came after message {last}")
        self.outstanding.append(seq)

    def complete(self, seq: int) -> None:
        outstanding, completed = self.outstanding, self.completed
        completed.add(seq)
        while outstanding and outstanding[0] in completed:
            self.done = outstanding.popleft()
            completed.remove(self.done)
            self.num_untold += 1

    def is_worth_telling(self) -> bool:
        """Whether as much is done as there is left to do: the rest lasts until what the credit lets in has come.

        So a node that is behind by many messages does not answer each of them: the controller has a thousand such
        nodes, and what it reads from each is what a step costs it.
        """
        return 0 < self.num_untold >= min(len(self.outstanding), _MAX_UNTOLD)

    def validate(self) -> None:
        seqs = list(self.outstanding)
        assert seqs == sorted(set(seqs))
        assert self.completed <= set(seqs)
        assert not seqs or (self.done < seqs[0] and seqs[0] not in self.completed)
        assert not self.num_untold or self.outstanding, "idle, and the controller does not know"
        assert self.num_untold < _MAX_UNTOLD


_NUM_FRAMES: dict[type[Message], int] = {Subgraph: 1, Upload: 1}
_Handler: TypeAlias = Callable[..., None]


class NodeState:
    """See the module. ``handle`` is the only way in."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        #: session number -> work, live ones only.
        self._sessions: dict[int, _SessionWork] = {}
        self.is_joined = False
        #: Set once; then nothing more is sent or done.
        self.end_reason: str | None = None
        self._actions: list[Action] = []
        self._handlers: dict[type[Message], _Handler] = {
            NodeWelcome: self._on_welcome,
            Refused: self._on_refused,
            ClusterClosing: self._on_closing,
            SessionOpened: self._on_session_opened,
            SessionEnded: self._on_session_ended,
            DefineMesh: self._on_define_mesh,
            DefineTemplates: self._on_define_templates,
            Subgraph: self._on_subgraph,
            Upload: self._on_upload,
            Fetch: self._on_fetch,
            Ask: self._on_ask,
            NodeJoined: self._on_node_joined,
            NodeDown: self._on_node_down,
        }

    @property
    def num_outstanding(self) -> int:
        """Messages and fetches that the executor has not answered."""
        return sum(len(work.outstanding) + len(work.fetches) for work in self._sessions.values())

    @property
    def sessions(self) -> list[int]:
        """The live sessions."""
        return list(self._sessions)

    def handle(self, event: Event) -> list[Action]:
        """Take one event. Returns what is to be done, in order. After the end there is nothing to do."""
        actions: list[Action] = []
        self._actions = actions
        if self.end_reason is not None:
            return actions
        if type(event) is Received:
            self._on_received(event)
        elif isinstance(event, Reported):
            self._on_reported(event.events)
        elif isinstance(event, Connected):
            self._send(self._hello())
        elif isinstance(event, ConnectionLost):
            self._leave(Leave(reason=event.reason, is_controller_lost=True))
        elif isinstance(event, CloseAsked | ExecutorBroke):
            self._send(NodeBye(reason=event.reason))
            self._leave(Leave(reason=event.reason, is_broken=isinstance(event, ExecutorBroke)))
        if self._config.check:
            self.validate()
        return actions

    def validate(self) -> None:
        """Check the invariants that the attributes state."""
        for work in self._sessions.values():
            work.validate()
        assert self.is_joined or not self._sessions, "sessions before the welcome"

    def _send(self, message: Message, frames: Sequence[Any] = ()) -> None:
        self._actions.append(Send(message=message, frames=frames))

    def _hello(self) -> NodeHello:
        config = self._config
        return NodeHello(
            version=PROTOCOL_VERSION,
            session_key=config.session_key,
            name=config.name,
            host=config.host,
            pid=config.pid,
            device_type=config.device_type,
            num_devices=config.num_devices,
            data_endpoint=config.data_endpoint,
        )

    def _leave(self, action: Leave) -> None:
        self.end_reason = action.reason
        self._sessions.clear()
        self._actions.append(action)

    # ---- from the controller ----

    def _on_received(self, event: Received) -> None:
        kind = type(event.message)
        try:
            if len(event.frames) != _NUM_FRAMES.get(kind, 0):
                raise _Broken(f"{kind.__name__} came with {len(event.frames)} payload frames")
            if not self.is_joined and kind not in (NodeWelcome, Refused, ClusterClosing):
                raise _Broken(f"{kind.__name__} came before the welcome")
            self._handlers[kind](event.message, event.frames)
        except _Broken as error:
            reason = f"the controller broke the protocol: {error}"
            self._send(NodeBye(reason=reason))
            self._leave(Leave(reason=reason, is_controller_lost=True))

    def _work(self, session: int) -> _SessionWork:
        work = self._sessions.get(session)
        if work is None:
            raise _Broken(f"session {session} is not open")
        return work

    def _on_welcome(self, message: NodeWelcome, frames: Sequence[Any]) -> None:
        if self.is_joined:
            raise _Broken("a second welcome")
        self.is_joined = True
        self._actions.append(
            Joined(
                devices=tuple(message.devices),
                nodes=tuple(message.nodes),
                heartbeat_endpoint=message.heartbeat_endpoint,
            )
        )

    def _on_refused(self, message: Refused, frames: Sequence[Any]) -> None:
        self._leave(Leave(reason=message.reason, is_refused=True))

    def _on_closing(self, message: ClusterClosing, frames: Sequence[Any]) -> None:
        self._leave(Leave(reason=f"the cluster was closed: {message.reason}"))

    def _on_session_opened(self, message: SessionOpened, frames: Sequence[Any]) -> None:
        if message.session in self._sessions:
            raise _Broken(f"session {message.session} was opened twice")
        self._sessions[message.session] = _SessionWork()
        self._actions.append(OpenSession(session=message.session))

    def _on_session_ended(self, message: SessionEnded, frames: Sequence[Any]) -> None:
        if self._sessions.pop(message.session, None) is not None:
            self._actions.append(EndSession(session=message.session))

    def _on_define_mesh(self, message: DefineMesh, frames: Sequence[Any]) -> None:
        self._work(message.session)
        self._actions.append(AddMesh(session=message.session, record=message.mesh))

    def _on_define_templates(self, message: DefineTemplates, frames: Sequence[Any]) -> None:
        self._work(message.session)
        self._actions.append(AddTemplates(session=message.session, records=tuple(message.templates)))

    def _on_subgraph(self, message: Subgraph, frames: Sequence[Any]) -> None:
        self._work(message.session).start(message.seq)
        self._actions.append(RunOps(session=message.session, seq=message.seq, frame=frames[0]))

    def _on_upload(self, message: Upload, frames: Sequence[Any]) -> None:
        self._work(message.session).start(message.seq)
        self._actions.append(TakeUpload(message=message, frame=frames[0]))

    def _on_fetch(self, message: Fetch, frames: Sequence[Any]) -> None:
        fetches = self._work(message.session).fetches
        if message.request_id in fetches:
            raise _Broken(f"fetch {message.request_id} was asked for twice")
        fetches[message.request_id] = message.device
        self._actions.append(
            StartFetch(
                session=message.session,
                request_id=message.request_id,
                value_id=message.value_id,
                device=message.device,
            )
        )

    def _on_ask(self, message: Ask, frames: Sequence[Any]) -> None:
        self._work(message.session)
        self._actions.append(
            TakeQuestion(session=message.session, request_id=message.request_id, question=message.question)
        )

    def _on_node_joined(self, message: NodeJoined, frames: Sequence[Any]) -> None:
        self._actions.append(PeerNodeJoined(node=message.node))

    def _on_node_down(self, message: NodeDown, frames: Sequence[Any]) -> None:
        self._actions.append(
            PeerNodeLost(name=message.name, devices=tuple(message.devices), reason=message.reason)
        )

    # ---- from the executor ----

    def _on_reported(self, events: Sequence[ExecutorEvent]) -> None:
        """Reports of sessions that have ended are of no interest. One ``Done`` a session at the end."""
        touched: dict[int, _SessionWork] = {}
        for event in events:
            work = self._sessions.get(event.session)
            if work is None:
                continue
            if isinstance(event, Completed):
                work.complete(event.seq)
                touched[event.session] = work
            elif isinstance(event, OpRaised):
                self._send(OpFailed(session=event.session, failure=event.failure))
            elif isinstance(event, Replied):
                self._send(Answer(session=event.session, request_id=event.request_id, reply=event.reply))
            elif work.fetches.pop(event.request_id, None) is not None:
                self._answer_fetch(event)
        for session, work in touched.items():
            if work.is_worth_telling():
                work.num_untold = 0
                self._send(Done(session=session, seq=work.done))

    def _answer_fetch(self, event: ValueReady | ValueMissing) -> None:
        if isinstance(event, ValueMissing):
            self._send(
                FetchFailed(
                    session=event.session,
                    request_id=event.request_id,
                    device=event.device,
                    failure=event.failure,
                )
            )
            return
        data = event.data.cast("B") if event.data.nbytes else memoryview(b"")
        shape = list(event.shape)
        for offset in range(0, max(data.nbytes, 1), self._config.chunk_bytes):
            self._send(
                ValueData(
                    session=event.session,
                    request_id=event.request_id,
                    device=event.device,
                    dtype=event.dtype,
                    shape=shape,
                    offset_bytes=offset,
                    total_bytes=data.nbytes,
                ),
                (data[offset : offset + self._config.chunk_bytes],),
            )
