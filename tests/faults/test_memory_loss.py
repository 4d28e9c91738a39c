"""A node that is lost while it is asked what it holds: the others answer, and nothing hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

import dtorch
from dtorch.memory import MemoryStats
from dtorch_runtime.testing.wait import wait_until

DEADLINE_S = 10.0


@pytest.fixture
def two_nodes() -> Iterator[dtorch.Cluster]:
    cluster = dtorch.init(num_nodes=2, devices_per_node=1)
    yield cluster
    with contextlib.suppress(dtorch.NodeLost):  # what the test is about
        dtorch.shutdown()


def test_a_node_that_is_lost_is_told_as_such(two_nodes: dtorch.Cluster) -> None:
    victim = next(node for node in two_nodes.nodes if 1 in node.devices)
    here, there = (dtorch.DeviceMesh("cpu", [device]) for device in (0, 1))
    x = dtorch.ones(256, device_mesh=here)
    y = dtorch.rand((1200, 1200), device_mesh=there)
    assert sorted(dtorch.memory_stats().devices) == [0, 1]
    for _ in range(2000):
        y = y @ y
    found: list[MemoryStats] = []
    with pytest.raises(dtorch.ClusterTimeout, match="the cluster to answer AskMemory"):
        dtorch.memory_stats(timeout_s=0.01)
    asking = threading.Thread(target=lambda: found.append(dtorch.memory_stats()))
    asking.start()
    wait_until(lambda: _is_asked(two_nodes), "the question to be on its way", DEADLINE_S)
    assert not found, "the victim answers behind the work that it has"
    start_s = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    asking.join(DEADLINE_S)
    assert time.monotonic() - start_s < DEADLINE_S
    (during,) = found
    after = dtorch.memory_stats()
    for stats in (during, after):
        assert list(stats.devices) == [0]
        assert stats[0].current_bytes == 1024
        assert list(stats.lost) == [victim.name]
        assert f"node {victim.name} is lost: " in str(stats)
    assert x.sum().item() == 256
    with pytest.raises(KeyError):
        after[1]


def _is_asked(cluster: dtorch.Cluster) -> bool:
    return bool(cluster.session._state._questions)
