"""Numbers for meshes: one for each different mesh of this process, the same in every session."""

from __future__ import annotations

import threading

from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.records import layout_to_record
from dtorch_runtime.wire.records import LayoutRecord

_ids: dict[DeviceMesh, int] = {}
_lock = threading.Lock()
_meshes: list[DeviceMesh] = []


def mesh_id(mesh: DeviceMesh) -> int:
    """The number of a mesh, given on first use."""
    found = _ids.get(mesh)
    if found is None:
        with _lock:
            found = _ids.get(mesh)
            if found is None:
                _meshes.append(mesh)
                found = _ids[mesh] = len(_meshes)
    return found


def mesh_of(number: int) -> DeviceMesh:
    """The mesh with a number that ``mesh_id`` gave."""
    return _meshes[number - 1]


def layout_record(layout: Layout) -> LayoutRecord:
    """A layout as it crosses a process, its mesh by number."""
    return layout_to_record(layout, mesh_id(layout.mesh))
