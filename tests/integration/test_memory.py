"""Memory on a cluster: a limit, and who holds what."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dtorch
from dtorch import DeviceMesh, RemoteOpError, Settings
from dtorch_runtime.local import LocalCluster, start_local_cluster
from tests.support.captured import replays
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


# ---- memory_stats ----


def held(device: int = 0) -> int:
    return dtorch.memory_stats()[device].current_bytes


def test_each_device_tells_what_it_holds_and_who_made_it(cluster: dtorch.Cluster) -> None:
    whole = dtorch.ones(2 * SIZE, device_mesh=MESH)
    cut = dtorch.from_torch(torch.ones(6 * SIZE), device_mesh=MESH, placements=[dtorch.Shard(0)])
    view = whole[1:].view(-1)
    stats = dtorch.memory_stats()
    assert sorted(stats.devices) == cluster.devices
    assert not stats.lost
    for device in MESH.devices:
        memory = stats[device]
        assert (memory.device, memory.node) == (device, cluster.nodes[0].name)
        assert (memory.current_bytes, memory.peak_bytes, memory.limit_bytes) == (5 * MIB, None, None)
        first, second = memory.largest
        assert (first.num_bytes, first.num_values, first.op) == (3 * MIB, 1, "from_torch")
        assert (second.num_bytes, second.num_values, second.op) == (2 * MIB, memory.num_values - 1, "ones")
        assert "cut = dtorch.from_torch(" in first.location
        assert "whole = dtorch.ones(2 * SIZE, device_mesh=MESH)" in second.location
    others = [stats[device] for device in cluster.devices if device not in MESH.devices]
    assert [(memory.current_bytes, memory.num_values) for memory in others] == [(0, 0)] * len(others)
    text = str(stats)
    assert f"device 0 (node {cluster.nodes[0].name}): {stats[0].num_values} values hold 5.0 MiB\n" in text
    assert "3.0 MiB  from_torch at" in text
    del whole, cut
    assert held() == 2 * MIB, "a view holds its memory"
    del view
    assert held() == 0


def test_only_so_many_values_are_told_as_were_asked_for(cluster: dtorch.Cluster) -> None:
    tensors = [dtorch.ones(size, device_mesh=MESH) for size in (100, 300, 200)]
    (largest,) = dtorch.memory_stats(num_largest=1)[0].largest
    assert largest.num_bytes == 1200
    assert dtorch.memory_stats(num_largest=0)[0].largest == ()
    assert len(dtorch.memory_stats()[0].largest) == len(tensors)
    for wrong in (-1, 1.5, True, "3"):
        with pytest.raises(dtorch.SettingError, match="num_largest takes a number of values"):
            dtorch.memory_stats(num_largest=wrong)  # type: ignore[arg-type]  # what it refuses


def test_values_of_other_sessions_are_not_told(
    cluster: dtorch.Cluster, shared_processes: LocalCluster
) -> None:
    mine = dtorch.ones(SIZE, device_mesh=MESH)
    address, key = shared_processes.address, shared_processes.session_key
    with dtorch.connect(address, session_key=key):
        theirs = dtorch.ones(2 * SIZE, device_mesh=MESH)
        assert held() == 2 * MIB
        del theirs
    assert held() == MIB
    del mine


def test_the_peak_is_the_most_that_values_held_since_it_was_asked_for(cluster: dtorch.Cluster) -> None:
    x = dtorch.ones(SIZE, device_mesh=MESH)
    assert (x + x).sum().item() == 2 * SIZE
    dtorch.reset_peak_memory_stats()
    assert dtorch.memory_stats()[0].peak_bytes == MIB
    y = torch.cat([x, x, x])
    del y
    assert held() == MIB
    memory = dtorch.memory_stats()[0]
    assert memory.peak_bytes == 4 * MIB
    assert str(memory).startswith(f"device 0 (node {memory.node}): 1 values hold 1.0 MiB, at most 4.0 MiB")
    dtorch.reset_peak_memory_stats()
    assert dtorch.memory_stats()[0].peak_bytes == MIB
    dtorch.reset_peak_memory_stats(measure=False)
    assert dtorch.memory_stats()[0].peak_bytes is None
    assert (x * 3).sum().item() == 3 * SIZE, "and the session goes on"


def test_a_captured_function_cannot_ask(cluster: dtorch.Cluster) -> None:
    @dtorch.capture
    def step(x):
        y = x + 1
        dtorch.memory_stats()
        return y

    with pytest.raises(dtorch.CaptureError, match="asks what the devices hold"):
        step(dtorch.ones(3, device_mesh=MESH))


def test_without_a_session_there_is_nothing_to_tell() -> None:
    assert not dtorch.memory_stats().devices
    dtorch.reset_peak_memory_stats()


# ---- liveness in captured calls ----


def chain(x):
    a = torch.exp(x)
    b = torch.sin(a)
    c = torch.sqrt(b)
    return c  # noqa: RET504  plain PyTorch holds what has a name


def sums(x):
    a = torch.cumsum(x, 0)
    b = torch.cumsum(a, 0)
    c = torch.cumsum(b, 0)
    return c  # noqa: RET504  plain PyTorch holds what has a name


class Live(TorchDispatchMode):
    """What the tensors that plain PyTorch has made hold at most, in bytes, those that exist before aside."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._sizes[id(result)] = result.nbytes
        weakref.finalize(result, self._sizes.pop, id(result))
        self.peak_bytes = max(self.peak_bytes, sum(self._sizes.values()))
        return result


@pytest.mark.parametrize(
    ("function", "num_held"),
    [
        pytest.param(chain, 1, id="each op writes to the memory of the one before"),
        pytest.param(sums, 2, id="two at any time"),
    ],
)
def test_a_captured_chain_holds_less_than_plain_pytorch(
    cluster: dtorch.Cluster, function: Callable[..., torch.Tensor], num_held: int
) -> None:
    num_bytes = 8 * MIB
    plain = torch.rand(8 * SIZE)
    with Live() as live:
        expected = function(plain)
    assert live.peak_bytes == 3 * num_bytes, "a, b and c, which have names until the function returns"

    x = dtorch.from_torch(plain, device_mesh=MESH)
    captured = dtorch.capture(function)
    captured(x)  # recorded, op by op
    dtorch.reset_peak_memory_stats()
    result = captured(x)
    memory = dtorch.memory_stats()[0]
    assert replays(captured) == 1
    assert memory.peak_bytes is not None
    assert memory.peak_bytes - num_bytes == num_held * num_bytes
    assert memory.peak_bytes - num_bytes < live.peak_bytes
    assert memory.current_bytes == 2 * num_bytes, "x and the result"
    torch.testing.assert_close(result.to_torch(), expected)
    for _ in range(3):
        result = captured(x)
    peak_bytes = dtorch.memory_stats()[0].peak_bytes
    what = "x, those of a call, and the result that the call's is to replace"
    assert peak_bytes == (2 + num_held) * num_bytes, what


def test_the_program_in_the_document_runs(
    cluster: dtorch.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, object] = {"torch": torch}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"docs/memory.md, program {number}", "exec"), names)
    assert capsys.readouterr().out.endswith(f"{2 * MIB} {3 * MIB}\n")
