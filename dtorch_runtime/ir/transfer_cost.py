"""What a redistribution costs, without its plan: cheap enough to compare many targets on the way of one op."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from dtorch_runtime.ir.layout import Box, Layout, all_boxes
from dtorch_runtime.ir.placement import Partial, Placement, Replicate


@lru_cache(maxsize=1 << 16)
def transfer_bytes(shape: tuple[int, ...], itemsize_bytes: int, source: Layout, target: Layout) -> int:
    """Bytes that the busiest device receives when a tensor of global ``shape`` goes from ``source`` to ``target``.

    Devices receive at the same time, so the busiest one predicts the time better than the sum over all does. 0 says
    that nothing moves. Exact where no terms are reduced; else the cheaper of reducing at once and of
    reduce-scatter then all-gather, for pieces of equal size.
    """
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
