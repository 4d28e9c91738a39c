"""``Layout`` = mesh x placements, and the boxes of the global tensor that each device holds under it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Placements, Replicate, Shard, split

#: Half-open (start, stop) for each dim, in the coordinates of the tensor that the context names.
Box: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a tensor lives: one placement for each axis of a mesh. Dims of shards are not negative."""

    mesh: DeviceMesh
    placements: Placements

    @property
    def is_partial(self) -> bool:
        """Whether any axis holds partial terms."""
        return any(isinstance(p, Partial) for p in self.placements)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole tensor."""
        return all(isinstance(p, Replicate) for p in self.placements)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.placements))}]"


def resolve_placements(placements: Sequence[Placement] | None, mesh: DeviceMesh, ndim: int) -> Placements:
    """Check placements that a user gave against a mesh and a tensor of ``ndim`` dims.

    ``None`` means Replicate on every axis. Negative dims are resolved.

    Raises:
        PlacementError: not one placement for each axis, not placements at all, or a dim out of range.
    """
    if placements is None:
        return (Replicate(),) * mesh.ndim
    if isinstance(placements, Replicate | Shard | Partial):
        raise PlacementError(f"placements takes a list, one for each mesh axis; write [{placements!r}]")
    if not isinstance(placements, list | tuple):
        raise PlacementError(
            f"placements takes a list with one of Replicate(), Shard(dim), Partial(op) for each mesh axis, got "
            f"{_named(placements)}; write e.g. {_example(placements)}, or by name "
            f"x.redistribute_by_dict({{'tp': Shard(0)}})"
        )
    result = tuple(placements)
    for placement in result:
        if not isinstance(placement, Replicate | Shard | Partial):
            write = "it with parentheses" if isinstance(placement, type) else f"e.g. {_example(placement)}"
            raise PlacementError(
                f"placements takes Replicate(), Shard(dim) or Partial(op), got {_named(placement)}; write {write}"
            )
    if len(result) != mesh.ndim:
        raise PlacementError(
            f"placements has {len(result)} entries for a mesh with {mesh.ndim} axes "
            f"(shape {mesh.shape}, names {mesh.mesh_dim_names}); write one for each axis"
        )
    return tuple(_resolve_dim(placement, ndim) for placement in result)


def _is_of_torch(given: object) -> bool:
    return type(given).__module__.startswith("torch.")


def _named(given: object) -> str:
    """What somebody gave, with its module where its name could be taken for one of ours."""
    return f"{given!r} of {type(given).__module__}" if _is_of_torch(given) else repr(given)


def _example(given: object) -> str:
    return "[dtorch.Shard(0)]" if _is_of_torch(given) else "[Shard(0)]"


def _resolve_dim(placement: Placement, ndim: int) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    if not -ndim <= placement.dim < ndim:
        allowed = f"a dim from {-ndim} to {ndim - 1}" if ndim else "only Replicate() or Partial()"
        raise PlacementError(f"{placement!r} does not fit a tensor of {ndim} dims; write {allowed}")
    return placement if placement.dim >= 0 else Shard(placement.dim + ndim, placement.unit)


def local_box(shape: Sequence[int], layout: Layout, coordinate: Sequence[int]) -> Box:
    """The box of the global tensor that the device at ``coordinate`` holds.

    Axes that cut the same dim nest: the first axis cuts the dim, the next one cuts the piece.
    """
    box = [(0, size) for size in shape]
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Shard):
            start, stop = box[placement.dim]
            low, high = split(stop - start, layout.mesh.shape[axis], placement.unit)[coordinate[axis]]
            box[placement.dim] = (start + low, start + high)
    return tuple(box)


def all_boxes(shape: Sequence[int], layout: Layout) -> list[Box]:
    """The box of the global tensor that each device holds, in the order of ``layout.mesh.devices``."""
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for size, placement in zip(layout.mesh.shape, layout.placements, strict=True):
        if not isinstance(placement, Shard):
            boxes = [box for box in boxes for _ in range(size)]
            continue
        dim, unit = placement.dim, placement.unit
        boxes = [
            (*box[:dim], (box[dim][0] + low, box[dim][0] + high), *box[dim + 1 :])
            for box in boxes
            for low, high in split(box[dim][1] - box[dim][0], size, unit)
        ]
    return boxes


def device_box(shape: Sequence[int], layout: Layout, device: int) -> Box:
    """The box of the global tensor that ``device`` holds. The device must be in the mesh."""
    coordinate = layout.mesh.coordinate(device)
    assert coordinate is not None, f"device {device} is not in {layout.mesh}"
    return local_box(shape, layout, coordinate)


def box_shape(box: Box) -> tuple[int, ...]:
    """The size of a box in each dim."""
    return tuple(stop - start for start, stop in box)


def local_shape(shape: Sequence[int], layout: Layout, device: int) -> tuple[int, ...]:
    """The shape of the piece that ``device`` holds."""
    return box_shape(device_box(shape, layout, device))


def num_elements(shape: Sequence[int]) -> int:
    """The number of elements of a shape."""
    return math.prod(shape)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes in the same coordinates, or None when it is empty."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def relative(box: Box, origin: Box) -> Box:
    """A box in coordinates that start at the corner of ``origin``."""
    return tuple((start - low, stop - low) for (start, stop), (low, _) in zip(box, origin, strict=True))
