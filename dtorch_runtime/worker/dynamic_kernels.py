"""Kernels whose results have a shape that only the data tells, and how the client learns it.

Importing this module registers them. Shapes are local unless a name says whole.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from dtorch_runtime.worker.blobs import name_of
from dtorch_runtime.worker.failures import InternalFailure
from dtorch_runtime.worker.kernels import find_kernel, kernel

#: A description has a fixed size, so that it is a value like any other. Enough for ten results of ten dims.
DESCRIPTION_BYTES = 2048


class ResultRecord(msgspec.Struct, frozen=True, array_like=True):
    """What one result is: its dtype by name, its shape, its strides in elements."""

    dtype: str
    shape: list[int]
    stride: list[int]


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[list[ResultRecord | None]] = msgspec.json.Decoder(list[ResultRecord | None])


@kernel("described", num_returns=2)
def described(operator: str, args: list[Any], /, **kwargs: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What ``operator`` gives for these arguments, and a description of it.

    Returns:
        Each result (an empty tensor for one that the op leaves out), and uint8 [DESCRIPTION_BYTES].
    """
    found = find_kernel(operator)
    device = next((tensor.device for tensor in _tensors(args)), torch.device("cpu"))
    result = found.function(*args, **kwargs)
    results = list(result) if isinstance(result, list | tuple) else [result]
    present = [torch.empty(0, device=device) if item is None else item for item in results]
    return present, describe(results).to(device)


def _tensors(args: list[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in args:
        if isinstance(value, list):
            found += _tensors(value)
        elif isinstance(value, torch.Tensor):
            found.append(value)
    return found


def describe(results: list[torch.Tensor | None]) -> torch.Tensor:
    """The description of results, as a CPU tensor: uint8 [DESCRIPTION_BYTES].

    Raises:
        InternalFailure: it would be longer.
    """
    records = [
        None if item is None else ResultRecord(name_of(item.dtype), list(item.shape), list(item.stride()))
        for item in results
    ]
    text = _encoder.encode(records)
    if len(text) > DESCRIPTION_BYTES:
        raise InternalFailure(f"the description of {len(results)} results has {len(text)} bytes")
    return torch.frombuffer(bytearray(text.ljust(DESCRIPTION_BYTES)), dtype=torch.uint8)


def read_description(description: torch.Tensor) -> list[ResultRecord | None]:
    """The inverse of ``describe``: one entry a result, None for one that the op leaves out.

    Raises:
        msgspec.DecodeError: that is no description.
    """
    return _decoder.decode(bytes(description.tolist()))
