"""Decides which CURVE keys may connect: ZeroMQ's authentication protocol, https://rfc.zeromq.org/spec/27/.

A CURVE server without a handler of this protocol lets *any* client key in. ZeroMQ asks one handler a context, on a
fixed inproc address; this one runs on a thread for as long as a socket needs it, and keeps one list of allowed keys
for each socket (a ZAP "domain").
"""

from __future__ import annotations

import itertools
import threading

import zmq
from zmq.utils import z85

from dtorch_runtime.errors import InternalError

Socket = zmq.Socket[bytes]

_ADDRESS = "inproc://zeromq.zap.01"
_STOP_DEADLINE_S = 5.0
_REQUEST_FRAMES = 7  # version, request id, domain, address, routing id, mechanism, the client's key


class _AccessControl:
    """The lists of allowed keys, and the thread that answers from them while there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._allowed: dict[bytes, frozenset[bytes]] = {}
        self._numbers = itertools.count(1)
        self._thread: threading.Thread | None = None
        self._stop: Socket | None = None

    def grant(self, socket: Socket, allowed_keys: frozenset[bytes]) -> None:
        with self._lock:
            domain = b"dtorch-%d" % next(self._numbers)
            socket.zap_domain = domain
            # Refuse clients, rather than let them all in, should the handler ever be missing.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self._allowed[domain] = allowed_keys
            if self._thread is None:
                self._start(socket.context)

    def revoke(self, domain: bytes) -> None:
        with self._lock:
            if self._allowed.pop(domain, None) is not None and not self._allowed:
                self._end()

    def _start(self, context: zmq.Context[Socket]) -> None:
        requests = context.socket(zmq.REP)
        requests.linger = 0
        requests.bind(_ADDRESS)
        stopped, self._stop = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        address = f"inproc://dtorch-zap-stop-{id(requests)}"
        stopped.bind(address)
        self._stop.connect(address)
        self._thread = threading.Thread(
            target=self._serve, args=(requests, stopped), name="dtorch-access-control", daemon=True
        )
        self._thread.start()

    def _end(self) -> None:
        thread, stop = self._thread, self._stop
        if thread is None or stop is None:
            return
        stop.send(b"")
        thread.join(_STOP_DEADLINE_S)
        stop.close(linger=0)
        self._thread = self._stop = None
        if thread.is_alive():
            raise InternalError(f"the access control thread did not end within {_STOP_DEADLINE_S:g} s")

    def _serve(self, requests: Socket, stopped: Socket) -> None:
        poller = zmq.Poller()
        poller.register(requests, zmq.POLLIN)
        poller.register(stopped, zmq.POLLIN)
        with requests, stopped:
            while True:
                ready = dict(poller.poll())
                if stopped in ready:
                    return
                requests.send_multipart(self.answer(requests.recv_multipart()))

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to one question of ZeroMQ's: status 200 for an allowed key, 400 for anything else."""
        version, request_id, domain = request[:3]
        is_allowed = False
        if len(request) == _REQUEST_FRAMES and request[5] == b"CURVE" and len(request[6]) == 32:
            is_allowed = z85.encode(request[6]) in self._allowed.get(domain, frozenset())
        if is_allowed:
            return [version, request_id, b"200", b"OK", b"", b""]
        return [version, request_id, b"400", b"this client's key is not among the allowed ones", b"", b""]


_access = _AccessControl()


def grant_access(socket: Socket, allowed_keys: frozenset[bytes]) -> None:
    """Let only clients with one of ``allowed_keys`` (Z85) connect to ``socket``, which is about to be bound."""
    _access.grant(socket, allowed_keys)


def revoke_access(socket: Socket) -> None:
    """Forget the keys of a socket that is about to be closed. Does nothing for one without keys."""
    domain = socket.getsockopt(zmq.ZAP_DOMAIN)
    if isinstance(domain, bytes) and domain:
        _access.revoke(domain.rstrip(b"\0"))
