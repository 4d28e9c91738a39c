"""Real processes on this machine: they come up, answer, notice deaths, and leave nothing behind.

The control plane alone, over null executors, except where a test says otherwise.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtorch_runtime.errors import ClusterTimeout, SettingError, TransportError
from dtorch_runtime.local import LocalCluster, start_local_cluster
from dtorch_runtime.settings import Settings
from dtorch_runtime.testing.wait import wait_until
from dtorch_runtime.transport.security import load_keys, write_keys
from dtorch_runtime.transport.zeromq import ZmqThreadLink
from dtorch_runtime.wire.codec import encode
from dtorch_runtime.wire.messages import (
    PROTOCOL_VERSION,
    ClientBye,
    ClusterClosing,
    Credit,
    FetchFailed,
    NodeDown,
    NodeJoined,
    Ops,
    Refused,
    Status,
    StatusRequest,
    StopCluster,
)
from tests.support.control import op
from tests.support.wire_client import WireClient

NULL = "dtorch_runtime.testing.null_executor:NullExecutor"
#: Deaths are noticed quickly, and not on a busy machine by mistake.
SETTINGS = Settings(heartbeat_interval_s=0.2, heartbeat_timeout_s=1.5, start_timeout_s=20)

Start = Callable[..., LocalCluster]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(num_nodes, devices_per_node)`` gives a running cluster that the end of the test stops."""
    clusters: list[LocalCluster] = []

    def make(num_nodes: int = 1, devices_per_node: int | None = 2, executor: str = NULL) -> LocalCluster:
        clusters.append(start_local_cluster(num_nodes, devices_per_node, SETTINGS, executor=executor))
        clusters[-1].wait_ready()
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.stop()


def connect(cluster: LocalCluster, **options: Any) -> WireClient:
    return WireClient(cluster.address, cluster.session_key, **options)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


class TestStart:
    def test_one_process_answers_and_stops_and_leaves_nothing(self, start: Start) -> None:
        cluster = start(1, None)
        folder = Path(cluster.address.removeprefix("ipc://")).parent
        with connect(cluster) as client:
            assert client.devices == {"node0": list(range(64))}
            client.define([0, 63])
            client.run(op(1, 5))
            assert client.fetch(5, 63) == array("q", [5]).tobytes()
            assert client.wait_for(Credit)[0].seq == 1
            client.send(ClientBye())
        (pid,) = cluster.pids.values()
        assert cluster.poll() == []
        cluster.stop()
        assert is_gone(pid)
        assert not folder.exists()
        assert [status.returncode for status in cluster.poll()] == [0]

    def test_every_node_has_joined_when_it_is_ready(self, start: Start) -> None:
        cluster = start(3, 2)
        with connect(cluster) as client:
            assert client.devices["node0"] == [0, 1]
            assert sorted(client.devices) == ["node0", "node1", "node2"]
            assert sorted(device for ids in client.devices.values() for device in ids) == [0, 1, 2, 3, 4, 5]
            client.define([0, 2, 4])
            client.run(op(1, 5))
            assert [client.fetch(5, device) for device in (0, 2, 4)] == [array("q", [5]).tobytes()] * 3
        assert len(cluster.pids) == 3

    def test_real_executor_runs_ops(self, start: Start) -> None:
        """The one test here that loads torch in the children."""
        from dtorch_runtime.wire.messages import DefineMesh, DefineTemplates, ValueData
        from dtorch_runtime.wire.records import DeviceArg, DTypeArg, ListArg, TemplateRecord
        from tests.support.control import mesh

        cluster = start(1, 2, "dtorch_runtime.worker.executor:WorkerExecutor")
        with connect(cluster) as client:
            client.send(DefineMesh(mesh=mesh(1, [0, 1])))
            kwargs: dict[str, Any] = {"dtype": DTypeArg("float32"), "device": DeviceArg()}
            full = TemplateRecord(1, "aten::full", [ListArg([3]), 1.5], kwargs, 0, 1, 0, [1])
            client.send(DefineTemplates(templates=[full]))
            client.run(op(1, 5))
            client.ask(5, 1)
            message, frames = client.wait_for(ValueData, timeout_s=30)
            assert (message.dtype, message.shape) == ("float32", [3])
            assert array("f", bytes(frames[0])).tolist() == [1.5, 1.5, 1.5]

    @pytest.mark.parametrize(("num_nodes", "devices"), [(0, 1), (1, 0), (-1, 1), (1, -2)])
    def test_impossible_numbers(self, num_nodes: int, devices: int) -> None:
        with pytest.raises(SettingError, match="positive int"):
            start_local_cluster(num_nodes, devices, SETTINGS, executor=NULL)

    def test_process_that_dies_at_start_is_shown_with_its_log(self) -> None:
        cluster = start_local_cluster(1, 1, SETTINGS, device_type="abacus", executor=NULL)
        try:
            with pytest.raises(TransportError, match="device_type is one of cpu, cuda, got 'abacus'"):
                cluster.wait_ready()
        finally:
            cluster.stop()

    def test_executor_that_cannot_be_imported_ends_the_cluster_with_the_reason(self) -> None:
        cluster = start_local_cluster(1, 1, SETTINGS, executor="no_such_module:Executor")
        try:
            wait_until(cluster.poll, "the process to end")
            (status,) = cluster.poll()
            assert status.returncode == 1
            assert "No module named 'no_such_module'" in str(status)
        finally:
            cluster.stop()

    def test_process_that_does_not_come_up_in_time_is_named(self) -> None:
        cluster = start_local_cluster(1, 1, SETTINGS, executor=NULL)
        try:
            with pytest.raises(ClusterTimeout, match="node0 to start"):
                cluster.wait_ready(timeout_s=1e-6)
        finally:
            cluster.stop()


class TestDeaths:
    def test_killed_agent_is_announced_and_its_values_are_lost(self, start: Start) -> None:
        cluster = start(2, 1)
        with connect(cluster) as client:
            (device,) = client.devices["node1"]
            client.define([0, device])
            client.run(op(1, 5))
            client.fetch(5, device)
            os.kill(cluster.pids["node1"], signal.SIGKILL)
            down, _ = client.wait_for(NodeDown, timeout_s=5)
            assert (down.name, down.devices) == ("node1", [device])
            seq = client.run(op(1, 6))
            client.wait_for(Credit, lambda credit: credit.seq == seq)
            client.ask(6, device)
            failed, _ = client.wait_for(FetchFailed)
            assert (failed.failure.kind, failed.failure.node) == ("node", "node1")
            assert client.fetch(6, 0) == array("q", [6]).tobytes()
            assert [status.returncode for status in cluster.poll()] == [-signal.SIGKILL]

    def test_stopped_agent_counts_as_lost(self, start: Start) -> None:
        cluster = start(2, 1)
        with connect(cluster) as client:
            os.kill(cluster.pids["node1"], signal.SIGSTOP)
            assert client.wait_for(NodeDown, timeout_s=5)[0].name == "node1"
        os.kill(cluster.pids["node1"], signal.SIGCONT)

    def test_agent_that_is_told_to_end_says_goodbye(self, start: Start) -> None:
        cluster = start(2, 1)
        with connect(cluster) as client:
            os.kill(cluster.pids["node1"], signal.SIGTERM)
            assert "SIGTERM" in client.wait_for(NodeDown)[0].reason
        wait_until(cluster.poll, "the agent to end")
        assert [status.returncode for status in cluster.poll()] == [0]

    def test_ctrl_c_is_the_parents_business(self, start: Start) -> None:
        cluster = start(1, 1)
        with connect(cluster) as client:
            os.kill(cluster.pids["node0"], signal.SIGINT)
            client.define([0])
            client.run(op(1, 5))
            assert client.fetch(5, 0) == array("q", [5]).tobytes()
        assert os.getpgid(cluster.pids["node0"]) != os.getpgid(0)

    def test_silent_client_is_forgotten(self, start: Start) -> None:
        cluster = start(1, 1)
        with connect(cluster) as other:
            silent = connect(cluster, has_heartbeats=False)
            silent._link.close()

            def sessions() -> list[int]:
                other.send(StatusRequest(version=PROTOCOL_VERSION, session_key=cluster.session_key))
                return other.wait_for(Status)[0].sessions

            wait_until(lambda: sessions() == [other.session], "the silent session to end", 5)

    def test_killed_controller_leaves_agents_waiting_and_stop_cleans_up(self, start: Start) -> None:
        cluster = start(2, 1)
        folder = Path(cluster.address.removeprefix("ipc://")).parent
        os.kill(cluster.pids["node0"], signal.SIGKILL)
        log = folder / "node1.log"
        wait_until(
            lambda: "waiting for the controller to let it in again" in log.read_text(), "the agent to notice"
        )
        assert [status.name for status in cluster.poll()] == ["node0"]
        cluster.stop()
        assert not folder.exists()
        assert all(is_gone(pid) for pid in cluster.pids.values())

    def test_children_end_when_their_parent_is_killed(self, tmp_path: Path) -> None:
        script = (
            "import os, signal\n"
            "from dtorch_runtime.local import start_local_cluster\n"
            f"cluster = start_local_cluster(2, 1, executor={NULL!r})\n"
            "cluster.wait_ready()\n"
            "print(cluster.address, *cluster.pids.values(), flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=30,
            cwd=tmp_path,
            check=False,
        )
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        address, *pids = ended.stdout.split()
        wait_until(lambda: all(is_gone(int(pid)) for pid in pids), "the children to end", 5)
        assert not Path(address.removeprefix("ipc://")).parent.exists()

    def test_interpreter_that_forgets_to_stop_stops_at_exit(self) -> None:
        script = (
            "from dtorch_runtime.local import start_local_cluster\n"
            f"cluster = start_local_cluster(1, 1, executor={NULL!r})\n"
            "cluster.wait_ready()\n"
            "print(cluster.address, *cluster.pids.values())\n"
        )
        ended = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        address, pid = ended.stdout.split()
        assert ended.stderr == ""
        assert is_gone(int(pid))
        assert not Path(address.removeprefix("ipc://")).parent.exists()


class TestStop:
    @pytest.mark.parametrize("how", ["signal", "request"])
    def test_everybody_is_told_and_ends(self, start: Start, how: str) -> None:
        cluster = start(2, 1)
        with connect(cluster) as client:
            if how == "signal":
                os.kill(cluster.pids["node0"], signal.SIGTERM)
            else:
                client.send(StopCluster(version=PROTOCOL_VERSION, session_key=cluster.session_key))
            assert client.wait_for(ClusterClosing)
            wait_until(lambda: len(cluster.poll()) == 2, "both processes to end", 5)
        assert [status.returncode for status in cluster.poll()] == [0, 0]

    def test_twice_is_once(self, start: Start) -> None:
        cluster = start(1, 1)
        cluster.stop()
        cluster.stop()


class TestStrangers:
    def test_ten_thousand_malformed_messages_disturb_nobody(self, start: Start, rng: random.Random) -> None:
        cluster = start(1, 1)
        with connect(cluster) as client:
            client.define([0])
            attacker = ZmqThreadLink.connect(cluster.address, timeout_s=5)
            hello = encode(StatusRequest(version=PROTOCOL_VERSION, session_key=b"guess"))
            ops = encode(Ops(seq=1, graph_id=1))
            for number in range(10_000):
                kind = rng.randrange(4)
                if kind == 0:
                    frames = [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(1, 4))]
                elif kind == 1:
                    frames = [hello[: rng.randrange(len(hello))]]
                elif kind == 2:
                    frames = [bytes(byte ^ (rng.random() < 0.05) for byte in hello)]
                else:
                    frames = [ops, rng.randbytes(16)]
                attacker.send(frames)
                if number % 1000 == 0:
                    client.run(op(1, 1 + number))
                    assert client.fetch(1 + number, 0) == array("q", [1 + number]).tobytes()
            attacker.close()
            client.run(op(1, 20_000))
            assert client.fetch(20_000, 0) == array("q", [20_000]).tobytes()
        assert cluster.poll() == []

    def test_wrong_key_is_refused(self, start: Start) -> None:
        cluster = start(1, 1)
        link = ZmqThreadLink.connect(cluster.address, timeout_s=5)
        link.send([encode(StopCluster(version=PROTOCOL_VERSION, session_key=b"x" * 32))])
        (first,) = link.receive(5)
        link.close()
        assert b"session key" in bytes(first[0])
        assert cluster.poll() == []

    def test_session_that_breaks_the_protocol_ends_alone(self, start: Start) -> None:
        cluster = start(1, 1)
        with connect(cluster) as good, connect(cluster) as bad:
            good.define([0])
            bad.run(op(77, 5))
            assert "template 77" in bad.wait_for(Refused)[0].reason
            good.run(op(1, 5))
            assert good.fetch(5, 0) == array("q", [5]).tobytes()


class TestSeparateProcesses:
    """As ``dtorch-launch controller`` and ``agent`` start them, over tcp with keys."""

    @pytest.fixture
    def spawn(self, tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], str]]]:
        write_keys(tmp_path / "keys")
        running: list[subprocess.Popen[bytes]] = []

        def make(**config: Any) -> tuple[subprocess.Popen[bytes], str]:
            with (tmp_path / f"{len(running)}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "dtorch_runtime.process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                )
            running.append(process)
            assert process.stdin is not None
            assert process.stdout is not None
            common = {
                "key_folder": str(tmp_path / "keys"),
                "executor": NULL,
                "settings": {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 1.5},
            }
            process.stdin.write(json.dumps(common | config).encode() + b"\n")
            ready = json.loads(process.stdout.readline())
            assert ready["ready"]
            assert ready["pid"] == process.pid
            return process, ready["endpoint"]

        yield make
        for process in running:
            process.stdin.close()  # type: ignore[union-attr]
        for process in running:
            process.wait(10)
            process.stdout.close()  # type: ignore[union-attr]

    def test_agent_waits_for_a_controller_that_was_killed_and_joins_the_next(
        self, spawn: Callable[..., tuple[subprocess.Popen[bytes], str]], tmp_path: Path
    ) -> None:
        keys = load_keys(tmp_path / "keys", "client")
        controller, endpoint = spawn(role="controller", endpoint="tcp://127.0.0.1:*")
        spawn(role="agent", endpoint=endpoint, node_name="far", num_devices=3, device_type="cpu")
        with WireClient(endpoint, keys.session_key, keys=keys) as client:
            assert client.devices == {"far": [0, 1, 2]}
        controller.kill()
        controller.wait()
        spawn(role="controller", endpoint=endpoint)
        with WireClient(endpoint, keys.session_key, keys=keys) as client:
            if "far" not in client.devices:
                assert client.wait_for(NodeJoined, timeout_s=20)[0].node.name == "far"
            client.define([0, 2])
            client.run(op(1, 5))
            assert client.fetch(5, 2) == array("q", [5]).tobytes()

    def test_second_agent_of_the_same_name_is_refused(
        self, spawn: Callable[..., tuple[subprocess.Popen[bytes], str]], tmp_path: Path
    ) -> None:
        _, endpoint = spawn(role="controller", endpoint="tcp://127.0.0.1:*")
        spawn(role="agent", endpoint=endpoint, node_name="same")
        with pytest.raises(json.JSONDecodeError):  # it ends without saying that it is ready
            spawn(role="agent", endpoint=endpoint, node_name="same")
        assert "a node named 'same' is already there" in (tmp_path / "2.log").read_text()
