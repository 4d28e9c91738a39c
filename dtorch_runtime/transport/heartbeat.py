"""Heartbeats, on their own threads and sockets, so that a busy event loop is not a dead node.

An agent or client runs a ``HeartbeatClient``, the controller one ``HeartbeatServer``. A beat is a message of five
frames: kind, name of the peer, number (8 bytes, little-endian), instance, and the HMAC-SHA256 of the others under the
session key. The server answers each with the same name and number, and with the random number of its own instance (16
bytes; empty in a beat): one that was started anew at the same address knows nobody, so that its answers mean that the
server is lost. What does not fit that, or was made with another key, is counted and ignored.

ZeroMQ's own heartbeats (https://rfc.zeromq.org/spec/37/) run below, on threads that need no interpreter lock. They end
the connection of a peer that is stopped or unplugged; so where a beat can still be sent, the peer is there, even while
one long call keeps its interpreter from answering.

A killed peer is told of within ``timeout_s + interval_s``, a stopped or unplugged one within 1.5 times that.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable

import zmq

from dtorch_runtime.errors import InternalError, SecurityError, TransportError
from dtorch_runtime.transport.base import LinkLimits
from dtorch_runtime.transport.beat_book import BeatBook
from dtorch_runtime.transport.security import CurveKeys
from dtorch_runtime.transport.sockets import (
    Socket,
    bound_address,
    close_socket,
    keep_connection_checked,
    new_client,
    open_server,
)

_BEAT = b"dtorch-beat-1"
_ANSWER = b"dtorch-answer-1"
_NUM_FRAMES = 5
_NUMBER_BYTES = 8
_INSTANCE_BYTES = 16
_MAX_NAME_BYTES = 255
_SERVER = "server"
_CLOSE_DEADLINE_S = 5.0
_SILENCE_LIMIT_S = 60.0
# No bound on unread messages: libzmq 4.3.5 aborts the process (`Assertion failed: !_io_error`) when a connection with
# heartbeats breaks whose messages it holds back. Frames are tiny, and the thread does nothing but read them.
_LIMITS = LinkLimits(max_queued_messages=1000, max_unread_messages=0, max_frame_bytes=1024)
_MAX_BEATS_A_TURN = 1000

_logger = logging.getLogger(__name__)


def seal(kind: bytes, peer_id: str, number: int, instance: bytes, session_key: bytes) -> list[bytes]:
    """The frames of a beat or an answer."""
    frames = [kind, peer_id.encode(), number.to_bytes(_NUMBER_BYTES, "little"), instance]
    return [*frames, _digest(frames, session_key)]


def is_genuine(kind: bytes, frames: list[bytes], session_key: bytes) -> bool:
    """Whether these are the frames of a message of this kind, made with this key."""
    if len(frames) != _NUM_FRAMES or frames[0] != kind:
        return False
    _, peer_id, number, instance, digest = frames
    if not 0 < len(peer_id) <= _MAX_NAME_BYTES or len(number) != _NUMBER_BYTES:
        return False
    if len(instance) != (_INSTANCE_BYTES if kind == _ANSWER else 0):
        return False
    return hmac.compare_digest(digest, _digest(frames[:-1], session_key))


def _digest(frames: list[bytes], session_key: bytes) -> bytes:
    # All but the name have the length that their kind fixes, so that the joined bytes have one reading only.
    return hmac.digest(session_key, b"".join(frames), "sha256")


def _check_session_key(session_key: bytes) -> None:
    if not session_key:
        raise SecurityError("heartbeats need the session key, an empty one was given: use new_session_key()")


class _BeatThread:
    """A thread that owns a socket: it hands over what arrives, and calls ``tick`` every ``interval_s``.

    Args:
        handle: takes the frames of one message and the time; False when they are malformed.
        tick: takes the time; False ends the thread.
    """

    def __init__(
        self,
        name: str,
        socket: Socket,
        interval_s: float,
        handle: Callable[[list[bytes], float], bool],
        tick: Callable[[float], bool],
    ) -> None:
        self._socket = socket
        self._interval_s = interval_s
        self._handle = handle
        self._tick = tick
        self._lock = threading.Lock()
        #: Guarded by the lock; the pipe is open while it is False.
        self._is_ending = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.num_genuine = 0
        self.num_malformed = 0
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; it closes the socket. May be called twice, and from the thread itself.

        Raises:
            InternalError: the thread did not end; a callback of it blocks.
        """
        with self._lock:
            if not self._is_ending:
                self._is_ending = True
                os.write(self._wake_write, b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_DEADLINE_S)
            if self._thread.is_alive():
                raise InternalError(f"thread {self._thread.name} did not end within {_CLOSE_DEADLINE_S:g} s")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        try:
            self._work(poller)
        finally:
            with self._lock:
                self._is_ending = True
                os.close(self._wake_read)
                os.close(self._wake_write)
            close_socket(self._socket)

    def _work(self, poller: zmq.Poller) -> None:
        next_tick_s = time.monotonic()
        while not self._is_ending:
            # What arrived during a stall is read before anybody is judged.
            self._read(time.monotonic())
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + self._interval_s
                if not self._tick(now_s):
                    return
            poller.poll(max(0, round((next_tick_s - time.monotonic()) * 1000)))

    def _read(self, now_s: float) -> None:
        try:
            for _ in range(_MAX_BEATS_A_TURN):
                if self._handle(self._socket.recv_multipart(zmq.NOBLOCK), now_s):
                    self.num_genuine += 1
                else:
                    self.num_malformed += 1
        except zmq.Again:
            return


class HeartbeatServer:
    """The controller's side: answers beats, and calls ``on_lost(peer_id)`` once for each peer that is lost.

    Args:
        address: where to bind; ``endpoint`` tells the address with its port.
        on_lost: called on the heartbeat thread. It must not block.
        keys: needed for an address that other machines can reach.
        silence_limit_s: the longest time without a beat of a peer whose connection is alive.

    Raises:
        SecurityError, TransportError: as ``ZmqServerLink``.
        SettingError: the times do not fit together.
    """

    def __init__(
        self,
        address: str,
        *,
        session_key: bytes,
        interval_s: float,
        timeout_s: float,
        on_lost: Callable[[str], None],
        keys: CurveKeys | None = None,
        silence_limit_s: float = _SILENCE_LIMIT_S,
    ) -> None:
        _check_session_key(session_key)
        self._session_key = session_key
        self._on_lost = on_lost
        self._instance = secrets.token_bytes(_INSTANCE_BYTES)
        self._lock = threading.Lock()
        #: Both guarded by the lock. A route is where the peer's last beat came from.
        self._book = BeatBook(
            interval_s=interval_s, timeout_s=timeout_s, silence_limit_s=max(silence_limit_s, timeout_s)
        )
        self._routes: dict[str, bytes] = {}
        self._socket = open_server(
            address, keys, _LIMITS, prepare=lambda s: keep_connection_checked(s, interval_s, timeout_s / 2)
        )
        self._endpoint = bound_address(self._socket)
        self._thread = _BeatThread(
            "dtorch-heartbeat-server", self._socket, interval_s, self._handle, self._tick
        )

    @property
    def endpoint(self) -> str:
        """The address that is really bound."""
        return self._endpoint

    @property
    def num_beats(self) -> int:
        """Genuine beats that arrived, of watched peers and others."""
        return self._thread.num_genuine

    @property
    def num_malformed(self) -> int:
        """Messages that were ignored: malformed, or made with another session key."""
        return self._thread.num_malformed

    def watch(self, peer_id: str) -> None:
        """Expect beats of this peer from now on; for any thread."""
        if not 0 < len(peer_id.encode()) <= _MAX_NAME_BYTES:
            raise TransportError(f"peer {peer_id!r}: the name of a peer has 1 to {_MAX_NAME_BYTES} bytes")
        with self._lock:
            self._book.watch(peer_id, time.monotonic())

    def forget(self, peer_id: str) -> None:
        """Expect nothing of this peer any more, as it said goodbye; for any thread."""
        with self._lock:
            self._book.forget(peer_id)
            self._routes.pop(peer_id, None)

    def close(self) -> None:
        """Stop. May be called twice."""
        self._thread.close()

    def _handle(self, frames: list[bytes], now_s: float) -> bool:
        route, *beat = frames
        if not is_genuine(_BEAT, beat, self._session_key):
            return False
        peer_id = beat[1].decode(errors="replace")
        with self._lock:
            self._book.beat(peer_id, now_s)
            if peer_id in self._book:
                self._routes[peer_id] = route
        self._send(route, peer_id, int.from_bytes(beat[2], "little"))
        return True

    def _tick(self, now_s: float) -> bool:
        with self._lock:
            for peer_id in self._book.silent(now_s):
                route = self._routes.get(peer_id)
                if route is not None and self._send(route, peer_id, 0):
                    self._book.reachable(peer_id, now_s)
            lost = self._book.expired(now_s)
            for peer_id in lost:
                self._routes.pop(peer_id, None)
        for peer_id in lost:
            try:
                self._on_lost(peer_id)
            except Exception:
                # Whatever the callback raises, the other peers go on being watched.
                _logger.exception("the callback for lost peer %s failed", peer_id)
        return True

    def _send(self, route: bytes, peer_id: str, number: int) -> bool:
        answer = seal(_ANSWER, peer_id, number, self._instance, self._session_key)
        try:
            self._socket.send_multipart([route, *answer], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False  # that connection has gone, or nothing is read from it: no sign of life
        return True


class HeartbeatClient:
    """The side of agents and clients: beats, and calls ``on_lost()`` once when the server is lost, then ends.

    It connects by itself; a server that is not there within ``timeout_s`` counts as lost.

    Args:
        address: of the ``HeartbeatServer``.
        peer_id: this process's name, which the server watches.
        on_lost: called on the heartbeat thread. It must not block; it may call ``close``.
        keys: needed for an address on another machine.
        silence_limit_s: the longest time without an answer from a server whose connection is alive.

    Raises:
        SecurityError, TransportError: as ``ZmqClientLink.connect``, less what only the connection tells.
        SettingError: the times do not fit together.
    """

    def __init__(
        self,
        address: str,
        peer_id: str,
        *,
        session_key: bytes,
        interval_s: float,
        timeout_s: float,
        on_lost: Callable[[], None],
        keys: CurveKeys | None = None,
        silence_limit_s: float = _SILENCE_LIMIT_S,
    ) -> None:
        _check_session_key(session_key)
        self._peer_id = peer_id
        self._session_key = session_key
        self._on_lost = on_lost
        self._number = 0
        self._server_instance: bytes | None = None
        self._is_server_replaced = False
        self._book = BeatBook(
            interval_s=interval_s, timeout_s=timeout_s, silence_limit_s=max(silence_limit_s, timeout_s)
        )
        self._book.watch(_SERVER, time.monotonic())
        self._socket = new_client(address, keys, _LIMITS)
        try:
            # Nothing is queued without a live connection: a send that works is a sign of life.
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            keep_connection_checked(self._socket, interval_s, timeout_s / 2)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            close_socket(self._socket)
            raise TransportError(f"cannot connect to {address}: {error.strerror}") from error
        self._thread = _BeatThread(
            "dtorch-heartbeat-client", self._socket, interval_s, self._handle, self._tick
        )

    @property
    def num_answers(self) -> int:
        """Genuine answers that arrived."""
        return self._thread.num_genuine

    @property
    def num_malformed(self) -> int:
        """Messages that were ignored: malformed, or made with another session key."""
        return self._thread.num_malformed

    def close(self) -> None:
        """Stop. May be called twice, and from ``on_lost``."""
        self._thread.close()

    def _handle(self, frames: list[bytes], now_s: float) -> bool:
        if not is_genuine(_ANSWER, frames, self._session_key) or frames[1] != self._peer_id.encode():
            return False
        instance = frames[3]
        self._server_instance = self._server_instance or instance
        if instance == self._server_instance:
            self._book.beat(_SERVER, now_s)
        else:
            self._is_server_replaced = True
        return True

    def _tick(self, now_s: float) -> bool:
        self._number += 1
        # What never gave a genuine answer is not the server, however alive its connection.
        if self._send_beat() and self._server_instance is not None and self._book.silent(now_s):
            self._book.reachable(_SERVER, now_s)
        if not self._book.expired(now_s) and not self._is_server_replaced:
            return True
        try:
            self._on_lost()
        except Exception:
            _logger.exception("the callback for the lost server failed")
        return False

    def _send_beat(self) -> bool:
        beat = seal(_BEAT, self._peer_id, self._number, b"", self._session_key)
        try:
            self._socket.send_multipart(beat, zmq.NOBLOCK)
        except zmq.Again:
            return False  # not connected
        return True
