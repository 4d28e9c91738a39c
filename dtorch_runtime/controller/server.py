"""The controller's shell: sockets and heartbeats to events, actions to sockets. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

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
from dtorch_runtime.controller.handshake import ControllerConfig
from dtorch_runtime.controller.state import ControllerState
from dtorch_runtime.errors import ClusterTimeout, TransportError
from dtorch_runtime.settings import Settings
from dtorch_runtime.tape import SessionTapes
from dtorch_runtime.transport.base import Message, ServerLink
from dtorch_runtime.transport.heartbeat import HeartbeatServer
from dtorch_runtime.transport.security import CurveKeys, same_session_key
from dtorch_runtime.wire.codec import MalformedMessage, decode_to_controller, encode
from dtorch_runtime.wire.messages import Answer, tag_of
from dtorch_runtime.wire.records import (
    AskCounts,
    ClockReply,
    CountsReply,
    Question,
    Reply,
    StartTrace,
    StopTrace,
    TraceReply,
)

_logger = logging.getLogger(__name__)
#: Peers that were refused, and are not answered again.
_MAX_REMEMBERED_PEERS = 1024
_Address: TypeAlias = tuple[int, bytes]


class ControllerServer:
    """A controller in the running event loop.

    Args:
        links: where clients and agents connect; bound, and closed by ``close``.
        local_links: the same for an agent in this process, which needs no heartbeats.
        heartbeat_address: where to bind the heartbeats; ``None`` in tests without sockets.
        keys: needed where others can reach the heartbeats.

    Raises:
        SecurityError, TransportError: the heartbeats cannot be bound.
    """

    def __init__(
        self,
        links: Sequence[ServerLink],
        *,
        session_key: bytes,
        settings: Settings,
        local_links: Sequence[ServerLink] = (),
        heartbeat_address: str | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._links = [*links, *local_links]
        self._first_local = len(links)
        self._settings = settings
        #: Peers that the state knows or is about to be told of, both ways.
        self._numbers: dict[_Address, int] = {}
        self._addresses: dict[int, _Address] = {}
        self._num_peers = 0
        #: The last ones that were refused, in order, as keys.
        self._refused: dict[_Address, None] = {}
        self._events: deque[Event] = deque()
        self._is_handling = False
        #: What one event is: ``_step``, or ``_step_timed`` while somebody profiles.
        self._take: Callable[[Event], None] = self._step
        self._tapes = SessionTapes()
        self._stopped = asyncio.Event()
        self.stop_reason = ""
        #: Bytes from strangers that were no message.
        self.num_garbage = 0
        self._heartbeats: HeartbeatServer | None = None
        if heartbeat_address is not None:
            self._heartbeats = HeartbeatServer(
                heartbeat_address,
                session_key=session_key,
                interval_s=settings.heartbeat_interval_s,
                timeout_s=settings.heartbeat_timeout_s,
                on_lost=self._on_beats_stopped,
                keys=keys,
            )
        self.state = ControllerState(
            ControllerConfig(
                is_session_key=lambda key: same_session_key(key, session_key),
                heartbeat_endpoint=self._heartbeats.endpoint if self._heartbeats else "",
                started_s=time.monotonic(),
                check=settings.check,
                relay_min_nodes=settings.relay_min_nodes,
                relay_fanout=settings.relay_fanout,
                shared_window_ops=settings.shared_window_ops,
            )
        )

    def start_local(self) -> None:
        """Begin to receive from the agent in this process, so that its devices are the first."""
        for index in range(self._first_local, len(self._links)):
            self._start_link(index)

    def start(self) -> None:
        """Begin to receive from everybody else."""
        for index in range(self._first_local):
            self._start_link(index)

    def _start_link(self, index: int) -> None:
        self._links[index].start(lambda peer, frames: self._on_message((index, peer), frames))

    def stop(self, reason: str) -> None:
        """Tell everybody that the cluster closes. ``wait_stopped`` returns then."""
        self._handle(StopAsked(reason=reason))

    async def wait_stopped(self) -> str:
        """Wait, without a deadline, until the controller is to end, and return the reason."""
        await self._stopped.wait()
        return self.stop_reason

    async def close(self, flush_s: float = 1.0) -> None:
        """Close everything; what was sent still leaves for at most ``flush_s``."""
        for link in self._links:
            try:
                await link.drain(0, flush_s)
            except ClusterTimeout as error:
                _logger.warning("closing with unsent data: %s", error)
            link.close(flush_s)
        if self._heartbeats is not None:
            await asyncio.to_thread(self._heartbeats.close)

    # ---- events ----

    def _on_message(self, address: _Address, frames: Message) -> None:
        number = self._numbers.get(address)
        try:
            message = decode_to_controller(frames[0])
        except MalformedMessage as error:
            if number is None:
                self.num_garbage += 1
            else:
                self._handle(ReceivedGarbage(peer=number, reason=str(error)))
            return
        if number is not None:
            self._handle(Received(peer=number, message=message, frames=frames[1:]))
        elif address not in self._refused:
            self._handle(Received(peer=self._meet(address), message=message, frames=frames[1:]))

    def _meet(self, address: _Address) -> int:
        self._num_peers += 1
        self._numbers[address] = self._num_peers
        self._addresses[self._num_peers] = address
        return self._num_peers

    def _on_beats_stopped(self, beat_name: str) -> None:
        """On the heartbeat thread."""
        reason = f"no heartbeat for {self._settings.heartbeat_timeout_s:g} s"
        try:
            self._loop.call_soon_threadsafe(self._handle, BeatsStopped(beat_name=beat_name, reason=reason))
        except RuntimeError:
            _logger.debug("%s went silent after the loop had closed", beat_name)

    def _handle(self, event: Event) -> None:
        """One event at a time: what goes wrong while acting on one is an event that comes after it."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                self._take(self._events.popleft())
        finally:
            self._is_handling = False

    def _step(self, event: Event) -> None:
        for action in self.state.handle(event, time.monotonic()):
            self._act(action)
        if isinstance(event, Received) and not self.state.knows(event.peer):
            self._forget(event.peer)

    def _step_timed(self, event: Event) -> None:
        start_ns = time.monotonic_ns()
        session = self.state.session_of_peer(event.peer) if isinstance(event, Received) else None
        self._step(event)
        if isinstance(event, Received):
            message = event.message
            if session is None:
                session = getattr(message, "session", None)
            number = getattr(message, "seq", getattr(message, "request_id", 0))
            num_bytes = sum(memoryview(frame).nbytes for frame in event.frames)
            self._tapes.add(session, tag_of(message), number, start_ns, num_bytes)
        else:
            self._tapes.add(None, type(event).__name__, 0, start_ns, 0)
        self._tapes.keep(self.state.sessions.__contains__)
        self._choose_step()

    def _choose_step(self) -> None:
        self._take = self._step_timed if self._tapes else self._step

    # ---- actions ----

    def _act(self, action: Action) -> None:
        if isinstance(action, Send):
            frames = [encode(action.message), *action.frames]
            for peer in action.peers:
                self._send(peer, frames)
        elif isinstance(action, ForgetPeer):
            address = self._addresses.get(action.peer)
            if address is not None:
                self._refused[address] = None
                if len(self._refused) > _MAX_REMEMBERED_PEERS:
                    del self._refused[next(iter(self._refused))]
                self._forget(action.peer)
        elif isinstance(action, WatchBeats):
            if self._heartbeats is not None and self._addresses[action.peer][0] < self._first_local:
                self._heartbeats.watch(action.beat_name)
        elif isinstance(action, ForgetBeats):
            if self._heartbeats is not None:
                self._heartbeats.forget(action.beat_name)
        elif isinstance(action, AnswerSelf):
            reply = self._reply(action.session, action.question)
            answer = Answer(session=action.session, request_id=action.request_id, reply=reply)
            self._send(action.peer, [encode(answer)])
        elif isinstance(action, Log):
            _logger.info("%s", action.text)
        else:
            self._stop(action)

    def _reply(self, session: int, question: Question) -> Reply:
        if isinstance(question, StartTrace):
            self._tapes.start(session, question.max_spans)
            self._choose_step()
        elif isinstance(question, StopTrace):
            tape = self._tapes.stop(session)
            self._choose_step()
            lanes = [] if tape is None else [tape.lane("controller")]
            return TraceReply(lanes)
        elif isinstance(question, AskCounts):
            return CountsReply({})
        return ClockReply(time.monotonic_ns())

    def _send(self, peer: int, frames: Message) -> None:
        address = self._addresses.get(peer)
        if address is None:
            return  # it was forgotten by an action before this one
        index, name = address
        try:
            reason = "" if self._links[index].send(name, frames) else "its connection is gone"
        except TransportError as error:
            reason = str(error)
        if reason:
            self._events.append(PeerGone(peer=peer, reason=reason))

    def _forget(self, peer: int) -> None:
        address = self._addresses.pop(peer, None)
        if address is not None:
            del self._numbers[address]

    def _stop(self, action: Stop) -> None:
        self.stop_reason = action.reason
        self._stopped.set()
