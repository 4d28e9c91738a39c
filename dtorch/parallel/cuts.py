"""Modules that say by themselves how their parameters are cut along an axis of a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, cast

from torch import nn

from dtorch_runtime.errors import MeshError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Placements, Replicate, Shard

#: Of a mesh: its name, or its number.
Axis: TypeAlias = "str | int"


class ShardedParameters:
    """A mixin of modules: says how each parameter is cut along ``axis``. ``dtorch.parallelize`` follows it."""

    axis: Axis

    def cuts(self) -> Mapping[str, Placement]:
        """The placement of each parameter on ``axis``; those that are not named are replicated."""
        raise NotImplementedError

    def cuts_by_axis(self) -> Mapping[Axis, Mapping[str, Placement]]:
        """The same for each axis that the module cuts over."""
        return {self.axis: self.cuts()}

    def placements_on(self, mesh: DeviceMesh) -> dict[str, Placements]:
        """The placements of the module's own parameters on a mesh: replicated on the axes that it does not cut over.

        Raises:
            MeshError: ``axis`` is neither a name nor a number.
        """
        names = (name for name, _ in cast(nn.Module, self).named_parameters(recurse=False))
        return cut_along(mesh, self.cuts_by_axis(), names)


def cut_along(
    mesh: DeviceMesh, cuts: Mapping[Axis, Mapping[str, Placement]], names: Iterable[str]
) -> dict[str, Placements]:
    """The placements of the parameters ``names`` on a mesh, replicated on the axes that ``cuts`` does not name.

    Raises:
        MeshError: an axis is neither a name nor a number.
    """
    by_number = {axis_number(mesh, axis): placements for axis, placements in cuts.items()}
    return {
        name: tuple(by_number.get(index, {}).get(name, Replicate()) for index in range(mesh.ndim))
        for name in names
    }


def axis_number(mesh: DeviceMesh, axis: Axis) -> int | None:
    """The number of an axis of a mesh; None when the mesh has no such axis.

    Raises:
        MeshError: it is neither a name nor a number.
    """
    if isinstance(axis, bool) or not isinstance(axis, str | int):
        raise MeshError(
            f"axis= takes the name or the number of an axis of a mesh, got {axis!r}; write axis='tp'"
        )
    if isinstance(axis, str):
        return mesh.axis(axis) if mesh.has_axis(axis) else None
    return axis if 0 <= axis < mesh.ndim else None


def piece_placements(shape: Sequence[int], layout: Layout, axis: Axis) -> Placements | None:
    """The placements that cut a tensor of global ``shape`` on the axis, by the dim whose largest piece is smallest.

    None where it stays as it is: on one device, when it is not replicated there, or every dim is cut already.
    """
    number = axis_number(layout.mesh, axis)
    assert number is not None, "asked for tensors that have the axis"
    size = layout.mesh.shape[number]
    if size == 1 or layout.placements[number] != Replicate():
        return None
    taken = {p.dim for p in layout.placements if isinstance(p, Shard)}
    free = [dim for dim in range(len(shape)) if dim not in taken and shape[dim] > 1]
    if not free:
        return None

    def waste(dim: int) -> float:
        return -(-shape[dim] // size) / shape[dim]

    dim = min(free, key=waste)  # of equals the first: its pieces lie in one row in memory
    return tuple(Shard(dim) if index == number else p for index, p in enumerate(layout.placements))
