"""How long a value takes to come back: ``x.to_torch()`` of one ready element, and a fresh op with its fetch.

Run: ``python -m benchmarks.fetch``. Peers: plain torch's ``item()``, and DTensor's ``full_tensor()`` of a
sharded tensor on two Gloo ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import dtorch
from benchmarks.gloo import on_gloo_ranks
from benchmarks.harness import Row, report

NUM_FETCHES = 2_000


def times_us(run: Callable[[], Any], count: int = NUM_FETCHES) -> list[float]:
    """Microseconds of each of ``count`` calls."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def median_us(run: Callable[[], Any], count: int = NUM_FETCHES) -> float:
    """Median microseconds of one call."""
    return statistics.median(times_us(run, count))


def dtensor_fetches(rank: int) -> tuple[float, float]:
    """Median microseconds of ``full_tensor()`` of a sharded and of a partial DTensor."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    # Without full_tensor(), item() of the partial sum would be one rank's own term: a wrong value.
    return median_us(lambda: x.full_tensor()), median_us(lambda: x.sum().full_tensor().item())


def main() -> None:
    """Measure and report."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    with torch.no_grad():
        one = dtorch.ones((1,), device_mesh=mesh)
        halves = dtorch.ones((2,), device_mesh=mesh, placements=[dtorch.Shard(0)])
        plain = torch.ones(2)
        median_us(one.to_torch, 200)
        times = times_us(one.to_torch)
        ready, slowest = statistics.median(times), statistics.quantiles(times, n=100)[-1]
        sharded = median_us(halves.to_torch)
        fresh = median_us(lambda: (one + one).to_torch())
        total = median_us(lambda: halves.sum().item())
        plain_item = median_us(lambda: plain.sum().item())
    dtorch.shutdown()
    full, item = on_gloo_ranks(dtensor_fetches)
    report(
        "fetch",
        [
            Row("fetch of a ready value", "us", ready, {}, "<= 150", ready <= 150),
            Row("fetch of a ready value, 99th percentile", "us", slowest, {}, "<= 1000", slowest <= 1000),
            Row("fetch of a value on two devices", "us", sharded, {"DTensor": full}),
            Row("op and fetch", "us", fresh),
            Row("x.sum().item(), x sharded", "us", total, {"DTensor": item, "plain torch": plain_item}),
        ],
    )


if __name__ == "__main__":
    main()
