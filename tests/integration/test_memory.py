"""Memory on a cluster: a limit, and who holds what."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, RemoteOpError, Settings
from dtorch_runtime.local import LocalCluster, start_local_cluster
from tests.support.leaks import LeakWatch

MIB = 1 << 20
#: Of a tensor of so many float32.
SIZE = MIB // 4
MESH = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))


@pytest.fixture(scope="module")
def limited(leak_watch: LeakWatch) -> Iterator[LocalCluster]:
    """Two devices whose values may hold 4 MiB."""
    before = leak_watch.snapshot()
    local = start_local_cluster(1, 2, Settings(device_memory_bytes=4 * MIB, num_threads=1))
    local.wait_ready()
    leak_watch.declare_baseline(before)
    yield local
    local.stop()


class TestLimit:
    """Devices whose values may hold 4 MiB."""

    @pytest.fixture(autouse=True)
    def connected(self, limited: LocalCluster) -> Iterator[dtorch.Cluster]:
        with dtorch.connect(limited.address, session_key=limited.session_key) as cluster:
            yield cluster

    def test_an_op_beyond_it_fails_and_tells_who_holds_what(self) -> None:
        x = dtorch.ones(2 * SIZE, device_mesh=MESH)
        view = x[1:]
        y = x * 2
        z = y + 1
        with pytest.raises(RemoteOpError) as caught:
            z.to_torch()
        text = str(caught.value)
        assert caught.value.failure.op == "aten::add.Tensor"
        assert "it asked for 2.0 MiB; 3 values of this session hold 4.0 MiB" in text
        assert "DTORCH_DEVICE_MEMORY_BYTES allows the device 4.0 MiB" in text
        assert re.search(r"2\.0 MiB  (aten::)?ones", text)
        assert "x = dtorch.ones(2 * SIZE, device_mesh=MESH) (shared by 2 values)" in text
        assert "test_memory.py" in caught.value.location
        assert "z = y + 1" in caught.value.location
        assert view[0].item() == 1, "what is there stays"
        del y, z
        assert (x + 1)[0].item() == 2, "and what was dropped makes room"

    def test_it_counts_what_a_device_holds_of_a_cut_tensor(self) -> None:
        x = dtorch.ones(6 * SIZE, device_mesh=MESH, placements=[dtorch.Shard(0)])
        with pytest.raises(RemoteOpError, match=r"asked for 3\.0 MiB"):
            (x + 1).to_torch()

    def test_it_holds_inside_of_captured_calls(self) -> None:
        @dtorch.capture
        def grow(x):
            y = x + 1
            return torch.cat([y, y])

        x = dtorch.ones(SIZE // 2, device_mesh=MESH)
        for _ in range(2):
            assert grow(x)[0].item() == 2
        x = dtorch.ones(SIZE, device_mesh=MESH)
        for _ in range(2):  # x, y and their double: exactly the limit
            assert grow(x)[0].item() == 2
        more = dtorch.ones(SIZE // 2, device_mesh=MESH)
        with pytest.raises(RemoteOpError) as caught:
            grow(x).to_torch()
        assert caught.value.failure.op == "aten::cat.default"
        assert "return torch.cat([y, y])" in caught.value.location
        assert "aten::add.Tensor at" in str(caught.value)
        assert "y = x + 1" in str(caught.value)
        del more
        assert grow(x)[0].item() == 2

    def test_an_upload_beyond_it_names_its_line(self) -> None:
        whole = torch.zeros(5 * SIZE)
        sent = dtorch.from_torch(whole, device_mesh=MESH)
        with pytest.raises(RemoteOpError, match=r"asked for 5\.0 MiB") as caught:
            sent.to_torch()
        assert "sent = dtorch.from_torch(whole, device_mesh=MESH)" in caught.value.location

    def test_a_redistribution_beyond_it_fails_on_every_device_and_hangs_none(self) -> None:
        x = dtorch.ones(5 * SIZE, device_mesh=MESH, placements=[dtorch.Shard(0)])
        with pytest.raises(RemoteOpError, match="OutOfMemoryError"):
            x.redistribute(placements=[dtorch.Replicate()]).to_torch()
        assert x.sum().item() == 5 * SIZE


def test_an_allocation_that_fails_tells_who_holds_what_without_a_limit(cluster: dtorch.Cluster) -> None:
    x = dtorch.ones(SIZE, device_mesh=MESH)
    with pytest.raises(RemoteOpError) as caught:
        x.new_empty(1 << 50).to_torch()
    text = str(caught.value)
    assert "it asked for 4096.0 TiB" in text
    assert re.search(r"1\.0 MiB  (aten::)?ones", text)
    assert "x = dtorch.ones(SIZE, device_mesh=MESH)" in text
    assert "x.new_empty(1 << 50).to_torch()" in caught.value.location
