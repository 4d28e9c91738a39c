"""Values on their way: many at once, from threads and event loops, and freed when nobody wants them."""

from __future__ import annotations

import asyncio
import threading

import psutil
import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Shard
from dtorch_runtime.local import LocalCluster

MIB = 1024 * 1024


async def test_a_thousand_awaits_in_flight(mesh: DeviceMesh) -> None:
    tensors = [dtorch.full((2,), float(i), device_mesh=mesh, placements=[Shard(0)]) + 1 for i in range(1000)]
    values = await asyncio.gather(*(t.value() for t in tensors))
    assert [v.tolist() for v in values] == [[i + 1.0] * 2 for i in range(1000)]


async def test_the_loop_goes_on_while_workers_are_busy(mesh: DeviceMesh) -> None:
    a = dtorch.rand(500, 500, device_mesh=mesh)
    for _ in range(30):
        a = (a @ a).clamp(0, 1)
    future = a.value()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while not future.is_ready():
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await future
    await counting
    assert turns > 10


async def test_sync_in_a_loop(mesh: DeviceMesh) -> None:
    x = dtorch.ones(3, device_mesh=mesh)
    for _ in range(500):
        x = x + 1
    await x.graph.sync_async()
    assert (await x.value()).tolist() == [501.0] * 3


async def test_a_large_value_is_assembled_beside_the_loop(mesh: DeviceMesh) -> None:
    x = dtorch.ones(1024, 1024, device_mesh=mesh, placements=[Shard(1)])
    value = await x.value()
    assert value.sum().item() == 1024 * 1024


def test_values_in_many_threads(mesh: DeviceMesh) -> None:
    shared = dtorch.ones(3, device_mesh=mesh)
    results: list[float] = []

    def work(number: int) -> None:
        x = dtorch.full((3,), float(number), device_mesh=mesh, placements=[Shard(0)])
        y = shared
        for _ in range(100):
            x = x + 1
            y = y + shared
        results.append(asyncio.run(value_of(x))[0].item() - number + y.to_torch()[0].item())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [201.0] * 6


async def value_of(x: dtorch.Tensor) -> torch.Tensor:
    return await x.value()


def test_graphs_wait_only_for_themselves(mesh: DeviceMesh) -> None:
    x = dtorch.ones(2, device_mesh=mesh)
    with dtorch.Graph() as other:
        y = dtorch.zeros(2, device_mesh=mesh)
        other.sync()
        assert y.to_torch().tolist() == [0.0, 0.0]
    assert (x + y).to_torch().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("shape", [(0, 3), (), (3 * MIB // 4 + 5,)], ids=str)
def test_values_of_any_size_come_and_go(mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
    t = torch.randn(shape)
    x = dtorch.from_torch(t, device_mesh=mesh)
    assert torch.equal(x.to_torch(), t)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int8], ids=str)
def test_values_of_any_dtype_come_and_go(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    t = (torch.randn(5, 3) * 3).to(dtype)
    x = dtorch.from_torch(t, device_mesh=mesh, placements=[Shard(0)])
    assert torch.equal(x.to_torch(), t)


def test_memory_of_dropped_values_is_used_again(shared_processes: LocalCluster, mesh: DeviceMesh) -> None:
    [pid] = shared_processes.pids.values()
    process = psutil.Process(pid)
    x = dtorch.zeros(4 * MIB, device_mesh=mesh)
    x.graph.sync()
    before = process.memory_info().rss
    for _ in range(60):
        x = x + 1  # 16 MiB on each of two devices: all of them would be 1920 MiB
    assert x[0].item() == 60.0
    assert process.memory_info().rss - before < 800 * MIB
