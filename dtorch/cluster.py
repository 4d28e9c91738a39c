"""``init``, ``shutdown``, ``connect``: which cluster this process works on. Torch is imported only by its first op."""

from __future__ import annotations

import asyncio
import atexit
import importlib
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from dtorch.keywords import teaches_keywords
from dtorch_runtime.errors import ClusterTimeout, ControllerLost, DTorchError, ForkError, SettingError
from dtorch_runtime.local import LocalCluster, start_local_cluster
from dtorch_runtime.settings import Settings
from dtorch_runtime.transport.heartbeat import HeartbeatClient
from dtorch_runtime.transport.security import CurveKeys, load_keys
from dtorch_runtime.wire.records import NodeRecord

if TYPE_CHECKING:  # imports torch
    from dtorch.connection import Session
    from dtorch.graph import Graph

ENV_ADDRESS = "DTORCH_ADDRESS"
ENV_SESSION_KEY = "DTORCH_SESSION_KEY"
ENV_KEYS = "DTORCH_KEYS"
#: How long the end of an interpreter that an exception ends waits for ops that still run; any other end waits
#: ``stop_timeout_s`` for them, so that their errors can be printed.
_FAILED_EXIT_SYNC_S = 0.3
_EXIT_STOP_S = 1.0


class Cluster:
    """A connection to a cluster, from ``connect`` or ``init``. ``with`` and ``async with`` close it at the end."""

    def __init__(self, open_session: Callable[[], _Open]) -> None:
        self._open_session = open_session
        self._open: _Open | None = None

    @property
    def session(self) -> Session:
        """The session; it lives from the beginning of the ``with`` to its end."""
        if self._open is None:
            raise SettingError(
                "connect() is used as `with dtorch.connect(...)` or `async with dtorch.connect(...)`"
            )
        return self._open.session

    @property
    def address(self) -> str:
        """The controller's address."""
        return self.session.address

    @property
    def devices(self) -> list[int]:
        """The ids of all devices, over all nodes."""
        return self.session.devices()

    @property
    def nodes(self) -> list[NodeRecord]:
        """The nodes that are alive, in the order of their devices."""
        return self.session.nodes()

    @property
    def graph(self) -> Graph:
        """This thread's graph in the session."""
        return self.session.default_graph()

    def __enter__(self) -> Cluster:
        if self._open is not None:
            raise SettingError("this connection is open already; call dtorch.connect() again for another one")
        self._open = self._open_session()
        _push(self._open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            _remove(opened)
            opened.close(raise_errors=error is None)

    async def __aenter__(self) -> Cluster:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    def __repr__(self) -> str:
        return f"<Cluster at {self._open.session.address}>" if self._open else "<Cluster, not connected>"


class _Open:
    """A session with what belongs to it: the heartbeat, and the processes if they are ours."""

    def __init__(self, session: Session, heartbeat: HeartbeatClient, local: LocalCluster | None) -> None:
        self.session = session
        self.heartbeat = heartbeat
        self.local = local

    def close(self, *, raise_errors: bool) -> None:
        """Wait for the ops that still run, close everything, then raise the first error that nobody saw."""
        errors: list[DTorchError] = []
        try:
            if raise_errors:
                self.session.sync_all()
        except ControllerLost:
            raise_errors = False  # every wait has said so, and there is nobody left to close
        finally:
            errors = self.session.unfetched_errors()
            self.heartbeat.close()
            self.session.close()
            if self.local is not None:
                self.local.stop()
        if raise_errors and errors:
            raise errors[0]

    def close_at_exit(self) -> None:
        """The same, promptly, and with errors printed."""
        has_failed = getattr(sys, "last_value", None) is not None
        limit_s = _FAILED_EXIT_SYNC_S if has_failed else self.session.settings.stop_timeout_s
        try:
            self.session.sync_all(limit_s)
        except ClusterTimeout:
            if not has_failed:
                print(
                    f"dtorch: ops still ran {limit_s:g} s after the program's end and were abandoned; "
                    f"dtorch.shutdown() waits for them",
                    file=sys.stderr,
                )
        except DTorchError:
            pass  # printed below, with the other errors that nobody has seen
        errors = self.session.unfetched_errors()
        self.heartbeat.close()
        self.session.close()
        if self.local is not None:
            self.local.stop(_EXIT_STOP_S)
        for error in errors:
            print(f"dtorch: an error that nobody fetched: {type(error).__name__}: {error}", file=sys.stderr)


_lock = threading.RLock()
#: Guarded by the lock: the sessions that are open, the current one last.
_stack: list[_Open] = []
#: Processes started ahead of the first op, so that they load while this process imports torch.
_ahead: LocalCluster | None = None
_forked_from: int | None = None


@teaches_keywords
def init(
    address: str | None = None,
    num_nodes: int = 1,
    devices_per_node: int | None = None,
    *,
    settings: Settings | None = None,
    keys: str | CurveKeys | None = None,
    session_key: bytes | None = None,
) -> Cluster:
    """Start an embedded cluster, or join one. The first op calls it when you do not.

    Args:
        address: of a controller, e.g. ``"tcp://head:5555"``. Without it ``DTORCH_ADDRESS`` counts, which
            ``dtorch-launch`` sets; without that too, processes of an embedded cluster are started here.
        num_nodes: of an embedded cluster.
        devices_per_node: of an embedded cluster. CPU devices are virtual: there may be more than cores.
        settings: those of the environment when None.
        keys: folder made by ``dtorch-launch keys``, or its keys; ``DTORCH_KEYS`` when None. Needed for
            addresses of other machines.
        session_key: what the controller printed, when there are no keys; ``DTORCH_SESSION_KEY`` when None.

    Raises:
        SettingError: DTorch runs already, or a number is not positive.
        ClusterTimeout: the cluster did not start, or does not answer, within ``start_timeout_s``.
        HandshakeError, SecurityError, TransportError: it cannot be joined.
        ForkError: this process was forked from one that used DTorch.
    """
    with _lock:
        _check_fork()
        if _stack and _stack[-1].session.is_open:
            raise SettingError(
                f"dtorch runs already, on {_stack[-1].session.address}; call dtorch.shutdown() before init()"
            )
        while _stack:
            _stack.pop().close(raise_errors=False)
        cluster = connect(
            address, num_nodes, devices_per_node, settings=settings, keys=keys, session_key=session_key
        )
        return cluster.__enter__()


@teaches_keywords
def connect(
    address: str | None = None,
    num_nodes: int = 1,
    devices_per_node: int | None = None,
    *,
    settings: Settings | None = None,
    keys: str | CurveKeys | None = None,
    session_key: bytes | None = None,
) -> Cluster:
    """A cluster for the length of a ``with`` or an ``async with``; arguments and errors as ``init``.

    Inside, tensors are made on it; connections may nest, the innermost counts.
    """
    settings = settings or Settings.from_environment()
    address = address or os.environ.get(ENV_ADDRESS)
    if address is not None and not isinstance(address, str):
        raise SettingError(
            f"address takes a string, got {address!r}; write e.g. 'tcp://head:5555', or devices_per_node={address!r} "
            f"for a cluster here"
        )

    def open_session() -> _Open:
        _check_fork()
        if address is None:
            return _open_local(num_nodes, devices_per_node, settings)
        _discard_ahead()
        curve = _find_keys(keys)
        return _open(address, _find_session_key(session_key, curve), curve, settings, None, shaped=True)

    return Cluster(open_session)


def shutdown() -> None:
    """Wait for what was issued, then close the session and stop the processes that ``init`` started.

    Does nothing when nothing runs. Afterwards ``init()`` may be called again; old tensors raise SessionClosed.

    Raises:
        RemoteOpError, NodeLost: an op failed and nobody has fetched what depends on it. All is closed before.
    """
    _check_fork()
    _discard_ahead()
    with _lock:
        opened = _stack.pop() if _stack else None
    if opened is not None:
        opened.close(raise_errors=True)


def current_session() -> Session:
    """The session that new tensors belong to; starts an embedded cluster when there is none."""
    if not _stack or _forked_from is not None:
        with _lock:
            _check_fork()
            if not _stack:
                init()
    return _stack[-1].session


def session_if_open() -> Session | None:
    """The session that new tensors belong to, if one is open."""
    return _stack[-1].session if _stack and _forked_from is None else None


def start_ahead() -> None:
    """Start the processes of an embedded cluster, because the first op is about to come."""
    global _ahead
    with _lock:
        if _ahead is None and not _stack and _forked_from is None and ENV_ADDRESS not in os.environ:
            _ahead = start_local_cluster()
            _run_first_at_exit()


def _discard_ahead() -> None:
    global _ahead
    with _lock:
        ahead, _ahead = _ahead, None
    if ahead is not None:
        ahead.stop()


def _open_local(num_nodes: int, devices_per_node: int | None, settings: Settings) -> _Open:
    global _ahead
    with _lock:
        local, _ahead = _ahead, None
    if local is not None and (
        num_nodes != 1 or devices_per_node is not None or settings != Settings.from_environment()
    ):
        local.stop()
        local = None
    if local is None:
        local = start_local_cluster(num_nodes, devices_per_node, settings)
    try:
        # While the processes load torch, this one does the same; and so that the first op need not, it loads what
        # torch's dispatcher imports in front of the first call of any __torch_dispatch__.
        importlib.import_module("dtorch.connection")
        importlib.import_module("torch.distributed.tensor")
        local.wait_ready()
        shaped = devices_per_node is not None or num_nodes > 1
        opened = _open(local.address, local.session_key, None, settings, local, shaped=shaped)
    except BaseException:
        local.stop()
        raise
    try:
        opened.session.wait_for_nodes(local.num_nodes)
    except BaseException:
        opened.close(raise_errors=False)
        raise
    return opened


def _open(
    address: str,
    session_key: bytes,
    keys: CurveKeys | None,
    settings: Settings,
    local: LocalCluster | None,
    *,
    shaped: bool,
) -> _Open:
    from dtorch import backend  # loads torch, which importing dtorch must not
    from dtorch.connection import Session
    from dtorch.handshake import join, watch

    backend.register()
    link, welcome = join(address, session_key, keys, settings)
    session = Session(link, welcome, settings, address, shaped=shaped)
    try:
        heartbeat = watch(
            welcome, session_key, keys, settings, lambda: session.lost(_why_lost(local, settings))
        )
    except BaseException:
        session.close()
        raise
    return _Open(session, heartbeat, local)


def _why_lost(local: LocalCluster | None, settings: Settings) -> str:
    ended = local.poll() if local is not None else []
    if ended:
        return "; ".join(map(str, ended))
    return f"it was silent for {settings.heartbeat_timeout_s:g} s"


def _find_keys(keys: str | CurveKeys | None) -> CurveKeys | None:
    if isinstance(keys, CurveKeys):
        return keys
    folder = keys or os.environ.get(ENV_KEYS)
    return load_keys(folder, "client") if folder else None


def _find_session_key(session_key: bytes | None, keys: CurveKeys | None) -> bytes:
    if session_key is not None:
        return session_key
    if keys is not None:
        return keys.session_key
    text = os.environ.get(ENV_SESSION_KEY, "")
    try:
        found = bytes.fromhex(text)
    except ValueError:
        raise SettingError(f"{ENV_SESSION_KEY} takes hexadecimal digits; got {len(text)} others") from None
    if not found:
        raise SettingError(
            f"joining a cluster needs its session key: set {ENV_SESSION_KEY} to what the controller printed, "
            f"or {ENV_KEYS} to the folder of its keys"
        )
    return found


def _push(opened: _Open) -> None:
    with _lock:
        _stack.append(opened)
        _run_first_at_exit()


def _remove(opened: _Open) -> None:
    with _lock:
        if opened in _stack:
            _stack.remove(opened)


# ---- forks and the end of the interpreter ----


def _fork_error() -> ForkError:
    return ForkError(
        f"this process was forked from process {_forked_from}, which uses dtorch; its threads and sockets do not "
        f"exist here. Start it with multiprocessing.get_context('spawn'), or fork before the first use of dtorch"
    )


def _check_fork() -> None:
    if _forked_from is not None:
        raise _fork_error()


def _after_fork() -> None:
    global _forked_from, _lock
    if _stack or _ahead is not None:
        _forked_from = os.getppid()
        _lock = threading.RLock()
        for opened in _stack:
            opened.session.abandon(_fork_error)


def _at_exit() -> None:
    if _forked_from is not None:
        return
    while _stack:
        _stack.pop().close_at_exit()
    _discard_ahead()


def _run_first_at_exit() -> None:
    """Handlers run in reverse order, and a local cluster has one of its own: say goodbye before it is stopped."""
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


os.register_at_fork(after_in_child=_after_fork)
