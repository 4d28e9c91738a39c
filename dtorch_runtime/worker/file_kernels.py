"""Kernels that read tensors from files: each device reads its own piece. Importing this module registers them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from dtorch_runtime.ir.layout import Box, box_shape, intersect, relative
from dtorch_runtime.worker.blobs import memory_of
from dtorch_runtime.worker.failures import InternalFailure
from dtorch_runtime.worker.kernels import kernel
from dtorch_runtime.worker.stored import CHECKED_BYTES, FileFacts, OpenFile, StoredFile, facts_of

#: Rows of which only some columns are wanted are read in blocks of about this size.
_BLOCK_BYTES: Final = 4 * 1024 * 1024
#: What lies in one place and has so many bytes is read by itself, and what is shorter with its whole row.
_RUN_BYTES: Final = 4 * 1024
#: In place of the size of a file that is no safetensors file.
NO_TENSORS: Final = -(1 << 20)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """The elements of a box of a tensor, row-major, from byte ``start`` of a file on."""

    file: StoredFile
    start: int
    box: Box


def read_box(out: torch.Tensor, box: Box, pieces: Sequence[StoredPiece]) -> None:
    """Fill ``out``, a contiguous CPU tensor, with the elements of ``box`` of the whole that ``pieces`` make.

    Raises:
        StoredError: a file is not there, cannot be read, or is not what it was.
    """
    for piece in pieces:
        common = intersect(box, piece.box)
        if common is None:
            continue
        with OpenFile(piece.file) as file:
            target = out[_index(relative(common, box))]
            _read_part(file, piece.start, box_shape(piece.box), relative(common, piece.box), target)


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _read_part(file: OpenFile, start: int, shape: Sequence[int], box: Box, target: torch.Tensor) -> None:
    """Fill ``target`` with a box of what lies row-major, of ``shape``, from byte ``start`` on."""
    itemsize = target.dtype.itemsize
    if not box:
        file.read_into(memory_of(target), start)
        return
    (low, high), rest = box[0], box[1:]
    row_bytes = itemsize * math.prod(shape[1:])
    start += low * row_bytes
    if rest == tuple((0, size) for size in shape[1:]):
        rows = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
        file.read_into(memory_of(rows), start)
        if rows is not target:
            target.copy_(rows)
    elif len(rest) > 1 or (rest[0][1] - rest[0][0]) * itemsize >= _RUN_BYTES:
        for number in range(high - low):
            _read_part(file, start + number * row_bytes, shape[1:], rest, target[number])
    else:
        num_rows = max(1, _BLOCK_BYTES // max(1, row_bytes))
        for first in range(0, high - low, num_rows):
            part = target[first : first + num_rows]
            rows = torch.empty((len(part), *shape[1:]), dtype=target.dtype)
            file.read_into(memory_of(rows), start + first * row_bytes)
            part.copy_(rows[(slice(None), *_index(rest))])


@kernel("read")
def read(
    starts: list[int],
    sizes: list[int],
    files: list[list[Any]],
    pieces: list[list[Any]],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The box of a stored tensor that this device holds.

    Args:
        starts, sizes: of the box in the whole.
        files: for each the path, the size, the CRC-32 of the header or None, and None or the checksums of some parts:
            number of the part, CRC-32, and so on. So who does not know a file is not told what is in it.
        pieces: for each the index of its file, the byte where it starts, and its box: start, stop, and so on.

    Raises:
        StoredError: a file is not there, cannot be read, or is not what it was.
    """
    known = [_file(*record) for record in files]
    stored = [
        StoredPiece(known[number], start, tuple(zip(bounds[::2], bounds[1::2], strict=True)))
        for number, start, bounds in pieces
    ]
    out = torch.empty(sizes, dtype=dtype, device="cpu")
    box = tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))
    if out.numel():
        read_box(out, box, stored)
    return out.to(device)


def _file(path: str, num_bytes: int, header_crc32: int | None, crcs: list[int] | None) -> StoredFile:
    if header_crc32 is None and crcs is None:
        raise InternalFailure(f"nothing is known of {path} that it could be compared with")
    parts = None if crcs is None else dict(zip(crcs[::2], crcs[1::2], strict=True))
    return StoredFile(path, FileFacts(num_bytes, header_crc32), parts)


@kernel("check_files")
def check_files(files: list[list[Any]], device: torch.device) -> torch.Tensor:
    """Compare parts of files with their checksums.

    Args:
        files: as for ``read``; the parts are those with checksums.

    Returns:
        int64 []: how many bytes were compared.

    Raises:
        StoredError: a file is not there, cannot be read, or is not what it was.
    """
    num_bytes = 0
    for record in files:
        stored = _file(*record)
        with OpenFile(stored) as file:
            for number in stored.crcs or ():
                start = number * CHECKED_BYTES
                stop = min(start + CHECKED_BYTES, stored.facts.num_bytes)
                file.check(start, stop)
                num_bytes += stop - start
    return torch.tensor(num_bytes).to(device)


@kernel("look_for_files")
def look_for_files(paths: list[str], device: torch.device) -> torch.Tensor:
    """What this device's node finds under some paths.

    Returns:
        int64 [paths, 2]: the size, and the CRC-32 of the header; or minus the number of the system's error, or
        ``NO_TENSORS``, and 0.
    """
    found = torch.zeros(len(paths), 2, dtype=torch.int64, device="cpu")
    for row, path in zip(found, paths, strict=True):
        try:
            facts = facts_of(path)
        except OSError as error:
            row[0] = -(error.errno or 0) or -1
        except ValueError:
            row[0] = NO_TENSORS
        else:
            row[0], row[1] = facts.num_bytes, facts.header_crc32 or 0
    return found.to(device)
