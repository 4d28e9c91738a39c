"""Between torch tensors on the client and the local pieces that devices hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import torch

from dtorch.session import LocalPiece
from dtorch.spec import Spec
from dtorch_runtime.errors import InternalError
from dtorch_runtime.ir.exchange import Part, Step
from dtorch_runtime.ir.layout import Box, Layout, device_box
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import ReduceOp, Replicate
from dtorch_runtime.ir.transfer import plan_redistribute
from dtorch_runtime.wire.messages import Upload
from dtorch_runtime.worker.blobs import dtype_of, memory_of, name_of


def tensor_of(piece: LocalPiece) -> torch.Tensor:
    """The CPU tensor with a piece's bytes. It shares memory with a ``bytearray``, and copies anything else."""
    try:
        dtype = dtype_of(piece.dtype)
    except ValueError as error:
        raise InternalError(f"a value came whose dtype is none: {error}") from None
    if len(piece.data) == 0:
        return torch.empty(piece.shape, dtype=dtype, device="cpu")
    data = piece.data if isinstance(piece.data, bytearray) else bytearray(piece.data)
    flat = torch.frombuffer(data, dtype=dtype)
    return flat if len(piece.shape) == 1 else flat.view(piece.shape)


# ---- down: from pieces to the global value ----


@dataclass(frozen=True)
class Gathering:
    """Which devices to ask for a value, and how their pieces make the whole on ``goal``."""

    devices: tuple[int, ...]
    steps: tuple[Step, ...]
    goal: int


@lru_cache(maxsize=4096)
def plan_gathering(spec: Spec) -> Gathering:
    """One device for a replicated value, otherwise one holder of each different piece.

    The plan is that of a redistribution to the mesh's first device alone.
    """
    layout = spec.layout
    goal = layout.mesh.devices[0]
    if layout.is_replicated:
        return Gathering((goal,), (), goal)
    alone = Layout(DeviceMesh(layout.mesh.device_type, [goal]), (Replicate(),))
    # All pieces come here first: more steps would save no bytes.
    steps = plan_redistribute(spec.shape, layout, alone, itemsize_bytes=0)
    if not steps:
        return Gathering((goal,), (), goal)
    sources = {s.device for part in steps[0].parts.values() for piece in part.pieces for s in piece.sources}
    return Gathering(tuple(sorted(sources)) or (goal,), steps, goal)


def assemble(spec: Spec, pieces: Mapping[int, LocalPiece]) -> torch.Tensor:
    """The global value from the pieces of the devices that ``plan_gathering`` named; on the CPU, contiguous."""
    gathering = plan_gathering(spec)
    if not gathering.steps:
        return tensor_of(pieces[gathering.goal])
    with torch.no_grad():
        local = {device: tensor_of(piece) for device, piece in pieces.items()}
        for step in gathering.steps:
            local = {device: _assemble_part(part, step, local, spec) for device, part in step.parts.items()}
    return local[gathering.goal]


def _assemble_part(part: Part, step: Step, local: Mapping[int, torch.Tensor], spec: Spec) -> torch.Tensor:
    out = torch.empty(part.shape, dtype=spec.dtype, device="cpu")
    for piece in part.pieces:
        terms = [cut(local[source.device], source.box) for source in piece.sources]
        target = cut(out, piece.box)
        target.copy_(terms[0])
        if step.reduce is not None:
            for term in terms[1:]:
                _REDUCE[step.reduce](target, term)
            if step.reduce == "avg":
                _divide(target, len(terms))
    return out


def _divide(target: torch.Tensor, number: int) -> None:
    if target.dtype.is_floating_point or target.dtype.is_complex:
        target.div_(number)
    else:
        target.div_(number, rounding_mode="trunc")


_REDUCE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": lambda a, b: a.add_(b),
    "avg": lambda a, b: a.add_(b),
    "prod": lambda a, b: a.mul_(b),
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "min": lambda a, b: torch.minimum(a, b, out=a),
}


# ---- up: from the global value to pieces ----


def device_boxes(shape: tuple[int, ...], layout: Layout) -> Iterator[tuple[tuple[int, ...], Box]]:
    """The different boxes of a global tensor that devices hold, each with its devices. No partial axes."""
    by_box: dict[Box, list[int]] = {}
    for device in layout.mesh.devices:
        by_box.setdefault(device_box(shape, layout, device), []).append(device)
    for box, devices in by_box.items():
        yield tuple(devices), box


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of the part of a tensor that lies in ``box``."""
    for dim, (start, stop) in enumerate(box):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def chunks(blocks: Iterable[torch.Tensor], chunk_bytes: int) -> Iterator[bytes]:
    """Copies of the bytes of contiguous CPU tensors, at most ``chunk_bytes`` each; one empty chunk if there are none.

    Copies, because a large frame must not change before it is sent, and the user may write to the tensor.
    """
    is_empty = True
    for block in blocks:
        data = memory_of(block)
        for offset in range(0, len(data), chunk_bytes):
            is_empty = False
            yield bytes(data[offset : offset + chunk_bytes])
    if is_empty:
        yield b""


def upload_parts(
    value_id: int,
    devices: Sequence[int],
    dtype: torch.dtype,
    shape: Sequence[int],
    blocks: Iterable[torch.Tensor],
    chunk_bytes: int,
) -> Iterator[tuple[Upload, bytes]]:
    """The messages, still without their seq, and payloads that bring a local piece of local ``shape`` to devices.

    ``blocks`` are contiguous CPU tensors that hold its elements in row-major order, one after the other.
    """
    message = Upload(
        seq=0,
        value_id=value_id,
        devices=list(devices),
        dtype=name_of(dtype),
        shape=list(shape),
        offset_bytes=0,
        total_bytes=math.prod(shape) * dtype.itemsize,
    )
    for chunk in chunks(blocks, chunk_bytes):
        yield message, chunk
        message = msgspec.structs.replace(message, offset_bytes=message.offset_bytes + len(chunk))
