"""The folder of a checkpoint: safetensors files, each with pieces of tensors, and one index with checksums.

The index is the checkpoint: it names its files, which have names of their own each time, and replaces the one before it
in a single step. Whoever dies before that step leaves the old checkpoint, whoever dies behind it the new one.

Files are of the format of github.com/huggingface/safetensors ("Format"). This module imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.layout import Box, box_shape, num_elements
from dtorch_runtime.worker.stored import CHECKED_BYTES, FileFacts, StoredFile

INDEX: Final = "checkpoint.json"
_VERSION: Final = 1
_OURS: Final = re.compile(r"[0-9a-f]{12}-\d+\.safetensors|checkpoint\.json\.[0-9a-f]{12}")
_FRAME: Final = re.compile(rb'\{"index":(.*),"crc32":"([0-9a-f]{8})"\}\n', re.DOTALL)


class Disk:
    """What is done to files; tests have one that dies at a given step."""

    def create(self, path: Path) -> BinaryIO:
        """A new file, to be written to."""
        return path.open("xb", buffering=0)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Append all of ``data``."""
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    def close(self, file: BinaryIO) -> None:
        """Close a file whose bytes will survive a power cut."""
        os.fsync(file.fileno())
        file.close()

    def replace(self, source: Path, target: Path) -> None:
        """Give a file the name of another, which is gone then."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Delete a file, if it is there."""
        path.unlink(missing_ok=True)

    def settle(self, folder: Path) -> None:
        """Let the names in a folder survive a power cut."""
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


@dataclass(frozen=True, slots=True)
class Entry:
    """A piece of a tensor in a file: the box of the global tensor that it is, row-major."""

    name: str
    #: As safetensors files write it: ``"F32"``.
    dtype: str
    itemsize: int
    box: Box

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return num_elements(box_shape(self.box)) * self.itemsize


# ---- writing ----


class Writer:
    """Writes one checkpoint into a folder, which may hold another one. Nothing is there before ``commit()``."""

    def __init__(self, folder: Path, tensors: Mapping[str, tuple[str, Sequence[int]]], disk: Disk) -> None:
        """``tensors``: the dtype and the global shape of each by name."""
        self._folder = folder
        self._disk = disk
        self._id = uuid.uuid4().hex[:12]
        self._files: dict[str, dict[str, Any]] = {}
        self._tensors: dict[str, dict[str, Any]] = {
            name: {"dtype": dtype, "shape": list(shape), "pieces": []}
            for name, (dtype, shape) in tensors.items()
        }
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, entries: Sequence[Entry]) -> FileWriter:
        """A new file with these pieces, whose bytes are written next, in this order."""
        name = f"{self._id}-{len(self._files)}.safetensors"
        self._files[name] = {}
        return FileWriter(self._disk, self._folder / name, entries)

    def end(self, file: FileWriter) -> None:
        """The file is complete."""
        self._files[file.path.name] = file.finish()
        for entry, start in zip(file.entries, file.starts, strict=True):
            piece = {"file": file.path.name, "start": start, "box": entry.box}
            self._tensors[entry.name]["pieces"].append(piece)

    def commit(self, state: Any) -> None:
        """Let the folder hold this checkpoint, and no more the one before it. ``state`` is JSON."""
        body = json.dumps(
            {"version": _VERSION, "state": state, "tensors": self._tensors, "files": self._files},
            separators=(",", ":"),
        ).encode()
        text = b'{"index":%b,"crc32":"%08x"}\n' % (body, zlib.crc32(body))
        path = self._folder / f"{INDEX}.{self._id}"
        file = self._disk.create(path)
        self._disk.write(file, text)
        self._disk.close(file)
        self._disk.settle(self._folder)
        self._disk.replace(path, self._folder / INDEX)
        self._disk.settle(self._folder)
        self._remove_others()

    def abandon(self) -> None:
        """Delete what was written."""
        for path in self._folder.glob(f"*{self._id}*"):
            self._disk.remove(path)

    def _remove_others(self) -> None:
        """Delete the files of the checkpoint before, and of those that were never completed."""
        for path in sorted(self._folder.iterdir()):
            if _OURS.fullmatch(path.name) and path.name not in self._files:
                self._disk.remove(path)


class FileWriter:
    """Writes one safetensors file from the front to the end, and notes its checksums."""

    def __init__(self, disk: Disk, path: Path, entries: Sequence[Entry]) -> None:
        self.path = path
        self.entries = entries
        self._disk = disk
        self._crcs: list[int] = []
        self._size = 0
        ends: list[int] = []
        for entry in entries:
            ends.append((ends[-1] if ends else 0) + entry.num_bytes)
        offsets = list(zip([0, *ends], ends, strict=False))
        header = json.dumps(
            {"__metadata__": {"format": "pt"}}
            | {
                entry.name: {
                    "dtype": entry.dtype,
                    "shape": box_shape(entry.box),
                    "data_offsets": offset,
                }
                for entry, offset in zip(entries, offsets, strict=True)
            },
            separators=(",", ":"),
        ).encode()
        header += b" " * (-len(header) % 8)
        #: Where each entry begins in the file.
        self.starts = [8 + len(header) + begin for begin, _ in offsets]
        self._file = disk.create(path)
        self.write(len(header).to_bytes(8, "little") + header)

    def write(self, data: bytes | memoryview) -> None:
        """The next bytes."""
        view = memoryview(data)
        while view:
            room = CHECKED_BYTES - self._size % CHECKED_BYTES
            part, view = view[:room], view[room:]
            if room == CHECKED_BYTES:
                self._crcs.append(0)
            self._crcs[-1] = zlib.crc32(part, self._crcs[-1])
            self._disk.write(self._file, part)
            self._size += len(part)

    def finish(self) -> dict[str, Any]:
        """Close it; what the index says of it."""
        self._disk.close(self._file)
        return {"num_bytes": self._size, "crc32": self._crcs}

    def drop(self) -> None:
        """Close it, incomplete."""
        self._file.close()


# ---- reading ----


@dataclass(frozen=True, slots=True)
class IndexedPiece:
    """Where the elements of a box are."""

    file: str
    start: int
    box: Box


@dataclass(frozen=True, slots=True)
class Indexed:
    """A tensor of a checkpoint: dtype as safetensors files write it, global shape."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[IndexedPiece, ...]


class Index:
    """What a checkpoint says of itself: the state, the tensors by name, and the files by theirs.

    Raises:
        SettingError: there is no checkpoint, it is of a newer version, or its index is damaged.
    """

    def __init__(self, folder: Path) -> None:
        index = _read_index(folder)
        self.state: Any = index["state"]
        self.tensors = {name: _indexed(record) for name, record in index["tensors"].items()}
        self.files = {
            name: StoredFile(
                str(folder.absolute() / name),
                FileFacts(record["num_bytes"], None),
                dict(enumerate(record["crc32"])),
            )
            for name, record in index["files"].items()
        }


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SettingError(
            f"{folder} holds no checkpoint: {error}; write the folder that dtorch.checkpoint.save() was given"
        ) from error
    found = _FRAME.fullmatch(text)
    if found is None or zlib.crc32(found[1]) != int(found[2], 16):
        raise SettingError(f"{path} is damaged: it is not what was written; restore it, or load another")
    index: dict[str, Any] = json.loads(found[1])
    if index["version"] != _VERSION:
        raise SettingError(
            f"{path} is of version {index['version']}, and this DTorch reads version {_VERSION}"
        )
    return index


def _indexed(record: dict[str, Any]) -> Indexed:
    pieces = tuple(
        IndexedPiece(p["file"], p["start"], tuple((low, high) for low, high in p["box"]))
        for p in record["pieces"]
    )
    return Indexed(record["dtype"], tuple(record["shape"]), pieces)
