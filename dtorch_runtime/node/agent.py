"""A node agent's shell: link, executor and heartbeats to events, actions to them. Decides nothing.

The executor is made on a thread of its own, because that imports torch; until it is there, its calls wait in line.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from dtorch_runtime.errors import ClusterTimeout, DTorchError, TransportError
from dtorch_runtime.ir.stream import unpack
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
    ExecutorCall,
    Joined,
    Leave,
    LinkRelay,
    OpenSession,
    PeerNodeJoined,
    PeerNodeLost,
    Received,
    ReceivedFromParent,
    Reported,
    RunOps,
    Send,
    SendDown,
    SendUp,
    StartFetch,
    TakeQuestion,
    TakeUpload,
)
from dtorch_runtime.node.executor import Executor, ExecutorEvent, Replied, ReportEvent
from dtorch_runtime.node.relay_links import RelayLinks
from dtorch_runtime.node.state import NodeConfig, NodeState
from dtorch_runtime.settings import Settings
from dtorch_runtime.tape import SessionTapes
from dtorch_runtime.transport.advertised import as_seen_from
from dtorch_runtime.transport.base import ClientLink, Message
from dtorch_runtime.transport.heartbeat import HeartbeatClient
from dtorch_runtime.transport.security import CurveKeys
from dtorch_runtime.wire.codec import MalformedMessage, decode_to_node, encode
from dtorch_runtime.wire.messages import tag_of
from dtorch_runtime.wire.records import AskClock, ClockReply, StartTrace, TraceReply

_logger = logging.getLogger(__name__)
#: Makes the executor, given where it reports to. Called on a thread of its own; may take seconds.
ExecutorFactory: TypeAlias = Callable[[ReportEvent], Executor]


class NodeAgent:
    """One membership of a node in a cluster, in the running event loop: from the hello to the end.

    Args:
        link: connected to the controller, not started; closed at the end.
        has_heartbeats: whether to send them; an agent in the controller's own process does not.
        keys: needed where the heartbeats of the controller are on another machine.
        relay_links: to take part in relays, at ``config.relay_endpoint``; closed at the end.
    """

    def __init__(
        self,
        config: NodeConfig,
        link: ClientLink,
        executor_factory: ExecutorFactory,
        *,
        settings: Settings,
        has_heartbeats: bool,
        keys: CurveKeys | None = None,
        relay_links: RelayLinks | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._settings = settings
        self._link = link
        self._keys = keys
        self._relay_links = relay_links
        self._has_heartbeats = has_heartbeats
        self._heartbeats: HeartbeatClient | None = None
        self._executor_factory = executor_factory
        self._executor: Executor | None = None
        #: Calls that came before the executor was there, in order.
        self._waiting_calls: deque[ExecutorCall] = deque()
        #: From then on, an executor that was still being made is closed and not used.
        self._is_closed = False
        self._maker = threading.Thread(target=self._make_executor, name="dtorch-make-executor", daemon=True)
        #: Set once the node was let in, or never will be.
        self._joined = asyncio.Event()
        #: Appended to by the executor's threads, emptied by the loop.
        self._reports: deque[ExecutorEvent] = deque()
        #: True from the moment the loop was woken until it looks.
        self._is_woken = False
        #: True while the loop is inside a call of the executor.
        self._is_calling = False
        self._events: deque[Event] = deque()
        self._is_handling = False
        #: What one event is: ``_step``, or ``_step_timed`` while somebody profiles.
        self._take: Callable[[Event], None] = self._step
        self._tapes = SessionTapes()
        self._ended: asyncio.Future[Leave] = self._loop.create_future()
        self.state = NodeState(config)

    async def run(self) -> Leave:
        """Join, work until the end, close everything, and say why it ended.

        Raises:
            ClusterTimeout: a worker does not stop.
        """
        self._maker.start()
        self._link.start(self._on_message)
        if self._relay_links is not None:
            self._relay_links.start(self._handle)
        self._handle(Connected())
        late = self._loop.call_later(self._settings.start_timeout_s, self._on_late)
        try:
            return await self._ended
        finally:
            late.cancel()
            await self._close()

    async def wait_joined(self) -> bool:
        """Wait until the controller has let this node in; False when that has ended otherwise."""
        await self._joined.wait()
        return self.state.is_joined

    async def wait_released(self) -> None:
        """Wait, once ``run`` has returned, until an executor that was still being made holds no address any more."""
        await asyncio.to_thread(self._maker.join, self._settings.start_timeout_s)

    def stop(self, reason: str) -> None:
        """Leave the cluster; ``run`` returns then."""
        self._handle(CloseAsked(reason=reason))

    def _on_late(self) -> None:
        if not self.state.is_joined:
            what = f"the controller at {self._link.endpoint} to let this node in"
            self._handle(ConnectionLost(reason=str(ClusterTimeout(what, self._settings.start_timeout_s))))

    async def _close(self) -> None:
        self._link.close(flush_s=1.0)
        if self._relay_links is not None:
            await self._relay_links.close()
        if self._heartbeats is not None:
            await asyncio.to_thread(self._heartbeats.close)
        self._is_closed = True
        if self._executor is not None:
            await asyncio.to_thread(self._executor.close, self._settings.stop_timeout_s)

    # ---- executor ----

    def _make_executor(self) -> None:
        """On its own thread."""
        try:
            executor = self._executor_factory(self._report)
        except Exception as error:
            # Whatever it is, the node is of no use and says so.
            _logger.exception("the executor cannot be made")
            self._call_in_loop(self._handle, ExecutorBroke(reason=f"the executor cannot be made: {error!r}"))
        else:
            if not self._call_in_loop(self._take_executor, executor):
                executor.close(self._settings.stop_timeout_s)

    def _call_in_loop(self, function: Callable[..., None], *args: Any) -> bool:
        """From any thread. False when the loop has closed."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True

    def _take_executor(self, executor: Executor) -> None:
        if self._is_closed:
            executor.close(self._settings.stop_timeout_s)
            return
        # What comes of these calls joins the line behind them, as long as there is no executor to be seen.
        while self._waiting_calls and self.state.end_reason is None:
            self._call(executor, self._waiting_calls.popleft())
        self._executor = executor

    def _report(self, event: ExecutorEvent) -> None:
        """On any thread. The loop is woken once for all reports that come before it looks."""
        self._reports.append(event)
        # While the loop is inside a call of the executor, it looks by itself after it.
        if not self._is_woken and not self._is_calling:
            self._is_woken = True
            self._call_in_loop(self._take_reports)

    def _take_reports(self) -> None:
        # Before emptying: a report that comes in between wakes the loop once more than needed, never once less.
        self._is_woken = False
        reports = self._reports
        events = []
        while reports:
            events.append(self._with_own_lane(reports.popleft()))
        if events:
            self._handle(Reported(events=events))

    # ---- events ----

    def _on_message(self, frames: Message) -> None:
        try:
            message = decode_to_node(frames[0])
        except MalformedMessage as error:
            self._handle(ConnectionLost(reason=f"the controller sent what is no message: {error}"))
        else:
            self._handle(Received(message=message, frames=frames[1:]))

    def _handle(self, event: Event) -> None:
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
        for action in self.state.handle(event):
            self._act(action)

    def _step_timed(self, event: Event) -> None:
        start_ns = time.monotonic_ns()
        self._step(event)
        if isinstance(event, Received | ReceivedFromParent):
            message = event.message
            number = getattr(message, "seq", getattr(message, "request_id", getattr(message, "number", 0)))
            num_bytes = sum(memoryview(frame).nbytes for frame in event.frames)
            self._tapes.add(getattr(message, "session", None), tag_of(message), number, start_ns, num_bytes)
        else:
            name = "reports of workers" if isinstance(event, Reported) else type(event).__name__
            self._tapes.add(None, name, 0, start_ns, 0)
        self._tapes.keep(self.state.sessions.__contains__)
        self._choose_step()

    def _choose_step(self) -> None:
        self._take = self._step_timed if self._tapes else self._step

    # ---- actions ----

    def _act(self, action: Action) -> None:
        if isinstance(action, Send):
            try:
                self._link.send([encode(action.message), *action.frames])
            except TransportError as error:
                self._events.append(ConnectionLost(reason=str(error)))
        elif isinstance(action, SendDown | SendUp | LinkRelay):
            if self._relay_links is not None:
                self._relay_links.act(action)
        elif isinstance(action, Leave):
            self._joined.set()
            if not self._ended.done():
                self._ended.set_result(action)
        else:
            if isinstance(action, Joined):
                self._joined.set()
                self._start_heartbeats(action.heartbeat_endpoint)
            elif isinstance(action, TakeQuestion) and self._answer(action):
                return
            if self._executor is None:
                self._waiting_calls.append(action)
            else:
                self._call(self._executor, action)

    def _answer(self, action: TakeQuestion) -> bool:
        """The shell's part of a question; whether that is all of it."""
        question = action.question
        if isinstance(question, AskClock):
            reply = ClockReply(time.monotonic_ns())
            told = Replied(session=action.session, request_id=action.request_id, reply=reply)
            self._events.append(Reported(events=[told]))
            return True
        if isinstance(question, StartTrace):
            self._tapes.start(action.session, question.max_spans)
            self._choose_step()
        return False

    def _with_own_lane(self, event: ExecutorEvent) -> ExecutorEvent:
        """A trace of the executor, and of this event loop until now."""
        if not isinstance(event, Replied) or not isinstance(event.reply, TraceReply):
            return event
        tape = self._tapes.stop(event.session)
        self._choose_step()
        if tape is None:
            return event
        reply = TraceReply([tape.lane("node"), *event.reply.lanes])
        return Replied(session=event.session, request_id=event.request_id, reply=reply)

    def _start_heartbeats(self, endpoint: str) -> None:
        if not self._has_heartbeats or not endpoint:
            return
        timeout_s = self._settings.heartbeat_timeout_s

        def on_lost() -> None:
            reason = f"the controller gave no sign of life for {timeout_s:g} s"
            self._call_in_loop(self._handle, ConnectionLost(reason=reason))

        try:
            self._heartbeats = HeartbeatClient(
                as_seen_from(endpoint, self._link.endpoint),
                f"node:{self._config.name}",
                session_key=self._config.session_key,
                interval_s=self._settings.heartbeat_interval_s,
                timeout_s=timeout_s,
                on_lost=on_lost,
                keys=self._keys,
            )
        except DTorchError as error:
            self._events.append(ConnectionLost(reason=f"no heartbeats to {endpoint}: {error}"))

    def _call(self, executor: Executor, call: ExecutorCall) -> None:
        self._is_calling = True
        try:
            perform(executor, call)
        except Exception as error:
            _logger.exception("the executor raised in %s", type(call).__name__)
            self._handle(ExecutorBroke(reason=f"its executor raised {error!r} in {type(call).__name__}"))
        finally:
            self._is_calling = False
        if self._reports:
            self._take_reports()


def perform(executor: Executor, call: ExecutorCall) -> None:
    """Carry out a decision of ``NodeState`` that concerns the executor."""
    if isinstance(call, RunOps):
        executor.run(call.session, call.seq, unpack(call.frame))
    elif isinstance(call, StartFetch):
        executor.fetch(call.session, call.request_id, call.value_id, call.device)
    elif isinstance(call, TakeUpload):
        executor.upload(call.message, call.frame)
    elif isinstance(call, TakeQuestion):
        executor.ask(call.session, call.request_id, call.question)
    elif isinstance(call, AddTemplates):
        executor.define_templates(call.session, call.records)
    elif isinstance(call, AddMesh):
        executor.define_mesh(call.session, call.record)
    elif isinstance(call, OpenSession):
        executor.open_session(call.session)
    elif isinstance(call, EndSession):
        executor.end_session(call.session)
    elif isinstance(call, PeerNodeJoined):
        executor.node_joined(call.node)
    elif isinstance(call, PeerNodeLost):
        executor.node_lost(call.name, call.devices, call.reason)
    else:
        executor.start(call.devices, call.nodes)
