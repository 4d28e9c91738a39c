"""Values of buffers that no checkpoint holds, in models that were built without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dtorch_runtime.errors import UnsupportedError


def restore_buffers(model: nn.Module) -> None:
    """Give non-persistent buffers on ``"meta"`` their values (rotary frequencies, position ids, ...), on the CPU.

    The module's own recipe is asked first: ``_init_weights`` of the Hugging Face model around it, which is what
    ``from_pretrained`` does; then a second instance is built from the module's ``config``.

    Raises:
        UnsupportedError: neither gives a value.
    """
    initialize: Callable[[nn.Module], Any] | None = None
    for name, module in model.named_modules():
        initialize = getattr(module, "_init_weights", initialize)
        wanted = [
            key
            for key, buffer in module.named_buffers(recurse=False)
            if buffer.device.type == "meta" and key in module._non_persistent_buffers_set
        ]
        if not wanted:
            continue
        missing = _initialized_in_place(module, wanted, initialize)
        missing = _rebuilt(module, missing)
        if missing:
            raise UnsupportedError(
                f"the buffer {name}.{missing[0]} is on 'meta', is in no checkpoint, and {type(module).__name__} has no "
                f"recipe for it; build this module outside torch.device('meta'), or register the buffer as persistent"
            )


def _initialized_in_place(
    module: nn.Module, names: list[str], initialize: Callable[[nn.Module], Any] | None
) -> list[str]:
    """Run ``initialize`` on the module with unset CPU buffers; the names of those that it left alone."""
    if initialize is None:
        return names
    before = {}
    for name in names:
        before[name] = module._buffers[name]
        module._buffers[name] = _unset_like(module.get_buffer(name))
    initialize(module)
    left = [name for name in names if _is_unset(module.get_buffer(name))]
    for name in left:
        module._buffers[name] = before[name]
    return left


def _rebuilt(module: nn.Module, names: list[str]) -> list[str]:
    """Take buffers from a second instance made on the CPU; the names of those that it does not give."""
    config = getattr(module, "config", None)
    if not names or config is None:
        return names
    try:
        with torch.device("cpu"):
            twin = type(module)(config)
    except TypeError:  # its constructor wants more than a config
        return names
    found = {name: buffer for name, buffer in twin.named_buffers(recurse=False) if name in names}
    for name, buffer in found.items():
        module._buffers[name] = buffer.to(module.get_buffer(name).dtype)
    return [name for name in names if name not in found]


def _unset_like(buffer: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of values that no recipe gives: NaN, or the lowest of the type."""
    if buffer.is_floating_point() or buffer.is_complex():
        return torch.full(buffer.shape, float("nan"), dtype=buffer.dtype, device="cpu")
    lowest = False if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min
    return torch.full(buffer.shape, lowest, dtype=buffer.dtype, device="cpu")


def _is_unset(buffer: torch.Tensor) -> bool:
    unset = _unset_like(buffer)
    return torch.allclose(buffer, unset, rtol=0, atol=0, equal_nan=True)
