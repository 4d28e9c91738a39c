"""A tensor that came from the client, on its way to the devices that get it."""

from __future__ import annotations

import threading

import torch

from dtorch_runtime.wire.messages import Upload
from dtorch_runtime.worker.session import DeviceSession


class SharedUpload:
    """One uploaded tensor for several devices: each gets memory of its own, the last one the original.

    The original is given away last, because its new owner may write to it at once.
    """

    def __init__(self, tensor: torch.Tensor, num_devices: int) -> None:
        self.num_bytes = tensor.nbytes
        self._lock = threading.Lock()
        self._tensor: torch.Tensor | None = tensor
        self._num_left = num_devices

    def take(self) -> torch.Tensor:
        """The memory of one of the devices."""
        with self._lock:
            assert self._tensor is not None
            tensor = self._tensor
            self._num_left -= 1
            if self._num_left:
                return tensor.clone()
            self._tensor = None
            return tensor


def upload_key(message: Upload) -> tuple[int, tuple[int, ...]]:
    """What the chunks of one piece have in common."""
    return message.value_id, tuple(message.devices)


def place(values: DeviceSession, value_id: int, shared: SharedUpload, torch_device: torch.device) -> None:
    """The job of a device that gets its own of a value that was uploaded."""
    if values.session.is_ended:
        shared.take()
    else:
        values.place(value_id, lambda: _to_device(shared.take(), torch_device), shared.num_bytes)


def _to_device(tensor: torch.Tensor, torch_device: torch.device) -> torch.Tensor:
    """On a GPU by way of pinned memory, so that the copy runs beside kernels and the worker goes on issuing."""
    if torch_device.type != "cuda":
        return tensor.to(torch_device)
    return tensor.pin_memory().to(torch_device, non_blocking=True)


def refuse(values: DeviceSession, value_id: int, error: Exception) -> None:
    """The job of a device that gets none, and why."""
    if not values.session.is_ended:
        values.refuse_upload(value_id, error)
