"""Weights from safetensors files, a few rows at a time, so that no whole tensor is ever in the client's memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.layout import Box, box_shape

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
#: Rows are read in blocks of about this size.
BLOCK_BYTES: Final = 4 * 1024 * 1024

#: Names of dtypes in a safetensors header (github.com/huggingface/safetensors, "Format").
DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a safetensors file: global shape and dtype as stored."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def blocks(self, box: Box, block_bytes: int = BLOCK_BYTES) -> Iterator[torch.Tensor]:
        """The elements of ``box`` in row-major order, as contiguous tensors of whole rows of about ``block_bytes``.

        The file is opened for each block and closed behind it: pages of a mapping that stays open count as the
        client's memory until the whole file has passed through it.
        """
        if not box:
            yield self._read(())
            return
        shape = box_shape(box)
        num_rows = shape[0]
        row_bytes = max(1, self.dtype.itemsize * math.prod(shape[1:]))
        rows_per_block = max(1, block_bytes // row_bytes)
        first = box[0][0]
        for start in range(first, first + num_rows, rows_per_block):
            stop = min(start + rows_per_block, first + num_rows)
            yield self._read((slice(start, stop), *(slice(low, high) for low, high in box[1:])))

    def _read(self, index: tuple[slice, ...]) -> torch.Tensor:
        from safetensors import safe_open  # only models need it; `import dtorch` works without

        with safe_open(str(self.file), framework="pt", device="cpu") as handle:
            if not index:
                return torch.Tensor(handle.get_tensor(self.name)).clone()
            block: torch.Tensor = handle.get_slice(self.name)[index]
            return block.clone(memory_format=torch.contiguous_format)


class Checkpoint:
    """The tensors of a safetensors file, or of a folder with one file or with an index of several.

    Only headers are read here.

    Raises:
        SettingError: there is no such file, or it is not of this format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.tensors: dict[str, StoredTensor] = {}
        for file in _files(self.path):
            self.tensors.update(_read_header(file))

    def find(self, names: Sequence[str], prefix: str = "") -> StoredTensor | None:
        """The tensor stored under the first of ``names`` that exists, with or without the base model's prefix."""
        for name in names:
            for candidate in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
                if candidate in self.tensors:
                    return self.tensors[candidate]
        return None


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return _indexed(path) if path.suffix == ".json" else [path]
    if not path.is_dir():
        raise SettingError(f"checkpoint={str(path)!r} does not exist; give a safetensors file or its folder")
    if (path / _INDEX).is_file():
        return _indexed(path / _INDEX)
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found
    raise SettingError(
        f"checkpoint={str(path)!r} holds {len(found) or 'no'} safetensors files and no {_INDEX}; "
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


def _read_header(file: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt", device="cpu") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118, not a mapping
            return {
                name: StoredTensor(file, name, tuple(view.get_shape()), DTYPES[view.get_dtype()])
                for name, view in slices.items()
            }
    except (SafetensorError, KeyError, OSError) as error:
        raise SettingError(f"{file} is not a safetensors file that can be read: {error!r}") from error
