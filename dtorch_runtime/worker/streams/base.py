"""What a worker asks of the place where its kernels run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Event(Protocol):
    """A point in the work of a stream."""

    def is_done(self) -> bool:
        """Whether the work before it has finished."""

    def wait(self, timeout_s: float, what: str) -> None:
        """Block the calling thread until the work before it has finished.

        Raises:
            ClusterTimeout: naming ``what``.
        """


class Signal(Event, Protocol):
    """An event of the host: what it stands for ends when its call returns."""

    def set(self) -> None:
        """What it stands for has finished."""


class Stream(Protocol):
    """A queue of kernels of one device, run in order. Used by one worker thread."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors are."""

    def activate(self) -> AbstractContextManager[None]:
        """Inside, kernels that the calling thread launches go to this stream."""

    def record(self) -> Event:
        """The point behind everything launched so far."""

    def wait_for(self, event: Event) -> None:
        """What is launched from now on runs after an event of another stream."""

    def use(self, tensor: torch.Tensor) -> None:
        """Work launched so far or next reads or writes memory that another stream made: it is not to be given to
        others, when it is freed, before that work is done."""
