"""``load``: a checkpoint onto any mesh; each device gets the rows that it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dtorch.checkpoint.files import INDEX, Index
from dtorch.checkpoint.saving import DCP_INDEX
from dtorch.checkpoint.tree import unpacked
from dtorch.graph import Graph
from dtorch.optimizers import fits_parameter
from dtorch.parallel.upload import finish_reading, upload, verify
from dtorch.parallel.weights import DTYPES, Checkpoint, Sources, StoredTensor
from dtorch.tensors import Tensor
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Replicate
from dtorch_runtime.worker.file_kernels import StoredPiece

#: So many bytes are read before they are written to where they belong: what cannot be read changes nothing there.
_AT_ONCE_BYTES: Final = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Fill:
    """Puts one thing in its place, once everything was found to fit."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    num_bytes: int = 0


def load(path: str | os.PathLike[str], into: Any = None) -> Any:
    """Take a checkpoint from the folder ``path``.

    Args:
        into: what was saved, or a dict with some of it: models, optimizers, tensors and numbers. Models, tensors and
            optimizers are filled in place, where they are and as they are cut, whatever the mesh that they were saved
            on. None gives everything as CPU tensors.

    Returns:
        ``into``, with the numbers of the checkpoint in the place of its own.

    Raises:
        SettingError: there is no checkpoint, one of its files is damaged (its name is given), or it does not fit: it
            lacks something, or has it with another shape or dtype. Both are found before anything changes: files
            are read twice. What goes to a mesh is compared and read by its devices where their nodes see the files.
        MeshError, NodeLost, ControllerLost, ClusterTimeout, SessionClosed: as for every op.
        RemoteOpError: an op failed before, and nobody has seen it: all that was issued is awaited.
    """
    stored = read_stored(Path(path))
    if into is None:
        return unpacked(stored.state, lambda name, _: stored.tensors[name].whole())
    loading = _Loading(stored)
    result = loading.fit(stored.state, into, ())
    verify(loading.used)
    with torch.no_grad():
        loading.fill()
    return result


class _Loading:
    """Compares a checkpoint with what it is loaded into, and notes what is to be done."""

    def __init__(self, stored: StoredState) -> None:
        self._stored = stored
        self._fills: list[_Fill] = []
        #: What the fills will read, by name and mesh; None where this process reads it.
        self._used: dict[tuple[str, DeviceMesh | None], tuple[StoredTensor, DeviceMesh | None]] = {}

    @property
    def used(self) -> Collection[tuple[StoredTensor, DeviceMesh | None]]:
        """What ``fill`` will read, with the mesh where it goes; None where this process reads it."""
        return self._used.values()

    def fill(self) -> None:
        """Put everything in its place, a part of it after the other.

        Raises:
            SettingError: files have changed since they were compared.
        """
        read: list[tuple[_Fill, Any]] = []
        num_bytes = 0
        for fill in self._fills:
            read.append((fill, fill.read()))
            num_bytes += fill.num_bytes
            if num_bytes >= _AT_ONCE_BYTES:
                self._write(read)
                num_bytes = 0
        self._write(read)

    def _write(self, read: list[tuple[_Fill, Any]]) -> None:
        if any(mesh is not None for _, mesh in self.used):
            finish_reading(Graph.default_graph())
        for fill, value in read:
            fill.write(value)
        read.clear()

    def _uses(self, name: str, where: torch.Tensor | None) -> StoredTensor:
        """The stored tensor of a name, which is to be where a tensor is."""
        stored = self._stored.tensors[name]
        mesh = where.device_mesh if isinstance(where, Tensor) else None
        self._used[name, mesh] = stored, mesh
        return stored

    def fit(self, node: Any, into: Any, path: tuple[Any, ...]) -> Any:
        """
        Raises:
            SettingError: it does not fit.
        """
        if isinstance(into, torch.Tensor):
            self._fit_tensor(node, into, path)
        elif isinstance(into, nn.Module):
            self._fit_module(node, into, path)
        elif isinstance(into, torch.optim.Optimizer):
            self._fit_optimizer(node, into, path)
        elif hasattr(into, "load_state_dict"):
            state = unpacked(node, lambda name, _: self._stored.tensors[name].whole())
            self._fills.append(_Fill(lambda: state, into.load_state_dict))
        elif isinstance(into, Mapping):
            known = self._dict(node, into, path)
            missing = [key for key in into if _key(key, known) not in known]
            if missing:
                raise _misfit(path, f"lacks {missing}; it has {list(known)}")
            return {
                key: self.fit(known[_key(key, known)], value, (*path, key)) for key, value in into.items()
            }
        elif isinstance(into, list | tuple):
            items = node.get(type(into).__name__) if isinstance(node, dict) else None
            if items is None or len(items) != len(into):
                raise _misfit(path, f"has something else than a {type(into).__name__} of {len(into)}")
            return type(into)(self.fit(items[i], value, (*path, i)) for i, value in enumerate(into))
        else:
            return unpacked(node, lambda name, _: self._stored.tensors[name].whole())
        return into

    def _dict(self, node: Any, into: Any, path: tuple[Any, ...]) -> dict[Any, Any]:
        if not isinstance(node, dict) or "dict" not in node:
            raise _misfit(path, f"has no dict there, and a {type(into).__name__} was given")
        return dict(node["dict"])

    def _fit_tensor(self, node: Any, into: torch.Tensor, path: tuple[Any, ...]) -> None:
        if not isinstance(node, dict) or "tensor" not in node:
            raise _misfit(path, "has no tensor there")
        stored = self._uses(node["tensor"], into)
        if stored.shape != tuple(into.shape):
            raise _misfit(
                path, f"has shape {list(stored.shape)}, and a tensor of {list(into.shape)} was given"
            )
        if stored.dtype != into.dtype:
            raise _misfit(
                path,
                f"has dtype {stored.dtype}, and a tensor of {into.dtype} was given; convert the model first: "
                f"model.to({stored.dtype})",
            )
        if isinstance(into, Tensor):
            num_bytes = into.numel() * into.itemsize
            self._fills.append(_Fill(lambda: _placed(stored, into), into.copy_, num_bytes))
        else:
            self._fills.append(_Fill(stored.whole, into.copy_))

    def _fit_module(self, node: Any, into: nn.Module, path: tuple[Any, ...]) -> None:
        known, wanted = self._dict(node, into, path), into.state_dict()
        missing = [key for key in wanted if key not in known]
        unexpected = [key for key in known if key not in wanted]
        if missing or unexpected:
            raise _misfit(
                path,
                f"is of another model: it lacks {missing[:5]} and has {unexpected[:5]} beside; for a checkpoint of "
                f"several things write load(path, {{'model': model}}) with the keys of save()",
            )
        extra = {key: unpacked(known[key], _no_tensor) for key, v in wanted.items() if not _is_tensor(v)}
        for key, value in wanted.items():
            if _is_tensor(value):
                self._fit_tensor(known[key], value, (*path, key))
        if extra:
            self._fills.append(_Fill(lambda: extra, lambda state: into.load_state_dict(state, strict=False)))

    def _fit_optimizer(self, node: Any, into: torch.optim.Optimizer, path: tuple[Any, ...]) -> None:
        known = self._dict(node, into, path)
        # A tensor among their numbers (a learning rate) goes where that of the optimizer is, by load_state_dict.
        groups = unpacked(known.get("param_groups"), lambda name, _: name)
        parameters = [parameter for group in into.param_groups for parameter in group["params"]]
        sizes = [len(group["params"]) for group in groups or ()]
        if sizes != [len(group["params"]) for group in into.param_groups]:
            raise _misfit(
                path, f"is of an optimizer with {sizes} parameters in its groups, of which this has others"
            )
        numbers = [number for group in groups for number in group["params"]]
        by_number = dict(zip(numbers, parameters, strict=True))
        # Torch's own checkpoints have strings in the place of numbers, and leave out what is empty.
        by_text = {str(number): number for number in numbers}
        items = known.get("state", {"dict": []})["dict"]
        state = {"dict": [[by_text.get(str(number), number), item] for number, item in items]}
        whole = {"dict": [["state", state], *([key, item] for key, item in known.items() if key != "state")]}
        unpacked(whole, lambda name, inner: self._check_state(name, inner, by_number, path))

        def tensor(name: str, inner: tuple[Any, ...]) -> torch.Tensor:
            stored = self._stored.tensors[name]
            like = _beside(stored, inner, by_number)
            return stored.whole() if like is None else _placed(stored, like, partial=False)

        self._fills.append(_Fill(lambda: unpacked(whole, tensor), into.load_state_dict))

    def _check_state(
        self, name: str, inner: tuple[Any, ...], by_number: Mapping[Any, torch.Tensor], path: tuple[Any, ...]
    ) -> None:
        stored = self._uses(name, _beside(self._stored.tensors[name], inner, by_number))
        parameter = by_number.get(inner[1]) if inner[0] == "state" else None
        if parameter is not None and not fits_parameter(inner[-1], stored.shape, parameter.shape):
            raise _misfit(
                (*path, *inner),
                f"has shape {list(stored.shape)}, and its parameter has {list(parameter.shape)}",
            )


def _beside(
    stored: StoredTensor, inner: tuple[Any, ...], by_number: Mapping[Any, torch.Tensor]
) -> Tensor | None:
    """The parameter that a tensor of an optimizer's state is placed like; None for one of this process."""
    parameter = by_number.get(inner[1]) if inner[0] == "state" else None
    if isinstance(parameter, Tensor) and inner[2:] != ("step",) and stored.shape == parameter.shape:
        return parameter
    return None


def _key(key: Any, known: Mapping[Any, Any]) -> Any:
    """Torch's own checkpoints have strings in the place of numbers."""
    return key if key in known else str(key)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _no_tensor(name: str, path: tuple[Any, ...]) -> Any:
    raise SettingError(f"the checkpoint has a tensor, {name}, where a number or a string is kept")


def _misfit(path: tuple[Any, ...], what: str) -> SettingError:
    return SettingError(f"load(): the checkpoint{' at ' + '/'.join(map(str, path)) if path else ''} {what}")


# ---- values ----


@dataclass(frozen=True, slots=True)
class StoredState:
    """What a checkpoint holds: the state as ``tree`` packs it, and its tensors by name."""

    state: Any
    tensors: Mapping[str, StoredTensor]


def read_stored(path: Path) -> StoredState:
    """What is at ``path``: a checkpoint, or safetensors files.

    Raises:
        SettingError: neither, or it is damaged.
    """
    if (path / INDEX).exists():
        return read_index(path)
    if (path / DCP_INDEX).exists():
        from dtorch.checkpoint import dcp  # it loads torch.distributed, which takes a second

        directory = dcp.read_directory(path.absolute())
        return StoredState(directory.state, directory.tensors)
    if not path.exists():
        raise SettingError(
            f"{path} holds no checkpoint: it does not exist; write the folder that save() was given, or a file"
        )
    weights = Checkpoint(path)
    return StoredState({"dict": [[name, {"tensor": name}] for name in weights.tensors]}, weights.tensors)


def read_index(folder: Path) -> StoredState:
    """
    Raises:
        SettingError: there is no checkpoint, it is of a newer version, or its index is damaged.
    """
    index = Index(folder)
    sources = Sources({file.path: file for file in index.files.values()})
    tensors = {
        name: StoredTensor(
            name,
            found.shape,
            DTYPES[found.dtype],
            tuple(StoredPiece(index.files[piece.file], piece.start, piece.box) for piece in found.pieces),
            sources,
        )
        for name, found in index.tensors.items()
    }
    return StoredState(index.state, tensors)


def _placed(stored: StoredTensor, like: Tensor, *, partial: bool = True) -> Tensor:
    """A stored tensor on the mesh of another and cut as that is, without ever being whole in this process.

    Args:
        partial: whether partial axes stay so; optimizers are not linear in their state.
    """
    whole = tuple(Replicate() if isinstance(p, Partial) else p for p in like.placements)
    made = upload(stored, like.device_mesh, whole)
    return made if whole == like.placements or not partial else made.redistribute(placements=like.placements)
