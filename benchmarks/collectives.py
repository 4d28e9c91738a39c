"""All-reduce, all-gather, reduce-scatter and all-to-all by ``redistribute()``, beside Gloo and DTensor on two ranks.

Run: ``python -m benchmarks.collectives [--nodes 2]``. Most rows: the time from issue to sync, per redistribute, in a
row of several; Gloo's and DTensor's is the blocking call. "waited for": each needs what the one before it made, inside
one captured call, so that nothing of issuing is left; Gloo's is the same call again.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import dtorch
from benchmarks.gloo import on_gloo_ranks
from benchmarks.harness import Row, report
from dtorch_runtime.settings import Settings

#: Rows and columns of the whole float32 tensor, by its bytes.
SIDES = {4 * 1024: 32, 1024 * 1024: 512, 64 * 1024 * 1024: 4096}
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
WAITED_BYTES = (4 * 1024, 1024 * 1024)
NUM_WAITED = 50


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


def in_a_row(call: Callable[[], Any]) -> Callable[[int], None]:
    """Makes the call on both ranks as often as asked."""

    def run(count: int) -> None:
        for _ in range(count):
            call()
        dist.barrier()

    return run


def gloo_costs(rank: int) -> dict[str, float]:
    """Median microseconds of each collective and size."""
    warnings.simplefilter("ignore", FutureWarning)  # some versions have other names for these
    costs = {}
    for size_bytes, side in SIDES.items():
        whole = torch.ones(side, side)
        half = torch.ones(side // 2, side)
        other = torch.empty_like(half)
        calls: dict[str, Callable[[], Any]] = {
            "all-reduce": lambda w=whole: dist.all_reduce(w),
            "all-gather": lambda w=whole, h=half: dist.all_gather_into_tensor(w, h),
            "reduce-scatter": lambda w=whole, h=half: dist.reduce_scatter_tensor(h, w),
            "all-to-all": lambda o=other, h=half: dist.all_to_all_single(o, h),
        }
        for kind, call in calls.items():
            costs[f"{kind} {size_bytes}"] = median_us(in_a_row(call), size_bytes)
    return costs


def dtensor_costs(rank: int) -> dict[str, float]:
    """The same by DTensor's redistribute."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

    warnings.simplefilter("ignore", FutureWarning)
    mesh = init_device_mesh("cpu", (2,))
    costs = {}
    for size_bytes, side in SIDES.items():
        terms = DTensor.from_local(torch.ones(side, side), mesh, [Partial()], run_check=False)
        rows = DTensor.from_local(torch.ones(side // 2, side), mesh, [Shard(0)], run_check=False)
        pairs: dict[str, tuple[DTensor, Any]] = {
            "all-reduce": (terms, Replicate()),
            "all-gather": (rows, Replicate()),
            "reduce-scatter": (terms, Shard(0)),
            "all-to-all": (rows, Shard(1)),
        }
        for kind, (x, target) in pairs.items():

            def call(x: DTensor = x, target: Any = target) -> None:
                local = x.redistribute(mesh, [target]).to_local()
                getattr(local, "wait", lambda: None)()

            with torch.no_grad():
                costs[f"{kind} {size_bytes}"] = median_us(in_a_row(call), size_bytes)
    return costs


def dtorch_costs() -> dict[str, float]:
    """The same by redistribute on two devices."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    rows, columns = dtorch.Shard(0), dtorch.Shard(1)
    partial, whole = dtorch.Partial("sum"), dtorch.Replicate()
    pairs: dict[str, tuple[dtorch.Placement, dtorch.Placement]] = {
        "all-reduce": (partial, whole),
        "all-gather": (rows, whole),
        "reduce-scatter": (partial, rows),
        "all-to-all": (rows, columns),
    }
    costs = {}
    for size_bytes, side in SIDES.items():
        for kind, (source, target) in pairs.items():
            x = dtorch.ones((side, side), device_mesh=mesh).redistribute(placements=[source])

            def run(count: int, x: Any = x, target: Any = target) -> None:
                for _ in range(count):
                    x.redistribute(placements=[target])
                x.graph.sync()

            costs[f"{kind} {size_bytes}"] = median_us(run, size_bytes)
            del x
    for size_bytes in WAITED_BYTES:
        costs[f"waited for {size_bytes}"] = waited_us(mesh, SIDES[size_bytes])
    return costs


def waited_us(mesh: dtorch.DeviceMesh, side: int) -> float:
    """Median microseconds of an all-reduce whose result the next one needs."""
    partial, whole = [dtorch.Partial("sum")], [dtorch.Replicate()]

    @dtorch.capture
    def chain(x: dtorch.Tensor) -> dtorch.Tensor:
        for _ in range(NUM_WAITED):  # to partial nothing moves
            x = x.redistribute(placements=whole).redistribute(placements=partial)
        return x

    x = dtorch.ones((side, side), device_mesh=mesh).redistribute(placements=partial)

    def run(count: int) -> None:
        for _ in range(count):
            chain(x).graph.sync()

    run(2)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        run(1)
        times.append((time.perf_counter() - start) / NUM_WAITED * 1e6)
    return statistics.median(times)


def add_us(size_bytes: int) -> float:
    """Microseconds that one thread takes to add two tensors of the size into memory that it has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    left, right = (torch.ones(size_bytes // 4) for _ in range(2))
    out = torch.empty_like(left)

    def run(count: int) -> None:
        for _ in range(count):
            torch.add(left, right, out=out)

    cost = median_us(run, size_bytes)
    torch.set_num_threads(before)
    return cost


def row_of(
    nodes: int, kind: str, size_bytes: int, ours: dict[str, float], peers: dict[str, dict[str, float]]
) -> Row:
    """One row of the table, with the goal that it has."""
    name = f"{kind} {size_bytes}"
    others = {peer: costs[name] for peer, costs in peers.items() if name in costs}
    limits = {"DTensor / 3": others["DTensor"] / 3}
    if kind == "all-reduce":
        limits = {"Gloo / 5": others["Gloo"] / 5} if nodes == 1 else limits | {"Gloo": others["Gloo"]}
        if nodes == 1 and "torch.add" in others:
            limits["1.25 torch.add"] = others["torch.add"] * 1.25
    goal = ", ".join(f"<= {limit}" for limit in limits)
    return Row(
        f"{kind} {size_bytes // 1024} KiB", "us", ours[name], others, goal, ours[name] <= min(limits.values())
    )


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--nodes", type=int, default=1, choices=(1, 2), help="node agents that hold the 2 devices"
    )
    nodes = parser.parse_args().nodes
    # Passes would take out what is moved there and back.
    dtorch.init(num_nodes=nodes, devices_per_node=2 // nodes, settings=Settings(passes="none"))
    with torch.no_grad():
        ours = dtorch_costs()
    dtorch.shutdown()
    peers = {"Gloo": on_gloo_ranks(gloo_costs), "DTensor": on_gloo_ranks(dtensor_costs)}
    largest = max(SIDES)
    peers["torch.add"] = {f"all-reduce {largest}": add_us(largest)}
    rows = [row_of(nodes, kind, size, ours, peers) for kind in KINDS for size in SIDES]
    for size in WAITED_BYTES:
        gloo = peers["Gloo"][f"all-reduce {size}"]
        cost = ours[f"waited for {size}"]
        figure = f"all-reduce {size // 1024} KiB, waited for"
        rows.append(Row(figure, "us", cost, {"Gloo": gloo}, "<= Gloo", cost <= gloo))
    report(f"collectives-{nodes}-node", rows)


if __name__ == "__main__":
    main()
