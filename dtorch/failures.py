"""From what the cluster reports to the errors that a user sees."""

from __future__ import annotations

from collections.abc import Mapping

from dtorch.location import describe
from dtorch_runtime.errors import (
    DTorchError,
    InternalError,
    MeshError,
    NodeLost,
    RemoteFailure,
    RemoteOpError,
)
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.wire.records import FailureRecord, NodeRecord


def error_of(failure: FailureRecord) -> DTorchError:
    """The error for a failure that arrived from the cluster."""
    if failure.kind == "node":
        return NodeLost(failure.node, failure.message)
    if failure.kind == "op":
        remote = RemoteFailure(
            op=failure.op,
            device=failure.device,
            node=failure.node,
            error_type=failure.error_type,
            message=failure.message,
            traceback=failure.traceback,
        )
        return RemoteOpError(remote, describe(failure.location_id))
    return InternalError(f"{failure.op} on device {failure.device}: {failure.message}\n{failure.traceback}")


def check_devices(
    mesh: DeviceMesh, nodes: Mapping[str, NodeRecord], lost: Mapping[int, FailureRecord], address: str
) -> None:
    """Check a mesh against the nodes that are there, and the devices that were lost.

    Raises:
        MeshError: the cluster has no such device, or it is of another type.
        NodeLost: the device was there and is gone.
    """
    types = {device: node.device_type for node in nodes.values() for device in node.devices}
    for device in mesh.devices:
        if device in lost:
            raise error_of(lost[device])
        if device not in types:
            raise MeshError(
                f"{mesh!r} names device {device}; the cluster at {address} has the devices {_ranges(types)}. "
                f"Write those, or start more: dtorch.init(devices_per_node=...) or dtorch-launch"
            )
        if types[device] != mesh.device_type:
            raise MeshError(
                f"{mesh!r} names device {device}, which is a {types[device]!r} device; "
                f"write DeviceMesh({types[device]!r}, ...)"
            )


def _ranges(devices: Mapping[int, str]) -> str:
    """``0 to 3, 8 to 11``."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][-1] + 1:
            runs[-1][1:] = [device]
        else:
            runs.append([device])
    return ", ".join(" to ".join(map(str, run)) for run in runs) or "(none: no node has joined)"
