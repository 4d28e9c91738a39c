"""What the controller decides: one event in, actions out. No sockets, no clock, no asyncio.

A *peer* is a connection, numbered by the shell. Until its hello was accepted it is a stranger and changes nothing.
A peer that breaks the protocol is refused and ended, alone: nothing that it sends reaches another session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from dtorch_runtime.controller.events import (
    Action,
    AnswerSelf,
    BeatsStopped,
    Event,
    ForgetBeats,
    ForgetPeer,
    Log,
    PeerGone,
    Received,
    ReceivedGarbage,
    Send,
    Stop,
    StopAsked,
    WatchBeats,
)
from dtorch_runtime.controller.fanout import Fanout
from dtorch_runtime.controller.handshake import ControllerConfig, Violation, check_hello
from dtorch_runtime.controller.membership import JoinRefused, Membership, Node
from dtorch_runtime.controller.session import Session
from dtorch_runtime.controller.turns import Turns
from dtorch_runtime.ir.graph import GraphError
from dtorch_runtime.wire.messages import (
    Answer,
    Ask,
    Asked,
    ClientBye,
    ClientHello,
    ClusterClosing,
    Credit,
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
    Ops,
    Refused,
    RelayBroken,
    RelayDone,
    SessionEnded,
    SessionOpened,
    Status,
    StatusRequest,
    StopCluster,
    Subgraph,
    Upload,
    ValueData,
    Welcome,
    tag_of,
)
from dtorch_runtime.wire.records import FailureRecord

#: How many payload frames a message has, where that is not none.
_NUM_FRAMES: dict[type[Message], int] = {Ops: 1, Upload: 1, ValueData: 1}
#: Messages that need the session key, and no session.
_FROM_ANYBODY = (StatusRequest, StopCluster)
#: Messages of clients that keep their order, and wait for each other.
_IN_TURN = frozenset((Ops, Upload, Fetch, DefineTemplates, DefineMesh, Ask))
_Handler: TypeAlias = Callable[..., None]


class ControllerState:
    """See the module. ``handle`` is the only way in."""

    def __init__(self, config: ControllerConfig) -> None:
        self._config = config
        self.membership = Membership()
        #: session number -> session, live ones only.
        self.sessions: dict[int, Session] = {}
        self._num_sessions = 0
        #: peer -> who it is. Exactly the peers of the live nodes and sessions.
        self._peers: dict[int, Node | Session] = {}
        #: Set once; afterwards nobody is let in.
        self._stop_reason: str | None = None
        self._num_ops_of_ended_sessions = 0
        self._actions: list[Action] = []
        #: Every message to a node goes through here, but for the last one that it gets.
        self._fanout = Fanout(config.relay_fanout, config.relay_min_nodes, self.sessions)
        #: What clients have sent and nodes are not to get yet.
        self.turns = Turns(config.shared_window_ops, self.sessions)
        self._now_s = config.started_s
        self._from_strangers: dict[type[Message], _Handler] = {
            ClientHello: self._on_client_hello,
            NodeHello: self._on_node_hello,
            StatusRequest: self._on_status_request,
            StopCluster: self._on_stop_cluster,
        }
        self._from_clients: dict[type[Message], _Handler] = {
            Ops: self._on_ops,
            Fetch: self._on_fetch,
            Upload: self._on_upload,
            DefineTemplates: self._on_define_templates,
            DefineMesh: self._on_define_mesh,
            Ask: self._on_ask,
            ClientBye: self._on_client_bye,
        }
        self._from_nodes: dict[type[Message], _Handler] = {
            Done: self._on_done,
            ValueData: self._on_value_data,
            FetchFailed: self._on_fetch_failed,
            OpFailed: self._on_op_failed,
            Answer: self._on_answer,
            RelayDone: self._on_relay_done,
            RelayBroken: self._on_relay_broken,
            NodeBye: self._on_node_bye,
        }

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event; ``now_s`` is a monotonic clock. Returns what is to be done, in order."""
        actions: list[Action] = []
        self._actions = self._fanout.actions = actions
        self._now_s = now_s
        if type(event) is Received:
            self._on_received(event)
        elif isinstance(event, ReceivedGarbage):
            if event.peer in self._peers:
                self._refuse(event.peer, event.reason)
        elif isinstance(event, PeerGone):
            self._lose(event.peer, event.reason)
        elif isinstance(event, BeatsStopped):
            peer = next((p for p, who in self._peers.items() if beat_name(who) == event.beat_name), None)
            if peer is not None:
                self._send(peer, Refused(reason=event.reason))  # if it was only held up, it joins again
                self._lose(peer, event.reason)
        elif isinstance(event, StopAsked):
            self._stop(event.reason)
        if not self.turns.is_empty:
            self._take_turns()
        if self._config.check:
            self.validate()
        return actions

    def knows(self, peer: int) -> bool:
        """Whether a peer is a live node or session."""
        return peer in self._peers

    def session_of_peer(self, peer: int) -> int | None:
        """The session of a client."""
        who = self._peers.get(peer)
        return who.number if isinstance(who, Session) else None

    def validate(self) -> None:
        """Check the invariants that the attributes state."""
        self.membership.validate()
        self._fanout.validate([node.peer for node in self.membership])
        self.turns.validate()
        numbers = {node.number for node in self.membership}
        for session in self.sessions.values():
            session.validate(numbers)
        peers = {node.peer: node for node in self.membership} | {s.peer: s for s in self.sessions.values()}
        assert peers == self._peers, "peers are not exactly those of live nodes and sessions"
        assert self._stop_reason is None or not self._peers, "a stopped controller has peers"

    # ---- receiving ----

    def _on_received(self, event: Received) -> None:
        message = event.message
        who = self._peers.get(event.peer)
        if type(who) is Session:
            handlers = self._from_clients
            if type(message) in _IN_TURN and self.turns.hold(who, message, event.frames):
                return
        elif type(who) is Node:
            handlers = self._from_nodes
        else:
            handlers = self._from_strangers
        self._obey(event.peer, who, message, event.frames, handlers)

    def _take_turns(self) -> None:
        for number, (message, frames) in self.turns.next_ones():
            session = self.sessions[number]
            self._obey(session.peer, session, message, frames, self._from_clients)

    def _obey(
        self,
        peer: int,
        who: Session | Node | None,
        message: Message,
        frames: Sequence[Any],
        handlers: dict[type[Message], _Handler],
    ) -> None:
        kind = type(message)
        handler = handlers.get(kind)
        try:
            if kind in _FROM_ANYBODY:
                handler, who = self._from_strangers[kind], None
            if handler is None:
                raise Violation(_unexpected(message, who))
            if len(frames) != _NUM_FRAMES.get(kind, 0):
                raise Violation(f"{tag_of(message)} came with {len(frames)} payload frames")
            handler(peer if who is None else who, message, frames)
        except (Violation, GraphError) as violation:
            self._refuse(peer, str(violation))

    def _send(self, peer: int, message: Message, frames: Sequence[Any] = ()) -> None:
        self._fanout.send((peer,), message, frames)

    def _broadcast(self, peers: Sequence[int], message: Message, session: int = 0) -> None:
        self._fanout.send(tuple(peers), message, session=session)

    def _refuse(self, peer: int, reason: str) -> None:
        who = self._peers.get(peer)
        self._actions.append(Log(text=f"refused {'a stranger' if who is None else beat_name(who)}: {reason}"))
        self._send(peer, Refused(reason=reason))
        if who is None:
            self._actions.append(ForgetPeer(peer=peer))
        else:
            self._lose(peer, f"it broke the protocol: {reason}")

    # ---- strangers ----

    def _check_hello(self, message: ClientHello | NodeHello | StatusRequest | StopCluster) -> None:
        check_hello(self._config, message, self._stop_reason)

    def _on_client_hello(self, peer: int, message: ClientHello, frames: Sequence[Any]) -> None:
        self._check_hello(message)
        self._num_sessions += 1
        number = self._num_sessions
        session = Session(
            number, peer, self.membership, self._fanout, check=self._config.check, passes=message.passes
        )
        self.sessions[number] = session
        self._peers[peer] = session
        self._actions.append(WatchBeats(peer=peer, beat_name=beat_name(session)))
        self._send(
            peer,
            Welcome(
                session=number,
                nodes=self.membership.records(),
                heartbeat_endpoint=self._config.heartbeat_endpoint,
            ),
        )
        self._broadcast([node.peer for node in self.membership], SessionOpened(session=number))
        self._actions.append(Log(text=f"session {number} opened by process {message.pid} on {message.host}"))

    def _on_node_hello(self, peer: int, message: NodeHello, frames: Sequence[Any]) -> None:
        self._check_hello(message)
        old = self.membership.named(message.name)
        if old is not None and (old.record.host, old.record.pid) == (message.host, message.pid):
            self._lose(old.peer, "it connected again")
        try:
            node = self.membership.join(peer, message)
        except JoinRefused as refusal:
            raise Violation(str(refusal)) from None
        self._peers[peer] = node
        self._fanout.add_node(peer, message.name, message.relay_endpoint)
        self._actions.append(WatchBeats(peer=peer, beat_name=beat_name(node)))
        self._send(
            peer,
            NodeWelcome(
                devices=node.record.devices,
                nodes=self.membership.records(without=node.number),
                heartbeat_endpoint=self._config.heartbeat_endpoint,
            ),
        )
        others = [other.peer for other in self.membership if other.number != node.number]
        self._broadcast(others, NodeJoined(node=node.record))
        for session in self.sessions.values():
            if session.add_node(node):
                self._send(session.peer, NodeJoined(node=node.record))
                self._bring_up_to_date(peer, session)
        self._actions.append(
            Log(text=f"node {node.name} joined from {message.host} with devices {node.record.devices}")
        )

    def _bring_up_to_date(self, node_peer: int, session: Session) -> None:
        self._send(node_peer, SessionOpened(session=session.number))
        for mesh in session.meshes.values():
            self._send(node_peer, DefineMesh(session=session.number, mesh=mesh))
        templates = list(session.graph.templates.values())
        if templates:
            self._send(node_peer, DefineTemplates(session=session.number, templates=templates))

    def _on_status_request(self, peer: int, message: StatusRequest, frames: Sequence[Any]) -> None:
        self._check_hello(message)
        num_ops = sum(session.graph.num_records for session in self.sessions.values())
        self._send(
            peer,
            Status(
                nodes=self.membership.records(),
                sessions=list(self.sessions),
                num_ops=num_ops + self._num_ops_of_ended_sessions,
                uptime_s=self._now_s - self._config.started_s,
            ),
        )

    def _on_stop_cluster(self, peer: int, message: StopCluster, frames: Sequence[Any]) -> None:
        self._check_hello(message)
        self._send(peer, ClusterClosing(reason="it was asked to"))
        self._stop("somebody with the session key asked it to")

    def _stop(self, reason: str) -> None:
        if self._stop_reason is not None:
            return
        self._stop_reason = reason
        if self._peers:
            self._actions.append(Send(peers=tuple(self._peers), message=ClusterClosing(reason=reason)))
        self._fanout.stop()
        for who in list(self._peers.values()):
            self._actions.append(ForgetBeats(beat_name=beat_name(who)))
            self._forget(who)
        self._actions.append(Stop(reason=reason))

    # ---- clients ----

    def _on_ops(self, session: Session, message: Ops, frames: Sequence[Any]) -> None:
        subgraph = Subgraph(session=session.number, seq=message.seq)
        for group, payload in session.add_ops(message, frames[0]):
            self._fanout.send(group.peers, subgraph, (payload,), session=session.number, seq=message.seq)
        self._send_credit(session)

    def _on_upload(self, session: Session, message: Upload, frames: Sequence[Any]) -> None:
        for group, part in session.add_upload(message, memoryview(frames[0]).nbytes):
            self._fanout.send(group.peers, part, frames, session=session.number, seq=message.seq)
        self._send_credit(session)

    def _on_fetch(self, session: Session, message: Fetch, frames: Sequence[Any]) -> None:
        answer = session.add_fetch(message)
        if isinstance(answer, FailureRecord):
            self._fail_fetch(session, message.request_id, message.device, answer)
            return
        forwarded = Fetch(
            session=session.number,
            request_id=message.request_id,
            value_id=message.value_id,
            device=message.device,
        )
        self._send(session.nodes[answer], forwarded)

    def _fail_fetch(self, session: Session, request_id: int, device: int, failure: FailureRecord) -> None:
        self._send(
            session.peer,
            FetchFailed(session=session.number, request_id=request_id, device=device, failure=failure),
        )

    def _on_define_mesh(self, session: Session, message: DefineMesh, frames: Sequence[Any]) -> None:
        session.define_mesh(message.mesh)
        sent_on = DefineMesh(session=session.number, mesh=message.mesh)
        self._broadcast(tuple(session.nodes.values()), sent_on, session.number)

    def _on_define_templates(self, session: Session, message: DefineTemplates, frames: Sequence[Any]) -> None:
        sent_on = DefineTemplates(
            session=session.number, templates=session.define_templates(message.templates)
        )
        self._broadcast(tuple(session.nodes.values()), sent_on, session.number)

    def _on_ask(self, session: Session, message: Ask, frames: Sequence[Any]) -> None:
        nodes = [node for node in self.membership if node.number in session.nodes]
        self._send(session.peer, Asked(request_id=message.request_id, nodes=[node.name for node in nodes]))
        self._broadcast(
            [node.peer for node in nodes], msgspec.structs.replace(message, session=session.number)
        )
        self._actions.append(
            AnswerSelf(
                peer=session.peer,
                session=session.number,
                request_id=message.request_id,
                question=message.question,
            )
        )

    def _on_client_bye(self, session: Session, message: ClientBye, frames: Sequence[Any]) -> None:
        self._lose(session.peer, "it said goodbye")

    def _send_credit(self, session: Session) -> None:
        seq = session.take_credit()
        if seq is not None:
            self._send(session.peer, Credit(seq=seq))

    # ---- nodes ----

    def _session_of(self, node: Node, number: int) -> Session | None:
        """The session that a node speaks of. None for one that has ended, or that the node takes no part in."""
        session = self.sessions.get(number)
        return session if session is not None and node.number in session.nodes else None

    def _on_done(self, node: Node, message: Done, frames: Sequence[Any]) -> None:
        session = self._session_of(node, message.session)
        if session is not None:
            session.done(node.number, message.seq)
            self._send_credit(session)

    def _on_relay_done(self, node: Node, message: RelayDone, frames: Sequence[Any]) -> None:
        relay, session = self._fanout.relay, self._session_of(node, message.session)
        if relay is None or relay.number != message.relay or session is None:
            return
        if node.peer not in relay.tops:
            raise Violation(f"it reports for relay {message.relay}, which has others at its top")
        relay.reached(-node.number, message.session, message.seq)
        session.done(-node.number, message.seq)
        self._send_credit(session)

    def _on_relay_broken(self, node: Node, message: RelayBroken, frames: Sequence[Any]) -> None:
        self._fanout.broken(node.peer, message.relay, f"node {node.name}: {message.reason}")
        for session in self.sessions.values():
            self._send_credit(session)

    def _on_value_data(self, node: Node, message: ValueData, frames: Sequence[Any]) -> None:
        session = self._session_of(node, message.session)
        if session is None:
            return
        verdict = session.take_chunk(node.number, message, memoryview(frames[0]).nbytes)
        if isinstance(verdict, FailureRecord):
            self._fail_fetch(session, message.request_id, message.device, verdict)
        elif verdict:
            self._send(session.peer, message, frames)

    def _on_fetch_failed(self, node: Node, message: FetchFailed, frames: Sequence[Any]) -> None:
        session = self._session_of(node, message.session)
        if session is not None and session.end_fetch(node.number, message.request_id):
            self._send(session.peer, message)

    def _on_op_failed(self, node: Node, message: OpFailed, frames: Sequence[Any]) -> None:
        session = self._session_of(node, message.session)
        if session is not None:
            self._send(session.peer, message)

    def _on_answer(self, node: Node, message: Answer, frames: Sequence[Any]) -> None:
        session = self._session_of(node, message.session)
        if session is not None:
            self._send(session.peer, msgspec.structs.replace(message, node=node.name))

    def _on_node_bye(self, node: Node, message: NodeBye, frames: Sequence[Any]) -> None:
        self._lose(node.peer, f"it left: {message.reason}")

    # ---- endings ----

    def _lose(self, peer: int, reason: str) -> None:
        """A peer has ended, for whatever reason."""
        who = self._peers.get(peer)
        if who is not None:
            self._actions.append(Log(text=f"{beat_name(who)} ended: {reason}"))
            self._actions.append(ForgetBeats(beat_name=beat_name(who)))
            self._forget(who)
            if isinstance(who, Session):
                self._broadcast(tuple(who.nodes.values()), SessionEnded(session=who.number))
                if self._fanout.relay is not None:
                    self._fanout.relay.forget_session(who.number)
            else:
                self._tell_of_lost_node(who, reason)
        self._actions.append(ForgetPeer(peer=peer))

    def _forget(self, who: Session | Node) -> None:
        del self._peers[who.peer]
        if isinstance(who, Session):
            self._num_ops_of_ended_sessions += who.graph.num_records
            del self.sessions[who.number]
            self.turns.forget(who.number)
            who.graph.clear()
        else:
            self.membership.leave(who.number)

    def _tell_of_lost_node(self, node: Node, reason: str) -> None:
        self._fanout.lose_node(node.peer)
        down = NodeDown(name=node.name, devices=node.record.devices, reason=reason)
        # Nodes first: what waits there for the lost devices is to fail before the client can ask for more.
        self._broadcast([other.peer for other in self.membership], down)
        for session in self.sessions.values():
            if node.number not in session.nodes:
                continue
            failed = session.lose_node(node, reason)
            self._send(session.peer, down)
            for request_id, device in failed:
                self._fail_fetch(session, request_id, device, session.device_failure(device))
            self._send_credit(session)


def beat_name(who: Session | Node) -> str:
    """The name under which a peer sends heartbeats."""
    return f"session:{who.number}" if isinstance(who, Session) else f"node:{who.name}"


def _unexpected(message: Message, who: Session | Node | None) -> str:
    if who is None:
        return f"{tag_of(message)} came from a peer that is not known (any more); begin with a hello"
    return f"{tag_of(message)} is not a message that {beat_name(who)} may send now"
