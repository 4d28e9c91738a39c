"""Copies between a device and the host, as transfers."""

from __future__ import annotations

import torch

from dtorch_runtime.worker.blobs import Blob, Pending, Poison, UnderWay
from dtorch_runtime.worker.streams.cpu import CpuEvent

#: The copy worker takes values of so many times ``DTORCH_BESIDE_BYTES``: that long a copy is worth the way to it.
COPY_FACTOR = 8
#: What makes a value that the client sent, and its location id.
UPLOADED = ("upload", 0)
#: What is copied within some microseconds.
_QUICK_BYTES = 64 * 1024


def size_of(blob: Blob | Pending | None) -> int:
    """Bytes of a value, which may be pending."""
    if isinstance(blob, Pending):
        return blob.made_bytes
    return 0 if blob is None or isinstance(blob, Poison) else blob.nbytes


def is_quick_to_read(blob: Blob | Pending | None, copy_bytes: int) -> bool:
    """Whether the bytes of a value can be had without a wait or a long copy.

    Args:
        copy_bytes: from which size on the copy worker takes values; 0 when there is none.
    """
    if not isinstance(blob, torch.Tensor):
        return not isinstance(blob, Pending)
    return blob.is_cpu and (
        blob.nbytes <= _QUICK_BYTES or (blob.is_contiguous() and (blob.nbytes < copy_bytes or not copy_bytes))
    )


def new_upload(value_id: int, num_bytes: int) -> Pending:
    """A value that is brought to the device."""
    transfer = UnderWay(None, num_bytes, f"the upload of value {value_id}", CpuEvent(is_done=False))
    return Pending(transfer, num_bytes, UPLOADED)


def new_fetch(blob: Blob | Pending | None, value_id: int, num_bytes: int) -> UnderWay:
    """A value that is taken from the device."""
    return UnderWay(blob, num_bytes, f"the fetch of value {value_id}", CpuEvent(is_done=False))
