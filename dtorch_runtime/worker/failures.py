"""Failure records: what a worker says about an op that could not run."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtorch_runtime.wire.records import FailureRecord, ShortageRecord
from dtorch_runtime.worker.races import DataRace


class SessionEnded(Exception):
    """Ends what a worker does for a session that is over. Never leaves the worker."""


class InternalFailure(Exception):
    """Something that the client and the controller should have made impossible."""


class PeerLost(Exception):
    """A device that should have taken part in an exchange is gone with its node."""


class OutOfMemoryError(Exception):
    """The values of a device would hold more than they may."""

    def __init__(self, asked_bytes: int) -> None:
        self.asked_bytes = asked_bytes
        super().__init__("the values of the device would hold more than DTORCH_DEVICE_MEMORY_BYTES")


#: How torch and CuPy say what could not be had: "tried to allocate 20.00 MiB", "allocating 1,024 bytes".
_ASKED = re.compile(r"allocat\w* ([\d.,]+) ?(bytes|KiB|MiB|GiB|TiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def asked_bytes_of(error: BaseException) -> int | None:
    """The bytes that an op asked for in vain, -1 when its error does not say; None when it has another error."""
    if isinstance(error, OutOfMemoryError):
        return error.asked_bytes
    text = str(error)
    is_shortage = isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in text or "out of memory" in text.lower())
    )
    if not is_shortage:
        return None
    found = _ASKED.search(text)
    return -1 if found is None else round(float(found[1].replace(",", "")) * _UNITS[found[2]])


@dataclass(frozen=True, slots=True)
class OpSite:
    """Where an op record stands: enough to name its failure the same way on every device."""

    session: int
    seq: int
    op: str
    location_id: int
    #: The words of the record.
    record: Sequence[int]

    @property
    def failure_id(self) -> str:
        return f"{self.session}:{self.seq}:{'.'.join(map(str, self.record))}"


def failure_of(
    error: BaseException, site: OpSite, device: int, node: str, shortage: ShortageRecord | None = None
) -> FailureRecord:
    """The record of an exception that an op raised; with ``shortage`` for one that found no memory."""
    kind = "op"
    if isinstance(error, InternalFailure):
        kind = "internal"
    elif isinstance(error, PeerLost):
        kind = "node"
    return FailureRecord(
        kind=kind,
        failure_id=site.failure_id,
        op=site.op,
        location_id=site.location_id,
        device=device,
        node=node,
        error_type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        shortage=shortage,
        other_location_id=error.other.location_id if isinstance(error, DataRace) else 0,
    )
