"""From ``kill -9`` of a node agent to the exception at the await. Run: ``python -m benchmarks.failure``."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import dtorch
from benchmarks.harness import Row, report

REPEATS = 3


async def seconds_to_exception() -> float:
    """Kill the agent that holds a value while the value is awaited behind long work."""
    cluster = dtorch.init(num_nodes=2, devices_per_node=1)
    try:
        mesh = dtorch.DeviceMesh("cpu", [1])
        victim = next(node for node in cluster.nodes if 1 in node.devices)
        x = dtorch.rand((1500, 1500), device_mesh=mesh)
        for _ in range(400):
            x = x @ x
        future = x.value()
        await asyncio.sleep(0.2)
        start = time.perf_counter()
        os.kill(victim.pid, signal.SIGKILL)
        try:
            await future
        except dtorch.NodeLost:
            return time.perf_counter() - start
        raise RuntimeError("the value came although its node was killed")
    finally:
        dtorch.shutdown()


def main() -> None:
    """Measure and report."""
    worst_s = max(asyncio.run(seconds_to_exception()) for _ in range(REPEATS))
    report("failure", [Row("agent killed to exception, worst", "s", worst_s, {}, "<= 5", worst_s <= 5)])


if __name__ == "__main__":
    main()
