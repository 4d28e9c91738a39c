"""Compute and an independent redistribution between two agents: each alone, both at once beside ops, and in order.

Run: ``python -m benchmarks.overlap``. Two agents of one device each, and a chain of products of matrices that takes
about as long as the transfer. In the first row a peer comes late, because it has such a chain to do first: the other's
transfer consists of waiting. In the second, an all-to-all of 64 MiB, the processors themselves copy what moves: with
one core for each agent, that takes its time from what computes. The third is the first in one captured call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import dtorch
from benchmarks.harness import Row, report
from dtorch_runtime.settings import Settings

SIDE = 4096
WIDTH = 256
REPEATS = 9


def products(first: Any, count: int) -> Any:
    """Of a matrix with itself, each of the one before."""
    x = first
    for _ in range(count):
        x = (x @ first) * (1 / WIDTH)
    return x


class Programs:
    """What is timed, on a cluster of two agents."""

    def __init__(self) -> None:
        self.mesh = dtorch.DeviceMesh("cpu", [0, 1])
        self.late = dtorch.DeviceMesh("cpu", [1])
        self.early = dtorch.DeviceMesh("cpu", [0])
        self.rows = dtorch.ones((SIDE, SIDE), device_mesh=self.mesh, placements=[dtorch.Shard(0)])
        self.few = dtorch.ones((WIDTH, WIDTH), device_mesh=self.late)
        self.squares = {
            mesh: dtorch.rand(WIDTH, WIDTH, device_mesh=mesh) for mesh in (self.mesh, self.late, self.early)
        }

    def chain(self, mesh: dtorch.DeviceMesh, count: int) -> Any:
        """Products, each of the one before."""
        return products(self.squares[mesh], count)

    def move(self) -> Any:
        """The all-to-all."""
        return self.rows.redistribute(placements=[dtorch.Shard(1)])

    def send(self, count: int) -> Any:
        """A small tensor that device 0 gets from device 1 once that has done ``count`` products."""
        x = self.chain(self.late, count) + self.few
        return x.redistribute(self.early, [dtorch.Replicate()])

    def send_and_compute(self, count: int) -> Callable[[], Any]:
        """A small tensor from the late device, and the chain of the other one, as one captured call."""
        target = self.early

        @dtorch.capture
        def step(few: Any, late: Any, early: Any) -> Any:
            sent = (products(late, count) + few).redistribute(target, [dtorch.Replicate()])
            return products(early, count) + sent

        return lambda: step(self.few, self.squares[self.late], self.squares[self.early])

    def seconds(self, run: Callable[[], Any]) -> float:
        """From the first op to the end of the last."""
        start = time.perf_counter()
        kept = run()
        self.rows.graph.sync()
        del kept
        return time.perf_counter() - start


def times(count: int | None) -> tuple[int, dict[str, float]]:
    """Median seconds of each program; ``count`` products, or as many as take the time of the transfer."""
    programs = Programs()
    programs.seconds(programs.move)
    if count is None:
        one = (
            statistics.median(programs.seconds(lambda: programs.chain(programs.mesh, 20)) for _ in range(5))
            / 20
        )
        count = max(1, round(statistics.median(programs.seconds(programs.move) for _ in range(5)) / one))
    runs: dict[str, Callable[[], Any]] = {
        "move": programs.move,
        "compute": lambda: programs.chain(programs.mesh, count),
        "both": lambda: (programs.move(), programs.chain(programs.mesh, count)),
        "late": lambda: programs.send(count),
        "early": lambda: programs.chain(programs.early, count),
        "late and early": lambda: (programs.send(count), programs.chain(programs.early, count)),
        "late and early, captured": programs.send_and_compute(count),
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            taken[name].append(programs.seconds(run))
    return count, {name: statistics.median(found) for name, found in taken.items()}


def main() -> None:
    """Measure and report."""
    count: int | None = None
    found: dict[int, dict[str, float]] = {}
    with torch.no_grad():
        for beside_bytes in (Settings().beside_bytes, 0):
            dtorch.init(
                num_nodes=2, devices_per_node=1, settings=Settings(num_threads=1, beside_bytes=beside_bytes)
            )
            count, found[beside_bytes] = times(count)
            dtorch.shutdown()
    beside, in_order = found.values()
    rows = []
    for figure, parts, both in (
        ("compute while a late peer is waited for", ("late", "early"), "late and early"),
        ("compute and an all-to-all of 64 MiB between agents", ("move", "compute"), "both"),
        ("compute while a late peer is waited for, captured", ("late", "early"), "late and early, captured"),
    ):
        alone = {part: beside[part] * 1e3 for part in parts}
        limit = 1.25 * max(alone.values())
        peers = {
            "in order": in_order[both] * 1e3,
            "the longer alone": max(alone.values()),
            "both in turn": sum(alone.values()),
        }
        rows.append(
            Row(figure, "ms", beside[both] * 1e3, peers, "<= 1.25 the longer", beside[both] * 1e3 <= limit)
        )
    report("overlap", rows)


if __name__ == "__main__":
    main()
