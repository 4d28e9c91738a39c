"""Carries out what a supervisor decides: starts processes, reads their logs, passes signals and ends on. No decisions.

Ends of processes arrive as events of the loop through pidfd_open(2), without threads.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol, TypeAlias

from dtorch_launcher.hosts import is_terminal_foreground
from dtorch_launcher.plan import log_prefix
from dtorch_launcher.supervise import (
    Action,
    ChildExited,
    ChildReady,
    DeadlinePassed,
    EndLifeline,
    Event,
    Finish,
    Launched,
    Report,
    Send,
    SignalArrived,
    Start,
)
from dtorch_runtime.errors import InternalError
from dtorch_runtime.transport.segments import unlink_segments_of

OWN_NAME = "dtorch-launch"

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READ_BYTES = 64 * 1024
_COLORS = (36, 35, 34, 33, 32)  # ANSI foregrounds: cyan, magenta, blue, yellow, green
_PR_SET_PDEATHSIG = 1
_START_FAILED = 127


class Machine(Protocol):
    """What decides: ``supervise.Supervisor`` or ``solo.SoloSupervisor``."""

    deadline_s: float | None

    def handle(self, event: Event, now: float) -> list[Action]: ...

    def validate(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Service:
    """A controller or an agent to start: its configuration is the first line of its standard input, which then stays
    open for as long as it is to live.

    ``ready_endpoint`` gives the address in the line of its standard output that says that it is ready, and None for
    any other line; they are not shown. Its standard error is its log.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    config_line: bytes
    ready_endpoint: Callable[[bytes], str | None]


@dataclass(frozen=True, kw_only=True)
class Foreground:
    """The user's program: it has the launcher's terminal, and ends with the launcher."""

    command: Sequence[str]
    environment: Mapping[str, str]


Spec: TypeAlias = Service | Foreground


class Logs:
    """Writes lines of several processes to one stream, each behind its name."""

    def __init__(self, names: Sequence[str], stream: IO[str]) -> None:
        width = max(map(len, names))
        is_colored = stream.isatty() and "NO_COLOR" not in os.environ
        self._prefixes = {
            name: log_prefix(name, width, _COLORS[i % len(_COLORS)] if is_colored else None)
            for i, name in enumerate(names)
        }
        self._stream = stream

    def write(self, name: str, line: bytes) -> None:
        """Write one line, without its end."""
        self._write(f"{self._prefixes[name]}{line.decode(errors='replace')}\n")

    def report(self, text: str) -> None:
        """Write a line of the launcher's own."""
        self._write(f"{OWN_NAME}: {text}\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            # `2>&1 | head`: whoever read it has gone, and the program goes on. What is buffered must go somewhere,
            # or the interpreter fails at exit; see "Note on SIGPIPE" in the documentation of Python's signal module.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class _LineReader:
    """Calls ``on_line`` for each line that arrives at a pipe, from the event loop."""

    def __init__(self, pipe: IO[bytes], on_line: Callable[[bytes], None]) -> None:
        self._pipe = pipe
        self._on_line = on_line
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._read)

    def _read(self) -> bool:
        """Take what is there; False when nothing is, now or ever."""
        try:
            data = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _READ_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._on_line(line)
        return True

    def close(self) -> None:
        """Take what is left. A process's own children may hold the pipe open: they are not waited for."""
        while self._read():
            continue
        if self._rest:
            self._on_line(self._rest)
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()


class _Child:
    """One running process with its pipes."""

    def __init__(self, name: str, spec: Spec, logs: Logs, on_event: Callable[[Event], None]) -> None:
        self._name = name
        self._on_event = on_event
        self._readers: list[_LineReader] = []
        self._process = self._start(spec, logs)
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    def _start(self, spec: Spec, logs: Logs) -> subprocess.Popen[bytes]:
        if isinstance(spec, Foreground):
            return subprocess.Popen(spec.command, env=spec.environment, preexec_fn=_end_with(os.getpid()))
        process = subprocess.Popen(
            spec.command,
            env=spec.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C at the terminal is for the program; the cluster ends after it
        )
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise InternalError("subprocess did not make the pipes that it was asked for")
        ready_endpoint = spec.ready_endpoint

        def on_output(line: bytes) -> None:
            endpoint = ready_endpoint(line)
            if endpoint is not None:
                self._on_event(ChildReady(name=self._name, endpoint=endpoint))

        self._readers = [
            _LineReader(process.stdout, on_output),
            _LineReader(process.stderr, lambda line: logs.write(self._name, line)),
        ]
        try:
            process.stdin.write(spec.config_line)
        except BrokenPipeError:
            process.stdin.close()  # it ended at once; its end is about to arrive as an event
        return process

    def end_lifeline(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def _exited(self) -> None:
        returncode = self._process.wait()
        self.close()
        self._on_event(ChildExited(name=self._name, returncode=returncode))

    def close(self) -> None:
        unlink_segments_of(self._process.pid)  # one that was killed could not
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.end_lifeline()
        for reader in self._readers:
            reader.close()

    def kill(self) -> None:
        """End it at once, when the launcher itself fails."""
        self._process.kill()
        self._process.wait()
        self.close()


def _end_with(parent: int) -> Callable[[], None]:
    """What a program does between fork and exec so that it is ended when the launcher dies, even by SIGKILL: it has no
    lifeline, because its standard input is the user's. See prctl(2), PR_SET_PDEATHSIG."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask_for_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), signal.SIGTERM)

    return ask_for_signal


class Launch:
    """Runs a supervisor over real processes.

    Args:
        spec_of: how to start the process of a name; called when the supervisor starts it.
        check: validate the supervisor after each event.
    """

    def __init__(
        self, machine: Machine, spec_of: Callable[[str], Spec], logs: Logs, *, check: bool = False
    ) -> None:
        self._machine = machine
        self._spec_of = spec_of
        self._logs = logs
        self._check = check
        self._children: dict[str, _Child] = {}
        self._timer: asyncio.TimerHandle | None = None

    def run(self) -> int:
        """Run to the end, and return the exit status. No process that was started is left."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[int] = loop.create_future()
        loop.set_exception_handler(self._callback_failed)
        # One that whoever started us has set to be ignored (nohup) stays ignored.
        numbers = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
        for number in numbers:
            loop.add_signal_handler(number, self._signal_arrived, number)
        try:
            self._feed(Launched())
            return await self._finished
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for child in self._children.values():
                child.kill()
            for number in numbers:
                loop.remove_signal_handler(number)

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # The loop would only log it, and the launch would never end.
        error = context.get("exception") or InternalError(str(context["message"]))
        if not self._finished.done():
            self._finished.set_exception(error)

    def _signal_arrived(self, number: int) -> None:
        # The terminal sends SIGINT to all of its foreground group: to pass it on would interrupt the program twice.
        reached_program = number == signal.SIGINT and is_terminal_foreground()
        self._feed(SignalArrived(number=number, reached_program=reached_program))

    def _feed(self, event: Event) -> None:
        if self._finished.done():
            return
        if isinstance(event, ChildExited):
            self._children.pop(event.name, None)
        for action in self._machine.handle(event, time.monotonic()):
            self._perform(action)
        if self._check:
            self._machine.validate()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._machine.deadline_s is not None:
            delay_s = max(0.0, self._machine.deadline_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._feed, DeadlinePassed())

    def _perform(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action.name)
            case EndLifeline():
                self._children[action.name].end_lifeline()
            case Send():
                self._children[action.name].send(action.number)
            case Report():
                self._logs.report(action.text)
            case Finish():
                self._finished.set_result(action.exit_status)

    def _start(self, name: str) -> None:
        try:
            self._children[name] = _Child(name, self._spec_of(name), self._logs, self._feed)
        except OSError as error:
            self._logs.report(f"cannot start {name}: {error}")
            event = ChildExited(name=name, returncode=_START_FAILED)
            asyncio.get_running_loop().call_soon(self._feed, event)


def own_python() -> str:
    """The interpreter that runs the launcher, and with it everything that it starts."""
    return sys.executable
