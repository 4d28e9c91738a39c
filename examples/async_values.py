"""Hundreds of awaits in flight, and an event loop that stays responsive. Run: python examples/async_values.py"""

from __future__ import annotations

import asyncio
import time

import dtorch

NUM_VALUES = 300
TICK_S = 0.001


async def measure_pauses(pauses_s: list[float]) -> None:
    """Note how late the loop wakes this task up, until it is cancelled."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(TICK_S)
        pauses_s.append(time.perf_counter() - start - TICK_S)


async def trace_of_power(x: dtorch.Tensor, exponent: int) -> float:
    """A product that takes the devices a while; the wait for it is an await like any other."""
    y = x
    for _ in range(exponent - 1):
        y = y @ x
    return (await y.trace().value()).item()


async def main() -> None:
    """Issue the products all at once, take the results as they come."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = dtorch.full((256, 256), 1 / 256, device_mesh=mesh)
    await trace_of_power(x, 2)  # the cluster is up, the kernels are known

    pauses_s: list[float] = []
    ticker = asyncio.create_task(measure_pauses(pauses_s))
    start = time.perf_counter()
    pending = []
    for k in range(NUM_VALUES):
        pending.append(asyncio.create_task(trace_of_power(x, 1 + k % 7)))
        await asyncio.sleep(0)  # to issue is work of this thread too: let others run in between
    issued_s = time.perf_counter() - start
    num_right = 0
    for result in asyncio.as_completed(pending):
        num_right += abs(await result - 1) < 1e-3
    ticker.cancel()
    print(f"issued in {issued_s:.2f} s, all there after {time.perf_counter() - start:.2f} s")
    print(f"{num_right} of {NUM_VALUES} values are right")
    print(f"longest pause of the event loop meanwhile: {max(pauses_s) * 1e3:.1f} ms")


asyncio.run(main())
