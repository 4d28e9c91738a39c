"""What values hold on the devices, and who made them: texts for errors, and ``memory_stats()``."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from dtorch.graph import Handle, ViewHandle
from dtorch.location import UNKNOWN, describe
from dtorch_runtime.wire.records import LiveValueRecord, ShortageRecord

if TYPE_CHECKING:  # it imports failures, which imports this
    from dtorch.connection import Session


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


def size_text(num_bytes: int) -> str:
    """``64.0 MiB``."""
    amount = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{num_bytes} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def value_lines(values: Iterable[LiveValueRecord]) -> list[str]:
    """A line for each value: its size, the op that made it, and the user's line."""
    lines = []
    for value in values:
        maker = (
            f"{value.op} at {describe(value.location_id)}" if value.op else "a tensor that was dropped since"
        )
        shared = f" (shared by {value.num_values} values)" if value.num_values > 1 else ""
        lines.append(f"{size_text(value.num_bytes):>10}  {maker}{shared}")
    return lines


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
    lines += [f"  {line}" for line in value_lines(held.largest)]
    advice = ", or raise the limit" if held.limit_bytes else ""
    lines.append(
        f"Drop tensors that are not needed (del x), capture the function (dtorch.capture drops values at their last "
        f"use), cut tensors over more devices{advice}"
    )
    return "\n".join("  " + line for line in lines)
