"""A node that is lost while somebody profiles: the others have their lanes, and nothing hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtorch
from dtorch_runtime.testing.wait import wait_until

DEADLINE_S = 10.0


@pytest.fixture
def two_nodes() -> Iterator[dtorch.Cluster]:
    cluster = dtorch.init(num_nodes=2, devices_per_node=1)
    yield cluster
    with contextlib.suppress(dtorch.NodeLost):  # what the test is about
        dtorch.shutdown()


def test_a_lost_node_has_no_lane_and_a_note(two_nodes: dtorch.Cluster) -> None:
    victim = next(node for node in two_nodes.nodes if 1 in node.devices)
    here, there = dtorch.DeviceMesh("cpu", [0]), dtorch.DeviceMesh("cpu", [1])
    x, y = dtorch.ones(3, device_mesh=here), dtorch.ones(3, device_mesh=there)
    with dtorch.profile() as profile:
        (y + 1).to_torch()
        os.kill(victim.pid, signal.SIGKILL)
        pending = (y + 1).value()
        wait_until(lambda: len(two_nodes.nodes) == 1, "the loss of a node to be known", DEADLINE_S)
        with pytest.raises(dtorch.NodeLost):
            pending.get(DEADLINE_S)
        (x + 1).to_torch()
        start_s = time.monotonic()
    assert time.monotonic() - start_s < DEADLINE_S
    processes = {span.process for span in profile.spans}
    assert f"node {victim.name}" not in processes
    assert len(processes) == 3
    (note,) = profile.notes
    assert victim.name in note
    events = profile.trace()["traceEvents"]
    assert any(event["ph"] == "i" and event["name"].startswith("no lane") for event in events)


def test_tensors_between_nodes_are_counted(two_nodes: dtorch.Cluster) -> None:
    first, second = (node.name for node in two_nodes.nodes)
    x = dtorch.rand(100, 100, device_mesh=dtorch.DeviceMesh("cpu", [0]))
    y = x.redistribute(device_mesh=dtorch.DeviceMesh("cpu", [1]))
    y.to_torch()
    links = dtorch.counters().link_bytes
    assert links[first, second] == 100 * 100 * 4
    assert links[second, first] == 0


def test_a_lost_controller_leaves_the_lanes_of_the_client(tmp_path: Path) -> None:
    cluster = dtorch.init()
    x = dtorch.ones(3)
    with dtorch.profile(tmp_path / "t.json") as profile:
        (x + 1).to_torch()
        os.kill(cluster.nodes[0].pid, signal.SIGKILL)  # the controller is in the same process
        wait_until(lambda: not cluster.session.is_open, "the loss of the controller to be known", DEADLINE_S)
        start_s = time.monotonic()
    assert time.monotonic() - start_s < DEADLINE_S
    assert {span.process for span in profile.spans} == {"client"}
    (note,) = profile.notes
    assert note.startswith("lanes of the cluster are missing")
    assert "batch" in (tmp_path / "t.json").read_text()
    dtorch.shutdown()
