"""Numbers for meshes: one for each different mesh of this process, the same in every session."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from dtorch_runtime.errors import MeshError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.records import layout_to_record
from dtorch_runtime.wire.records import LayoutRecord, NodeRecord

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


def node_of_devices(nodes: Iterable[NodeRecord]) -> dict[int, str]:
    """The name of the node of each device."""
    return {device: node.name for node in nodes for device in node.devices}


def layout_record(layout: Layout) -> LayoutRecord:
    """A layout as it crosses a process, its mesh by number."""
    return layout_to_record(layout, mesh_id(layout.mesh))


def check_index(device: object) -> None:
    """Refuse ``"dtorch:5"``: the device is the whole cluster. Index 0 is what torch itself shows.

    Args:
        device: a ``torch.device``, an index, or None.

    Raises:
        MeshError: another device of type dtorch than 0.
    """
    if device is None or getattr(device, "type", "dtorch") != "dtorch":
        return
    index = device if isinstance(device, int) else getattr(device, "index", None)
    if isinstance(index, int) and index > 0:
        raise MeshError(
            f"got device='dtorch:{index}': 'dtorch' is one device, the whole cluster, and an index has no meaning. "
            f"Write 'dtorch', and a mesh for where a tensor lives: dtorch.DeviceMesh('cpu', [{index}]) as device_mesh= "
            f"of dtorch.zeros() and its like, of dtorch.from_torch(t) or of x.redistribute()"
        )
