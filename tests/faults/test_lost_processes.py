"""Processes that are killed: who hears of it within five seconds, and what is left behind (nothing)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import dtorch
from dtorch_runtime.testing.wait import wait_until

DEADLINE_S = 5.0
LONG_CHAIN = """
import sys, torch, dtorch
cluster = dtorch.init(num_nodes=2, devices_per_node=1)
x = dtorch.rand((1200, 1200), device_mesh=dtorch.DeviceMesh("cpu", [1]))
x.to_torch()
for _ in range(2000):
    x = x @ x
future = x.value()
print(*[node.pid for node in cluster.nodes], flush=True)
future.get()
"""


def long_chain(device: int) -> dtorch.Tensor:
    """A value that takes minutes to come."""
    x = dtorch.rand((1200, 1200), device_mesh=dtorch.DeviceMesh("cpu", [device]))
    for _ in range(2000):
        x = x @ x
    return x


def test_a_killed_agent_fails_pending_values_and_names_itself() -> None:
    cluster = dtorch.init(num_nodes=2, devices_per_node=1)
    try:
        victim = next(node for node in cluster.nodes if 1 in node.devices)
        other = dtorch.ones((3,), device_mesh=dtorch.DeviceMesh("cpu", [0]))
        pending = long_chain(1)
        future = pending.value()
        other.to_torch()
        start = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(dtorch.NodeLost) as caught:
            future.get(timeout_s=30)
        assert time.monotonic() - start < DEADLINE_S
        assert caught.value.node == victim.name
        assert other.sum().item() == 3, "the other node's values stay"
        with pytest.raises(dtorch.NodeLost):
            (pending + 1).to_torch(timeout_s=30)
    finally:
        with contextlib.suppress(dtorch.NodeLost):
            dtorch.shutdown()


def test_a_peer_that_waits_for_a_killed_agent_is_freed() -> None:
    cluster = dtorch.init(num_nodes=2, devices_per_node=1)
    try:
        mesh = dtorch.DeviceMesh("cpu", [0, 1])
        victim = next(node for node in cluster.nodes if 1 in node.devices)
        whole = [dtorch.Replicate()]
        for _ in range(3):  # after these the agents have mailboxes at one another, and wait for those
            parts = dtorch.ones((2,), device_mesh=mesh).redistribute(placements=[dtorch.Partial()])
            parts.redistribute(placements=whole).to_torch()
        late = long_chain(1)
        moved = late.redistribute(device_mesh=mesh, placements=whole)
        after = dtorch.ones((2,), device_mesh=dtorch.DeviceMesh("cpu", [0])) + 1
        future = moved.value()
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(dtorch.NodeLost):
            future.get(timeout_s=DEADLINE_S * 3)
        assert after.to_torch(timeout_s=DEADLINE_S * 3).tolist() == [2.0, 2.0]
    finally:
        with contextlib.suppress(dtorch.NodeLost):
            dtorch.shutdown()


def test_a_killed_controller_fails_everything_pending_and_later() -> None:
    cluster = dtorch.init()
    controller = cluster.nodes[0].pid
    future = long_chain(0).value()
    x = dtorch.ones((2,))
    os.kill(controller, signal.SIGKILL)
    with pytest.raises(dtorch.ControllerLost):
        future.get(timeout_s=30)
    with pytest.raises(dtorch.ControllerLost):
        (x + 1).to_torch(timeout_s=30)
    dtorch.shutdown()
    assert dtorch.ones((2,)).sum().item() == 2, "a new cluster can be started"
    dtorch.shutdown()


@contextlib.contextmanager
def running_chain(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A script that waits for a value; it and the processes of its cluster. Whatever happens, they end."""
    script = tmp_path / "chain.py"
    script.write_text(LONG_CHAIN)
    client = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert client.stdout is not None
    pids = client.stdout.readline().split()
    try:
        if len(pids) != 2:
            raise AssertionError(client.communicate(timeout=20)[1])
        yield client, [psutil.Process(int(pid)) for pid in pids]
    finally:
        client.kill()
        client.communicate()


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_a_killed_client_takes_its_cluster_with_it(tmp_path: Path) -> None:
    with running_chain(tmp_path) as (client, nodes):
        client.kill()
        client.communicate(timeout=20)
        wait_until(lambda: all_gone(nodes), "the nodes of a killed client to end", DEADLINE_S)


def test_ctrl_c_ends_a_waiting_script_and_leaves_no_process(tmp_path: Path) -> None:
    with running_chain(tmp_path) as (client, nodes):
        start = time.monotonic()
        client.send_signal(signal.SIGINT)
        _, errors = client.communicate(timeout=20)
        assert time.monotonic() - start < DEADLINE_S
        assert client.returncode in (130, -signal.SIGINT, 1)
        assert "KeyboardInterrupt" in errors
        wait_until(lambda: all_gone(nodes), "the nodes of an interrupted script to end", DEADLINE_S)


def test_a_forked_child_is_told_to_spawn_instead(tmp_path: Path) -> None:
    script = tmp_path / "fork.py"
    script.write_text(
        "import os, dtorch\n"
        "x = dtorch.ones((2,))\n"
        "x.to_torch()\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        x + 1\n"
        "    except dtorch.ForkError as error:\n"
        "        print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print((x + 1).tolist())\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=40, check=False)
    assert result.returncode == 0, result.stderr
    assert "spawn" in result.stdout
    assert "[2.0, 2.0]" in result.stdout
