"""Runs entries in child processes, and keeps what became of every check, a crash of the child included."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.numerics.opinfo.check import Outcome
from tests.numerics.opinfo.entries import Run
from tests.numerics.opinfo.worker import WAIT_TIMEOUT_S
from tests.support.leaks import RUN_MARKER, end_stray_processes

#: Silence of a child after which it is ended, in seconds: longer than its own longest waits.
_SILENCE_S = 4 * WAIT_TIMEOUT_S
#: Longest time until a child has loaded the database and has a cluster, in seconds.
_START_S = 300.0
_END_S = 15.0


@dataclass(frozen=True)
class Check:
    """One check of an entry."""

    sample: int
    placements: str
    is_sharded: bool
    outcome: Outcome


@dataclass
class Result:
    """Every check of one entry, in order."""

    entry: str
    checks: list[Check] = field(default_factory=list)


def child_command(run: Run) -> list[str]:
    """What starts a child process."""
    options = json.dumps(dataclasses.asdict(run))
    return [sys.executable, "-m", "tests.numerics.opinfo", "--child", options]


def run_entries(
    command: Sequence[str],
    names: Sequence[str],
    num_jobs: int,
    done: Callable[[Result], object] = lambda result: None,
    silence_s: float = _SILENCE_S,
) -> dict[str, Result]:
    """Check entries, ``num_jobs`` at a time.

    Args:
        command: as ``child_command`` gives it.
        done: called after each entry, on the thread of its job.
        silence_s: a child that says nothing for so long is ended, and its entry has a hang.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    results = {name: Result(name) for name in names}
    marker = uuid.uuid4().hex
    jobs = [
        _Job(command, waiting, results, done, silence_s, marker) for _ in range(min(num_jobs, len(names)))
    ]
    try:
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
    finally:
        for job in jobs:
            job.stop()
        end_stray_processes(marker)
    errors = [job.error for job in jobs if job.error is not None]
    if errors:
        raise errors[0]
    return results


class _Job(threading.Thread):
    """One child at a time, started again after it ended in the middle of an entry."""

    def __init__(
        self,
        command: Sequence[str],
        waiting: queue.SimpleQueue[str],
        results: dict[str, Result],
        done: Callable[[Result], object],
        silence_s: float,
        marker: str,
    ) -> None:
        super().__init__(name="opinfo-job", daemon=True)
        self._command, self._waiting, self._results, self._done = command, waiting, results, done
        self._silence_s, self._marker = silence_s, marker
        self._child: _Child | None = None
        self._is_stopped = False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._is_stopped:
                try:
                    name = self._waiting.get_nowait()
                except queue.Empty:
                    return
                self._check(self._results[name])
                self._done(self._results[name])
        except BaseException as error:  # noqa: BLE001  raised again on the thread that waits for the job
            self.error = error
        finally:
            if self._child is not None:
                self._child.end()

    def stop(self) -> None:
        """End early."""
        self._is_stopped = True
        if self._child is not None:
            self._child.kill()
        self.join(_END_S)

    def _check(self, result: Result) -> None:
        if self._child is None:
            self._child = _Child(self._command, self._marker)
            self._child.read_line(_START_S)
        self._child.ask(result.entry)
        while True:
            line = self._child.read_line(self._silence_s)
            if not line:
                how = self._child.kill()
                self._child = None
                category = "hang" if line is None else "crash"
                result.checks.append(Check(-1, "", False, Outcome(category, how)))
                return
            record = json.loads(line)
            if len(record) == 1:
                return
            _, sample, placements, is_sharded, *fields = record
            result.checks.append(Check(sample, placements, is_sharded, Outcome(*fields)))


class _Child:
    """A process that runs ``worker.start``: it says when it is ready, then answers."""

    def __init__(self, command: Sequence[str], marker: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed when the process has ended
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            env={**os.environ, RUN_MARKER: marker},
        )
        self._unread = b""

    def ask(self, entry: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{entry}\n".encode())
        except BrokenPipeError:
            return  # it ended; reading says so

    def read_line(self, silence_s: float) -> str | None:
        """The next line; empty when the process ended, None when it was silent for so long."""
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], silence_s)[0]:
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                return ""
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def end(self) -> None:
        """Let it finish."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self.kill()

    def kill(self) -> str:
        """End it now; returns how it ended and its last words."""
        self._process.kill()
        self._process.wait(_END_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        if self._log.closed:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 300))
        words = " ".join(self._log.read().decode(errors="replace").split())
        self._log.close()
        return f"exit status {self._process.returncode}: {words}"
