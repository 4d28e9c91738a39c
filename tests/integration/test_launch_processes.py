"""The shell that starts, watches and ends processes, over small processes that stand for a cluster's."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil
import pytest

from dtorch_launcher.plan import CONTROLLER
from dtorch_launcher.processes import Foreground, Launch, Logs, Service, Spec
from dtorch_launcher.solo import SoloSupervisor
from dtorch_launcher.supervise import PROGRAM, Supervisor
from dtorch_runtime.testing.wait import wait_until

NODES = ("node0", "node1")

#: Repeats its configuration on its log, is ready, and ends with its lifeline.
OBEDIENT = """
import sys
sys.stderr.write("config " + sys.stdin.readline())
sys.stderr.flush()
print("chatter", flush=True)
print("ready", flush=True)
sys.stdin.read()
sys.stderr.write("last words")
"""

#: Is ready and ends at nothing but SIGKILL.
STUBBORN = """
import signal, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
threading.Event().wait()
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def service(code: str, config: bytes = b"{}\n") -> Service:
    return Service(
        command=python(code),
        environment=os.environ,
        config_line=config,
        ready_endpoint=lambda line: "here" if line == b"ready" else None,
    )


def launch(
    program: Sequence[str], services: dict[str, Service] | None = None, *, stop_timeout_s: float = 30.0
) -> tuple[int, list[str]]:
    """Run a launch of two agents to its end: its exit status and the lines that it wrote."""
    named = {name: service(OBEDIENT, f"for {name}\n".encode()) for name in (CONTROLLER, *NODES)}
    specs: dict[str, Spec] = {**named, **(services or {})}
    specs[PROGRAM] = Foreground(command=program, environment=os.environ)
    stream = io.StringIO()
    supervisor = Supervisor(agents=NODES, start_timeout_s=30.0, stop_timeout_s=stop_timeout_s)
    logs = Logs([CONTROLLER, *NODES], stream)
    status = Launch(supervisor, specs.__getitem__, logs, check=True).run()
    return status, stream.getvalue().splitlines()


@pytest.mark.parametrize(("code", "status"), [("0", 0), ("3", 3)])
def test_the_program_s_status_comes_back_and_the_cluster_ends_in_order(code: str, status: int) -> None:
    returned, lines = launch(python(f"raise SystemExit({code})"))
    assert returned == status
    assert lines[:3] == [
        "[controller] config for controller",
        "[node0]      config for node0",
        "[node1]      config for node1",
    ]
    assert sorted(lines[3:5]) == ["[node0]      last words", "[node1]      last words"]
    assert lines[5:] == ["[controller] last words"]


def test_a_program_that_a_signal_ended_is_told_from_one_that_failed() -> None:
    status, _ = launch(python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert status == 137


def test_the_program_has_the_launcher_s_own_output(capfd: pytest.CaptureFixture[str]) -> None:
    launch(python("import sys; print('to stdout'); print('to stderr', file=sys.stderr)"))
    assert capfd.readouterr() == ("to stdout\n", "to stderr\n")


def test_a_program_that_cannot_be_started_ends_the_launch() -> None:
    status, lines = launch(["/nonexistent/python"])
    assert status == 127
    assert any("cannot start program" in line and "/nonexistent/python" in line for line in lines)


def test_a_service_that_fails_shows_its_log_and_nothing_is_run(tmp_path: Path) -> None:
    witness = tmp_path / "was-run"
    failing = service("import sys; sys.exit('address in use')")
    status, lines = launch(["touch", str(witness)], {"node1": failing})
    assert status == 2
    assert "[node1]      address in use" in lines
    assert any("node1 ended with status 1 before the cluster was up" in line for line in lines)
    assert not witness.exists()


def test_a_service_that_does_not_end_is_killed() -> None:
    status, lines = launch(python("pass"), {"node0": service(STUBBORN)}, stop_timeout_s=0.2)
    assert status == 0
    assert "dtorch-launch: node0 did not end within 0.2 s: killed" in lines


def test_a_long_line_and_bytes_that_are_no_text_do_not_stop_a_log() -> None:
    noisy = service(
        "import os, sys\n"
        "sys.stderr.buffer.write(b'x' * 200_000 + b'\\nno text: \\xff\\n')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()"
    )
    _, lines = launch(python("pass"), {"node0": noisy})
    of_node = [line.removeprefix("[node0]      ") for line in lines if line.startswith("[node0]")]
    assert "".join(of_node[:-1]) == "x" * 200_000
    assert of_node[-1] == "no text: \ufffd"


def test_signals_reach_the_program_and_leave_the_cluster_to_it(tmp_path: Path) -> None:
    # The program sends the launcher a SIGTERM, and takes it back as its own.
    program = python(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "while True: time.sleep(0.02)  # signal.pause() would sleep through a signal that came just before it"
    )
    status, lines = launch(program)
    assert status == 9
    assert any("the program gets SIGTERM" in line for line in lines)


class Trigger(io.StringIO):
    """Sends this process a SIGTERM when ``word`` is written."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self._word = word

    def write(self, text: str) -> int:
        if self._word in text:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


def test_one_service_runs_until_it_is_told_to_end() -> None:
    stream = Trigger("is up")
    solo = SoloSupervisor(
        name="node7",
        start_timeout_s=30.0,
        stop_timeout_s=30.0,
        ready_means="",
        announcement="node7 is up {endpoint}",
    )
    assert Launch(solo, lambda _: service(OBEDIENT), Logs(["node7"], stream), check=True).run() == 0
    assert stream.getvalue().splitlines() == [
        "[node7] config {}",
        "dtorch-launch: node7 is up here",
        "[node7] last words",
    ]


def test_a_log_that_nobody_reads_any_more_does_not_stop_the_program() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w", buffering=1) as stream:  # its end flushes, and would raise
        logs = Logs(["node7"], stream)
        logs.report("the first finds out")
        logs.write("node7", b"the second is dropped")


LAUNCHER = """
import sys
sys.path.insert(0, {root!r})
from tests.integration.test_launch_processes import launch, python
sys.exit(launch(python({program!r}))[0])
"""


def launcher(program: str) -> list[str]:
    """A command line that launches ``program`` in a process of its own."""
    root = str(Path(__file__).parents[2])
    return [sys.executable, "-c", LAUNCHER.format(root=root, program=program)]


def test_kill_9_of_the_launcher_leaves_nothing() -> None:
    command = launcher("import signal; print('runs', flush=True); signal.pause()")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 4, "a controller, two agents and the program"
        process.send_signal(signal.SIGKILL)
        wait_until(
            lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family),
            "the launcher's children to end",
            state=lambda: family,
        )


#: Counts Ctrl-C, and says how often it came when it is asked to end. It holds the launcher still until it has had its
#: own: two signals that arrive together would be one.
COUNTS_INTERRUPTS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
os.kill(os.getppid(), signal.SIGSTOP)
print("waits", flush=True)
signal.sigwait([signal.SIGINT])
print("interrupted", flush=True)
os.kill(os.getppid(), signal.SIGCONT)
signal.sigwait([signal.SIGTERM])
print("interrupts", 1 + (signal.SIGINT in signal.sigpending()), flush=True)
"""


def test_ctrl_c_at_a_terminal_interrupts_the_program_once() -> None:
    """The terminal sends it to launcher and program alike. The SIGTERM that follows is passed on after it, so that an
    interrupt that was passed on as well would have been counted."""
    terminal, end = os.openpty()
    process = subprocess.Popen(
        launcher(COUNTS_INTERRUPTS),
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,  # the terminal becomes its own, as that of a shell
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(end)
    with os.fdopen(terminal, "r+b", buffering=0) as keyboard:
        try:
            read_until(keyboard, b"waits")
            keyboard.write(b"\x03")
            read_until(keyboard, b"interrupted")
            process.send_signal(signal.SIGTERM)
            read_until(keyboard, b"interrupts ")
            assert keyboard.read(1) == b"1"
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()


def read_until(terminal: IO[bytes], word: bytes) -> bytes:
    seen = b""
    while word not in seen:
        seen += terminal.read(1)
    return seen
