"""Agent processes that pass the controller's messages on to each other, with the threshold lowered to a few nodes."""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dtorch
from dtorch_runtime.local import LocalCluster, start_local_cluster
from dtorch_runtime.settings import Settings
from dtorch_runtime.wire.messages import Credit, NodeDown
from tests.support.control import op
from tests.support.wire_client import WireClient

NULL = "dtorch_runtime.testing.null_executor:NullExecutor"
SETTINGS = Settings(
    relay_min_nodes=2,
    relay_fanout=2,
    heartbeat_interval_s=0.2,
    heartbeat_timeout_s=1.5,
    start_timeout_s=20,
    check=True,
)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Five nodes: two are told by the controller, and three by the first of those and of these."""
    made = start_local_cluster(5, 1, SETTINGS, executor=NULL)
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


def log_of(cluster: LocalCluster) -> str:
    return (Path(cluster.address.removeprefix("ipc://")).parent / "node0.log").read_text()


def test_killed_member_costs_its_relay_and_no_message(cluster: LocalCluster) -> None:
    with WireClient(cluster.address, cluster.session_key) as client:
        nodes = [node.name for node in sorted(client.welcome.nodes, key=lambda node: node.devices)]
        devices = [client.devices[name][0] for name in nodes]
        client.define(devices)
        for value_id in range(1, 21):
            client.run(op(1, value_id))
            assert client.fetch(value_id, devices[-1]) == array("q", [value_id]).tobytes()
        assert "relay 1 begins: 5 nodes, 2 below each" in log_of(cluster)
        # Not the controller's own; the second in the order of joining has others below it, or is below the first.
        victim = next(name for name in nodes if name != "node0")
        os.kill(cluster.pids[victim], signal.SIGKILL)
        for value_id in range(21, 201):
            seq = client.run(op(1, value_id))
        assert client.wait_for(NodeDown)[0].name == victim
        client.wait_for(Credit, lambda credit: credit.seq == seq)
        left = [client.devices[name][0] for name in nodes if name != victim]
        for device in left:
            assert client.fetch(200, device) == array("q", [200]).tobytes()
        seq = client.run(op(1, 201))
        client.wait_for(Credit, lambda credit: credit.seq == seq)
        assert "relay 1 ended: a member was lost" in log_of(cluster)
        assert "relay 2 begins: 4 nodes" in log_of(cluster)


@pytest.mark.slow  # three processes import torch
def test_training_through_a_relay_gives_what_plain_torch_gives() -> None:
    torch.manual_seed(0)
    start, data = torch.randn(6, 6), torch.randn(9, 6)
    cluster = dtorch.init(
        num_nodes=3, devices_per_node=1, settings=Settings(relay_min_nodes=2, relay_fanout=1)
    )
    try:
        mesh = dtorch.DeviceMesh("cpu", cluster.devices)
        weight = dtorch.from_torch(start, device_mesh=mesh)
        batch = dtorch.from_torch(data, device_mesh=mesh, placements=[dtorch.Shard(0)])

        @dtorch.capture
        def step(weight: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            out = (batch @ weight).relu().sum(0).redistribute(placements=[dtorch.Replicate()])
            weight.sub_(out * 0.01)
            return out.sum()

        expected = start.clone()
        for _ in range(12):
            loss = step(weight, batch)
            out = (data @ expected).relu().sum(0)
            expected.sub_(out * 0.01)
            torch.testing.assert_close(loss.to_torch(), out.sum())
        torch.testing.assert_close(weight.to_torch(), expected)
        folder = Path(cluster.address.removeprefix("ipc://")).parent
        assert "relay 1 begins: 3 nodes" in (folder / "node0.log").read_text()
    finally:
        dtorch.shutdown()
