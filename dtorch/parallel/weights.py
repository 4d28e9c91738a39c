"""Tensors in safetensors files, of which only a few rows are ever in the client's memory."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.layout import Box, box_shape, num_elements
from dtorch_runtime.worker.file_kernels import StoredPiece, read_box
from dtorch_runtime.worker.stored import FileFacts, OpenFile, StoredError, StoredFile, read_header

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
#: Rows are read in blocks of about this size.
BLOCK_BYTES: Final = 4 * 1024 * 1024

#: Names of dtypes in a safetensors header (github.com/huggingface/safetensors, "Format").
DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(slots=True, eq=False)
class Sources:
    """The files of one checkpoint, by path, and what is known of who can read them: ``upload`` keeps it."""

    files: Mapping[str, StoredFile]
    #: Session and node -> path -> why the node cannot read it.
    unseen: dict[tuple[int, str], Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in files: global shape, dtype as stored, and where its elements are."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]
    sources: Sources = field(repr=False)

    @property
    def file(self) -> Path:
        """The first that has elements of it."""
        return Path(self.pieces[0].file.path if self.pieces else next(iter(self.sources.files)))

    @property
    def is_for_workers(self) -> bool:
        """Whether workers can read it, where they see its files."""
        return True

    def blocks(self, box: Box, block_bytes: int = BLOCK_BYTES) -> Iterator[torch.Tensor]:
        """The elements of ``box`` in row-major order, as contiguous tensors of whole rows of about ``block_bytes``.

        Raises:
            SettingError: a file is not what it was, or cannot be read.
        """
        if not box:
            yield self._read(())
            return
        row_bytes = max(1, self.dtype.itemsize * math.prod(box_shape(box[1:])))
        num_rows = max(1, block_bytes // row_bytes)
        first, last = box[0]
        for start in range(first, last, num_rows):
            yield self._read(((start, min(start + num_rows, last)), *box[1:]))

    def whole(self) -> torch.Tensor:
        """All of it, on the CPU.

        Raises:
            SettingError: as ``blocks``.
        """
        return self._read(tuple((0, size) for size in self.shape))

    def verify(self) -> None:
        """Look whether it can be read, and compare it with its checksums where there are some.

        Raises:
            SettingError: as ``blocks``.
        """
        try:
            for piece in self.pieces:
                num_bytes = num_elements(box_shape(piece.box)) * self.dtype.itemsize
                with OpenFile(piece.file) as file:
                    file.check(piece.start, piece.start + num_bytes)
        except StoredError as error:
            raise SettingError(str(error)) from error

    def _read(self, box: Box) -> torch.Tensor:
        out = torch.empty(box_shape(box), dtype=self.dtype, device="cpu")
        try:
            if out.numel():
                read_box(out, box, self.pieces)
        except StoredError as error:
            raise SettingError(str(error)) from error
        return out


class Checkpoint:
    """The tensors of a safetensors file, or of a folder with one file or with an index of several.

    Only headers are read here.

    Raises:
        SettingError: there is no such file, or it is not of this format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.tensors: dict[str, StoredTensor] = {}
        files: dict[str, StoredFile] = {}
        sources = Sources(files)
        for file in _files(self.path):
            self.tensors.update(_read_file(file.absolute(), files, sources))

    def find(self, names: Sequence[str], prefix: str = "") -> StoredTensor | None:
        """As ``find_stored``, among the tensors of these files."""
        return find_stored(self.tensors, names, prefix)


def find_stored(
    tensors: Mapping[str, StoredTensor], names: Sequence[str], prefix: str = ""
) -> StoredTensor | None:
    """The tensor stored under the first of ``names`` that exists, with or without the base model's prefix."""
    for name in names:
        for candidate in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
            if candidate in tensors:
                return tensors[candidate]
    return None


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return _indexed(path) if path.suffix == ".json" else [path]
    if not path.is_dir():
        raise SettingError(f"checkpoint={str(path)!r} does not exist; give a safetensors file or its folder")
    if (path / INDEX).is_file():
        return _indexed(path / INDEX)
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found
    raise SettingError(
        f"checkpoint={str(path)!r} holds {len(found) or 'no'} safetensors files and no {INDEX}; "
        + ("name the file" if found else f"it lists {sorted(p.name for p in path.iterdir())[:8]}")
    )


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise SettingError(f"{index} is not an index of safetensors files: {error!r}") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise SettingError(f"{index} names files that are not there: {', '.join(missing[:5])}")
    return [index.parent / name for name in names]


def _read_file(
    path: Path, files: dict[str, StoredFile], sources: Sources
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors that a header names; the file is noted among ``files``."""
    try:
        num_bytes = path.stat().st_size
        header = read_header(str(path))
        file = StoredFile(str(path), FileFacts(num_bytes, zlib.crc32(header)))
        records: dict[str, dict[str, Any]] = json.loads(header)
        records.pop("__metadata__", None)
        found = [_stored(name, record, file, 8 + len(header), sources) for name, record in records.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(f"{path} is not a safetensors file that can be read: {error!r}") from error
    files[file.path] = file
    for stored in found:
        yield stored.name, stored


def _stored(
    name: str, record: Mapping[str, Any], file: StoredFile, begin: int, sources: Sources
) -> StoredTensor:
    shape = tuple(int(size) for size in record["shape"])
    dtype = DTYPES[record["dtype"]]
    low, high = record["data_offsets"]
    if not 0 <= low <= high <= file.facts.num_bytes - begin:
        raise ValueError(f"the elements of {name} are not in the file")
    if high - low != num_elements(shape) * dtype.itemsize:
        raise ValueError(f"{name} has {high - low} bytes, and {dtype}{list(shape)} has another number")
    pieces = (StoredPiece(file, begin + low, tuple((0, size) for size in shape)),) if high > low else ()
    return StoredTensor(name, shape, dtype, pieces, sources)
