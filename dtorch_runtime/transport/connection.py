"""Connects a socket and says why, when that fails: ZeroMQ itself only goes on trying in silence."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from dtorch_runtime.errors import ClusterTimeout, DTorchError, HandshakeError, SecurityError, TransportError
from dtorch_runtime.transport.sockets import Socket, has_message, int_option

_WATCHED_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# Number and value of an event: https://libzmq.readthedocs.io/en/latest/zmq_socket_monitor.html
_EVENT = struct.Struct("=HI")
_HANGUPS_TO_GIVE_UP = 3
_PROTOCOL_ERROR_MECHANISM_MISMATCH = 0x11000002


class ConnectionProgress:
    """Turns the events of one connection attempt into an outcome. Decides only; does no I/O.

    Invariant: once ``is_connected`` is set or ``handle`` has raised, no further event is given to it.
    """

    def __init__(self, address: str, *, has_keys: bool) -> None:
        self._address = address
        self._has_keys = has_keys
        self._num_hangups = 0
        self._was_reached = False
        self.is_connected = False

    def handle(self, event: int, value: int) -> None:
        """Take one event of the socket's monitor.

        Raises:
            SecurityError: the server refuses this client's key, or one side uses keys and the other does not.
            HandshakeError: what listens there does not speak this protocol.
        """
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_connected = True
        elif event == zmq.EVENT_CONNECTED:
            self._was_reached = True
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise SecurityError(
                f"the server at {self._address} refused this client's key. Allowed are the clients listed in the "
                f"server's key file: use a client key file made together with it by `dtorch-launch keys`"
            )
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            raise self._protocol_failure(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._num_hangups += 1
            if self._num_hangups >= _HANGUPS_TO_GIVE_UP:
                raise self._hangup_failure()

    def timed_out(self, timeout_s: float) -> ClusterTimeout:
        """The error for a connection that was not there in time, with the likely cause."""
        if self._num_hangups or self._was_reached:
            hint = "Something listens there but does not complete the handshake: is it a DTorch process?"
        else:
            hint = "Nothing answers there: is the other process running, and is the address right?"
        return ClusterTimeout(f"a connection to {self._address}", timeout_s, hint)

    def _protocol_failure(self, code: int) -> DTorchError:
        if code == _PROTOCOL_ERROR_MECHANISM_MISMATCH:
            ours, theirs = ("with keys", "without") if self._has_keys else ("without keys", "with")
            return SecurityError(
                f"this side connects to {self._address} {ours}, the server runs {theirs}. Give both sides keys made "
                f"by `dtorch-launch keys`, or neither"
            )
        if self._has_keys:
            return SecurityError(
                f"the encrypted handshake with {self._address} failed (code {code:#x}): the keys do not match. "
                f"Use key files made together by `dtorch-launch keys`"
            )
        return HandshakeError(
            f"what listens at {self._address} does not speak DTorch's protocol (code {code:#x})"
        )

    def _hangup_failure(self) -> DTorchError:
        if self._has_keys:
            return SecurityError(
                f"the server at {self._address} ended the handshake {self._num_hangups} times. Its key is probably not "
                f"the one in this client's key file: use files made together by `dtorch-launch keys`"
            )
        return HandshakeError(
            f"what listens at {self._address} ended the handshake {self._num_hangups} times: it is probably not a "
            f"DTorch process"
        )


def connect_blocking(socket: Socket, address: str, *, has_keys: bool, timeout_s: float) -> None:
    """Connect ``socket`` and wait for the handshake to complete.

    Raises:
        ClusterTimeout: nothing there, or no complete handshake, within ``timeout_s``.
        SecurityError, HandshakeError: as ``ConnectionProgress.handle``.
        TransportError: the address cannot be connected to at all.
    """
    progress = ConnectionProgress(address, has_keys=has_keys)
    deadline_s = time.monotonic() + timeout_s
    with _monitored(socket) as monitor:
        _connect(socket, address)
        while not progress.is_connected:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not monitor.poll(round(remaining_s * 1000) + 1):
                raise progress.timed_out(timeout_s)
            progress.handle(*_EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0]))


async def connect_async(socket: Socket, address: str, *, has_keys: bool, timeout_s: float) -> None:
    """As ``connect_blocking``, while the event loop goes on running."""
    progress = ConnectionProgress(address, has_keys=has_keys)
    loop = asyncio.get_running_loop()
    with _monitored(socket) as monitor:
        file = int_option(monitor, zmq.FD)
        readable = asyncio.Event()
        loop.add_reader(file, readable.set)
        try:
            _connect(socket, address)
            async with asyncio.timeout(timeout_s):
                while not progress.is_connected:
                    readable.clear()
                    while not progress.is_connected and has_message(monitor):
                        progress.handle(*_EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0]))
                    if not progress.is_connected:
                        await readable.wait()
        except TimeoutError as error:
            if isinstance(error, ClusterTimeout):
                raise
            raise progress.timed_out(timeout_s) from None
        finally:
            loop.remove_reader(file)


def _connect(socket: Socket, address: str) -> None:
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise TransportError(f"cannot connect to {address}: {error.strerror}") from error


@contextmanager
def _monitored(socket: Socket) -> Iterator[Socket]:
    monitor = socket.get_monitor_socket(_WATCHED_EVENTS)
    monitor.linger = 0
    try:
        yield monitor
    finally:
        socket.disable_monitor()
        if not monitor.closed:
            monitor.close()
