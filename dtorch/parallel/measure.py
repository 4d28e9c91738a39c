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
from dtorch.tensors import Tensor
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate

#: A matrix is made larger until so many products of it take so long, or it has that many rows.
_NUM_PRODUCTS: Final = 4
_LONG_ENOUGH_S: Final = 0.01
_MAX_ROWS: Final = 8192
#: float32 numbers of what is reduced, and how often: latency is seen in the first, bandwidth in the second.
_REDUCED: Final = ((256, 16), (512 * 1024, 4))
_NUM_REPEATS: Final = 3
_ITEMSIZE_BYTES: Final = 4

_rates: WeakKeyDictionary[Session, dict[DeviceMesh, float]] = WeakKeyDictionary()
_links: WeakKeyDictionary[Session, dict[tuple[DeviceMesh, str], LinkCosts]] = WeakKeyDictionary()


def measure(mesh: DeviceMesh, axes: Sequence[str]) -> ClusterCosts:
    """The rate of float32 products while all devices of the mesh work, and the links along these axes.

    The first call for a mesh waits for what was issued before, and takes about a second.

    Raises:
        MeshError: the cluster does not have the devices.
    """
    graph = Graph.default_graph()
    rates, links = _rates.setdefault(graph.session, {}), _links.setdefault(graph.session, {})
    with torch.no_grad(), graph.device_mesh_guard(mesh):
        if mesh not in rates:
            rates[mesh] = _flops_per_s(graph, mesh)
        for axis in axes:
            if (mesh, axis) not in links:
                links[mesh, axis] = _link(graph, mesh, axis)
    return ClusterCosts(flops_per_s=rates[mesh], links={axis: links[mesh, axis] for axis in axes})


def _seconds(graph: Graph, call: Callable[[Tensor], Tensor], x: Tensor, count: int) -> float:
    """Of one call, in a row of calls that each need what the one before made. Issuing one and the wait are left out."""

    def run(num_calls: int) -> float:
        graph.sync()
        start = time.perf_counter()
        made = x
        for _ in range(num_calls):
            made = call(made)
        graph.sync()
        return time.perf_counter() - start

    run(1)  # what only a first call does
    one, all_of_them = (min(run(n) for _ in range(_NUM_REPEATS)) for n in (1, 1 + count))
    return max(all_of_them - one, 1e-9) / count


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
