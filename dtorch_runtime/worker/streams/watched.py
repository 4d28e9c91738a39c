"""A stream whose events are told to the race detector."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from dtorch_runtime.worker.races import Point
from dtorch_runtime.worker.streams.base import Event, Stream
from dtorch_runtime.worker.watch import StreamWatch


@dataclass(frozen=True, slots=True)
class WatchedEvent:
    """An event, and the point in the clocks that it stands for."""

    event: Event
    point: Point

    def is_done(self) -> bool:
        return self.event.is_done()

    def wait(self, timeout_s: float, what: str) -> None:
        self.event.wait(timeout_s, what)


class WatchedStream:
    """``Stream`` that does as another one, and tells what its events order."""

    def __init__(self, stream: Stream, watch: StreamWatch) -> None:
        self._stream = stream
        self._watch = watch

    @property
    def torch_device(self) -> torch.device:
        return self._stream.torch_device

    def activate(self) -> AbstractContextManager[None]:
        return self._stream.activate()

    def record(self) -> WatchedEvent:
        return WatchedEvent(self._stream.record(), self._watch.record())

    def wait_for(self, event: Event) -> None:
        if isinstance(event, WatchedEvent):
            self._stream.wait_for(event.event)
            self._watch.wait_for(event.point)
        else:
            self._stream.wait_for(event)

    def use(self, tensor: torch.Tensor) -> None:
        self._stream.use(tensor)
