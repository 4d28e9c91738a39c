"""Storages on the device: there is no memory here, and torch would read or write where there is none and crash."""

from __future__ import annotations

from typing import Any

import torch

from dtorch_runtime.errors import UnsupportedError


def refuse_storages() -> None:
    """Let ``torch.UntypedStorage(n, device="dtorch")``, and what makes one, raise; done once."""
    make = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "dtorch":
            raise UnsupportedError(
                "a storage on 'dtorch' has no memory here: what tensors hold is on the workers. Write "
                "dtorch.empty(n, dtype=torch.uint8) for memory on the cluster, or x.cpu().untyped_storage() for the "
                "bytes of a tensor"
            )
        return make(cls, *args, **kwargs)

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign]  # torch has no allocator for the device to register
    torch.serialization.register_package(5, lambda storage: None, _restore)


def _restore(storage: Any, location: str) -> None:
    """``torch.load`` asks for each storage of a file where it shall go; None leaves the answer to others.

    Raises:
        UnsupportedError: to the device.
    """
    if location.partition(":")[0] == "dtorch":
        raise UnsupportedError(
            f"torch.load(map_location={location!r}) would make storages, which hold bytes here, and 'dtorch' has none. "
            f"Allowed is map_location='cpu'; write torch.load(file, map_location='cpu'), then t.to('dtorch') for a "
            f"tensor, or module.load_state_dict(...) of a module that is on the cluster"
        )
