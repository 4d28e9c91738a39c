"""From what the cluster reports to the errors that a user sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from dtorch.location import UNKNOWN, describe
from dtorch.memory import handles_of, named_value, shortage_text
from dtorch_runtime.errors import (
    DTorchError,
    InternalError,
    MeshError,
    NodeLost,
    RemoteFailure,
    RemoteOpError,
)
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.wire.records import FailureRecord, NodeRecord, ShortageRecord

if TYPE_CHECKING:  # a session makes errors of failures
    from dtorch.connection import Session

#: Failures that are remembered with the names of their values: each arrives once for each value that depends on it.
_MAX_KNOWN = 64
_known: WeakKeyDictionary[Session, dict[str, FailureRecord]] = WeakKeyDictionary()


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
            message=failure.message + _other_place(failure) + _shortage(failure),
            traceback=failure.traceback,
        )
        return RemoteOpError(remote, describe(failure.location_id))
    return InternalError(f"{failure.op} on device {failure.device}: {failure.message}\n{failure.traceback}")


def named(event: Any, session: Session) -> Any:
    """What arrived from the cluster; a failure for want of memory with the names of values that only this side knows.

    They are looked up at once, because the program may drop its tensors before it sees the error.
    """
    failure: FailureRecord | None = getattr(event, "failure", None)
    if failure is None or failure.shortage is None:
        return event
    known = _known.setdefault(session, {})
    if failure.failure_id not in known:
        while len(known) >= _MAX_KNOWN:
            del known[next(iter(known))]
        known[failure.failure_id] = _named_failure(failure, failure.shortage, session)
    return msgspec.structs.replace(event, failure=known[failure.failure_id])


def _named_failure(failure: FailureRecord, shortage: ShortageRecord, session: Session) -> FailureRecord:
    wanted = {shortage.value_id, *(value.value_id for value in shortage.held.largest)}
    handles = handles_of(session, wanted)
    largest = [named_value(value, handles) for value in shortage.held.largest]
    held = msgspec.structs.replace(shortage.held, largest=largest)
    location_id = failure.location_id
    if (
        location_id == UNKNOWN and shortage.value_id in handles
    ):  # an upload, which the cluster knows no line of
        location_id = handles[shortage.value_id].location
    return msgspec.structs.replace(
        failure, location_id=location_id, shortage=msgspec.structs.replace(shortage, held=held)
    )


def _other_place(failure: FailureRecord) -> str:
    """The line of the second op that a message names."""
    other = failure.other_location_id
    return "" if other == UNKNOWN else f"\nThe other op was issued at {describe(other)}"


def _shortage(failure: FailureRecord) -> str:
    return "" if failure.shortage is None else "\n" + shortage_text(failure.shortage)


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
