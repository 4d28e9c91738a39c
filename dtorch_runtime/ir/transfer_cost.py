"""What a redistribution costs, without its plan: cheap enough to compare many targets on the way of one op."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from dtorch_runtime.ir.layout import Box, Layout, all_boxes
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard, split


@lru_cache(maxsize=1 << 16)
def transfer_bytes(shape: tuple[int, ...], itemsize_bytes: int, source: Layout, target: Layout) -> int:
    """Bytes that the busiest device receives when a tensor of global ``shape`` goes from ``source`` to ``target``.

    Devices receive at the same time, so the busiest one predicts the time better than the sum over all does. 0 says
    that nothing moves. Exact where no terms are reduced; else the cheaper of reducing at once and of
    reduce-scatter then all-gather, for pieces of equal size.
    """
    if source.mesh.ndim == 1 and source.mesh == target.mesh:
        return max(cheapest for cheapest, _ in _received(shape, source, target)) * itemsize_bytes
    num_terms = _num_reduced_terms(source, target)
    goal = _without_new_partial(source, target)
    held = _boxes_by_device(shape, source)
    most = 0
    for device, wanted in _boxes_by_device(shape, goal).items():
        own = held.get(device)
        wanted_size = _size(wanted)
        common = 0 if own is None else _common_size(own, wanted)
        if num_terms == 1:
            most = max(most, wanted_size - common)
        else:
            own_size = max(map(_size, held.values())) if own is None else _size(own)
            at_once = num_terms * wanted_size - common
            scattered = (num_terms - 1) * own_size // num_terms
            in_two_steps = scattered + wanted_size - common // num_terms
            most = max(most, min(at_once, in_two_steps))
    return most * itemsize_bytes


def moves_nothing(shape: tuple[int, ...], source: Layout, target: Layout) -> bool:
    """Whether each device has afterwards what it had before: the same piece, and the same term of it.

    So it is where only axes of one device change, and between meshes of the same devices.
    """
    old, new = _longer_axes(source), _longer_axes(target)
    is_partial = source.is_partial or target.is_partial
    if is_partial and (source.mesh.devices, *map(_terms_of, old)) != (
        target.mesh.devices,
        *map(_terms_of, new),
    ):
        return False
    return _boxes_by_device(shape, source) == _boxes_by_device(shape, target)


def bytes_at_once(shape: tuple[int, ...], itemsize_bytes: int, source: Layout, target: Layout) -> int | None:
    """Bytes that all devices together receive in one exchange, which is how small tensors go.

    None where that takes a plan: for meshes of several axes, for two meshes, and for terms that are made.
    """
    if source.mesh.ndim != 1 or source.mesh != target.mesh or target.is_partial:
        return None
    return sum(at_once for _, at_once in _received(shape, source, target)) * itemsize_bytes


def _longer_axes(layout: Layout) -> list[tuple[int, Placement]]:
    """The axes with more than one device: how many, and the placement."""
    return [
        (size, placement)
        for size, placement in zip(layout.mesh.shape, layout.placements, strict=True)
        if size > 1
    ]


def _terms_of(axis: tuple[int, Placement]) -> tuple[int, str | None]:
    size, placement = axis
    return size, placement.op if isinstance(placement, Partial) else None


def _received(shape: tuple[int, ...], source: Layout, target: Layout) -> list[tuple[int, int]]:
    """Elements that each device of a mesh with one axis receives: in the cheaper way, and in one exchange."""
    old, new, num_devices = source.placements[0], target.placements[0], source.mesh.shape[0]
    if isinstance(new, Partial):
        if old == new or (not isinstance(old, Partial) and new.op != "avg"):
            return [(0, 0)]  # what a device holds is its term
        new = Replicate()
    if isinstance(old, Replicate) or old == new:
        return [(0, 0)]
    size = math.prod(shape)
    if isinstance(old, Partial):
        scattered = (num_devices - 1) * size // num_devices
        pieces = [size] if isinstance(new, Replicate) else _piece_sizes(shape, new, num_devices)
        ways = [((num_devices - 1) * n, scattered + n - n // num_devices) for n in pieces]
        received = [(min(at_once, in_two_steps), at_once) for at_once, in_two_steps in ways]
        return received * num_devices if isinstance(new, Replicate) else received
    if isinstance(new, Replicate):
        lacking = [size - own for own in _piece_sizes(shape, old, num_devices)]
    else:
        lacking = _lacking(shape, old, new, num_devices)
    return [(n, n) for n in lacking]


def _lacking(shape: tuple[int, ...], old: Shard, new: Shard, num_devices: int) -> list[int]:
    """Elements of each device's new piece that are not in its old one."""
    have, want = _cuts(shape, old, num_devices), _cuts(shape, new, num_devices)
    pairs = zip(have, want, strict=True)
    if old.dim == new.dim:
        row = math.prod(shape[: new.dim] + shape[new.dim + 1 :])
        return [row * (d - c - max(0, min(b, d) - max(a, c))) for (a, b), (c, d) in pairs]
    first, second = sorted((old.dim, new.dim))
    row = math.prod(shape[:first] + shape[first + 1 : second] + shape[second + 1 :])
    return [row * (d - c) * (shape[old.dim] - (b - a)) for (a, b), (c, d) in pairs]


def _piece_sizes(shape: tuple[int, ...], cut: Shard, num_devices: int) -> list[int]:
    row = math.prod(shape[: cut.dim] + shape[cut.dim + 1 :])
    return [row * (stop - start) for start, stop in _cuts(shape, cut, num_devices)]


def _cuts(shape: tuple[int, ...], cut: Shard, num_devices: int) -> list[tuple[int, int]]:
    return split(shape[cut.dim], num_devices, cut.unit)


@lru_cache(maxsize=1 << 12)
def _boxes_by_device(shape: tuple[int, ...], layout: Layout) -> dict[int, Box]:
    return dict(zip(layout.mesh.devices, all_boxes(shape, layout), strict=True))


def _num_reduced_terms(source: Layout, target: Layout) -> int:
    """How many terms become one."""
    num_source, num_target = _num_terms(source), _num_terms(target)
    if _partial_ops(source) == _partial_ops(target):
        return max(1, num_source // num_target)
    return num_source


def _num_terms(layout: Layout) -> int:
    pairs = zip(layout.mesh.shape, layout.placements, strict=True)
    return math.prod(size for size, p in pairs if isinstance(p, Partial))


def _partial_ops(layout: Layout) -> frozenset[str]:
    return frozenset(p.op for p in layout.placements if isinstance(p, Partial))


def _without_new_partial(source: Layout, target: Layout) -> Layout:
    """The target with new partial axes as the source has them: a device that holds a piece gives it as its term."""
    same_mesh = source.mesh == target.mesh
    olds: Iterable[Placement] = source.placements if same_mesh else (Replicate(),) * target.mesh.ndim

    def goal(old: Placement, new: Placement) -> Placement:
        if not isinstance(new, Partial):
            return new
        return Replicate() if new.op == "avg" or isinstance(old, Partial) else old

    pairs = zip(olds, target.placements, strict=True)
    return Layout(target.mesh, tuple(goal(old, new) for old, new in pairs))


def _size(box: Box) -> int:
    size = 1
    for start, stop in box:
        size *= stop - start
    return size


def _common_size(a: Box, b: Box) -> int:
    size = 1
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        size *= max(0, min(a_stop, b_stop) - max(a_start, b_start))
    return size
