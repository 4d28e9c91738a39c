"""A cluster on this machine: child processes of this one, started together and stopped together.

``start_local_cluster`` returns as soon as the processes exist; ``wait_ready`` waits for them. Nothing is left behind,
not even by a child that was killed: processes, socket folder and shared memory go with ``stop``, which also runs at
exit; children whose parent was killed see the end of their lifeline and stop by themselves.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtorch_runtime.errors import ClusterTimeout, SettingError, TransportError
from dtorch_runtime.settings import Settings
from dtorch_runtime.transport.endpoint import make_ipc_folder
from dtorch_runtime.transport.security import new_session_key
from dtorch_runtime.transport.segments import unlink_segments_of
from dtorch_runtime.worker.memory import keeping_environment

#: Virtual devices of a single node when nothing else was asked for; workers start when they are first used.
DEFAULT_DEVICES = 64
_TAIL_BYTES = 4000
_KILL_DEADLINE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ChildStatus:
    """A process of the cluster that has ended. ``returncode`` is negative for a signal, as in ``subprocess``."""

    name: str
    pid: int
    returncode: int
    stderr_tail: str

    def __str__(self) -> str:
        how = (
            f"was ended by signal {-self.returncode}"
            if self.returncode < 0
            else f"exited with {self.returncode}"
        )
        tail = f"; the end of its log:\n{self.stderr_tail}" if self.stderr_tail else ""
        return f"process {self.pid} of {self.name} {how}{tail}"


class _Child:
    """One process. Its standard input is the lifeline, its standard error a file in the cluster's folder."""

    def __init__(self, name: str, config: dict[str, Any], folder: Path) -> None:
        self.name = name
        self._log_path = folder / f"{name}.log"
        # Kept open: the process may remove the folder before its last words are read.
        self._log = self._log_path.open("w+b")
        self._last_words = ""
        self._output = b""
        self.is_ready = False
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "dtorch_runtime.process"],  # -P: not from the user's folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
                env=keeping_environment(os.environ) if config["settings"]["keep_memory"] else None,
                start_new_session=True,  # Ctrl-C in the terminal is for the parent
            )
        except BaseException:
            self._log.close()
            raise
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self._lifeline = self.popen.stdin
        self._stdout = self.popen.stdout
        try:
            self._lifeline.write(json.dumps(config).encode() + b"\n")
        except BrokenPipeError:
            return  # it died at once; whoever waits for it says so

    def status(self) -> ChildStatus | None:
        """How it ended, or None while it runs."""
        returncode = self.popen.poll()
        if returncode is None:
            return None
        return ChildStatus(
            name=self.name, pid=self.popen.pid, returncode=returncode, stderr_tail=self._tail()
        )

    def wait_ready(self, deadline_s: float, timeout_s: float) -> None:
        while not self.is_ready:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not select.select([self._stdout], [], [], remaining_s)[0]:
                raise ClusterTimeout(f"{self.name} to start", timeout_s, f"Its log is {self._log_path}")
            data = os.read(self._stdout.fileno(), 4096)
            if not data:
                self.popen.wait(_KILL_DEADLINE_S)
                raise TransportError(f"the cluster did not start: {self.status()}")
            self._output += data
            self.is_ready = self._output.endswith(b"\n")

    def end_lifeline(self) -> None:
        self._lifeline.close()

    def wait(self, deadline_s: float) -> None:
        """Wait until it has ended; kill it at the deadline."""
        try:
            self.popen.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(_KILL_DEADLINE_S)
        self._stdout.close()
        self._last_words = self._tail()
        self._log.close()

    def _tail(self) -> str:
        if self._log.closed:
            return self._last_words
        # Not by seeking: the process writes at the position that both share.
        size = os.fstat(self._log.fileno()).st_size
        start = max(0, size - _TAIL_BYTES)
        return os.pread(self._log.fileno(), size - start, start).decode(errors="replace").strip()


class LocalCluster:
    """The processes of a cluster on this machine. Made by ``start_local_cluster``."""

    def __init__(
        self, folder: Path, configs: Sequence[tuple[str, dict[str, Any]]], settings: Settings
    ) -> None:
        self.address = f"ipc://{folder}/controller"
        #: Proves to the controller that a client belongs to this cluster.
        self.session_key = bytes.fromhex(configs[0][1]["session_key"])
        self.num_nodes = len(configs)
        self.devices_per_node: int = configs[0][1]["num_devices"]
        self._folder = folder
        self._settings = settings
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._is_stopped = False
        self._children: list[_Child] = []
        atexit.register(self.stop)
        try:
            self._children.extend(_Child(name, config, folder) for name, config in configs)
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each node's process, by the node's name."""
        return {child.name: child.popen.pid for child in self._children}

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the controller answers and every node has joined.

        Raises:
            ClusterTimeout: not within ``timeout_s`` (default ``Settings.start_timeout_s``).
            TransportError: a process ended instead; with the end of its log.
        """
        timeout_s = self._settings.start_timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        for child in self._children:
            child.wait_ready(deadline_s, timeout_s)

    def poll(self) -> list[ChildStatus]:
        """The processes that have ended."""
        return [status for child in self._children if (status := child.status()) is not None]

    def stop(self, timeout_s: float | None = None) -> None:
        """End all processes, in order or else by force, and remove what they used. May be called twice.

        In a forked child of the process that started the cluster it does nothing.
        """
        if os.getpid() != self._owner:
            return
        timeout_s = self._settings.stop_timeout_s if timeout_s is None else timeout_s
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            deadline_s = time.monotonic() + timeout_s
            for child in self._children:
                child.end_lifeline()
            for child in self._children:
                child.wait(deadline_s)
            shutil.rmtree(self._folder, ignore_errors=True)
            for pid in self.pids.values():
                unlink_segments_of(pid)
        atexit.unregister(self.stop)


def default_devices(num_nodes: int) -> int:
    """Virtual devices of each node when nothing was asked for: 64 on a single node, whose workers start when they are
    first used; on several nodes the number of cores, at least 2."""
    return DEFAULT_DEVICES if num_nodes == 1 else max(2, os.cpu_count() or 1)


def start_local_cluster(
    num_nodes: int = 1,
    devices_per_node: int | None = None,
    settings: Settings | None = None,
    device_type: str = "cpu",
    *,
    executor: str | None = None,
) -> LocalCluster:
    """Start the processes of a cluster on this machine, and return without waiting for them.

    The first process holds the controller and ``node0``; each further node has its own.

    Args:
        devices_per_node: by default ``default_devices(num_nodes)``.
        executor: ``module:name`` of another executor, for tests.

    Raises:
        SettingError: a number that is not positive.
        TransportError: the processes cannot be started.
    """
    settings = settings or Settings.from_environment()
    if devices_per_node is None:
        devices_per_node = default_devices(num_nodes)
    for name, value in (("num_nodes", num_nodes), ("devices_per_node", devices_per_node)):
        if not isinstance(value, int) or value < 1:
            raise SettingError(f"{name} takes a positive int, got {value!r}")
    folder = make_ipc_folder()
    common = {
        "endpoint": f"ipc://{folder}/controller",
        "session_key": new_session_key().hex(),
        "num_devices": devices_per_node,
        "device_type": device_type,
        "settings": dataclasses.asdict(settings),
    }
    if executor is not None:
        common["executor"] = executor
    configs = [
        (f"node{index}", {**common, "role": "agent" if index else "embedded", "node_name": f"node{index}"})
        for index in range(num_nodes)
    ]
    configs[0][1]["folder"] = str(folder)
    try:
        return LocalCluster(folder, configs, settings)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise TransportError(f"cannot start the processes of a local cluster: {error}") from error
