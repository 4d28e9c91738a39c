"""A CPU device's stream is its worker thread: a kernel has finished when its call returns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dtorch_runtime.errors import ClusterTimeout, InternalError
from dtorch_runtime.worker.streams.base import Event

_CPU = torch.device("cpu")


class CpuEvent:
    """An event of a CPU stream. Recorded by the worker thread between two kernels, so it is done at once; an event
    made with ``is_done=False`` is set by whoever finishes what it stands for."""

    def __init__(self, *, is_done: bool = True) -> None:
        self._done = threading.Event()
        if is_done:
            self._done.set()

    def is_done(self) -> bool:
        return self._done.is_set()

    def set(self) -> None:
        """What the event stands for has finished."""
        self._done.set()

    def wait(self, timeout_s: float, what: str) -> None:
        if not self._done.wait(timeout_s):
            raise ClusterTimeout(what, timeout_s)


class CpuStream:
    """``Stream`` of a virtual CPU device.

    Args:
        wait_timeout_s: longest wait for an event of another stream.
    """

    def __init__(self, wait_timeout_s: float, torch_device: torch.device = _CPU) -> None:
        self._wait_timeout_s = wait_timeout_s
        self.torch_device = torch_device

    @contextmanager
    def activate(self) -> Iterator[None]:
        yield

    def record(self) -> CpuEvent:
        return CpuEvent()

    def wait_for(self, event: Event) -> None:
        if not isinstance(event, CpuEvent):
            raise InternalError(f"a CPU stream cannot wait for {event!r}, an event of another kind of device")
        event.wait(self._wait_timeout_s, "an event of another CPU stream")

    def use(self, tensor: torch.Tensor) -> None:
        """Nothing: a kernel has finished when its call returns, and until then the caller holds the tensor."""
