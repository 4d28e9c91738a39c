"""What a device holds under a value id: a torch tensor, ``Poison`` where there can be none, or ``Pending``."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

from dtorch_runtime.wire.records import FailureRecord
from dtorch_runtime.worker.failures import SessionEnded
from dtorch_runtime.worker.streams.base import Event, Signal


@dataclass(frozen=True, slots=True, eq=False)
class Poison:
    """Stands in place of a value that does not exist. Whatever is made of it is the same poison.

    It is no tensor, so that a kernel that gets one raises by itself; only then does the worker look for it.
    """

    failure: FailureRecord


Blob: TypeAlias = torch.Tensor | Poison


@dataclass(slots=True, eq=False)
class UnderWay:
    """A transfer that the device's communication worker or copy worker carries out. See ``transfers``.

    Attributes:
        reads: what is transferred; kept until the transfer has ended.
        num_bytes: of what is read and what is made.
        what: names the transfer for people.
        done: whether it has ended, on that worker's thread.
        point: the end of it in that worker's stream.
    """

    reads: Blob | Pending | None
    num_bytes: int
    what: object
    done: Signal
    point: Event | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Pending:
    """Stands in place of a value that a transfer under way is making. Who drops it drops the result.

    Attributes:
        made_bytes: of the value.
        made_by: the op, and its location id.
        result: the value, why there is none, None where the device gets nothing; once the transfer is done.
    """

    transfer: UnderWay
    made_bytes: int
    made_by: tuple[str, int]
    result: Blob | SessionEnded | None = None


Blobs: TypeAlias = dict[int, Blob | Pending]


@cache
def dtype_of(name: str) -> torch.dtype:
    """``torch.<name>``. Quantized dtypes, which torch is about to remove, are not among them.

    Raises:
        ValueError: that is no dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or name.startswith(("q", "bits")):
        raise ValueError(f"torch has no dtype named {name!r} that DTorch can use")
    return found


def name_of(dtype: torch.dtype) -> str:
    """The inverse of ``dtype_of``: ``float32``."""
    return str(dtype).removeprefix("torch.")


def check_plain(value: object) -> None:
    """Whether a kernel's result is something that can be cut, sent and fetched; None is no result.

    Raises:
        TypeError: it is no tensor, or one that is sparse, mkldnn, nested or quantized.
    """
    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the kernel returned {type(value).__name__}, not a tensor")
    if value.is_nested or value.layout is not torch.strided or value.is_quantized:
        kind = "a nested tensor" if value.is_nested else f"a tensor of {value.layout} and {value.dtype}"
        raise TypeError(
            f"the kernel made {kind}; devices hold strided tensors of plain dtypes, whose pieces can be sent. Compute "
            f"it on the CPU: x.cpu()"
        )


def poison_with_aliases(blobs: Blobs, value_ids: Iterable[int], poison: Poison) -> None:
    """Poison values that a failed op was to write to, and every other value that shares their memory."""
    storages = set()
    for value_id in value_ids:
        blob = blobs.get(value_id)
        if isinstance(blob, torch.Tensor):
            storages.add(storage_of(blob))
        blobs[value_id] = poison
    for value_id, blob in list(blobs.items()):
        memory = blob.result if isinstance(blob, Pending) else blob
        if isinstance(memory, torch.Tensor) and storage_of(memory) in storages:
            blobs[value_id] = poison


def poison_in(blobs: Blobs, value_ids: Iterable[int]) -> Poison | None:
    """The first of some values that is poison."""
    found = (blobs.get(value_id) for value_id in value_ids)
    return next((blob for blob in found if isinstance(blob, Poison)), None)


def storage_of(tensor: torch.Tensor) -> int:
    """A number of the memory that a tensor lies in, as long as that is there."""
    return int(tensor.untyped_storage()._cdata)


_SMALL_BYTES = 64 * 1024


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A copy of a tensor's elements in row-major order, as bytes in host memory that nobody else knows of."""
    is_plain = tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())
    if is_plain and 0 < tensor.nbytes <= _SMALL_BYTES and tensor.is_contiguous():
        return memoryview(
            ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        )  # a tenth of the time of what follows
    plain = tensor.detach().resolve_conj().resolve_neg()
    copy = torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
    copy.copy_(plain)
    return memory_of(copy)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory itself, not a copy; writable. It keeps the tensor alive.

    Not by ``numpy()``: torch lets nobody resize memory that numpy has seen.
    """
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    buffer: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    buffer.tensor = tensor
    return memoryview(buffer).cast("B")


class ChunkedTensor:
    """A tensor in host memory that is filled by chunks of bytes, which come in order.

    Raises:
        ValueError: the shape, dtype and total size do not fit.
    """

    def __init__(self, dtype: str, shape: Sequence[int], total_bytes: int) -> None:
        self.check(dtype, shape, total_bytes)
        self.tensor = torch.empty(tuple(shape), dtype=dtype_of(dtype))
        self._memory = memory_of(self.tensor)
        self._num_filled = 0

    @staticmethod
    def check(dtype: str, shape: Sequence[int], total_bytes: int) -> None:
        """Whether a shape, a dtype and a size fit.

        Raises:
            ValueError: they do not.
        """
        num_bytes = math.prod(shape) * dtype_of(dtype).itemsize
        if num_bytes != total_bytes or any(size < 0 for size in shape):
            raise ValueError(f"{dtype}{list(shape)} has {num_bytes} bytes, {total_bytes} were announced")

    @property
    def is_full(self) -> bool:
        return self._num_filled == self._memory.nbytes

    def room(self, offset_bytes: int, num_bytes: int) -> memoryview:
        """Where the next chunk goes; it counts as filled from now on.

        Raises:
            ValueError: it does not follow the one before, or it is longer than what is missing.
        """
        stop = offset_bytes + num_bytes
        if offset_bytes != self._num_filled or not offset_bytes <= stop <= self._memory.nbytes:
            raise ValueError(
                f"a chunk of bytes {offset_bytes} to {stop} cannot follow {self._num_filled} of {self._memory.nbytes}"
            )
        self._num_filled = stop
        return self._memory[offset_bytes:stop]
