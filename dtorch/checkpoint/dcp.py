"""Directories of ``torch.distributed.checkpoint``: read whoever wrote them, written so that it reads them.

``.metadata`` is a pickle that says which tensors and values there are and where each piece is: a stretch of a
``.distcp`` file, as ``torch.save`` writes a tensor. A pickle can run anything, so that one is read by an unpickler that
knows the classes of such metadata and nothing else, and the rest by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem, metadata as records
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.utils._pytree import tree_map_only

from dtorch.checkpoint.files import Disk
from dtorch.checkpoint.pieces import Piece, arriving, by_device
from dtorch.checkpoint.tree import expanded, identity, packed
from dtorch.parallel.weights import Sources, StoredTensor
from dtorch.values import cut
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.layout import Box, box_shape, intersect, relative

INDEX: Final = ".metadata"
_FILE: Final = re.compile(r"__\d+_(\d+)\.distcp|\.metadata\.[0-9a-f]{12}")

# ---- reading ----

_RECORDS: Final = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
#: All that may be named in ``.metadata``, beside dtypes. None of it does anything but hold what it is given.
_ALLOWED: Final[Mapping[tuple[str, str], Any]] = {
    **{(records.__name__, name): getattr(records, name) for name in _RECORDS},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{("pathlib", name): pathlib.PurePosixPath for name in ("Path", "PosixPath", "PurePosixPath")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of such a checkpoint")


@dataclass(frozen=True, slots=True)
class SavedTensor(StoredTensor):
    """A tensor in pieces that ``torch.save`` wrote, or that is here already. Only this process can read it."""

    parts: tuple[tuple[Box, Callable[[], torch.Tensor]], ...] = ()
    where: Path = Path()

    @property
    def file(self) -> Path:
        """The folder."""
        return self.where

    @property
    def is_for_workers(self) -> bool:
        """No: they read bytes, and no pickles."""
        return False

    def verify(self) -> None:
        """As of every stored tensor."""
        for _, read in self.parts:
            read()

    def _read(self, box: Box) -> torch.Tensor:
        out = torch.empty(box_shape(box), dtype=self.dtype, device="cpu")
        for part, read in self.parts:
            common = intersect(box, part)
            if common is not None:
                target = cut(out, relative(common, box))
                target.copy_(cut(read(), relative(common, part)))
        return out


class _Stretches:
    """Reads what ``torch.save`` wrote into stretches of files; keeps the last one, of which rows are taken in turn."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: tuple[Any, Any] = (None, None)

    def read(self, name: str, where: Any) -> Any:
        """
        Raises:
            SettingError: it cannot be read, or is more than tensors and plain values.
        """
        if self._last[0] is where:
            return self._last[1]
        path = self._folder / where.relative_path
        if path.parent != self._folder or getattr(where, "transform_descriptors", None):
            raise SettingError(
                f"{self._folder / INDEX} says that {name} is in {where.relative_path}, and DTorch reads plain files "
                f"of the folder itself, without extensions"
            )
        try:
            with path.open("rb") as file:
                file.seek(where.offset)
                data = file.read(where.length)
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except OSError as error:
            raise SettingError(f"{path}, a file of this checkpoint, cannot be read: {error}") from error
        except Exception as error:
            raise SettingError(
                f"{path} is damaged, or {name} in it is more than tensors and plain values, of which DTorch runs "
                f"nothing: {error}"
            ) from error
        self._last = (where, found)
        return found


@dataclass(frozen=True, slots=True)
class Directory:
    """What a directory holds: the state as ``tree`` packs it, and its tensors by name."""

    state: Any
    tensors: Mapping[str, StoredTensor]


def read_directory(folder: Path) -> Directory:
    """
    Raises:
        SettingError: its metadata is damaged, names what it should not, or is not of files.
    """
    found = _metadata(folder / INDEX)
    stretches = _Stretches(folder)
    tensors: dict[str, StoredTensor] = {}
    root: dict[Any, Any] = {}
    paths = found.planner_data if isinstance(found.planner_data, dict) else {}
    try:
        for name, record in found.state_dict_metadata.items():
            if isinstance(record, records.TensorStorageMetadata):
                tensors[name] = _tensor(folder, stretches, name, record, found.storage_data)
                node: Any = {"tensor": name}
            else:
                where = found.storage_data[records.MetadataIndex(name)]
                node = _value(folder, name, stretches.read(name, where), tensors)
            set_element(root, tuple(paths.get(name, (name,))), _Leaf(node))
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(f"{folder / INDEX} contradicts itself: {error!r}") from error
    return Directory(_node(root), tensors)


def _metadata(path: Path) -> records.Metadata:
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        raise SettingError(
            f"{path} is not metadata of torch.distributed.checkpoint, or is damaged: {error}"
        ) from error
    if not isinstance(found, records.Metadata) or not isinstance(found.storage_data, dict):
        raise SettingError(f"{path} is not metadata of torch.distributed.checkpoint on files")
    return found


def _tensor(
    folder: Path, stretches: _Stretches, name: str, record: records.TensorStorageMetadata, where: Any
) -> SavedTensor:
    parts = []
    for chunk in record.chunks:
        box = tuple(
            (int(low), int(low) + int(size)) for low, size in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        stretch = where[records.MetadataIndex(name, chunk.offsets)]
        parts.append((box, _reading(stretches, name, stretch, box, record.properties.dtype)))
    shape = tuple(int(size) for size in record.size)
    return SavedTensor(name, shape, record.properties.dtype, (), Sources({}), tuple(parts), folder)


def _reading(
    stretches: _Stretches, name: str, stretch: Any, box: Box, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        found = stretches.read(name, stretch)
        if (
            not isinstance(found, torch.Tensor)
            or tuple(found.shape) != box_shape(box)
            or found.dtype != dtype
        ):
            raise SettingError(f"{name} in {stretch.relative_path} is not what {INDEX} says of it")
        return found

    return read


class _Leaf:
    def __init__(self, node: Any) -> None:
        self.node = node


def _value(folder: Path, name: str, value: Any, tensors: dict[str, StoredTensor]) -> Any:
    """A value that is no tensor, as ``tree`` packs it; tensors in it get names."""
    node, inner = packed({name: value})
    for key, tensor in inner.items():
        box = tuple((0, size) for size in tensor.shape)
        part = (box, partial(torch.Tensor.detach, tensor))
        tensors[key] = SavedTensor(key, tuple(tensor.shape), tensor.dtype, (), Sources({}), (part,), folder)
    [(_, item)] = node["dict"]
    return item


def _node(value: Any) -> Any:
    if isinstance(value, _Leaf):
        return value.node
    if isinstance(value, dict):
        return {"dict": [[key, _node(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return {"list": [_node(item) for item in value]}
    return value


# ---- writing ----


def planned(
    state: Any,
) -> tuple[dict[str, torch.Tensor], Callable[[Mapping[str, torch.Tensor]], Callable[[Path, Disk], None]]]:
    """The tensors of a state by the names that torch gives them, and what makes of them the write.

    Raises:
        SettingError: no dict, something that is neither a tensor nor plain, or two of one name.
    """
    whole = expanded(state)
    if not isinstance(whole, Mapping):
        raise SettingError(f"save(format='dcp') takes a dict or a model, got {type(state).__name__}")
    packed(whole)  # refuses what is not plain
    try:
        flat, paths = flatten_state_dict(dict(whole))
    except ValueError as error:
        raise SettingError(f"save(format='dcp'): two values would have one name: {error}") from error
    tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    # Tuples with tensors stay whole there.
    values = tree_map_only(
        torch.Tensor, _here, {name: value for name, value in flat.items() if name not in tensors}
    )
    first: dict[Any, str] = {}
    same = {name: first.setdefault(identity(tensor), name) for name, tensor in tensors.items()}

    def plan(given: Mapping[str, torch.Tensor]) -> Callable[[Path, Disk], None]:
        once = {name: given[name] for name in first.values()}
        files = by_device(once)
        return lambda folder, disk: _Directory(folder, disk).write(given, same, values, paths, files)

    return tensors, plan


def _here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


class _Directory:
    """Writes a directory, which may hold another one. Nothing is there before the metadata gets its name."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._made: list[Path] = []

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        same: Mapping[str, str],
        values: Mapping[str, Any],
        paths: Mapping[str, Any],
        files: Sequence[Sequence[Piece]],
    ) -> None:
        """``same``: the name under which each tensor is written, its own or that of an equal one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(found[1] or -1) for found in self._ours()), default=-1)
        try:
            pieces: dict[str, list[tuple[Box, Any]]] = {name: [] for name in tensors}
            for index, part in enumerate(files):
                items = ((piece.entry, tensor) for piece, tensor in zip(part, arriving(part), strict=True))
                for entry, where in self._write_file(f"__{index}_{number}.distcp", items):
                    pieces[entry.name].append((entry.box, where))
            plain = dict(self._write_file(f"__{len(files)}_{number}.distcp", values.items()))
            self._commit(tensors, {name: pieces[same[name]] for name in tensors}, plain, paths)
        except BaseException:
            for path in self._made:
                self._disk.remove(path)
            raise
        for found in self._ours():
            if self._folder / found[0] not in self._made:
                self._disk.remove(self._folder / found[0])

    def _ours(self) -> list[re.Match[str]]:
        return [found for path in sorted(self._folder.iterdir()) if (found := _FILE.fullmatch(path.name))]

    def _write_file(self, name: str, items: Any) -> list[tuple[Any, Any]]:
        self._made.append(self._folder / name)
        file = self._disk.create(self._made[-1])
        places = []
        try:
            offset = 0
            for key, value in items:
                buffer = io.BytesIO()
                torch.save(value, buffer)
                self._disk.write(file, buffer.getbuffer())
                length = buffer.tell()
                places.append((key, filesystem._StorageInfo(name, offset, length)))
                offset += length
            self._disk.close(file)
        finally:
            file.close()
        return places

    def _commit(
        self,
        tensors: Mapping[str, torch.Tensor],
        pieces: Mapping[str, Sequence[tuple[Box, Any]]],
        plain: Mapping[str, Any],
        paths: Mapping[str, Any],
    ) -> None:
        described: dict[str, Any] = {name: records.BytesStorageMetadata() for name in plain}
        where: dict[Any, Any] = {records.MetadataIndex(name): place for name, place in plain.items()}
        for name, tensor in tensors.items():
            chunks = []
            for number, (box, place) in enumerate(pieces[name]):
                offsets = torch.Size([low for low, _ in box])
                chunks.append(records.ChunkStorageMetadata(offsets, torch.Size(box_shape(box))))
                where[records.MetadataIndex(name, offsets, number)] = place
            properties = records.TensorProperties(dtype=tensor.dtype)
            described[name] = records.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        data = pickle.dumps(
            records.Metadata(
                described, planner_data=dict(paths), storage_data=where, storage_meta=records.StorageMeta()
            )
        )
        path = self._folder / f"{INDEX}.{uuid.uuid4().hex[:12]}"
        self._made.append(path)
        file = self._disk.create(path)
        try:
            self._disk.write(file, data)
            self._disk.close(file)
        finally:
            file.close()
        self._disk.settle(self._folder)
        self._disk.replace(path, self._folder / INDEX)
        self._disk.settle(self._folder)
