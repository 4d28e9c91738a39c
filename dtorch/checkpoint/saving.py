"""``save``: the pieces that devices hold, each read once, into files of a folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch

from dtorch.checkpoint import plain
from dtorch.checkpoint.files import INDEX, Disk, Writer
from dtorch.checkpoint.pieces import NAMES, arriving, by_device
from dtorch.checkpoint.tree import packed
from dtorch_runtime.errors import SettingError
from dtorch_runtime.worker.blobs import memory_of

#: How a checkpoint is written: as ``dtorch.checkpoint`` does, for ``torch.distributed.checkpoint``, or as safetensors
#: files for programs on one device.
Format: TypeAlias = Literal["dtorch", "dcp", "safetensors"]
#: Writes tensors into a folder, or a file.
Write: TypeAlias = Callable[[Path, Disk], None]

DCP_INDEX: Final = ".metadata"
#: What a folder that holds a checkpoint has, by format.
_INDICES: Final[Mapping[str, tuple[str, ...]]] = {
    "dtorch": (INDEX,),
    "dcp": (DCP_INDEX,),
    "safetensors": (plain.SINGLE, plain.INDEX),
}
#: The last save into a folder: those of one folder are done in their order.
_last: dict[Path, Future[None]] = {}
_lock = threading.Lock()


def save(path: str | os.PathLike[str], state: Any, *, format: Format = "dtorch") -> None:
    """Write a checkpoint into the folder ``path``, in the place of one that is there.

    Whatever ends the program meanwhile, the folder holds the old checkpoint or the new one, whole.

    Args:
        state: dicts, lists and tuples of tensors, numbers, strings and of what has a state dict: models, optimizers,
            schedulers. ``{"model": model, "optimizer": optimizer, "step": 7}``.
        format: ``"dcp"`` writes what ``torch.distributed.checkpoint.load`` reads; ``"safetensors"`` whole tensors,
            into ``model.safetensors`` or several files with an index, or into the file ``path`` that
            ends in ``.safetensors``. It takes a model, or dicts of tensors.

    Raises:
        SettingError: something else in ``state``, no such format, or a folder with a checkpoint of another one.
        UnsupportedError: a tensor whose dtype safetensors files do not have.
        OSError: the folder cannot be written to.
        RemoteOpError, NodeLost, ControllerLost, ClusterTimeout, SessionClosed: as ``Tensor.to_torch``.
    """
    write_checkpoint(Path(path).absolute(), state, Disk(), format)


def save_async(path: str | os.PathLike[str], state: Any, *, format: Format = "dtorch") -> Future[None]:
    """As ``save``, beside the program: what is written is what the tensors are now, of which devices keep a copy.

    Returns:
        A future; ``result()`` waits until the checkpoint is there, and raises what ``save`` would.

    Raises:
        SettingError, UnsupportedError: as ``save``.
    """
    folder = Path(path).absolute()
    tensors, plan = _planned(folder, state, format)
    with torch.no_grad():
        write = plan({name: tensor.detach().clone() for name, tensor in tensors.items()})
    before, done = _queued(folder)

    def run() -> None:
        if before is not None:
            before.exception()
        try:
            write(folder, Disk())
        except BaseException as error:  # noqa: BLE001  it is raised again where the result is asked for
            done.set_exception(error)
        else:
            done.set_result(None)

    # Not a daemon: a program that ends waits until its checkpoint is there.
    threading.Thread(target=run, name=f"dtorch save {folder.name}").start()
    return done


def write_checkpoint(folder: Path, state: Any, disk: Disk, format: Format = "dtorch") -> None:
    """``save`` on a disk that may have faults. Those that were begun for the folder before it are done first."""
    tensors, plan = _planned(folder, state, format)
    write = plan(tensors)
    before, done = _queued(folder)
    try:
        if before is not None:
            before.exception()
        write(folder, disk)
    finally:
        done.set_result(None)


def _queued(folder: Path) -> tuple[Future[None] | None, Future[None]]:
    """The save into the folder that comes before this one, and this one."""
    done: Future[None] = Future()
    with _lock:
        before = _last.get(folder)
        _last[folder] = done
    return before, done


def _planned(
    folder: Path, state: Any, format: Format
) -> tuple[dict[str, torch.Tensor], Callable[[Mapping[str, torch.Tensor]], Write]]:
    """The tensors of a state, and what makes of these, or of copies of them, the write."""
    if format not in _INDICES:
        raise SettingError(f"save(format=) takes one of {', '.join(map(repr, _INDICES))}, got {format!r}")
    for other, names in _INDICES.items():
        if other != format and (found := [name for name in names if (folder / name).exists()]):
            raise SettingError(
                f"save(): {folder} holds {found[0]}, of format {other!r}; write into a folder of its own, or write "
                f"format={other!r}"
            )
    if format == "safetensors":
        return plain.planned(state)
    if format == "dcp":
        from dtorch.checkpoint import dcp  # it loads torch.distributed, which takes a second

        return dcp.planned(state)
    tree, tensors = packed(state)
    return tensors, lambda tensors: _write(tree, tensors)


def _write(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Write:
    known = {name: (NAMES.get(tensor.dtype, ""), tensor.shape) for name, tensor in tensors.items()}
    files = by_device(tensors)

    def write(folder: Path, disk: Disk) -> None:
        writer = Writer(folder, known, disk)
        try:
            for pieces in files:
                file = writer.begin([piece.entry for piece in pieces])
                try:
                    for tensor in arriving(pieces):
                        file.write(memory_of(tensor))
                    writer.end(file)
                finally:
                    file.drop()
            writer.commit(tree)
        except BaseException:
            writer.abandon()
            raise

    return write
