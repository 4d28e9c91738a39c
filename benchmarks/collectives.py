"""All-reduce, all-gather and reduce-scatter by ``redistribute()``, beside Gloo on as many ranks.

Run: ``python -m benchmarks.collectives [--nodes 2]``. The time is from issue to sync, per redistribute, in a row of
several; Gloo's is the blocking call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import dtorch
from benchmarks.gloo import on_gloo_ranks
from benchmarks.harness import Row, report

SIZES_BYTES = (4 * 1024, 1024 * 1024, 64 * 1024 * 1024)
KINDS = ("all-reduce", "all-gather", "reduce-scatter")


def num_calls(size_bytes: int) -> int:
    """Calls in one measured row: many of the small, few of the large."""
    return 200 if size_bytes <= 64 * 1024 else 50 if size_bytes <= 4 * 1024 * 1024 else 3


def median_us(run: Callable[[int], Any], size_bytes: int, repeats: int = 5) -> float:
    """Median microseconds of one call in a row of calls."""
    count = num_calls(size_bytes)
    run(1)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(count)
        times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


def gloo_costs(rank: int) -> dict[str, float]:
    """Median microseconds of each collective and size."""
    costs = {}
    for size_bytes in SIZES_BYTES:
        whole = torch.ones(size_bytes // 4)
        half = torch.ones(size_bytes // 8)
        calls: dict[str, Callable[[], Any]] = {
            "all-reduce": lambda w=whole: dist.all_reduce(w),
            "all-gather": lambda w=whole, h=half: dist.all_gather_into_tensor(w, h),
            "reduce-scatter": lambda w=whole, h=half: dist.reduce_scatter_tensor(h, w),
        }
        for kind, call in calls.items():

            def run(count: int, call: Callable[[], Any] = call) -> None:
                for _ in range(count):
                    call()
                dist.barrier()

            costs[f"{kind} {size_bytes}"] = median_us(run, size_bytes)
    return costs


def dtorch_costs() -> dict[str, float]:
    """The same by redistribute on two devices."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    shard, partial, whole = dtorch.Shard(0), dtorch.Partial("sum"), dtorch.Replicate()
    pairs: dict[str, tuple[dtorch.Placement, dtorch.Placement]]
    pairs = {"all-reduce": (partial, whole), "all-gather": (shard, whole), "reduce-scatter": (partial, shard)}
    costs = {}
    for size_bytes in SIZES_BYTES:
        for kind, (source, target) in pairs.items():
            x = dtorch.ones((size_bytes // 4,), device_mesh=mesh).redistribute(placements=[source])

            def run(count: int, x: Any = x, target: Any = target) -> None:
                for _ in range(count):
                    x.redistribute(placements=[target])
                x.graph.sync()

            costs[f"{kind} {size_bytes}"] = median_us(run, size_bytes)
            del x
    return costs


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--nodes", type=int, default=1, choices=(1, 2), help="node agents that hold the 2 devices"
    )
    nodes = parser.parse_args().nodes
    dtorch.init(num_nodes=nodes, devices_per_node=2 // nodes)
    with torch.no_grad():
        ours = dtorch_costs()
    dtorch.shutdown()
    gloo = on_gloo_ranks(gloo_costs)
    rows = [
        Row(f"{kind} {size // 1024} KiB", "us", ours[f"{kind} {size}"], {"Gloo": gloo[f"{kind} {size}"]})
        for kind in KINDS
        for size in SIZES_BYTES
    ]
    report(f"collectives-{nodes}-node", rows)


if __name__ == "__main__":
    main()
