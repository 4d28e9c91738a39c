"""The pieces of tensors that go to the files of a checkpoint, each read once from a device that holds it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from dtorch.checkpoint.files import Entry
from dtorch.parallel.weights import DTYPES
from dtorch.spec import intern_spec
from dtorch.tensors import Tensor
from dtorch.values import device_boxes
from dtorch_runtime.errors import UnsupportedError
from dtorch_runtime.ir.layout import Layout, box_shape, num_elements
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Replicate

#: Pieces of so many bytes together, or one, are on their way to this process at once.
_WINDOW_BYTES: Final = 64 * 1024 * 1024
#: dtype -> its name in safetensors files.
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, to be had from a device or from this process."""

    entry: Entry
    #: Asks for the elements; what it returns waits for them.
    ask: Callable[[], Callable[[], torch.Tensor]]


def arriving(pieces: Sequence[Piece]) -> Iterator[torch.Tensor]:
    """The pieces in their order; the next ones are on the way while one is written."""
    asked: deque[tuple[int, Callable[[], torch.Tensor]]] = deque()
    num_bytes = 0
    for piece in pieces:
        while asked and num_bytes + piece.entry.num_bytes > _WINDOW_BYTES:
            size, wait = asked.popleft()
            num_bytes -= size
            yield wait()
        asked.append((piece.entry.num_bytes, piece.ask()))
        num_bytes += piece.entry.num_bytes
    for _, wait in asked:
        yield wait()


def by_device(tensors: Mapping[str, torch.Tensor]) -> list[list[Piece]]:
    """The pieces of each device that holds one, then those of this process. Of equal pieces one is written.

    Raises:
        UnsupportedError: a tensor whose dtype safetensors files do not have.
    """
    of_device: dict[int, list[Piece]] = {}
    num_bytes: dict[int, int] = {}
    here: list[Piece] = []
    for name, tensor in tensors.items():
        _check_dtype(name, tensor)
        if not isinstance(tensor, Tensor):
            here.append(_piece_here(name, tensor))
            continue
        whole = _without_bits(tensor)
        for devices, box in device_boxes(tuple(whole.shape), whole._spec.layout):
            if num_elements(box_shape(box)) == 0:
                continue
            device = min(devices, key=lambda device: num_bytes.get(device, 0))
            entry = _entry(name, whole, box)
            num_bytes[device] = num_bytes.get(device, 0) + entry.num_bytes
            of_device.setdefault(device, []).append(Piece(entry, _asking(whole, device, entry)))
    return [*(of_device[device] for device in sorted(of_device)), *([here] if here else [])]


def whole(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    """Each tensor as one piece.

    Raises:
        UnsupportedError: a tensor whose dtype safetensors files do not have.
    """
    pieces = []
    for name, tensor in tensors.items():
        _check_dtype(name, tensor)
        pieces.append(_gathered(name, tensor) if isinstance(tensor, Tensor) else _piece_here(name, tensor))
    return pieces


def _entry(name: str, tensor: torch.Tensor, box: Any = None) -> Entry:
    whole_box = tuple((0, size) for size in tensor.shape)
    return Entry(name, NAMES[tensor.dtype], tensor.dtype.itemsize, whole_box if box is None else box)


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in NAMES:
        raise UnsupportedError(
            f"save(): {name} has dtype {tensor.dtype}, which safetensors files do not have; write "
            f"torch.view_as_real(t) for complex numbers, t.to(torch.float32) for others"
        )


def _without_bits(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        resolved: Any = tensor.detach().resolve_conj().resolve_neg()
        placements = [Replicate() if isinstance(p, Partial) else p for p in resolved.placements]
        plain: Tensor = resolved.redistribute(placements=placements)
    return plain


def _asking(tensor: Tensor, device: int, entry: Entry) -> Callable[[], Callable[[], torch.Tensor]]:
    alone = Layout(DeviceMesh(tensor.device_mesh.device_type, [device]), (Replicate(),))
    # To its device, a piece is a tensor of its own.
    spec = intern_spec(box_shape(entry.box), tensor.dtype, alone)

    def ask() -> Callable[[], torch.Tensor]:
        future = tensor.graph.session.fetch(tensor._handle, spec, f"piece on device {device}")
        return lambda: future.get().contiguous()

    return ask


def _gathered(name: str, tensor: Tensor) -> Piece:
    resolved = _without_bits(tensor)

    def ask() -> Callable[[], torch.Tensor]:
        future = resolved.to_torch_async()
        return lambda: future.get().contiguous()

    return Piece(_entry(name, tensor), ask)


def _piece_here(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(_entry(name, tensor), lambda: lambda: tensor.detach().cpu().contiguous())
