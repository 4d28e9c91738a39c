"""``dtorch.load``: files onto a mesh, each worker reading its own bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from dtorch.checkpoint.loading import StoredState, read_stored
from dtorch.checkpoint.tree import unpacked
from dtorch.graph import Graph
from dtorch.keywords import teaches_keywords
from dtorch.parallel.facts import base_prefix
from dtorch.parallel.upload import READ_BY, ReadBy, finish_reading, upload
from dtorch.parallel.weights import StoredTensor, find_stored
from dtorch.tensors import Tensor
from dtorch_runtime.errors import MeshError, PlacementError, SettingError
from dtorch_runtime.ir.layout import resolve_placements
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate

_Placements: TypeAlias = Sequence[Placement] | Placement | None
#: For every tensor the same; by name, where a name that is not there means Replicate(); or from name and shape.
_ByName: TypeAlias = _Placements | Mapping[str, _Placements] | Callable[[str, tuple[int, ...]], _Placements]

_Identity: TypeAlias = tuple[int, ...]


@teaches_keywords
def load(
    path: str | os.PathLike[str],
    *,
    like: nn.Module | Mapping[str, torch.Tensor] | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _ByName = None,
    read_by: ReadBy = "auto",
) -> Any:
    """The tensors of safetensors files, or of a checkpoint, on a mesh.

    Every device reads the bytes that it holds, where its node sees the files: on this machine, or on a shared file
    system. Elsewhere this process reads, and sends every device its piece.

    Args:
        path: a safetensors file; a folder with one, or with several and their index; the index; or the folder of a
            checkpoint, of ``dtorch.checkpoint`` or of ``torch.distributed.checkpoint``.
        like: a model, or a dict of tensors: what is loaded is what it has, with its dtypes, on its meshes and with its
            placements. What the files have beside is not read. ``model.load_state_dict(dtorch.load(path, like=model))``
        device_mesh: the graph's default mesh when None, or that of ``like``.
        placements: for all tensors, one for each mesh axis; a dict of such by name, Replicate() for other names; or
            a function of a tensor's name and global shape. Replicate() when None, or those of ``like``.
        read_by: ``"workers"`` refuses files that a node does not see, ``"client"`` sends everything.

    Returns:
        A dict from names to tensors; of a checkpoint, what was saved.

    Raises:
        SettingError: no such files; they are damaged, or do not have what ``like`` has, or have it in another shape;
            a name in ``placements`` that they lack; a node that cannot read them with ``read_by="workers"``.
        PlacementError: placements that do not fit the mesh or a tensor.
        MeshError, NodeLost, ControllerLost, ClusterTimeout, SessionClosed: as for every op.
        RemoteOpError: an op failed before, and nobody has seen it: all that was issued is awaited.
    """
    if read_by not in READ_BY:
        raise SettingError(f"load(read_by=) takes one of {', '.join(map(repr, READ_BY))}, got {read_by!r}")
    stored = read_stored(Path(path))
    goals = _Goals(stored, device_mesh, placements)
    with torch.no_grad():
        if like is None:
            loaded = {name: goals.place(name, tensor, read_by) for name, tensor in stored.tensors.items()}
            result = unpacked(stored.state, lambda name, _: loaded[name])
        else:
            result = _like(stored, like, goals, read_by)
        finish_reading(Graph.default_graph())
    return result


class _Goals:
    """Where each tensor is to be."""

    def __init__(self, stored: StoredState, device_mesh: DeviceMesh | None, placements: _ByName) -> None:
        if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
            raise MeshError(
                f"device_mesh takes a DeviceMesh, got {device_mesh!r}; write e.g. dtorch.DeviceMesh('cpu', [0, 1])"
            )
        self._mesh = device_mesh
        self._placements = placements
        if isinstance(placements, Mapping):
            unknown = [name for name in placements if name not in stored.tensors]
            if unknown:
                raise SettingError(
                    f"load(placements=) names {unknown[:5]}, which the files lack; they have "
                    f"{', '.join(sorted(stored.tensors)[:5])}{', ...' if len(stored.tensors) > 5 else ''}"
                )

    def place(
        self, name: str, tensor: StoredTensor, read_by: ReadBy, like: torch.Tensor | None = None
    ) -> Tensor:
        """
        Raises:
            PlacementError: placements that do not fit; with the name of the tensor.
        """
        ours = like if isinstance(like, Tensor) else None
        mesh = self._mesh
        if mesh is None:
            mesh = Graph.default_graph().default_mesh if ours is None else ours.device_mesh
        chosen = self._of(name, tensor, mesh)
        if chosen is None:
            chosen = ours.placements if ours is not None and ours.device_mesh == mesh else None
        try:
            goal = resolve_placements(chosen, mesh, len(tensor.shape))
        except PlacementError as error:
            raise PlacementError(f"load(): {name} of shape {list(tensor.shape)}: {error}") from error
        whole = tuple(Replicate() if isinstance(p, Partial) else p for p in goal)
        made: Any = upload(tensor, mesh, whole, read_by)
        if like is not None and made.dtype != like.dtype:
            made = made.to(like.dtype)
        return cast(Tensor, made if whole == goal else made.redistribute(placements=goal))

    def _of(self, name: str, tensor: StoredTensor, mesh: DeviceMesh) -> Sequence[Placement] | None:
        given = self._placements
        if isinstance(given, Mapping):
            chosen = given.get(name)
        elif callable(given):
            chosen = given(name, tensor.shape)
        else:
            chosen = given
        one_of_one = isinstance(chosen, Placement) and mesh.ndim == 1
        return (chosen,) if one_of_one else chosen  # type: ignore[return-value]  # others are refused by name


def _like(stored: StoredState, like: Any, goals: _Goals, read_by: ReadBy) -> dict[str, Tensor]:
    wanted: Mapping[str, Any]
    if isinstance(like, nn.Module):
        wanted, prefix = like.state_dict(keep_vars=True), base_prefix(like)
    elif isinstance(like, Mapping):
        wanted, prefix = like, ""
    else:
        raise SettingError(f"load(like=) takes a model or a dict of tensors, got {type(like).__name__}")
    tensors = {name: tensor for name, tensor in wanted.items() if isinstance(tensor, torch.Tensor)}
    names: dict[_Identity, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(_identity(tensor), []).append(name)
    found = _found(stored, tensors, names, prefix)
    loaded: dict[_Identity, Tensor] = {}
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        key = _identity(tensor)
        if key not in loaded:
            loaded[key] = goals.place(name, found[name], read_by, tensor)
        result[name] = loaded[key]
    return result


def _found(
    stored: StoredState,
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[_Identity, Sequence[str]],
    prefix: str,
) -> dict[str, StoredTensor]:
    """What the files have for each tensor, under one of its names, on the first level that has all of them.

    Raises:
        SettingError: nothing, or something of another shape or kind of dtype.
    """
    lacks: list[list[str]] = []
    for known in _levels(stored):
        found = {name: find_stored(known, names[_identity(t)], prefix) for name, t in tensors.items()}
        missing = [name for name, one in found.items() if one is None]
        if not missing:
            fitting = {name: one for name, one in found.items() if one is not None}
            _check_fit(fitting, tensors)
            return fitting
        lacks.append(missing)
    fewest = min(lacks, key=len)
    raise SettingError(
        f"load(like=): the files lack {', '.join(fewest[:5])}{', ...' if len(fewest) > 5 else ''}; they have "
        f"{', '.join(sorted(stored.tensors)[:5])}{', ...' if len(stored.tensors) > 5 else ''}"
    )


def _levels(stored: StoredState) -> Iterator[dict[str, StoredTensor]]:
    """The tensors by their keys in the state that was saved, then in each dict in it: ``{"model": model}``."""
    nodes = [stored.state]
    if isinstance(stored.state, dict):
        nodes += [item for _, item in stored.state.get("dict", ())]
    for node in nodes:
        items = node.get("dict", ()) if isinstance(node, dict) else ()
        yield {
            str(key): stored.tensors[item["tensor"]]
            for key, item in items
            if isinstance(item, dict) and "tensor" in item
        }


def _check_fit(found: Mapping[str, StoredTensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, one in found.items():
        tensor = tensors[name]
        if one.shape != tuple(tensor.shape):
            raise SettingError(
                f"load(like=): {name} has shape {list(tensor.shape)}, and {list(one.shape)} in {one.file}"
            )
        if not torch.can_cast(one.dtype, tensor.dtype):
            raise SettingError(
                f"load(like=): {name} has dtype {tensor.dtype}, and {one.dtype} in {one.file}, which cannot become "
                f"that without loss"
            )


def _identity(tensor: torch.Tensor) -> _Identity:
    """Equal for those that are one value: a tied weight has several names."""
    if isinstance(tensor, Tensor):
        return (id(tensor._handle),)
    return (tensor.data_ptr(), *tensor.shape) if tensor.data_ptr() else (id(tensor),)
