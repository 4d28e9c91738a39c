"""What layouts mean, written down a second time without plans and boxes: taken apart and put together axis by axis.

The first axis of a mesh is the outermost. Values are small integers, so that sums in any order are exact in any dtype.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from hypothesis import strategies as st

from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import REDUCE_OPS, Partial, Placement, Replicate, Shard, split

Array: TypeAlias = np.ndarray[Any, Any]

_REDUCE: dict[str, Callable[[Array], Any]] = {
    "sum": lambda terms: terms.sum(0) if terms.dtype != bool else terms.any(0),
    "avg": lambda terms: terms.sum(0) / len(terms) if terms.dtype.kind == "f" else terms.sum(0) // len(terms),
    "max": lambda terms: terms.max(0),
    "min": lambda terms: terms.min(0),
    "prod": lambda terms: terms.prod(0) if terms.dtype != bool else terms.all(0),
}


def take_apart(value: Array, layout: Layout, rng: random.Random) -> dict[int, Array]:
    """The local piece of each device, with random terms where the layout is partial. Replicas are equal."""

    def descend(part: Array, axis: int) -> dict[tuple[int, ...], Array]:
        if axis == layout.mesh.ndim:
            return {(): part}
        placement, num_ranks = layout.placements[axis], layout.mesh.shape[axis]
        if isinstance(placement, Replicate):
            same = descend(part, axis + 1)
            return {(rank, *rest): piece for rank in range(num_ranks) for rest, piece in same.items()}
        children = [descend(child, axis + 1) for child in _children(part, placement, num_ranks, rng)]
        return {(rank, *rest): piece for rank, child in enumerate(children) for rest, piece in child.items()}

    return {_device(layout.mesh, at): piece.copy() for at, piece in descend(value, 0).items()}


def put_together(pieces: Mapping[int, Array], layout: Layout) -> Array:
    """The global value that local pieces stand for. Replicas must be equal."""

    def ascend(coordinate: tuple[int, ...]) -> Array:
        axis = len(coordinate)
        if axis == layout.mesh.ndim:
            return pieces[_device(layout.mesh, coordinate)]
        children = [ascend((*coordinate, rank)) for rank in range(layout.mesh.shape[axis])]
        match layout.placements[axis]:
            case Replicate():
                for child in children[1:]:
                    np.testing.assert_array_equal(child, children[0])
                return children[0]
            case Shard(dim):
                return np.concatenate(children, dim)
            case Partial(op):
                return _REDUCE[op](np.stack(children))

    return ascend(())


def _children(part: Array, placement: Shard | Partial, num_ranks: int, rng: random.Random) -> list[Array]:
    match placement:
        case Shard(dim, unit):
            cuts = split(part.shape[dim], num_ranks, unit)
            return [part.take(range(start, stop), dim) for start, stop in cuts]
        case Partial(op):
            return _terms(part, op, num_ranks, rng)


def _terms(part: Array, op: str, num_ranks: int, rng: random.Random) -> list[Array]:
    """Terms whose reduction is ``part``."""
    noise = np.random.default_rng(rng.randrange(2**32))
    keeper = rng.randrange(num_ranks)
    if part.dtype == bool:
        other = {"sum": np.zeros_like(part), "max": np.zeros_like(part)}.get(op, np.ones_like(part))
        return [part if rank == keeper else other for rank in range(num_ranks)]
    offsets = [noise.integers(0, 3, part.shape).astype(part.dtype) for _ in range(num_ranks)]
    total = sum(offsets) - offsets[keeper]
    terms = []
    for rank, offset in enumerate(offsets):
        is_keeper = rank == keeper
        match op:
            case "sum":
                term = part - total if is_keeper else offset
            case "avg":
                term = part - total if is_keeper else part + offset
            case "max":
                term = part if is_keeper else part - offset
            case "min":
                term = part if is_keeper else part + offset
            case _:
                term = part if is_keeper else np.ones_like(part)
        terms.append(np.asarray(term, part.dtype))
    return terms


def _device(mesh: DeviceMesh, coordinate: tuple[int, ...]) -> int:
    return mesh.devices[int(np.ravel_multi_index(coordinate, mesh.shape))]


# ------------------------------------------------------------------------------------ hypothesis strategies

_MESH_SHAPES = ((1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 1))


def shapes(max_ndim: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors: 0-dim, empty, and with fewer rows than ranks among them."""
    return st.lists(st.integers(0, 7), max_size=max_ndim).map(tuple)


@st.composite
def meshes(draw: st.DrawFn, num_devices: int = 12) -> DeviceMesh:
    """Meshes of one or two axes, their devices in any order."""
    shape = draw(st.sampled_from(_MESH_SHAPES))
    size = int(np.prod(shape))
    devices = draw(st.permutations(range(num_devices)))[:size]
    return DeviceMesh.from_flat("cpu", shape, devices)


def placements_for(ndim: int, ops: tuple[str, ...] = REDUCE_OPS) -> st.SearchStrategy[Placement]:
    """Placements of one axis for a tensor of ``ndim`` dims."""
    kinds: list[st.SearchStrategy[Placement]] = [st.just(Replicate())]
    if ops:
        kinds.append(st.sampled_from(ops).map(Partial))
    if ndim:
        kinds.append(st.builds(Shard, st.integers(0, ndim - 1), st.integers(1, 3)))
    return st.one_of(kinds)


@st.composite
def layout_pairs(draw: st.DrawFn, ndim: int, ops: tuple[str, ...] = REDUCE_OPS) -> tuple[Layout, Layout]:
    """A source and a target: on the same mesh, on overlapping meshes, or on disjoint ones."""
    source_mesh = draw(meshes())
    target_mesh = source_mesh if draw(st.booleans()) else draw(meshes())
    one = placements_for(ndim, ops)
    source = tuple(draw(one) for _ in source_mesh.shape)
    target = tuple(draw(one) for _ in target_mesh.shape)
    return Layout(source_mesh, source), Layout(target_mesh, target)


def numbers(shape: tuple[int, ...], rng: random.Random) -> Array:
    """Small integers."""
    return np.random.default_rng(rng.randrange(2**32)).integers(-4, 5, shape)


def all_pairs(mesh: DeviceMesh, choices: tuple[Placement, ...]) -> list[tuple[Layout, Layout]]:
    """Every pair of layouts on a mesh whose axes have these placements."""
    every = [Layout(mesh, tuple(p)) for p in itertools.product(choices, repeat=mesh.ndim)]
    return list(itertools.product(every, every))
