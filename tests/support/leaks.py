"""What a test may leave behind: nothing. Snapshots of a process's threads, children, sockets and files, compared."""

from __future__ import annotations

import gc
import os
import re
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import zmq
from zmq.utils import garbage

from dtorch_runtime.errors import ClusterTimeout
from dtorch_runtime.testing.wait import wait_until

#: Set in the environment of the test run, inherited by everything that it starts, and by nothing else.
RUN_MARKER = "TEST_RUN_OF_DTORCH"

_SHARED_MEMORY = Path("/dev/shm")

#: Threads and processes that libraries start once and keep until the interpreter ends.
_LIBRARY_THREADS = ("TMonitor", "asyncio-waitpid", "GarbageCollectorThread")
_LIBRARY_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True)
class Resources:
    """What this process holds at one moment."""

    threads: frozenset[threading.Thread] = frozenset()
    processes: frozenset[psutil.Process] = frozenset()
    zmq_sockets: frozenset[zmq.Socket[Any]] = frozenset()
    #: ``socket:[inode]``, as /proc names an open socket.
    sockets: frozenset[str] = frozenset()
    #: Names under /dev/shm and in the run's own temporary folder that begin with ``dtorch-``.
    files: frozenset[Path] = frozenset()

    def minus(self, other: Resources) -> Resources:
        return Resources(
            self.threads - other.threads,
            self.processes - other.processes,
            self.zmq_sockets - other.zmq_sockets,
            self.sockets - other.sockets,
            self.files - other.files,
        )

    def plus(self, other: Resources) -> Resources:
        return Resources(
            self.threads | other.threads,
            self.processes | other.processes,
            self.zmq_sockets | other.zmq_sockets,
            self.sockets | other.sockets,
            self.files | other.files,
        )

    def describe(self) -> list[str]:
        """One line for each thing held, as a person would look for it."""
        lines = [f"thread {t.name!r} ({'daemon' if t.daemon else 'not daemon'})" for t in self.threads]
        lines += [f"process {p.pid}: {_command_line(p)}" for p in self.processes]
        lines += [f"ZeroMQ socket {_describe_zmq(s)}" for s in self.zmq_sockets if not s.closed]
        lines += [f"open file descriptor of {s}{_kernel_line(s)}" for s in self.sockets]
        lines += [f"file {path}" for path in self.files]
        return sorted(lines)


@dataclass
class LeakWatch:
    """Takes snapshots, and knows what a session-wide fixture was allowed to keep."""

    declared: Resources = field(default_factory=Resources)
    _zmq_sockets: weakref.WeakSet[zmq.Socket[Any]] = field(default_factory=weakref.WeakSet)
    #: Those of them that are connected or bound to something outside this process.
    _wired: weakref.WeakSet[zmq.Socket[Any]] = field(default_factory=weakref.WeakSet)

    def install(self) -> None:
        """Learn of every ZeroMQ socket that this process opens from now on."""
        original, connect, bind = zmq.Socket.__init__, zmq.Socket.connect, zmq.Socket.bind
        registry, wired = self._zmq_sockets, self._wired

        def remembering(socket: zmq.Socket[Any], *args: Any, **kwargs: Any) -> None:
            original(socket, *args, **kwargs)
            registry.add(socket)

        def wiring(call: Callable[..., Any]) -> Callable[..., Any]:
            def wire(socket: zmq.Socket[Any], address: str) -> Any:
                result = call(socket, address)
                if not address.startswith("inproc:"):
                    wired.add(socket)
                return result

            return wire

        zmq.Socket.__init__ = remembering  # type: ignore[assignment, method-assign]
        zmq.Socket.connect = wiring(connect)  # type: ignore[method-assign]
        zmq.Socket.bind = wiring(bind)  # type: ignore[method-assign]

    def snapshot(self) -> Resources:
        return Resources(
            threads=frozenset(t for t in threading.enumerate() if not _is_library_thread(t)),
            processes=frozenset(p for p in _children() if not _is_library_process(p)),
            zmq_sockets=frozenset(
                s for s in list(self._zmq_sockets) if not (s.closed or _is_library_socket(s))
            ),
            sockets=_open_sockets(),
            files=_files(),
        )

    def declare_baseline(self, before: Resources) -> None:
        """What was opened since ``before`` may stay until the session ends: a shared cluster, and its helpers.

        ZeroMQ connects on threads of its own, so a session may be open before all its connections are.
        """
        wait_until(lambda: self._is_connected(self.snapshot().minus(before)), "ZeroMQ to connect its sockets")
        self.declared = self.declared.plus(self.snapshot().minus(before))

    def _is_connected(self, opened: Resources) -> bool:
        return len(opened.sockets) >= len(opened.zmq_sockets & frozenset(self._wired))

    def leaks_since(self, before: Resources, grace_s: float = 3.0) -> list[str]:
        """What was opened since ``before`` and is still there; waits a moment for what is about to end."""
        allowed = before.plus(self.declared)
        left = self.snapshot().minus(allowed)
        if not left.describe():
            return []
        gc.collect()

        def nothing_left() -> bool:
            nonlocal left
            left = self._without_foreign_files(self.snapshot().minus(allowed))
            return not left.describe()

        try:
            wait_until(nothing_left, "the test's resources to be released", grace_s)
        except ClusterTimeout:
            return left.describe()
        return []

    def _without_foreign_files(self, left: Resources) -> Resources:
        """Segments are named after the process that made them: another run's, or a declared cluster's, are not ours."""
        declared = {process.pid for process in self.declared.processes}
        ours = frozenset(path for path in left.files if not _belongs_elsewhere(path, declared))
        return Resources(left.threads, left.processes, left.zmq_sockets, left.sockets, ours)


def end_stray_processes(run: str) -> list[str]:
    """End what a test run started and lost: processes that carry its marker. Returns a line for each."""
    strays = [p for p in psutil.process_iter() if p.pid != os.getpid() and _marker_of(p) == run]
    strays = [p for p in strays if not _is_library_process(p)]
    lines = [f"process {p.pid}: {_command_line(p)}" for p in strays]
    for process in strays:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(strays, timeout=5)
    return lines


def _children() -> list[psutil.Process]:
    """All descendants. Asked of each process for itself: psutil reads every process of the machine instead."""
    found = []
    for pid in _descendants(os.getpid()):
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return [p for p in found if _is_running(p)]


def _descendants(pid: int) -> Iterator[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return  # it has ended
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children = file.read().split()
        except OSError:
            continue  # the thread ended while we looked
        for child in map(int, children):
            yield child
            yield from _descendants(child)


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _open_sockets() -> frozenset[str]:
    targets = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            targets.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return frozenset(t for t in targets if t.startswith("socket:"))


def _kernel_line(socket: str) -> str:
    """What the kernel's tables say of ``socket:[inode]``: protocol, state, and path or address."""
    inode = socket.removeprefix("socket:[").removesuffix("]")
    for table in ("unix", "tcp", "tcp6", "udp", "udp6", "netlink"):
        with suppress(OSError):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                if inode in line.split():
                    return f" ({table}: {' '.join(line.split())})"
    return ""


def _files() -> frozenset[Path]:
    return frozenset(
        path
        for folder in (_SHARED_MEMORY, Path(tempfile.gettempdir()))
        if folder.is_dir()
        for path in folder.iterdir()
        if path.name.startswith("dtorch-")
    )


def _is_library_thread(thread: threading.Thread) -> bool:
    # A _DummyThread stands for a thread that Python did not start, such as those of torch's autograd engine.
    is_foreign = isinstance(thread, threading._DummyThread)
    return is_foreign or thread.name.startswith(_LIBRARY_THREADS) or type(thread).__name__ in _LIBRARY_THREADS


def _is_library_socket(socket: zmq.Socket[Any]) -> bool:
    # pyzmq keeps one thread and two sockets, once a frame was sent without copying it, to be told of its release.
    return socket.context is garbage.gc.context


def _is_library_process(process: psutil.Process) -> bool:
    return any(name in _command_line(process) for name in _LIBRARY_PROCESSES)


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or f"({process.name()}, {process.status()})"
    except psutil.Error as error:
        return f"({error})"


def _describe_zmq(socket: zmq.Socket[Any]) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    return f"{zmq.SocketType(int(socket.type)).name} at {endpoint!r}"


def _marker_of(process: psutil.Process) -> str | None:
    try:
        marker: str | None = process.environ().get(RUN_MARKER)
    except psutil.Error:
        return None
    return marker


def _belongs_elsewhere(path: Path, declared_pids: set[int]) -> bool:
    match = re.fullmatch(r"dtorch-(\d+)-.*", path.name)
    if path.parent != _SHARED_MEMORY or match is None:
        return False
    pid = int(match[1])
    if pid in declared_pids:
        return True
    try:
        return _marker_of(psutil.Process(pid)) != os.environ.get(RUN_MARKER) and pid != os.getpid()
    except psutil.NoSuchProcess:
        return False
