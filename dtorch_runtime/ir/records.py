"""Between wire records and the ir: meshes, placements, layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, ReduceOp, Replicate, Shard
from dtorch_runtime.wire.records import LayoutRecord, MeshRecord, PlacementRecord


def placement_to_record(placement: Placement) -> PlacementRecord:
    """A placement as it crosses a process."""
    match placement:
        case Replicate():
            return PlacementRecord("R")
        case Shard(dim, unit):
            return PlacementRecord("S", dim=dim, unit=unit)
        case Partial(op):
            return PlacementRecord("P", op=op)


def placement_from_record(record: PlacementRecord) -> Placement:
    """The inverse.

    Raises:
        ValueError: the kind is not R, S or P, or a field does not fit it.
    """
    match record.kind:
        case "R":
            return Replicate()
        case "S":
            return Shard(record.dim, record.unit)
        case "P":
            return Partial(cast(ReduceOp, record.op))
    raise ValueError(f"a placement is of kind R, S or P, got {record.kind!r}")


def mesh_to_record(mesh: DeviceMesh, mesh_id: int) -> MeshRecord:
    """A mesh as it crosses a process. Axis names stay with the client."""
    return MeshRecord(mesh_id, mesh.device_type, list(mesh.shape), list(mesh.devices))


def mesh_from_record(record: MeshRecord) -> DeviceMesh:
    """The inverse.

    Raises:
        MeshError: it is not a mesh.
    """
    return DeviceMesh.from_flat(record.device_type, tuple(record.shape), tuple(record.devices))


def layout_to_record(layout: Layout, mesh_id: int) -> LayoutRecord:
    """A layout as it crosses a process."""
    return LayoutRecord(mesh_id, [placement_to_record(p) for p in layout.placements])


def layout_from_record(record: LayoutRecord, meshes: Mapping[int, DeviceMesh]) -> Layout:
    """The inverse.

    Raises:
        KeyError: the mesh was not defined.
        ValueError: a placement is malformed.
    """
    return Layout(meshes[record.mesh_id], tuple(placement_from_record(p) for p in record.placements))
