"""What one small op costs: ``c = c + b`` of one element on a mesh of two devices, no grad.

Run: ``python -m benchmarks.overhead``. Peers: plain torch, and PyTorch DTensor on two Gloo ranks (where each
rank issues and runs only its own share).
"""

from __future__ import annotations

import time
from typing import Any

import torch

import dtorch
from benchmarks.gloo import on_gloo_ranks
from benchmarks.harness import Row, median_of, report

NUM_OPS = 20_000
REPEATS = 7


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
    return _median(issue[1:]), _median(whole[1:])


def plain_cost() -> float:
    """Microseconds an op of plain torch."""
    b = torch.ones(1)

    def run() -> float:
        start = time.perf_counter()
        chain(b, b)
        return (time.perf_counter() - start) / NUM_OPS * 1e6

    return median_of(run, REPEATS)


def dtensor_cost(rank: int) -> float:
    """Microseconds an op of a DTensor program, on one rank."""
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    b = distribute_tensor(torch.ones(1), mesh, [Replicate()])

    def run() -> float:
        start = time.perf_counter()
        chain(b, b)
        return (time.perf_counter() - start) / NUM_OPS * 1e6

    with torch.no_grad():
        return median_of(run, REPEATS)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    """Measure and report."""
    with torch.no_grad():
        issue, whole = dtorch_costs()
        plain = plain_cost()
    dtorch.shutdown()
    dtensor = on_gloo_ranks(dtensor_cost)
    peers = {"plain torch": plain, "DTensor": dtensor}
    report(
        "overhead",
        [
            Row("issue of c = c + b", "us/op", issue, peers, "<= 8", issue <= 8),
            Row(f"end to end, {NUM_OPS} ops and a fetch", "us/op", whole, peers, "<= 12", whole <= 12),
        ],
    )


if __name__ == "__main__":
    main()
