"""The transport without sockets: between the parts of one process, and in tests.

A ``MemoryHub`` stands for the network. Each connection has two lanes, ``uplink`` to the server and ``downlink`` to
the client. A lane delivers in order, a portion a turn of the event loop; a test may ``hold`` and ``release`` it, so
that it decides what happens before what, and may script faults on it by the number of the message::

    client.downlink.hold()
    client.uplink.drop(2)          # the third message sent from now on
    ...
    hub.check_faults_fired()
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable

from dtorch_runtime.errors import ClusterTimeout, TransportError
from dtorch_runtime.transport.base import (
    Frames,
    LinkLimits,
    Message,
    OnMessage,
    OnPeerMessage,
    checked_frames,
)
from dtorch_runtime.transport.lane import Lane, large_bytes

_DEFAULT_ADDRESS = "memory://server"


class MemoryHub:
    """The network of one event loop: servers by address, and the connections to them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._servers: dict[str, MemoryServerLink] = {}
        #: The open ones, and closed ones that have faults to account for.
        self._connections: list[_Connection] = []
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()

    def serve(self, address: str = _DEFAULT_ADDRESS, *, limits: LinkLimits | None = None) -> MemoryServerLink:
        """A server link bound to ``address``, any text.

        Raises:
            TransportError: the address is in use.
        """
        if address in self._servers:
            raise TransportError(f"cannot bind {address}: a server link of this hub has it already")
        server = MemoryServerLink(self, address, limits or LinkLimits())
        self._servers[address] = server
        self._changed.set()
        return server

    async def connect(
        self, address: str = _DEFAULT_ADDRESS, *, limits: LinkLimits | None = None, timeout_s: float
    ) -> MemoryClientLink:
        """A client link to the server at ``address``.

        Raises:
            ClusterTimeout: nobody served the address within ``timeout_s``.
        """
        await self._wait_for_server(address, timeout_s)
        return MemoryClientLink(self._new_connection(address, limits or LinkLimits()))

    async def connect_thread(
        self, address: str = _DEFAULT_ADDRESS, *, limits: LinkLimits | None = None, timeout_s: float
    ) -> MemoryThreadLink:
        """As ``connect``, for a client that runs in other threads."""
        await self._wait_for_server(address, timeout_s)
        return MemoryThreadLink(self._new_connection(address, limits or LinkLimits()))

    def check_faults_fired(self) -> None:
        """Check that every scripted fault happened: a test whose fault did not fire has shown nothing.

        Raises:
            AssertionError: listing those that did not.
        """
        unfired = [fault for connection in self._connections for fault in connection.unfired_faults()]
        if unfired:
            raise AssertionError("scripted faults that did not fire: " + "; ".join(unfired))

    def _new_connection(self, address: str, limits: LinkLimits) -> _Connection:
        connection = _Connection(self._loop, address, next(self._numbers), limits)
        self._connections = [old for old in self._connections if not old.is_closed or old.unfired_faults()]
        self._connections.append(connection)
        self.attach(connection)
        return connection

    def attach(self, connection: _Connection) -> None:
        """Let the connection's messages reach its server, if there is one, under a new peer name."""
        server = self._servers.get(connection.address)
        if server is not None:
            server.accept(connection, b"peer-%d" % next(self._numbers))

    def server_started(self, address: str) -> None:
        for connection in self._connections:
            if connection.address == address and connection.peer is None and not connection.is_closed:
                self.attach(connection)

    def server_closed(self, address: str) -> None:
        self._servers.pop(address, None)
        self._changed.clear()

    async def _wait_for_server(self, address: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while address not in self._servers:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            hint = f"Served are: {', '.join(sorted(self._servers)) or 'none'}"
            raise ClusterTimeout(f"a connection to {address}", timeout_s, hint) from None


class _Connection:
    """What the two ends of a connection share. ``peer`` is the server's name for the client, None when detached."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, address: str, number: int, limits: LinkLimits
    ) -> None:
        self.loop = loop
        self.address = address
        self.limits = limits
        self.uplink = Lane(loop, f"uplink {number} of {address}", limits)
        self.downlink = Lane(loop, f"downlink {number} of {address}", limits)
        self.is_closed = False
        self.peer: bytes | None = None
        self.on_closed: Callable[[], None] = lambda: None

    def unfired_faults(self) -> list[str]:
        return self.uplink.unfired_faults() + self.downlink.unfired_faults()

    def close(self, flush_s: float) -> None:
        """Called by the client's end."""
        self.is_closed = True
        self.downlink.deliver_to(None)
        self.downlink.clear()
        if flush_s == 0:
            self.uplink.clear()
        self.on_closed()


class MemoryServerLink:
    """Implements ``base.ServerLink``; made by ``MemoryHub.serve``."""

    def __init__(self, hub: MemoryHub, address: str, limits: LinkLimits) -> None:
        self._hub = hub
        self._limits = limits
        self._address = address
        #: Those that can be sent to, and those that are received from: also clients that closed, until they are read.
        self._peers: dict[bytes, _Connection] = {}
        self._sources: dict[bytes, _Connection] = {}
        self._on_message: OnPeerMessage | None = None
        self._is_closed = False

    @property
    def endpoint(self) -> str:
        return self._address

    @property
    def unsent_bytes(self) -> int:
        return sum(connection.downlink.unsent_bytes for connection in self._peers.values())

    def start(self, on_message: OnPeerMessage) -> None:
        self._on_message = on_message
        for peer, connection in self._sources.items():
            self._listen(connection, peer)
        self._hub.server_started(self._address)

    def accept(self, connection: _Connection, peer: bytes) -> None:
        """Called by the hub for a new connection."""
        connection.peer = peer
        connection.downlink.max_queued_messages = self._limits.max_queued_messages
        connection.uplink.max_messages_per_turn = self._limits.max_messages_per_turn
        connection.on_closed = lambda: self._forget(peer)
        self._peers[peer] = connection
        self._sources = {
            name: source
            for name, source in self._sources.items()
            if not source.is_closed or source.uplink.num_queued
        }
        self._sources[peer] = connection
        self._listen(connection, peer)

    def send(self, peer: bytes, frames: Frames) -> bool:
        if self._is_closed:
            raise TransportError(f"cannot send to a peer of {self._address}: the link is closed")
        message = checked_frames(frames)
        connection = self._peers.get(peer)
        if connection is None:
            return False
        connection.downlink.put(message)
        return True

    async def drain(self, max_unsent_bytes: int, timeout_s: float) -> None:
        others_bytes = 0
        for connection in list(self._peers.values()):
            await connection.downlink.drain(max(0, max_unsent_bytes - others_bytes), timeout_s)
            others_bytes += connection.downlink.unsent_bytes

    def close(self, flush_s: float = 0.0) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._hub.server_closed(self._address)
        for connection in self._sources.values():
            connection.peer = None
            connection.uplink.deliver_to(None)
            connection.uplink.clear()
            if flush_s == 0:
                connection.downlink.clear()
        self._peers.clear()
        self._sources.clear()

    def _listen(self, connection: _Connection, peer: bytes) -> None:
        on_message = self._on_message
        if on_message is not None:
            connection.uplink.deliver_to(lambda message: on_message(peer, message))

    def _forget(self, peer: bytes) -> None:
        self._peers.pop(peer, None)


class MemoryClientLink:
    """Implements ``base.ClientLink``; made by ``MemoryHub.connect``. ``uplink`` and ``downlink`` are for tests."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.uplink = connection.uplink
        self.downlink = connection.downlink

    @property
    def endpoint(self) -> str:
        return self._connection.address

    @property
    def unsent_bytes(self) -> int:
        return self.uplink.unsent_bytes

    def start(self, on_message: OnMessage) -> None:
        self.downlink.deliver_to(on_message)

    def send(self, frames: Frames) -> None:
        message = checked_frames(frames)
        if self._connection.is_closed:
            raise TransportError(f"cannot send to {self.endpoint}: the link is closed")
        self.uplink.put(message)

    async def drain(self, max_unsent_bytes: int, timeout_s: float) -> None:
        await self.uplink.drain(max_unsent_bytes, timeout_s)

    def close(self, flush_s: float = 0.0) -> None:
        if not self._connection.is_closed:
            self._connection.close(flush_s)


class MemoryThreadLink:
    """Implements ``base.ThreadLink``; made by ``MemoryHub.connect_thread``."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.uplink = connection.uplink
        self.downlink = connection.downlink
        self._arrived = threading.Condition()
        #: Guarded by the condition.
        self._messages: list[Message] = []
        self._is_woken = False
        self._is_closed = False
        self._scheduled_bytes = 0
        self.downlink.deliver_to(self._on_message)
        self.uplink.on_fall = self._notify

    @property
    def endpoint(self) -> str:
        return self._connection.address

    @property
    def unsent_bytes(self) -> int:
        return self._scheduled_bytes + self.uplink.unsent_bytes

    def send(self, frames: Frames, timeout_s: float = 60.0) -> None:
        message = checked_frames(frames)
        with self._arrived:
            self._check_open("send to")
            max_bytes = self._connection.limits.max_unsent_bytes
            if not self._arrived.wait_for(
                lambda: self.unsent_bytes <= max_bytes or self._is_closed, timeout_s
            ):
                what = f"{self.endpoint} to read large frames"
                raise ClusterTimeout(what, timeout_s, f"{self.unsent_bytes} bytes are still unsent")
            self._check_open("send to")
            if self.uplink.num_queued >= self._connection.limits.max_queued_messages:
                raise TransportError(
                    f"cannot send to {self.endpoint}: its queue is full, because nobody reads it"
                )
            self._scheduled_bytes += large_bytes(message)
            self._connection.loop.call_soon_threadsafe(self._put, message)

    def receive(self, timeout_s: float) -> list[Message]:
        with self._arrived:
            self._check_open("receive from")
            self._arrived.wait_for(lambda: self._messages or self._is_woken or self._is_closed, timeout_s)
            self._check_open("receive from")
            self._is_woken = False
            messages, self._messages = self._messages, []
            return messages

    def wake(self) -> None:
        with self._arrived:
            self._is_woken = True
            self._arrived.notify_all()

    def close(self, flush_s: float = 0.0) -> None:
        with self._arrived:
            if self._is_closed:
                return
            self._is_closed = True
            self._arrived.notify_all()
        if not self._connection.loop.is_closed():
            self._connection.loop.call_soon_threadsafe(self._connection.close, flush_s)

    def _put(self, message: Message) -> None:
        with self._arrived:
            self._scheduled_bytes -= large_bytes(message)
        self.uplink.put(message)
        self._notify()

    def _notify(self) -> None:
        with self._arrived:
            self._arrived.notify_all()

    def _on_message(self, message: Message) -> None:
        with self._arrived:
            self._messages.append(message)
            self._arrived.notify_all()

    def _check_open(self, action: str) -> None:
        if self._is_closed:
            raise TransportError(f"cannot {action} {self.endpoint}: the link is closed")
