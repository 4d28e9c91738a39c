"""Safetensors files as programs on one device read them: whole tensors, under the keys of a state dict.

One file, or several with an index of which tensor is where, as Hugging Face's libraries write them. Files that replace
others get names of their own; the last step is the renaming of the one file, or of the index.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from dtorch.checkpoint.files import Disk, FileWriter
from dtorch.checkpoint.pieces import Piece, arriving, whole
from dtorch.checkpoint.tree import expanded
from dtorch.parallel.weights import INDEX, SINGLE
from dtorch_runtime.errors import SettingError
from dtorch_runtime.worker.blobs import memory_of

__all__ = ["INDEX", "SINGLE", "planned"]

#: A file has at most so many bytes of elements, or one tensor.
_MAX_FILE_BYTES: Final = 5 * 1000**3
_SUFFIX: Final = ".safetensors"
_OURS: Final = re.compile(
    rf"model-[0-9a-f]{{12}}-\d{{5}}-of-\d{{5}}\.safetensors|{re.escape(INDEX)}\.[0-9a-f]{{12}}"
)


def planned(
    state: Any,
) -> tuple[dict[str, torch.Tensor], Callable[[Mapping[str, torch.Tensor]], Callable[[Path, Disk], None]]]:
    """The tensors of a state by their keys, joined with dots, and what makes of them the write.

    Raises:
        SettingError: something that is no tensor, or two with one name.
    """
    found: dict[str, torch.Tensor] = {}

    def collect(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                collect(item, (*path, str(key)))
            return
        name = ".".join(path)
        if not isinstance(value, torch.Tensor):
            raise SettingError(
                f"save(format='safetensors'): {name or 'the state'} is a {type(value).__name__}, and these files hold "
                f"named tensors; write the model alone, or leave out format="
            )
        if not name or found.setdefault(name, value) is not value:
            raise SettingError(
                "save(format='safetensors'): "
                + (
                    f"two tensors would have the name {name!r}; rename a key"
                    if name
                    else "give a dict of tensors"
                )
            )

    collect(expanded(state), ())
    return found, _plan


def _plan(tensors: Mapping[str, torch.Tensor]) -> Callable[[Path, Disk], None]:
    pieces = whole(tensors)
    return lambda path, disk: _write(path, pieces, disk)


def _write(path: Path, pieces: Sequence[Piece], disk: Disk) -> None:
    number = uuid.uuid4().hex[:12]
    is_file = path.suffix == _SUFFIX
    folder = path.parent if is_file else path
    folder.mkdir(parents=True, exist_ok=True)
    parts = [list(pieces)] if is_file else _parts(pieces)
    old = _left_of(path) if is_file else [*_files_of(folder), *_left_in(folder)]
    made: list[Path] = []
    try:
        for index, part in enumerate(parts):
            name = f"model-{number}-{index + 1:05}-of-{len(parts):05}{_SUFFIX}"
            name = f"{path.name}.{number}" if is_file else name
            made.append(folder / name)
            _write_file(made[-1], part, disk)
        if len(parts) > 1:
            made.append(_write_index(folder / f"{INDEX}.{number}", made, parts, disk))
        target = path if is_file else folder / (INDEX if len(parts) > 1 else SINGLE)
        disk.settle(folder)
        disk.replace(made[-1], target)
        disk.settle(folder)
    except BaseException:
        for file in made:
            disk.remove(file)
        raise
    for file in old:
        if file != target:
            disk.remove(file)


def _left_in(folder: Path) -> list[Path]:
    """Files of writers that have died. Nobody else gives such names."""
    return [path for path in sorted(folder.iterdir()) if _OURS.fullmatch(path.name)]


def _left_of(file: Path) -> list[Path]:
    ours = re.compile(rf"{re.escape(file.name)}\.[0-9a-f]{{12}}")
    return [path for path in sorted(file.parent.iterdir()) if ours.fullmatch(path.name)]


def _parts(pieces: Sequence[Piece]) -> list[list[Piece]]:
    parts: list[list[Piece]] = [[]]
    num_bytes = 0
    for piece in pieces:
        if parts[-1] and num_bytes + piece.entry.num_bytes > _MAX_FILE_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(piece)
        num_bytes += piece.entry.num_bytes
    return parts


def _write_file(path: Path, pieces: Sequence[Piece], disk: Disk) -> None:
    file = FileWriter(disk, path, [piece.entry for piece in pieces])
    try:
        for tensor in arriving(pieces):
            file.write(memory_of(tensor))
        file.finish()
    finally:
        file.drop()


def _write_index(path: Path, files: Sequence[Path], parts: Sequence[Sequence[Piece]], disk: Disk) -> Path:
    total = sum(piece.entry.num_bytes for part in parts for piece in part)
    where = {p.entry.name: file.name for file, part in zip(files, parts, strict=True) for p in part}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
    file = disk.create(path)
    try:
        disk.write(file, text.encode())
        disk.close(file)
    finally:
        file.close()
    return path


def _files_of(folder: Path) -> list[Path]:
    """The files of a checkpoint that is there: what says which they are comes first."""
    found: list[Path] = []
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            names = []  # it is no index, so nobody needs what it names
        found = [folder / INDEX, *(folder / Path(name).name for name in names)]
    return [*found, *([folder / SINGLE] if (folder / SINGLE).is_file() else [])]
