"""The ZeroMQ links: ROUTER for the end that others connect to, DEALER for those that connect."""

from __future__ import annotations

import os
import select
import threading
import time

import zmq

from dtorch_runtime.errors import InternalError, TransportError
from dtorch_runtime.transport.base import Frames, LinkLimits, Message, OnMessage, OnPeerMessage
from dtorch_runtime.transport.connection import connect_async, connect_blocking
from dtorch_runtime.transport.interrupts import DeferredInterrupts
from dtorch_runtime.transport.security import CurveKeys
from dtorch_runtime.transport.sockets import (
    LoopReader,
    Socket,
    UnsentLedger,
    bound_address,
    close_socket,
    has_message,
    int_option,
    new_client,
    open_server,
    receive_message,
    send_message,
)

_ROUTING_ID_AND_FIRST_FRAME = 2
_FIRST_FRAME = 1
_LEAVE_DEADLINE_S = 5.0
_SEND_ERRORS: dict[int, str] = {
    zmq.EAGAIN: "its queue is full, because the other side does not read",
    zmq.ENOTSOCK: "the link is closed",
}


def _send_error(error: zmq.ZMQError, target: str) -> TransportError:
    reason = _SEND_ERRORS.get(error.errno or 0, error.strerror)
    return TransportError(f"cannot send to {target}: {reason}")


class ZmqServerLink:
    """A bound ROUTER socket in the running asyncio loop. Implements ``base.ServerLink``.

    Raises:
        SecurityError: others could reach ``address`` and there are no keys, or its folder is open to others.
        TransportError: the address is malformed, in use, or not of this machine.
    """

    def __init__(
        self, address: str, *, keys: CurveKeys | None = None, limits: LinkLimits | None = None
    ) -> None:
        self._limits = limits or LinkLimits()
        self._socket = open_server(address, keys, self._limits)
        self._endpoint = bound_address(self._socket)
        self._ledger = UnsentLedger()
        self._reader: LoopReader | None = None

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def unsent_bytes(self) -> int:
        return self._ledger.num_bytes

    def start(self, on_message: OnPeerMessage) -> None:
        def deliver(message: Message) -> None:
            peer = message.pop(0)
            on_message(bytes(peer), message)

        self._reader = LoopReader(
            self._socket,
            deliver,
            num_copied=_ROUTING_ID_AND_FIRST_FRAME,
            max_messages_per_turn=self._limits.max_messages_per_turn,
        )

    def send(self, peer: bytes, frames: Frames) -> bool:
        try:
            send_message(self._socket, peer, frames, self._ledger)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise _send_error(error, f"peer {peer.hex()} of {self._endpoint}") from None
        if self._reader is not None:
            self._reader.after_send()
        return True

    async def drain(self, max_unsent_bytes: int, timeout_s: float) -> None:
        await self._ledger.drain(
            max_unsent_bytes, timeout_s, f"peers of {self._endpoint} to read large frames"
        )

    def close(self, flush_s: float = 0.0) -> None:
        if self._reader is not None:
            self._reader.stop()
        close_socket(self._socket, flush_s)


class ZmqClientLink:
    """A connected DEALER socket in the running asyncio loop. Implements ``base.ClientLink``; made by ``connect``."""

    def __init__(self, socket: Socket, address: str, limits: LinkLimits) -> None:
        self._socket = socket
        self._endpoint = address
        self._limits = limits
        self._ledger = UnsentLedger()
        self._reader: LoopReader | None = None

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        keys: CurveKeys | None = None,
        limits: LinkLimits | None = None,
        timeout_s: float,
    ) -> ZmqClientLink:
        """Connect, and wait until the other side has completed the handshake of ZeroMQ and of the keys.

        Raises:
            ClusterTimeout: no connection within ``timeout_s``.
            SecurityError: no keys for an address that needs them, or keys that do not match.
            HandshakeError: what listens there is not a ZeroMQ socket.
            TransportError: the address is malformed.
        """
        limits = limits or LinkLimits()
        socket = new_client(address, keys, limits)
        try:
            await connect_async(socket, address, has_keys=keys is not None, timeout_s=timeout_s)
        except BaseException:
            close_socket(socket)
            raise
        return cls(socket, address, limits)

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def unsent_bytes(self) -> int:
        return self._ledger.num_bytes

    def start(self, on_message: OnMessage) -> None:
        self._reader = LoopReader(
            self._socket,
            on_message,
            num_copied=_FIRST_FRAME,
            max_messages_per_turn=self._limits.max_messages_per_turn,
        )

    def send(self, frames: Frames) -> None:
        try:
            send_message(self._socket, None, frames, self._ledger)
        except zmq.ZMQError as error:
            raise _send_error(error, self._endpoint) from None
        if self._reader is not None:
            self._reader.after_send()

    async def drain(self, max_unsent_bytes: int, timeout_s: float) -> None:
        await self._ledger.drain(max_unsent_bytes, timeout_s, f"{self._endpoint} to read large frames")

    def close(self, flush_s: float = 0.0) -> None:
        if self._reader is not None:
            self._reader.stop()
        close_socket(self._socket, flush_s)


class ZmqThreadLink:
    """A connected DEALER socket for threads. Implements ``base.ThreadLink``; made by ``connect``.

    The socket is used under a lock, by whichever thread sends. The one receiver waits without the lock, on the
    socket's file descriptor and on a pipe. A send may consume the descriptor's news of an arrival, so it looks, and
    wakes the receiver through the pipe.
    """

    def __init__(self, socket: Socket, address: str, limits: LinkLimits) -> None:
        self._socket = socket
        self._endpoint = address
        self._limits = limits
        self._ledger = UnsentLedger()
        self._lock = threading.Lock()
        #: Guarded by the lock, as is every use of the socket.
        self._is_closed = False
        self._is_woken = False
        self._is_pipe_written = False
        self._is_receiving = False
        self._receiver_left = threading.Condition(self._lock)
        self._wake_read, self._wake_write = os.pipe()
        self._poll = select.poll()
        self._poll.register(int_option(socket, zmq.FD), select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        keys: CurveKeys | None = None,
        limits: LinkLimits | None = None,
        timeout_s: float,
    ) -> ZmqThreadLink:
        """Connect, and block until the handshake is complete. Raises as ``ZmqClientLink.connect``."""
        limits = limits or LinkLimits()
        socket = new_client(address, keys, limits)
        try:
            connect_blocking(socket, address, has_keys=keys is not None, timeout_s=timeout_s)
            return cls(socket, address, limits)
        except BaseException:
            close_socket(socket)
            raise

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def unsent_bytes(self) -> int:
        return self._ledger.num_bytes

    def send(self, frames: Frames, timeout_s: float = 60.0) -> None:
        max_bytes = self._limits.max_unsent_bytes
        if self._ledger.num_bytes > max_bytes:
            self._ledger.wait_below(max_bytes, timeout_s, f"{self._endpoint} to read large frames")
        with DeferredInterrupts(), self._lock:
            self._check_open("send to")
            try:
                send_message(self._socket, None, frames, self._ledger)
            except zmq.ZMQError as error:
                raise _send_error(error, self._endpoint) from None
            if self._is_receiving and has_message(self._socket):
                self._write_pipe()

    def receive(self, timeout_s: float) -> list[Message]:
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._check_open("receive from")
            if self._is_receiving:
                raise TransportError(f"two threads receive from {self._endpoint} at once; only one may")
            self._is_receiving = True
        try:
            while True:
                with self._lock:
                    self._check_open("receive from")
                    messages = self._read_all()
                    is_woken, self._is_woken = self._is_woken, False
                remaining_s = deadline_s - time.monotonic()
                if messages or is_woken or remaining_s <= 0:
                    return messages
                self._poll.poll(remaining_s * 1000)
        finally:
            with self._lock:
                self._is_receiving = False
                self._receiver_left.notify_all()

    def wake(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_woken = True
                self._write_pipe()

    def close(self, flush_s: float = 0.0) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._write_pipe()
            # The receiver sees the flag and leaves; only then may the descriptors that it polls be closed.
            if not self._receiver_left.wait_for(lambda: not self._is_receiving, _LEAVE_DEADLINE_S):
                raise InternalError(
                    f"the receiver of {self._endpoint} did not leave in {_LEAVE_DEADLINE_S:g} s"
                )
            close_socket(self._socket, flush_s)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _read_all(self) -> list[Message]:
        if self._is_pipe_written:
            os.read(self._wake_read, 1)
            self._is_pipe_written = False
        messages: list[Message] = []
        while has_message(self._socket):
            messages.append(receive_message(self._socket, _FIRST_FRAME))
        return messages

    def _write_pipe(self) -> None:
        if not self._is_pipe_written:
            self._is_pipe_written = True
            os.write(self._wake_write, b"\0")

    def _check_open(self, action: str) -> None:
        if self._is_closed:
            raise TransportError(f"cannot {action} {self._endpoint}: the link is closed")
