"""A stream of a CUDA device: CuPy's streams and events, which torch is told to launch on.

Written against the documented behaviour of CuPy and torch; it has not run on a GPU yet. tests/gpu says what is to hold.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dtorch_runtime.errors import ClusterTimeout, InternalError, UnsupportedError
from dtorch_runtime.worker.streams.base import Event

try:
    import cupy
except ImportError:
    cupy = None

#: CUDA has no wait with a deadline, so a wait looks this often, in seconds.
_LOOK_INTERVAL_S = 0.0002


def require_cuda() -> None:
    """Check that CUDA devices can be used.

    Raises:
        UnsupportedError: CuPy is not installed, or it or torch finds no GPU.
    """
    if cupy is None:
        raise UnsupportedError("CUDA devices need CuPy: pip install dtorch[gpu]")
    if not (cupy.cuda.is_available() and torch.cuda.is_available()):
        raise UnsupportedError("CuPy or torch finds no CUDA device on this machine; use device_type='cpu'")


class CudaEvent:
    """A point in the work of a CUDA stream."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.done)

    def wait(self, timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.event.done:
            if time.monotonic() > deadline_s:
                raise ClusterTimeout(what, timeout_s)
            time.sleep(_LOOK_INTERVAL_S)


class CudaStream:
    """``Stream`` of a CUDA device of this machine. Made and used on the worker's thread.

    Raises:
        UnsupportedError: CuPy is not installed, or it finds no GPU.
    """

    def __init__(self, torch_device: torch.device) -> None:
        require_cuda()
        self.torch_device = torch_device
        with cupy.cuda.Device(torch_device.index):
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._torch_stream = torch.cuda.ExternalStream(self._stream.ptr, device=self.torch_device)

    @contextmanager
    def activate(self) -> Iterator[None]:
        with cupy.cuda.Device(self.torch_device.index), torch.cuda.stream(self._torch_stream):
            yield

    def record(self) -> CudaEvent:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        return CudaEvent(event)

    def wait_for(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise InternalError(
                f"a CUDA stream cannot wait for {event!r}, an event of another kind of device"
            )
        self._stream.wait_event(event.event)

    def use(self, tensor: torch.Tensor) -> None:
        # torch's caching allocator reuses freed memory in the order of the stream that it was made for, unless told
        # that another one uses it.
        tensor.record_stream(self._torch_stream)
