"""An agent's connections to other agents for relays: to those below it, and from the one above. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from dtorch_runtime.errors import DTorchError, TransportError
from dtorch_runtime.node.events import (
    Event,
    LinkRelay,
    ReceivedFromChild,
    ReceivedFromParent,
    RelayLinkFailed,
    SendDown,
    SendUp,
    Ticked,
)
from dtorch_runtime.transport.base import ClientLink, Message, ServerLink
from dtorch_runtime.wire.codec import MalformedMessage, decode_from_child, decode_from_parent, encode
from dtorch_runtime.wire.messages import RelayMember

_logger = logging.getLogger(__name__)
#: Connects to an address; raises a ``DTorchError`` when that fails.
Connect: TypeAlias = Callable[[str], Awaitable[ClientLink]]


class _Child:
    """The connection to a node below, from the wish for it to its end."""

    def __init__(self, relay: int, member: RelayMember) -> None:
        self.relay = relay
        self.member = member
        self.link: ClientLink | None = None
        #: What is to be sent before the connection is there.
        self.waiting: list[Message] = []
        self.task: asyncio.Task[None] | None = None

    def send(self, frames: Message) -> None:
        """Raises TransportError when the node does not read."""
        if self.link is None:
            self.waiting.append(frames)
        else:
            self.link.send(frames)

    def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
        if self.link is not None:
            self.link.close()


class RelayLinks:
    """See the module. In the running event loop.

    Args:
        server: where other agents connect; bound, not started, closed by ``close``.
        connect: connects to the ``server`` of another agent.
        interval_s: time between two ticks.
    """

    def __init__(self, server: ServerLink, connect: Connect, interval_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = server
        self._connect = connect
        self._interval_s = interval_s
        self._handle: Callable[[Event], None] = lambda event: None
        self._children: list[_Child] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def endpoint(self) -> str:
        """Where other agents connect."""
        return self._server.endpoint

    def start(self, handle: Callable[[Event], None]) -> None:
        """Begin to receive; ``handle`` takes what happens."""
        self._handle = handle
        self._server.start(self._on_from_parent)

    def act(self, action: LinkRelay | SendDown | SendUp) -> None:
        """Carry out a decision of ``NodeState``."""
        if isinstance(action, SendDown):
            self._send_down([encode(action.message), *action.frames])
        elif isinstance(action, SendUp):
            self._send_up(action)
        else:
            self._link(action.relay, action.children)

    async def close(self) -> None:
        """Close every connection."""
        tasks = [child.task for child in self._children if child.task is not None]
        self._link(0, ())
        await asyncio.gather(*tasks, return_exceptions=True)
        self._server.close()

    def _link(self, relay: int, children: Sequence[RelayMember]) -> None:
        for child in self._children:
            child.close()
        self._children = [_Child(relay, member) for member in children]
        for child in self._children:
            child.task = asyncio.create_task(self._open(child), name=f"relay to {child.member.name}")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if relay:
            self._timer = self._loop.call_later(self._interval_s, self._tick)

    async def _open(self, child: _Child) -> None:
        try:
            link = await self._connect(child.member.endpoint)
        except DTorchError as error:
            self._fail(child, str(error))
            return
        if child not in self._children:
            link.close()
            return
        child.link = link
        link.start(lambda frames: self._on_from_child(child, frames))
        waiting, child.waiting = child.waiting, []
        for frames in waiting:
            self._send(child, frames)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        self._handle(Ticked())

    def _send_down(self, frames: Message) -> None:
        for child in self._children:
            self._send(child, frames)

    def _send(self, child: _Child, frames: Message) -> None:
        try:
            child.send(frames)
        except TransportError as error:
            self._fail(child, str(error))

    def _send_up(self, action: SendUp) -> None:
        relay = getattr(action.message, "relay", 0)
        try:
            reason = (
                "" if self._server.send(action.peer, [encode(action.message)]) else "its connection is gone"
            )
        except TransportError as error:
            reason = str(error)
        if reason:
            self._handle(RelayLinkFailed(relay=relay, reason=f"the node above cannot be told: {reason}"))

    def _fail(self, child: _Child, reason: str) -> None:
        text = f"node {child.member.name} cannot be reached: {reason}"
        self._handle(RelayLinkFailed(relay=child.relay, reason=text))

    def _on_from_parent(self, peer: bytes, frames: Message) -> None:
        try:
            message = decode_from_parent(frames[0])
        except MalformedMessage as error:
            _logger.warning("dropped a message at %s: %s", self.endpoint, error)
        else:
            self._handle(ReceivedFromParent(peer=peer, message=message, frames=frames[1:]))

    def _on_from_child(self, child: _Child, frames: Message) -> None:
        try:
            message = decode_from_child(frames[0])
        except MalformedMessage as error:
            self._fail(child, str(error))
        else:
            self._handle(ReceivedFromChild(name=child.member.name, message=message))
