"""What the ZeroMQ links share: one context, socket options, whole messages in and out, and frames in flight."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import cast

import zmq

# Exit handlers run last to first: this registers the one of pyzmq's keeper of frames in flight, and the keeper must
# still be there while `_ProcessContext` sends what is left, or the process dies of a segmentation fault.
from zmq.utils import garbage  # noqa: F401

from dtorch_runtime.errors import ClusterTimeout, ForkError, TransportError
from dtorch_runtime.transport.base import LARGE_FRAME_BYTES, Frames, LinkLimits, Message, checked_frames
from dtorch_runtime.transport.endpoint import Endpoint, parse_endpoint, prepare_ipc_bind, require_keys
from dtorch_runtime.transport.security import CurveKeys
from dtorch_runtime.transport.zap import revoke_access

Socket = zmq.Socket[bytes]

# The compiled methods: the ones in Python around them only serve socket kinds that are not used here, at 1 us a frame.
_send_frame = zmq.backend.Socket.send
_receive_frame = zmq.backend.Socket.recv
_get_option = zmq.backend.Socket.get
_LAST_FRAME = int(zmq.NOBLOCK)
_MORE_FOLLOW = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_RCVMORE = int(zmq.RCVMORE)

_FIRST_RECONNECT_MS = 20
_LAST_RECONNECT_MS = 1000
_TCP_KEEPALIVE_IDLE_S = 60


class _ProcessContext:
    """The process's one ZeroMQ context, made at first use, and the sockets that are open in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[Socket] | None = None
        self._pid = 0
        self.open_sockets: weakref.WeakSet[Socket] = weakref.WeakSet()
        atexit.register(self._end)

    def get(self) -> zmq.Context[Socket]:
        with self._lock:
            if self._context is None:
                # Not zmq.Context.instance(): programs that embed Python terminate that one under our feet.
                self._context = zmq.Context()
                self._pid = os.getpid()
            elif self._pid != os.getpid():
                raise ForkError(
                    "sockets of DTorch were used in a forked child of the process that opened them; start the child "
                    "with multiprocessing.get_context('spawn'), or fork before the first use of DTorch"
                )
            return self._context

    def _end(self) -> None:
        """At exit, give closed sockets the rest of their flush time. With a socket still open it would never end."""
        if self._context is not None and self._pid == os.getpid() and not self.num_open():
            self._context.term()

    def num_open(self) -> int:
        return sum(not socket.closed for socket in self.open_sockets)


_process = _ProcessContext()


def shared_context() -> zmq.Context[Socket]:
    """The one ZeroMQ context of this process.

    Raises:
        ForkError: this process was forked from one that had opened sockets.
    """
    return _process.get()


def num_open_sockets() -> int:
    """Sockets that DTorch holds open in this process: zero after everything was closed."""
    return _process.num_open()


def new_socket(kind: int) -> Socket:
    """A socket of the shared context that is counted by ``num_open_sockets``. It drops what is unsent at close."""
    socket: Socket = shared_context().socket(kind)
    socket.linger = 0
    _process.open_sockets.add(socket)
    return socket


def has_message(socket: Socket) -> bool:
    """Whether something can be read. Asking arms the socket's file descriptor when there is nothing.

    Quicker than the exception that reading an empty socket raises; and not with ``zmq.POLLIN`` itself, whose ``&``
    is a Python method that takes longer than the question.
    """
    return bool(cast("int", _get_option(socket, _EVENTS)) & _POLLIN)


def int_option(socket: Socket, option: zmq.SocketOption) -> int:
    """An option of the socket that is a number."""
    return cast("int", _get_option(socket, option))


def bound_address(socket: Socket) -> str:
    """The address that a bound socket really has, with the port that was chosen."""
    return cast("bytes", socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def close_socket(socket: Socket, flush_s: float = 0.0) -> None:
    """Close a socket; what it has queued is still sent for at most ``flush_s``, in the background."""
    if not socket.closed:
        revoke_access(socket)
        socket.close(linger=round(flush_s * 1000))


def open_server(
    address: str,
    keys: CurveKeys | None,
    limits: LinkLimits,
    *,
    prepare: Callable[[Socket], None] | None = None,
) -> Socket:
    """A bound ROUTER socket. ``prepare`` sets further options before it is bound.

    Raises:
        SecurityError: others could reach the address and there are no keys, or its folder is open to others.
        TransportError: the address is malformed, in use, or not of this machine.
    """
    endpoint = parse_endpoint(address)
    require_keys(endpoint, has_keys=keys is not None, action="bind")
    if endpoint.scheme == "ipc":
        prepare_ipc_bind(endpoint)
    socket = new_socket(zmq.ROUTER)
    try:
        # Without this a message to a peer that has gone is dropped in silence.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        _set_options(socket, endpoint, limits)
        if prepare is not None:
            prepare(socket)
        if keys is not None:
            keys.protect_server(socket)
        socket.bind(address)
    except zmq.ZMQError as error:
        close_socket(socket)
        raise TransportError(f"cannot bind {address}: {error.strerror}") from error
    except BaseException:
        close_socket(socket)
        raise
    return socket


def keep_connection_checked(socket: Socket, interval_s: float, timeout_s: float) -> None:
    """Let ZeroMQ's own threads end connections whose other side is stopped or unplugged (ZMTP heartbeats)."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, round(interval_s * 1000)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, round(timeout_s * 1000)))


def new_client(address: str, keys: CurveKeys | None, limits: LinkLimits) -> Socket:
    """A DEALER socket with its options set, which ``connect`` has not been called on.

    Raises:
        SecurityError: the address is not private and there are no keys.
        TransportError: the address is malformed.
    """
    endpoint = parse_endpoint(address)
    require_keys(endpoint, has_keys=keys is not None, action="connect to")
    if endpoint.port == "*":
        raise TransportError(
            f"cannot connect to {address}: port * is only for binding. Give the port's number"
        )
    socket = new_socket(zmq.DEALER)
    try:
        _set_options(socket, endpoint, limits)
        if keys is not None:
            keys.protect_client(socket)
    except BaseException:
        close_socket(socket)
        raise
    return socket


def _set_options(socket: Socket, endpoint: Endpoint, limits: LinkLimits) -> None:
    socket.setsockopt(zmq.SNDHWM, limits.max_queued_messages)
    socket.setsockopt(zmq.RCVHWM, limits.max_unread_messages)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_frame_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, _FIRST_RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LAST_RECONNECT_MS)
    if endpoint.scheme == "tcp":
        socket.setsockopt(zmq.IPV6, int(endpoint.is_ipv6))
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _TCP_KEEPALIVE_IDLE_S)


class UnsentLedger:
    """Counts the bytes of large frames that ZeroMQ still reads from, and tells when that falls.

    ZeroMQ gives a buffer back by dropping its reference, on a thread of its own; so every large frame is sent as a
    fresh memoryview, and a weak reference to that view counts it out.
    """

    def __init__(self) -> None:
        # Reentrant: dropping a view may run `_give_back` on a thread that is inside one of these methods.
        self._changed = threading.Condition(threading.RLock())
        #: By id of the reference (a reference hashes as its view does, and views of writable memory do not).
        self._loans: dict[int, tuple[weakref.ref[memoryview], int]] = {}
        self._num_bytes = 0
        self._listeners: list[Callable[[], None]] = []

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def lend(self, frame: bytes | memoryview) -> memoryview:
        """A view of ``frame`` to hand to ZeroMQ, counted until ZeroMQ drops it."""
        view = memoryview(frame)
        reference = weakref.ref(view, self._give_back)
        with self._changed:
            self._loans[id(reference)] = (reference, view.nbytes)
            self._num_bytes += view.nbytes
        return view

    def _give_back(self, reference: weakref.ref[memoryview]) -> None:
        with self._changed:
            self._num_bytes -= self._loans.pop(id(reference))[1]
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def wait_below(self, max_bytes: int, timeout_s: float, what: str) -> None:
        """Block the calling thread until at most ``max_bytes`` are in flight.

        Raises:
            ClusterTimeout: naming ``what``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_bytes <= max_bytes, timeout_s):
                raise ClusterTimeout(what, timeout_s, f"{self._num_bytes} bytes are still unsent")

    async def drain(self, max_bytes: int, timeout_s: float, what: str) -> None:
        """As ``wait_below``, from an event loop that goes on running.

        Raises:
            ClusterTimeout: naming ``what``.
        """
        if self._num_bytes <= max_bytes:
            return
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def notify() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._listeners.append(notify)
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_bytes > max_bytes:
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            raise ClusterTimeout(what, timeout_s, f"{self._num_bytes} bytes are still unsent") from None
        finally:
            with self._changed:
                self._listeners.remove(notify)


def send_message(socket: Socket, prefix: bytes | None, frames: Frames, ledger: UnsentLedger) -> None:
    """Queue a whole message without waiting, after ``prefix`` (the peer's routing id on a ROUTER socket).

    Raises:
        TransportError: there are no frames, or one is not a buffer.
        zmq.ZMQError: EAGAIN when the queue is full, EHOSTUNREACH when the peer has gone.
    """
    checked = checked_frames(frames)
    if prefix is not None:
        _send_frame(socket, prefix, _MORE_FOLLOW)
    last = len(checked) - 1
    for index, frame in enumerate(checked):
        flags = _LAST_FRAME if index == last else _MORE_FOLLOW
        if len(frame) < LARGE_FRAME_BYTES:
            _send_frame(socket, frame, flags)
        else:
            _send_frame(socket, ledger.lend(frame), flags, copy=False)


def receive_message(socket: Socket, num_copied: int) -> Message:
    """Take one whole message without waiting.

    Args:
        num_copied: this many leading frames are read as bytes, which is quicker for frames known to be small.

    Raises:
        zmq.Again: no message is there. Only then is the socket's file descriptor armed again.
    """
    frames: Message = [_receive_frame(socket, _LAST_FRAME)]
    for _ in range(num_copied - 1):
        frames.append(_receive_frame(socket, _LAST_FRAME))
    more = _get_option(socket, _RCVMORE)
    while more:
        frame = _receive_frame(socket, _LAST_FRAME, copy=False)
        frames.append(frame.bytes if len(frame) < LARGE_FRAME_BYTES else frame.buffer)
        more = frame.more
    return frames


class LoopReader:
    """Reads a socket from an asyncio loop through its file descriptor, which is edge-triggered.

    The descriptor becomes readable once for a change of state, and any call on the socket may consume that. So the
    reader reads until nothing is there, comes back through the loop when it stopped earlier to let others run, and
    must be told of every send.
    """

    def __init__(
        self,
        socket: Socket,
        on_message: Callable[[Message], None],
        *,
        num_copied: int,
        max_messages_per_turn: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._file = int_option(socket, zmq.FD)
        self._on_message = on_message
        self._num_copied = num_copied
        self._max_messages_per_turn = max_messages_per_turn
        self._is_scheduled = False
        self._is_reading = False
        self._is_stopped = False
        self._loop.add_reader(self._file, self._on_readable)
        self._schedule()

    def after_send(self) -> None:
        """Look whether the send consumed the news of an arrival."""
        if self._is_scheduled or self._is_reading:
            return  # it will be looked at anyway
        if has_message(self._socket):
            self._schedule()

    def stop(self) -> None:
        """Stop reading; to be called before the socket is closed."""
        if not self._is_stopped:
            self._is_stopped = True
            if not self._loop.is_closed():
                self._loop.remove_reader(self._file)

    def _on_readable(self) -> None:
        if not self._is_scheduled:
            self._read()

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._is_scheduled = False
        self._is_reading = True
        is_empty = False
        try:
            for _ in range(self._max_messages_per_turn):
                if self._is_stopped:
                    return
                if not has_message(self._socket):
                    is_empty = True
                    return
                self._on_message(receive_message(self._socket, self._num_copied))
        finally:
            self._is_reading = False
            # Also when on_message raised (the loop reports that): the messages behind it are not to be lost.
            if not (is_empty or self._is_stopped):
                self._schedule()
