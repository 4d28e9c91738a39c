"""``dtorch-launch`` as a user runs it: real processes, a real cluster."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from dtorch_runtime.errors import ClusterTimeout
from dtorch_runtime.testing.wait import wait_until

LAUNCH = [sys.executable, "-m", "dtorch_launcher"]
DEADLINE_S = 30.0
_A_LOOK_S = 0.05


class Running:
    """A ``dtorch-launch`` that runs, and the lines that it writes."""

    def __init__(self, *argv: str, environment: dict[str, str] | None = None) -> None:
        names = ("DTORCH_ADDRESS", "DTORCH_SESSION_KEY", "DTORCH_KEYS")
        clean = {name: value for name, value in os.environ.items() if name not in names}
        self.popen = subprocess.Popen(
            [*LAUNCH, *argv],
            env=clean | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        self.out: list[str] = []
        self.err: list[str] = []
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines))
            for stream, lines in ((self.popen.stdout, self.out), (self.popen.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()
        self.family: list[psutil.Process] = []

    def _read(self, stream: IO[str], lines: list[str]) -> None:
        with stream:
            for line in stream:
                lines.append(line.rstrip("\n"))
                self._arrived.put(None)
        self._arrived.put(None)

    def wait_line(self, pattern: str) -> re.Match[str]:
        """The first line on either output that matches, as soon as it has come."""
        while True:
            is_last_look = not any(reader.is_alive() for reader in self._readers)
            for line in (*self.out, *self.err):
                if match := re.search(pattern, line):
                    return match
            assert not is_last_look, f"it ended without a line like {pattern!r}: {self.text}"
            try:
                self._arrived.get(timeout=_A_LOOK_S if self.popen.poll() is not None else DEADLINE_S)
            except queue.Empty:
                if self.popen.poll() is not None:
                    continue  # a reader is about to end
                raise ClusterTimeout(
                    f"a line like {pattern!r}", DEADLINE_S, f"There were: {self.text}"
                ) from None

    @property
    def text(self) -> str:
        return "\n".join((*self.out, *self.err))

    def send(self, number: int) -> None:
        self.popen.send_signal(number)

    def remember_family(self) -> list[psutil.Process]:
        """Every process that the launcher has started so far."""
        self.family = psutil.Process(self.popen.pid).children(recursive=True)
        return self.family

    def wait(self) -> int:
        status = self.popen.wait(DEADLINE_S)
        for reader in self._readers:
            reader.join(DEADLINE_S)
        return status

    def end(self) -> None:
        """End it, whatever the test has left of it."""
        if self.popen.poll() is None:
            self.remember_family()
            self.popen.kill()
        self.wait()
        wait_until(lambda: not living(self.family), "the processes of a launch to end", DEADLINE_S)


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Running] = []

    def begin(*argv: str, environment: dict[str, str] | None = None) -> Running:
        started.append(Running(*argv, environment=environment))
        return started[-1]

    yield begin
    for running in reversed(started):
        running.end()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


#: Asks the cluster that it was launched on for its nodes, as ``dtorch-launch status`` does.
ASK = """
import json, os, sys
from dtorch_launcher.control import request_status, require_credentials
status = request_status(os.environ["DTORCH_ADDRESS"], require_credentials(None, "client"), 30.0)
print(json.dumps([[node.name, node.devices] for node in status.nodes]), flush=True)
"""


#: Moves data between the nodes of the cluster that it finds, and computes with it.
COMPUTE = """
import dtorch
mesh = dtorch.DeviceMesh("cpu", [0, 1, 2, 3])
x = dtorch.ones((8, 3), device_mesh=mesh, placements=[dtorch.Shard(0)])
y = x.redistribute(placements=[dtorch.Replicate()])
print("sum", (y + y).sum().item(), flush=True)
"""


def test_a_script_runs_on_its_cluster_and_its_status_comes_back(
    start: Start, script: Callable[[str], str]
) -> None:
    program = script(ASK + COMPUTE + "print(sys.argv[1:], file=sys.stderr)\nsys.exit(7)")
    launch = start("--nodes", "2", "--devices-per-node", "2", program, "--nodes", "x y")
    assert launch.wait() == 7, launch.text
    nodes, total = launch.out
    assert json.loads(nodes) == [["node0", [0, 1]], ["node1", [2, 3]]]
    assert total == "sum 48.0"
    assert "['--nodes', 'x y']" in launch.err, "what the script writes is not touched"
    prefixes = {match[1] for line in launch.err if (match := re.match(r"\[(\w+)\] +\d{4}-", line))}
    assert prefixes == {"controller", "node0", "node1"}


def test_a_module_runs_and_no_secret_is_visible_in_a_command_line(start: Start, tmp_path: Path) -> None:
    code = "import os, signal\nprint('key', os.environ['DTORCH_SESSION_KEY'], flush=True)\nsignal.pause()\n"
    (tmp_path / "my_module.py").write_text(code)
    launch = start("--devices-per-node", "1", "-m", "my_module", environment={"PYTHONPATH": str(tmp_path)})
    key = launch.wait_line(r"^key (\w{64})$")[1]
    family = launch.remember_family()
    assert len(family) == 3, "a controller, an agent and the script"
    assert [p for p in family if key in " ".join(p.cmdline())] == []
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143, launch.text
    assert living(family) == []


def test_ctrl_c_reaches_the_script_and_ends_the_cluster_after_it(
    start: Start, script: Callable[[str], str]
) -> None:
    # A loop of short waits: a signal that comes just before signal.pause() would not end it.
    program = script(
        "import sys, time\n"
        "try:\n"
        "    print('waits', flush=True)\n"
        "    while True: time.sleep(0.02)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(4)\n"
    )
    launch = start("--devices-per-node", "1", program)
    launch.wait_line("^waits$")
    family = launch.remember_family()
    launch.send(signal.SIGINT)
    assert launch.wait() == 4, launch.text
    assert living(family) == []


def test_kill_9_of_the_launcher_leaves_nothing(start: Start, script: Callable[[str], str]) -> None:
    program = script("import signal\nprint('waits', flush=True)\nsignal.pause()\n")
    before = set(Path(tempfile.gettempdir()).glob("dtorch-*"))
    launch = start("--nodes", "2", "--devices-per-node", "1", program)
    launch.wait_line("^waits$")
    folders = set(Path(tempfile.gettempdir()).glob("dtorch-*")) - before
    assert len(folders) == 3, "one for the sockets of each process of the cluster"
    family = launch.remember_family()
    assert len(family) == 4
    launch.send(signal.SIGKILL)
    wait_until(lambda: not living(family), "what the launcher had started to end", DEADLINE_S)
    assert [folder for folder in folders if folder.exists()] == []


@pytest.fixture
def keys(start: Start, tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    assert start("keys", str(folder)).wait() == 0
    return folder


def test_a_cluster_of_separate_processes_with_keys(
    start: Start, keys: Path, script: Callable[[str], str]
) -> None:
    controller = start("controller", "--bind", "tcp://127.0.0.1:*", "--keys", str(keys))
    address = controller.wait_line(r"the controller listens at (tcp://\S+);")[1]
    agents = []
    for name, num_devices in (("left", 2), ("right", 3)):
        agents.append(
            start(
                "agent",
                "--connect",
                address,
                "--name",
                name,
                "--devices",
                str(num_devices),
                "--keys",
                str(keys),
            )
        )
        agents[-1].wait_line(f"{name} has joined {re.escape(address)} with {num_devices} cpu device")

    asked = start("status", "--connect", address, "--keys", str(keys))
    assert asked.wait() == 0, asked.text
    assert re.match(rf"{re.escape(address)}: 2 nodes, 5 devices, 0 sessions, 0 ops, up ", asked.out[0])
    assert [line.split()[::4] for line in asked.out[1:]] == [
        ["node", "devices"],
        ["left", "0-1"],
        ["right", "2-4"],
    ]

    environment = {"DTORCH_ADDRESS": address, "DTORCH_KEYS": str(keys)}
    program = subprocess.run(
        [sys.executable, script(COMPUTE)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (program.returncode, program.stdout) == (0, "sum 48.0\n"), program.stderr

    as_json = start("status", "--json", environment=environment)
    assert as_json.wait() == 0, as_json.text
    assert [node["devices"] for node in json.loads(as_json.out[0])["nodes"]] == [[0, 1], [2, 3, 4]]

    stopped = start("stop", "--connect", address, "--keys", str(keys))
    assert (stopped.wait(), controller.wait(), *(agent.wait() for agent in agents)) == (0, 0, 0, 0)


def test_without_keys_the_controller_tells_its_session_key(start: Start) -> None:
    controller = start("controller", "--bind", "tcp://127.0.0.1:*")
    line = controller.wait_line(r"listens at (tcp://\S+); .* export DTORCH_SESSION_KEY=(\w+)$")
    asked = start("status", "--connect", line[1], environment={"DTORCH_SESSION_KEY": line[2]})
    assert asked.wait() == 0, asked.text
    stranger = start("status", "--connect", line[1], environment={"DTORCH_SESSION_KEY": "00"})
    assert stranger.wait() == 2
    assert "refused" in stranger.text
    assert "session key" in stranger.text
    controller.send(signal.SIGTERM)
    assert controller.wait() == 0, controller.text


def test_a_port_in_use_is_an_error_that_names_it(start: Start) -> None:
    first = start("controller", "--bind", "tcp://127.0.0.1:*")
    address = first.wait_line(r"listens at (tcp://\S+);")[1]
    second = start("controller", "--bind", address)
    assert second.wait() == 2
    assert f"cannot bind {address}: Address already in use" in second.text


def test_an_agent_that_finds_no_controller_ends_with_a_deadline_that_has_a_name(
    start: Start, unused_endpoint: Callable[[str], str]
) -> None:
    address = unused_endpoint("tcp")
    environment = {"DTORCH_SESSION_KEY": "00ff", "DTORCH_START_TIMEOUT_S": "1"}
    agent = start("agent", "--connect", address, "--name", "lonely", environment=environment)
    assert agent.wait() == 2
    assert f"dtorch-launch: waited 1 s for lonely to join {address}" in agent.err


def test_a_script_that_is_not_there_starts_nothing(start: Start) -> None:
    launch = start("--nodes", "2", "no_such_script.py")
    assert launch.wait() == 2
    (line,) = launch.err
    assert line.startswith("dtorch-launch: there is no script 'no_such_script.py'.")
