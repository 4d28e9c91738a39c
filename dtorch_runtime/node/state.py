"""What a node agent decides: one event in, actions out. No sockets, no clock, no asyncio.

Lives from one hello to the controller's end; an agent that joins again begins with a new state.
"""

from __future__ import annotations

import hmac
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
    LinkRelay,
    OpenSession,
    PeerNodeJoined,
    PeerNodeLost,
    Received,
    ReceivedFromChild,
    ReceivedFromParent,
    RelayLinkFailed,
    Reported,
    RunOps,
    Send,
    SendDown,
    SendUp,
    StartFetch,
    TakeQuestion,
    TakeUpload,
    Ticked,
)
from dtorch_runtime.node.executor import Completed, ExecutorEvent, OpRaised, Replied, ValueMissing, ValueReady
from dtorch_runtime.node.progress import ProtocolBroken, SessionWork
from dtorch_runtime.node.relay import Doorway, Seat
from dtorch_runtime.wire.codec import MalformedMessage, decode_to_node
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
    RelayBeat,
    RelayBegin,
    RelayBroken,
    RelayDone,
    Relayed,
    RelayEnd,
    RelayHello,
    RelayMark,
    SessionEnded,
    SessionOpened,
    Subgraph,
    Upload,
    ValueData,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Who this node is. Other nodes reach its data plane, and it for relays, at the two endpoints."""

    name: str
    host: str
    pid: int
    device_type: str
    num_devices: int
    data_endpoint: str
    session_key: bytes = field(repr=False)
    chunk_bytes: int
    #: Empty: it takes no part in relays.
    relay_endpoint: str = ""
    check: bool = False


_NUM_FRAMES: dict[type[Message], int] = {Subgraph: 1, Upload: 1}
#: Messages that are taken as they come, whatever else is waited for.
_UNORDERED = frozenset((NodeWelcome, Refused, ClusterClosing, RelayBegin, RelayMark, RelayEnd, Relayed))
_Handler: TypeAlias = Callable[..., None]


class NodeState:
    """See the module. ``handle`` is the only way in."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        #: session number -> work, live ones only.
        self._sessions: dict[int, SessionWork] = {}
        self.is_joined = False
        #: Set once; then nothing more is sent or done.
        self.end_reason: str | None = None
        #: Its place in the present relay.
        self._seat: Seat | None = None
        self._doorway = Doorway()
        #: session -> node below -> how far that is, of sessions that this node was not told of yet.
        self._reports_ahead: dict[int, dict[str, int]] = {}
        self._last_session = 0
        #: The message that is being taken came through the relay.
        self._is_relayed = False
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
            RelayBegin: self._on_relay_begin,
            RelayMark: self._on_relay_mark,
            RelayEnd: self._on_relay_end,
            Relayed: self._on_relayed,
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
        elif isinstance(event, ReceivedFromParent | ReceivedFromChild | RelayLinkFailed | Ticked):
            self._on_relay_event(event)
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
            assert self._seat is not None or not work.relayed.pending, (
                "something is relayed, and there is no relay"
            )
        if self._seat is not None:
            self._seat.validate()
        assert all(session > self._last_session for session in self._reports_ahead)
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
            relay_endpoint=config.relay_endpoint,
        )

    def _leave(self, action: Leave) -> None:
        self.end_reason = action.reason
        self._sessions.clear()
        self._actions.append(action)

    # ---- from the controller ----

    def _on_received(self, event: Received) -> None:
        message, seat = event.message, self._seat
        try:
            if seat is None or type(message) in _UNORDERED:
                self._take(message, event.frames)
            else:
                seat.arrive_direct(message, event.frames)
                self._take_ready()
        except ProtocolBroken as error:
            self._leave_broken(error)

    def _take(self, message: Message, frames: Sequence[Any]) -> None:
        kind = type(message)
        if len(frames) != _NUM_FRAMES.get(kind, 0) and kind is not Relayed:
            raise ProtocolBroken(f"{kind.__name__} came with {len(frames)} payload frames")
        if not self.is_joined and kind not in (NodeWelcome, Refused, ClusterClosing):
            raise ProtocolBroken(f"{kind.__name__} came before the welcome")
        self._handlers[kind](message, frames)

    def _leave_broken(self, error: ProtocolBroken) -> None:
        reason = f"the controller broke the protocol: {error}"
        self._send(NodeBye(reason=reason))
        self._leave(Leave(reason=reason, is_controller_lost=True))

    def _work(self, session: int) -> SessionWork:
        work = self._sessions.get(session)
        if work is None:
            raise ProtocolBroken(f"session {session} is not open")
        return work

    def _on_welcome(self, message: NodeWelcome, frames: Sequence[Any]) -> None:
        if self.is_joined:
            raise ProtocolBroken("a second welcome")
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
            raise ProtocolBroken(f"session {message.session} was opened twice")
        work = self._sessions[message.session] = SessionWork()
        self._last_session = max(self._last_session, message.session)
        work.below.update(self._reports_ahead.pop(message.session, {}))
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
        self._work(message.session).start(message.seq, is_relayed=self._is_relayed)
        self._actions.append(RunOps(session=message.session, seq=message.seq, frame=frames[0]))

    def _on_upload(self, message: Upload, frames: Sequence[Any]) -> None:
        self._work(message.session).start(message.seq, is_relayed=self._is_relayed)
        self._actions.append(TakeUpload(message=message, frame=frames[0]))

    def _on_fetch(self, message: Fetch, frames: Sequence[Any]) -> None:
        fetches = self._work(message.session).fetches
        if message.request_id in fetches:
            raise ProtocolBroken(f"fetch {message.request_id} was asked for twice")
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

    # ---- relays ----

    def _on_relay_begin(self, message: RelayBegin, frames: Sequence[Any]) -> None:
        if self._seat is not None or message.relay <= self._doorway.last_relay:
            raise ProtocolBroken(f"relay {message.relay} began after relay {self._doorway.last_relay}")
        parent, early = self._doorway.begin(message.relay)
        self._seat = Seat(message, parent)
        self._actions.append(LinkRelay(relay=message.relay, children=tuple(message.children)))
        self._actions.append(
            SendDown(message=RelayHello(session_key=self._config.session_key, relay=message.relay))
        )
        for kept, payload in early:
            self._arrive(self._seat, kept, payload, is_from_above=True)

    def _on_relay_mark(self, message: RelayMark, frames: Sequence[Any]) -> None:
        if self._seat is None:
            raise ProtocolBroken("a mark came, and there is no relay")
        self._seat.mark(message)

    def _on_relay_end(self, message: RelayEnd, frames: Sequence[Any]) -> None:
        if self._seat is None:
            raise ProtocolBroken("a relay ended that had not begun")
        self._seat.check_end(message)
        self._seat = None
        self._reports_ahead.clear()
        self._actions.append(LinkRelay(relay=0, children=()))
        for session, work in self._sessions.items():
            work.end_relay()
            self._tell(session, work)

    def _on_relayed(self, message: Relayed, frames: Sequence[Any]) -> None:
        """From the controller: to a node at the top, or again, because the relay is about to end."""
        seat = self._seat
        if seat is None or message.relay != seat.relay:
            raise ProtocolBroken(f"a message of relay {message.relay} came, which has not begun or is over")
        self._arrive(seat, message, frames, is_from_above=not seat.has_parent)

    def _arrive(self, seat: Seat, message: Relayed, frames: Sequence[Any], *, is_from_above: bool) -> None:
        if seat.arrive_relayed(message, frames, is_from_above=is_from_above):
            if seat.children:
                self._actions.append(SendDown(message=message, frames=frames))
        elif is_from_above and seat.lacks(message.number):
            self._break_relay(f"number {message.number} came after {seat.passed}")
        self._take_ready()

    def _take_ready(self) -> None:
        """Take everything whose turn has come."""
        if self._seat is None:
            return
        for packet in self._seat.ready():
            if packet.message is not None:
                self._take(packet.message, packet.frames)
                continue
            self._is_relayed = True
            try:
                self._take(decode_to_node(packet.frames[0]), packet.frames[1:])
            except MalformedMessage as error:
                raise ProtocolBroken(f"it relayed what is no message: {error}") from None
            finally:
                self._is_relayed = False

    def _on_relay_event(
        self, event: ReceivedFromParent | ReceivedFromChild | RelayLinkFailed | Ticked
    ) -> None:
        seat = self._seat
        if isinstance(event, ReceivedFromParent):
            try:
                self._on_from_parent(event)
            except ProtocolBroken as error:
                self._leave_broken(error)
        elif seat is None:
            return
        elif isinstance(event, ReceivedFromChild):
            self._on_below_done(seat, event.name, event.message)
        elif isinstance(event, Ticked):
            if seat.children:
                self._actions.append(SendDown(message=RelayBeat(relay=seat.relay, number=seat.passed)))
            if seat.tick():
                self._break_relay("the node above gives no sign of life")
        elif event.relay == seat.relay:
            self._break_relay(event.reason)

    def _on_from_parent(self, event: ReceivedFromParent) -> None:
        message, seat = event.message, self._seat
        if isinstance(message, RelayHello):
            if hmac.compare_digest(message.session_key, self._config.session_key):
                self._doorway.let_in(event.peer, message.relay)
                if seat is not None and seat.has_parent and seat.relay == message.relay:
                    seat.parent = event.peer
        elif not self._doorway.knows(event.peer):
            return
        elif seat is None or message.relay != seat.relay:
            if isinstance(message, Relayed):
                self._doorway.keep(message, event.frames)
        elif event.peer != seat.parent:
            return
        elif isinstance(message, Relayed):
            self._arrive(seat, message, event.frames, is_from_above=True)
        elif seat.beat(message):
            self._break_relay(f"number {message.number} was sent, and {seat.passed} is the last that came")

    def _on_below_done(self, seat: Seat, name: str, message: RelayDone) -> None:
        if message.relay != seat.relay or name not in seat.children:
            return
        work = self._sessions.get(message.session)
        if work is not None:
            work.below[name] = max(message.seq, work.below.get(name, 0))
            self._tell(message.session, work)
        elif message.session > self._last_session:
            self._reports_ahead.setdefault(message.session, {})[name] = message.seq

    def _break_relay(self, reason: str) -> None:
        if self._seat is not None and not self._seat.is_broken:
            self._seat.is_broken = True
            self._send(RelayBroken(relay=self._seat.relay, reason=reason))

    def _tell(self, session: int, work: SessionWork) -> None:
        """Tell whoever is to know how far the session is."""
        direct, seat = work.direct, self._seat
        if direct.is_worth_telling():
            direct.num_untold = 0
            self._send(Done(session=session, seq=direct.done))
        if seat is None or not (work.relayed.pending or work.relayed.num_untold):
            return
        work.advance_relayed(seat.children)
        if not work.relayed.is_worth_telling() or (seat.has_parent and seat.parent is None):
            return
        work.relayed.num_untold = 0
        done = RelayDone(relay=seat.relay, session=session, seq=work.relayed.done)
        if seat.parent is None:
            self._send(done)
        else:
            self._actions.append(SendUp(peer=seat.parent, message=done))

    # ---- from the executor ----

    def _on_reported(self, events: Sequence[ExecutorEvent]) -> None:
        """Reports of sessions that have ended are of no interest. One ``Done`` a session at the end."""
        touched: dict[int, SessionWork] = {}
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
            self._tell(session, work)

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
