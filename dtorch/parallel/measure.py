"""What devices and links of a cluster can do, measured once in a session for each mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, cast
from weakref import WeakKeyDictionary

import torch

from dtorch.connection import Session
from dtorch.factory import zeros
from dtorch.graph import Graph
from dtorch.parallel.costs import ClusterCosts, LinkCosts
from dtorch.parallel.exchanges import moved_bytes
from dtorch.replay.capture import capture
from dtorch.tensors import Tensor
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate

#: A matrix is made larger until so many products of it take so long, or it has that many rows.
_NUM_PRODUCTS: Final = 4
_LONG_ENOUGH_S: Final = 0.01
_MAX_ROWS: Final = 8192
#: float32 numbers of what is read and written in a row of calls.
_ACCESSED: Final = (256 * 1024, 16)
#: float32 numbers of what is reduced, and how often: latency is seen in the first, bandwidth in the second.
_REDUCED: Final = ((256, 16), (512 * 1024, 4))
#: Repeats are at least so many, and last at least so long: of short rows, some find the machine to themselves.
_NUM_REPEATS: Final = 5
_REPEATED_S: Final = 0.1
#: Runs that are recorded, or do what only first ones do.
_NUM_FIRST: Final = 2
_ITEMSIZE_BYTES: Final = 4

#: By devices: their rate is no other one along other axes, and two measured at different times would differ by noise.
_rates: WeakKeyDictionary[Session, dict[frozenset[int], tuple[float, float]]] = WeakKeyDictionary()
_links: WeakKeyDictionary[Session, dict[tuple[DeviceMesh, str], LinkCosts]] = WeakKeyDictionary()


def measure(mesh: DeviceMesh, axes: Sequence[str]) -> ClusterCosts:
    """The rates of float32 products and of memory while all devices of the mesh work, and the links along these axes.

    The first call for a mesh waits for what was issued before, and takes about a second.

    Raises:
        MeshError: the cluster does not have the devices.
    """
    graph = Graph.default_graph()
    rates, links = _rates.setdefault(graph.session, {}), _links.setdefault(graph.session, {})
    devices = frozenset(mesh.devices)
    with torch.no_grad(), graph.device_mesh_guard(mesh):
        if devices not in rates:
            rates[devices] = _flops_per_s(graph, mesh), _memory_bytes_per_s(graph, mesh)
        for axis in axes:
            if (mesh, axis) not in links:
                links[mesh, axis] = _link(graph, mesh, axis)
    flops_per_s, memory_bytes_per_s = rates[devices]
    return ClusterCosts(
        flops_per_s=flops_per_s,
        links={axis: links[mesh, axis] for axis in axes},
        memory_bytes_per_s=memory_bytes_per_s,
    )


def _seconds(graph: Graph, call: Callable[[Tensor], Tensor], x: Tensor, count: int) -> float:
    """Of one call on the devices, in a row of calls that each need what the one before made.

    The row is a captured call: issuing its ops one by one takes this process longer than the devices need for small
    ones, and would be seen instead. Sending the row and the wait are left out, as what a row of one takes.
    """

    def row(num_calls: int) -> Callable[[Tensor], Tensor]:
        def calls(made: Tensor) -> Tensor:
            for _ in range(num_calls):
                made = call(made)
            return made

        return capture(calls)

    def run(calls: Callable[[Tensor], Tensor]) -> float:
        graph.sync()
        start = time.perf_counter()
        calls(x)
        graph.sync()
        return time.perf_counter() - start

    one, all_of_them = row(1), row(1 + count)
    for _ in range(_NUM_FIRST):
        run(one)
        run(all_of_them)
    times: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(times) < _NUM_REPEATS or time.perf_counter() - start < _REPEATED_S:
        times.append((run(one), run(all_of_them)))
    return time_of_one(min(short for short, _ in times), min(long for _, long in times), count)


def time_of_one(one_s: float, all_s: float, count: int) -> float:
    """Of a call, by the seconds of a row of one and of a row of ``count`` more; what noise hides is not nothing."""
    return (all_s - one_s) / count if all_s > one_s else all_s / (1 + count)


def _square(x: Tensor) -> Tensor:
    return cast(Tensor, x @ x)


def _flops_per_s(graph: Graph, mesh: DeviceMesh) -> float:
    rows = 256
    while True:
        matrix = zeros(
            rows, rows, dtype=torch.float32, device_mesh=mesh, placements=[Replicate()] * mesh.ndim
        )
        seconds = _seconds(graph, _square, matrix, _NUM_PRODUCTS)
        if seconds * _NUM_PRODUCTS >= _LONG_ENOUGH_S or rows >= _MAX_ROWS:
            return 2.0 * rows**3 / seconds
        rows *= 2


def _memory_bytes_per_s(graph: Graph, mesh: DeviceMesh) -> float:
    num_elements, count = _ACCESSED
    x = zeros(num_elements, dtype=torch.float32, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
    return 2.0 * num_elements * _ITEMSIZE_BYTES / _seconds(graph, _increase, x, count)


def _increase(x: Tensor) -> Tensor:
    return cast(Tensor, x + 1.0)


def _link(graph: Graph, mesh: DeviceMesh, axis: str) -> LinkCosts:
    def placements(on_axis: Placement) -> list[Placement]:
        return [on_axis if name == axis else Replicate() for name in mesh.mesh_dim_names or ()]

    whole, terms = placements(Replicate()), placements(Partial("sum"))

    def reduce(x: Tensor) -> Tensor:
        return x.redistribute(placements=terms).redistribute(placements=whole)

    points = []
    for num_elements, count in _REDUCED:
        x = zeros(num_elements, dtype=torch.float32, device_mesh=mesh, placements=whole)
        ends = Layout(mesh, tuple(terms)), Layout(mesh, tuple(whole))
        points.append(
            (moved_bytes((num_elements,), _ITEMSIZE_BYTES, *ends), _seconds(graph, reduce, x, count))
        )
    return line_through(*points)


def line_through(small: tuple[float, float], large: tuple[float, float]) -> LinkCosts:
    """Latency and bandwidth of two measured (bytes, seconds): the line through them, which is never below 0."""
    (few, short), (many, long) = small, large
    slope = (long - short) / (many - few)
    latency = short - slope * few
    if slope <= 0 or latency < 0:  # noise is larger than what was to be seen
        return LinkCosts(latency_s=0.0 if latency < 0 else short, bytes_per_s=many / long)
    return LinkCosts(latency_s=latency, bytes_per_s=1 / slope)
