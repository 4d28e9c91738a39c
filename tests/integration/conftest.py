"""One embedded cluster for the tests of the client; its processes live as long as the test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dtorch
from dtorch_runtime.local import LocalCluster, start_local_cluster
from dtorch_runtime.settings import Settings
from tests.support.leaks import LeakWatch

NUM_DEVICES = 4


@pytest.fixture(scope="session")
def shared_processes(leak_watch: LeakWatch) -> Iterator[LocalCluster]:
    """Processes of a cluster with four CPU devices on one node."""
    before = leak_watch.snapshot()
    local = start_local_cluster(1, NUM_DEVICES, Settings(num_threads=1))
    local.wait_ready()
    leak_watch.declare_baseline(before)
    yield local
    local.stop()


@pytest.fixture
def cluster(shared_processes: LocalCluster) -> Iterator[dtorch.Cluster]:
    """A session on the shared processes, which is the current one."""
    local = shared_processes
    with dtorch.connect(local.address, session_key=local.session_key) as connected:
        yield connected


@pytest.fixture
def mesh(cluster: dtorch.Cluster) -> dtorch.DeviceMesh:
    """Two devices."""
    return dtorch.DeviceMesh("cpu", [0, 1])


@pytest.fixture
def grid(cluster: dtorch.Cluster) -> dtorch.DeviceMesh:
    """Two by two devices."""
    return dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
