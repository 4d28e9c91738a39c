"""What a small eager op costs its program: ``c = c + b`` of one element on a mesh of two devices, and a few like it.

Run: ``python -m benchmarks.overhead``. No grad. Peers: plain torch, and PyTorch DTensor on two Gloo ranks (where each
rank issues and runs only its own share).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import dtorch
from benchmarks.gloo import on_gloo_ranks
from benchmarks.harness import Row, median_of, report

NUM_OPS = 20_000
#: Of the calls of ``CALLS``.
NUM_CALLS = 2_000
NUM_SHAPES = 300
REPEATS = 7
#: On a tensor of 8 x 8 elements, cut by rows.
CALLS: dict[str, Callable[[Any], Any]] = {
    "x.view(8, 2, 4), x sharded": lambda x: x.view(8, 2, 4),
    "x + 1.0, x sharded": lambda x: x + 1.0,
    "x[:, 1:3], x sharded": lambda x: x[:, 1:3],
}
NEW_SHAPE = "x + x, a new shape at every call"
GOALS_US = {NEW_SHAPE: 60} | dict.fromkeys(CALLS, 6)


def chain(c: Any, b: Any, num_ops: int = NUM_OPS) -> Any:
    """``num_ops`` dependent additions."""
    for _ in range(num_ops):
        c = c + b
    return c


def dtorch_costs() -> tuple[float, float]:
    """Microseconds an op: issuing it, and until the value of the last one has come back."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    b = dtorch.ones((1,), device_mesh=mesh)
    issue, whole = [], []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        c = chain(b, b)
        issued = time.perf_counter()
        value = c.to_torch()
        issue.append((issued - start) / NUM_OPS * 1e6)
        whole.append((time.perf_counter() - start) / NUM_OPS * 1e6)
        if value.item() != NUM_OPS + 1:
            raise RuntimeError(f"wrong sum: {value.item()}")
    return statistics.median(issue[1:]), statistics.median(whole[1:])


def _chain_cost(b: Any) -> float:
    """Microseconds an op where issuing is running."""

    def run() -> float:
        start = time.perf_counter()
        chain(b, b)
        return (time.perf_counter() - start) / NUM_OPS * 1e6

    return median_of(run, REPEATS)


def call_costs(x: Any, vector: Callable[[int], Any], finish: Callable[[], None]) -> dict[str, float]:
    """Microseconds of issuing each of ``CALLS`` on ``x``, and of the first call on vectors of sizes not seen before.

    ``finish`` waits for what was issued, outside of the time.
    """
    costs = {}
    for name, call in CALLS.items():

        def run(call: Callable[[Any], Any] = call) -> float:
            start = time.perf_counter()
            for _ in range(NUM_CALLS):
                call(x)
            cost = (time.perf_counter() - start) / NUM_CALLS * 1e6
            finish()
            return cost

        costs[name] = median_of(run, REPEATS)
    vectors = [vector(size) for size in range(2, NUM_SHAPES + 2)]
    finish()
    firsts = []
    for v in vectors:
        start = time.perf_counter()
        v + v
        firsts.append((time.perf_counter() - start) * 1e6)
    finish()
    return costs | {NEW_SHAPE: statistics.median(firsts)}


def dtorch_calls() -> dict[str, float]:
    """``call_costs`` of this project."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = dtorch.ones((8, 8), device_mesh=mesh, placements=[dtorch.Shard(0)])
    return call_costs(
        x, lambda size: dtorch.ones((size,), device_mesh=mesh), dtorch.Graph.default_graph().sync
    )


def dtensor_costs(rank: int) -> tuple[float, dict[str, float]]:
    """An op of the chain, and ``call_costs``, of a DTensor program on one rank."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    b = distribute_tensor(torch.ones(1), mesh, [Replicate()])
    x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])

    def vector(size: int) -> Any:
        return distribute_tensor(torch.ones(size), mesh, [Replicate()])

    with torch.no_grad():
        return _chain_cost(b), call_costs(x, vector, lambda: None)


def main() -> None:
    """Measure and report."""
    with torch.no_grad():
        issue, whole = dtorch_costs()
        plain = _chain_cost(torch.ones(1))
        own = dtorch_calls()
        torch_calls = call_costs(torch.ones(8, 8), torch.ones, lambda: None)
    dtorch.shutdown()
    dtensor, dtensor_calls = on_gloo_ranks(dtensor_costs)
    peers = {"plain torch": plain, "DTensor": dtensor}
    report(
        "overhead",
        [
            Row("issue of c = c + b", "us/op", issue, peers, "<= 5", issue <= 5),
            Row(f"end to end, {NUM_OPS} ops and a fetch", "us/op", whole, peers, "<= 8", whole <= 8),
            *(
                Row(
                    f"issue of {name}",
                    "us/op",
                    cost,
                    {"plain torch": torch_calls[name], "DTensor": dtensor_calls[name]},
                    f"<= {GOALS_US[name]}",
                    cost <= GOALS_US[name],
                )
                for name, cost in own.items()
            ),
        ],
    )


if __name__ == "__main__":
    main()
