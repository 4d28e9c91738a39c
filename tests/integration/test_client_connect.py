"""Joining a cluster that is there, in every way that a program can."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import dtorch
from dtorch.cluster import ENV_ADDRESS, ENV_SESSION_KEY, current_session
from dtorch_runtime.local import LocalCluster, start_local_cluster
from dtorch_runtime.settings import Settings
from dtorch_runtime.wire.messages import NodeDown
from tests.support.wire_client import WireClient


async def test_async_with(shared_processes: LocalCluster) -> None:
    local = shared_processes
    async with dtorch.connect(local.address, session_key=local.session_key) as cluster:
        assert cluster.address == local.address
        assert cluster.devices == [0, 1, 2, 3]
        x = dtorch.ones(2) + 1
        assert x.graph is cluster.graph
        assert (await x.value()).tolist() == [2.0, 2.0]
    with pytest.raises(dtorch.SessionClosed):
        x.to_torch()
    assert "not connected" in repr(cluster)


def test_connections_nest(shared_processes: LocalCluster, cluster: dtorch.Cluster) -> None:
    outer = dtorch.ones(2)
    local = shared_processes
    with dtorch.connect(local.address, session_key=local.session_key) as other:
        assert dtorch.ones(2).graph.session is other.session
        assert (outer + 1).to_torch().tolist() == [2.0, 2.0]
    assert dtorch.ones(2).graph.session is cluster.session


def test_the_environment_names_the_cluster(
    shared_processes: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_ADDRESS, shared_processes.address)
    monkeypatch.setenv(ENV_SESSION_KEY, shared_processes.session_key.hex())
    try:
        assert dtorch.ones(2).tolist() == [1.0, 1.0]
        assert dtorch.ones(2).graph.session.address == shared_processes.address
    finally:
        dtorch.shutdown()


def fail_on_a_worker(local: LocalCluster, error: Exception | None = None) -> None:
    with dtorch.connect(local.address, session_key=local.session_key):
        dtorch.ones(2)[dtorch.tensor([5])]
        if error is not None:
            raise error


def test_an_error_inside_the_block_is_not_hidden_by_one_at_its_end(shared_processes: LocalCluster) -> None:
    with pytest.raises(KeyError, match="mine"):
        fail_on_a_worker(shared_processes, KeyError("mine"))
    with pytest.raises(dtorch.RemoteOpError, match="IndexError"):
        fail_on_a_worker(shared_processes)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda c: {"address": c.address, "session_key": b"x" * 32}, dtorch.HandshakeError, "session key"),
        (lambda c: {"address": c.address, "session_key": b""}, dtorch.DTorchError, "session"),
        (lambda c: {"address": c.address}, dtorch.SettingError, "needs its session key"),
        (lambda c: {"address": "abacus://here", "session_key": b"x" * 32}, dtorch.TransportError, "abacus"),
        (lambda c: {"num_nodes": 0}, dtorch.SettingError, "num_nodes"),
        (lambda c: {"devices_per_node": -1}, dtorch.SettingError, "devices_per_node"),
    ],
    ids=["wrong key", "empty key", "no key", "scheme", "no nodes", "negative"],
)
def test_what_cannot_be_joined_says_why(
    shared_processes: LocalCluster,
    arguments: Callable[[LocalCluster], dict[str, Any]],
    error: type[Exception],
    message: str,
) -> None:
    connection = dtorch.connect(**arguments(shared_processes))
    with pytest.raises(error, match=message), connection:
        pass


def test_nobody_there(unused_endpoint: Callable[[str], str]) -> None:
    connection = dtorch.connect(
        unused_endpoint("tcp"), session_key=b"x" * 32, settings=Settings(start_timeout_s=0.1)
    )
    with pytest.raises(dtorch.ClusterTimeout, match=r"waited 0\.1 s for a connection"), connection:
        pass


def test_nodes_that_are_late_are_waited_for() -> None:
    """As one that a busy machine has kept from beating: it was there, and comes back."""
    short = Settings(start_timeout_s=0.2)
    local = start_local_cluster(2, 1, Settings(heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0))
    try:
        local.wait_ready()
        os.kill(local.pids["node1"], signal.SIGSTOP)
        with WireClient(local.address, local.session_key) as client:
            client.wait_for(NodeDown)
        with dtorch.connect(local.address, session_key=local.session_key, settings=short):
            with pytest.raises(dtorch.ClusterTimeout, match=r"2 node\(s\) to join .* There are: node0"):
                current_session().wait_for_nodes(2)
            os.kill(local.pids["node1"], signal.SIGCONT)
        with dtorch.connect(local.address, session_key=local.session_key):
            nodes = current_session().wait_for_nodes(2)
            assert [(node.name, node.devices) for node in nodes] == [("node0", [0]), ("node1", [1])]
    finally:
        local.stop()
