"""``save``: the pieces that devices hold, each read once, into files of a folder."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from dtorch.checkpoint.files import Disk, Entry, Writer
from dtorch.checkpoint.tree import packed
from dtorch.parallel.weights import DTYPES
from dtorch.spec import intern_spec
from dtorch.tensors import Tensor
from dtorch.values import device_boxes
from dtorch_runtime.errors import UnsupportedError
from dtorch_runtime.ir.layout import Layout, box_shape, num_elements
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Replicate
from dtorch_runtime.worker.blobs import memory_of

#: Pieces of so many bytes together, or one, are on their way to this process at once.
_WINDOW_BYTES: Final = 64 * 1024 * 1024
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
#: The last save into a folder: those of one folder are done in their order.
_last: dict[Path, Future[None]] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Piece:
    entry: Entry
    #: Asks for the elements; what it returns waits for them.
    ask: Callable[[], Callable[[], torch.Tensor]]


def save(path: str | os.PathLike[str], state: Any) -> None:
    """Write a checkpoint into the folder ``path``, in the place of one that is there.

    Whatever ends the program meanwhile, the folder holds the old checkpoint or the new one, whole.

    Args:
        state: dicts, lists and tuples of tensors, numbers, strings and of what has a state dict: models, optimizers,
            schedulers. ``{"model": model, "optimizer": optimizer, "step": 7}``.

    Raises:
        SettingError: something else in ``state``.
        UnsupportedError: a tensor whose dtype safetensors files do not have.
        OSError: the folder cannot be written to.
        RemoteOpError, NodeLost, ControllerLost, ClusterTimeout, SessionClosed: as ``Tensor.to_torch``.
    """
    write_checkpoint(Path(path).absolute(), state, Disk())


def save_async(path: str | os.PathLike[str], state: Any) -> Future[None]:
    """As ``save``, beside the program: what is written is what the tensors are now, of which devices keep a copy.

    Returns:
        A future; ``result()`` waits until the checkpoint is there, and raises what ``save`` would.

    Raises:
        SettingError, UnsupportedError: as ``save``.
    """
    tree, tensors = packed(state)
    with torch.no_grad():
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    files = _files(copies)
    folder = Path(path).absolute()
    before, done = _queued(folder)

    def run() -> None:
        if before is not None:
            before.exception()
        try:
            _write(folder, tree, copies, files, Disk())
        except BaseException as error:  # noqa: BLE001  it is raised again where the result is asked for
            done.set_exception(error)
        else:
            done.set_result(None)

    # Not a daemon: a program that ends waits until its checkpoint is there.
    threading.Thread(target=run, name=f"dtorch save {folder.name}").start()
    return done


def write_checkpoint(folder: Path, state: Any, disk: Disk) -> None:
    """``save`` on a disk that may have faults. Those that were begun for the folder before it are done first."""
    tree, tensors = packed(state)
    files = _files(tensors)
    before, done = _queued(folder)
    try:
        if before is not None:
            before.exception()
        _write(folder, tree, tensors, files, disk)
    finally:
        done.set_result(None)


def _queued(folder: Path) -> tuple[Future[None] | None, Future[None]]:
    """The save into the folder that comes before this one, and this one."""
    done: Future[None] = Future()
    with _lock:
        before = _last.get(folder)
        _last[folder] = done
    return before, done


def _write(
    folder: Path,
    tree: Any,
    tensors: Mapping[str, torch.Tensor],
    files: Sequence[Sequence[_Piece]],
    disk: Disk,
) -> None:
    known = {name: (_NAMES[tensor.dtype], tensor.shape) for name, tensor in tensors.items()}
    writer = Writer(folder, known, disk)
    try:
        for pieces in files:
            file = writer.begin([piece.entry for piece in pieces])
            try:
                for tensor in _arriving(pieces):
                    file.write(memory_of(tensor))
                writer.end(file)
            finally:
                file.drop()
        writer.commit(tree)
    except BaseException:
        writer.abandon()
        raise


def _arriving(pieces: Sequence[_Piece]) -> Iterator[torch.Tensor]:
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


# ---- which piece goes to which file ----


def _files(tensors: Mapping[str, torch.Tensor]) -> list[list[_Piece]]:
    """The pieces of each device that holds one, then those of this process. Of equal pieces one is written.

    Raises:
        UnsupportedError: a tensor whose dtype safetensors files do not have.
    """
    by_device: dict[int, list[_Piece]] = {}
    num_bytes: dict[int, int] = {}
    here: list[_Piece] = []
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
            entry = Entry(name, _NAMES[whole.dtype], whole.dtype.itemsize, box)
            num_bytes[device] = num_bytes.get(device, 0) + entry.num_bytes
            by_device.setdefault(device, []).append(_Piece(entry, _asking(whole, device, entry)))
    return [*(by_device[device] for device in sorted(by_device)), *([here] if here else [])]


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _NAMES:
        raise UnsupportedError(
            f"save(): {name} has dtype {tensor.dtype}, which safetensors files do not have; write "
            f"torch.view_as_real(t) for complex numbers, t.to(torch.float32) for others"
        )


def _without_bits(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        resolved: Any = tensor.detach().resolve_conj().resolve_neg()
        placements = [Replicate() if isinstance(p, Partial) else p for p in resolved.placements]
        whole: Tensor = resolved.redistribute(placements=placements)
    return whole


def _asking(tensor: Tensor, device: int, entry: Entry) -> Callable[[], Callable[[], torch.Tensor]]:
    alone = Layout(DeviceMesh(tensor.device_mesh.device_type, [device]), (Replicate(),))
    spec = intern_spec(
        box_shape(entry.box), tensor.dtype, alone
    )  # to its device, a piece is a tensor of its own

    def ask() -> Callable[[], torch.Tensor]:
        future = tensor.graph.session.fetch(tensor._handle, spec, f"piece on device {device}")
        return lambda: future.get().contiguous()

    return ask


def _piece_here(name: str, tensor: torch.Tensor) -> _Piece:
    box = tuple((0, size) for size in tensor.shape)
    entry = Entry(name, _NAMES[tensor.dtype], tensor.dtype.itemsize, box)
    return _Piece(entry, lambda: lambda: tensor.detach().cpu().contiguous())
