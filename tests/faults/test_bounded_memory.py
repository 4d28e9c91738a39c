"""A million ops issued as fast as possible behind a worker that sleeps: what each process holds is bounded."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import dtorch
from dtorch_runtime.testing.wait import wait_until

MIB = 1024 * 1024
NUM_OPS = 1_000_000
CALL_OPS = 100
#: The statement of docs/performance.md: bytes of an op that is under way, and what an allocator keeps for itself.
BYTES_PER_OP = 400
SLACK_BYTES = 16 * MIB


@dtorch.capture
def add_many(x: Any, y: Any) -> Any:
    for _ in range(CALL_OPS):
        x = x + y
    return x


def eagerly(one: Any, num_ops: int) -> Any:
    total = one
    for _ in range(num_ops):
        total = total + one
    return total


def captured(one: Any, num_ops: int) -> Any:
    total = one
    for _ in range(num_ops // CALL_OPS):
        total = add_many(total, one)
    return total


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("issue", [eagerly, captured])
def test_a_million_ops_behind_a_sleeping_worker(issue: Callable[[Any, int], Any]) -> None:
    settings = dtorch.Settings.from_environment(heartbeat_timeout_s=600.0)
    cluster = dtorch.init(num_nodes=3, devices_per_node=1, settings=settings)
    nodes = {node.name: node for node in cluster.nodes}
    state, stopped_pid = cluster.session._state, nodes["node2"].pid
    try:
        one = dtorch.ones(1, device_mesh=dtorch.DeviceMesh("cpu", nodes["node1"].devices))
        both = dtorch.DeviceMesh("cpu", nodes["node1"].devices + nodes["node2"].devices)
        halves = dtorch.ones(2, device_mesh=both, placements=[dtorch.Shard(0)])
        # What is loaded and allocated at first use: of exchanges, of both kinds of issuing, and of a full batch.
        halves.redistribute(placements=[dtorch.Replicate()]).to_torch()
        issue(one, 3000).to_torch()
        processes = {
            "client": psutil.Process(),
            "controller": psutil.Process(nodes["node0"].pid),
            "agent": psutil.Process(nodes["node1"].pid),
        }
        before = {name: process.memory_info().rss for name, process in processes.items()}
        most = dict(before)

        def measure() -> bool:
            for name, process in processes.items():
                most[name] = max(most[name], process.memory_info().rss)
            return True

        # The worker of node1 waits in an exchange for a process that does not run.
        os.kill(stopped_pid, signal.SIGSTOP)
        halves.redistribute(placements=[dtorch.Replicate()]).graph.flush()
        asleep_at = state.seq
        totals: list[Any] = []
        flood = threading.Thread(target=lambda: totals.append(issue(one, NUM_OPS)))
        flood.start()
        limit = settings.max_outstanding_ops
        wait_until(
            lambda: measure() and state.num_ops > limit - settings.batch_ops, "the client to wait", 120
        )
        assert flood.is_alive(), "it was not held back"
        assert state.num_ops <= limit
        assert state.acknowledged_seq < asleep_at, "the worker did not sleep"
        os.kill(stopped_pid, signal.SIGCONT)
        wait_until(lambda: measure() and not flood.is_alive(), "the rest to be issued", 240)
        flood.join()
        assert totals[0].item() == NUM_OPS + 1
        measure()
        held = {name: most[name] - before[name] for name in most}
        assert max(held.values()) < limit * BYTES_PER_OP + SLACK_BYTES, held
    finally:
        os.kill(stopped_pid, signal.SIGCONT)
        dtorch.shutdown()
