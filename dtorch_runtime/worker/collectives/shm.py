"""Parcels between agents of one machine: the bytes in POSIX shared memory, the news of them through the socket."""

from __future__ import annotations

import torch

from dtorch_runtime.transport.segments import Segment, SegmentReader
from dtorch_runtime.wire.data import ParcelInSegment
from dtorch_runtime.worker.blobs import ChunkedTensor, dtype_of


def write_to_segment(segment: Segment, value: torch.Tensor) -> None:
    """Copy a tensor, whatever its strides, to the start of a segment in row-major order."""
    _view_of(segment, value.dtype, tuple(value.shape)).copy_(value)


def read_from_segment(reader: SegmentReader, message: ParcelInSegment) -> torch.Tensor:
    """The parcel in the sender's memory itself, not a copy: it must not be written to.

    Raises:
        TransportError: there is no such segment.
        ValueError: it is too short, or the shape and dtype do not fit the size.
    """
    segment = reader.map(message.segment)
    ChunkedTensor.check(message.dtype, message.shape, message.total_bytes)
    if message.total_bytes > segment.num_bytes:
        raise ValueError(
            f"segment {segment.name} has {segment.num_bytes} bytes, the parcel {message.total_bytes}"
        )
    return _view_of(segment, dtype_of(message.dtype), tuple(message.shape))


def _view_of(segment: Segment, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    num_elements = torch.Size(shape).numel()
    if not num_elements:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(segment.memory, dtype=dtype, count=num_elements).view(shape)
