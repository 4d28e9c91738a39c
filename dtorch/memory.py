"""``dtorch.memory_stats``: what values hold on the devices and who made them; errors for want of memory, as text."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from dtorch.cluster import session_if_open
from dtorch.graph import Handle, ViewHandle
from dtorch.keywords import teaches_keywords
from dtorch.location import UNKNOWN, describe
from dtorch_runtime.errors import SettingError
from dtorch_runtime.wire.records import (
    AskMemory,
    DeviceMemoryRecord,
    LiveValueRecord,
    MemoryReply,
    ShortageRecord,
)

if TYPE_CHECKING:  # it imports failures, which imports this
    from dtorch.connection import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveValue:
    """Memory on one device, and the value that was made in it first.

    Attributes:
        num_bytes: of the memory, as a whole: a view keeps all of it.
        num_values: how many values share it.
        op: what made the value; empty when that is not known, because its tensor was dropped since.
        location: the line of the program that did.
    """

    num_bytes: int
    num_values: int
    op: str
    location: str

    def __str__(self) -> str:
        maker = f"{self.op} at {self.location}" if self.op else "a tensor that was dropped since"
        shared = f" (shared by {self.num_values} values)" if self.num_values > 1 else ""
        return f"{size_text(self.num_bytes):>10}  {maker}{shared}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What the values of this session hold on one device. Memory that several share counts once.

    Attributes:
        current_bytes: behind everything that was issued before the question.
        peak_bytes: the most since ``reset_peak_memory_stats()``; None when nobody asked for it: it was not counted.
        limit_bytes: what the values of all sessions may hold; None without a limit.
        num_values: all of them, views among them.
        largest: the largest pieces of memory, the largest first.
    """

    device: int
    node: str
    current_bytes: int
    peak_bytes: int | None
    limit_bytes: int | None
    num_values: int
    largest: tuple[LiveValue, ...]

    def __str__(self) -> str:
        text = f"device {self.device} (node {self.node}): {self.num_values} values hold {size_text(self.current_bytes)}"
        if self.peak_bytes is not None:
            text += f", at most {size_text(self.peak_bytes)}"
        if self.limit_bytes is not None:
            text += f", limit {size_text(self.limit_bytes)}"
        return "\n".join([text, *map(str, self.largest)])


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """What ``memory_stats()`` gives; ``print()`` shows it, ``stats[3]`` is what it says of device 3.

    Attributes:
        devices: by device, of the nodes that answered.
        lost: why other nodes did not answer, by their names.
    """

    devices: Mapping[int, DeviceMemory]
    lost: Mapping[str, str]

    def __getitem__(self, device: int) -> DeviceMemory:
        return self.devices[device]

    def __str__(self) -> str:
        lines = [str(self.devices[device]) for device in sorted(self.devices)]
        return "\n".join([*lines, *(f"node {name} is lost: {why}" for name, why in self.lost.items())])


@teaches_keywords
def memory_stats(*, num_largest: int = 5, timeout_s: float | None = None) -> MemoryStats:
    """What the values of this session hold on each device, and who made the largest of them.

    It waits for what was issued before. Counted are values: what ops made and nobody has freed; not the temporaries of
    kernels, buffers of exchanges, and what an allocator keeps. Each device looks through its values when it is asked,
    and counts nothing meanwhile. So there is a peak only where ``reset_peak_memory_stats()`` asked for one before, or
    where a limit is set. From then on each op is counted, those inside of captured calls too, and the peak is exact:
    the most that values held when an op had made its results.

    Args:
        num_largest: how many values are told a device.
        timeout_s: longest wait in seconds; the setting ``wait_timeout_s`` when None.

    Raises:
        SettingError: ``num_largest`` is no count.
        CaptureError: a captured function asks, whose replays would not.
        ClusterTimeout, ControllerLost, SessionClosed: as for any wait. A node that is lost meanwhile is in ``lost``.
    """
    if isinstance(num_largest, bool) or not isinstance(num_largest, int) or num_largest < 0:
        raise SettingError(f"num_largest takes a number of values, 0 or more, got {num_largest!r}")
    return _ask(AskMemory(num_largest=num_largest, peak="keep"), timeout_s)


@teaches_keywords
def reset_peak_memory_stats(*, measure: bool = True) -> None:
    """Measure the peak of ``memory_stats()`` from now on; with ``measure=False``, no more.

    While it is measured, an op takes about 2 us longer in the workers. Where a limit is set
    (``DTORCH_DEVICE_MEMORY_BYTES``), it is measured always.

    Raises:
        CaptureError, ClusterTimeout, ControllerLost, SessionClosed: as ``memory_stats``.
    """
    _ask(AskMemory(num_largest=0, peak="reset" if measure else "stop"))


def _ask(question: AskMemory, timeout_s: float | None = None) -> MemoryStats:
    session = session_if_open()
    if session is None:
        return MemoryStats({}, {})
    recording = session.default_graph().watching
    if recording is not None:
        recording.refuse("asks what the devices hold, and a replay would not ask. Ask outside of it")
    session.batches.flush_all()
    session.batches.flush_old(0.0)  # what graphs that are gone have left
    answers = session.ask(question).get(timeout_s)
    replies = {name: reply for name, reply in answers.replies.items() if isinstance(reply, MemoryReply)}
    values = [value for reply in replies.values() for record in reply.devices for value in record.largest]
    handles = handles_of(session, {value.value_id for value in values}) if values else {}
    devices = {
        record.device: _device_memory(name, record, handles)
        for name, reply in replies.items()
        for record in reply.devices
    }
    return MemoryStats(devices, {**session.lost_nodes(), **answers.lost})


def _device_memory(node: str, record: DeviceMemoryRecord, handles: Mapping[int, Handle]) -> DeviceMemory:
    return DeviceMemory(
        device=record.device,
        node=node,
        current_bytes=record.current_bytes,
        peak_bytes=record.peak_bytes if record.peak_bytes >= 0 else None,
        limit_bytes=record.limit_bytes or None,
        num_values=record.num_values,
        largest=tuple(_live_value(named_value(value, handles)) for value in record.largest),
    )


def _live_value(record: LiveValueRecord) -> LiveValue:
    location = describe(record.location_id) if record.op else ""
    return LiveValue(
        num_bytes=record.num_bytes, num_values=record.num_values, op=record.op, location=location
    )


# ---- names ----


def handles_of(session: Session, value_ids: Collection[int]) -> dict[int, Handle]:
    """The handles of those of the values that the program still has. Looks at every object: not for hot paths."""
    handles = [item for item in gc.get_objects() if type(item) in (Handle, ViewHandle)]
    return {
        handle.value_id: handle
        for handle in handles
        if getattr(handle, "value_id", None) in value_ids and handle.graph.session is session
    }


def named_value(value: LiveValueRecord, handles: Mapping[int, Handle]) -> LiveValueRecord:
    """The record with the op and the location of a value, where only its handle knows them."""
    handle = handles.get(value.value_id)
    if handle is None or (value.op and value.location_id != UNKNOWN):
        return value
    return msgspec.structs.replace(value, op=str(handle.origin), location_id=handle.location)


# ---- texts ----


def size_text(num_bytes: int) -> str:
    """``64.0 MiB``."""
    amount = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{num_bytes} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def shortage_text(shortage: ShortageRecord) -> str:
    """What an op asked for in vain, what the device holds, and what to do."""
    held = shortage.held
    asked = "an unknown number of bytes" if shortage.asked_bytes < 0 else size_text(shortage.asked_bytes)
    text = (
        f"it asked for {asked}; {held.num_values} values of this session hold {size_text(held.current_bytes)}"
    )
    if shortage.other_bytes:
        text += f", other sessions hold {size_text(shortage.other_bytes)}"
    if held.limit_bytes:
        text += f", and DTORCH_DEVICE_MEMORY_BYTES allows the device {size_text(held.limit_bytes)}"
    lines = [text, *(["the largest:"] if held.largest else [])]
    lines += [f"  {_live_value(value)}" for value in held.largest]
    advice = ", or raise the limit" if held.limit_bytes else ""
    lines.append(
        f"Drop tensors that are not needed (del x), capture the function (dtorch.capture drops values at their last "
        f"use), cut tensors over more devices{advice}"
    )
    return "\n".join("  " + line for line in lines)
