"""A distributed tensor in five lines. Run: python examples/hello.py"""

from __future__ import annotations

import dtorch

mesh = dtorch.DeviceMesh("cpu", [0, 1])
x = dtorch.rand((4, 3), device_mesh=mesh, placements=[dtorch.Shard(0)])
print(f"{x=}")  # value, shape, mesh and placements

w = dtorch.rand((3, 2), device_mesh=mesh)
y = (x @ w).relu()  # each device computes its own rows
print(f"{y=}")

total = y.sum()  # partial sums, one on each device
print(f"{total.placements=}, {total.item():.3f}")
