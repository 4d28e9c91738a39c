"""``load``: a checkpoint onto any mesh; each device is sent the rows that it holds."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from dtorch.checkpoint.files import Reader, Stored
from dtorch.checkpoint.tree import unpacked
from dtorch.graph import Graph
from dtorch.issue import upload_boxes
from dtorch.location import capture
from dtorch.parallel.weights import BLOCK_BYTES, DTYPES
from dtorch.spec import intern_spec
from dtorch.tensors import Tensor
from dtorch.values import cut
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.layout import Box, Layout, box_shape, intersect, relative
from dtorch_runtime.ir.placement import Partial, Replicate

#: Puts one thing in its place; called when everything was found to fit.
_Fill: TypeAlias = Callable[[], object]


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
            lacks something, or has it with another shape or dtype. What does not fit is found before anything changes.
        MeshError, ControllerLost, SessionClosed: as for every op.
    """
    reader = Reader(Path(path))
    if into is None:
        return unpacked(reader.state, lambda name, _: _whole(reader, reader.tensors[name]))
    loading = _Loading(reader)
    result = loading.fit(reader.state, into, ())
    with torch.no_grad():
        for fill in loading.fills:
            fill()
    return result


class _Loading:
    """Compares a checkpoint with what it is loaded into, and notes what is to be done."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.fills: list[_Fill] = []

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
            state = unpacked(node, lambda name, _: _whole(self._reader, self._reader.tensors[name]))
            self.fills.append(lambda: into.load_state_dict(state))
        elif isinstance(into, Mapping):
            known = self._dict(node, into, path)
            missing = [key for key in into if key not in known]
            if missing:
                raise _misfit(path, f"lacks {missing}; it has {list(known)}")
            return {key: self.fit(known[key], value, (*path, key)) for key, value in into.items()}
        elif isinstance(into, list | tuple):
            items = node.get(type(into).__name__) if isinstance(node, dict) else None
            if items is None or len(items) != len(into):
                raise _misfit(path, f"has something else than a {type(into).__name__} of {len(into)}")
            return type(into)(self.fit(items[i], value, (*path, i)) for i, value in enumerate(into))
        else:
            return unpacked(node, lambda name, _: _whole(self._reader, self._reader.tensors[name]))
        return into

    def _dict(self, node: Any, into: Any, path: tuple[Any, ...]) -> dict[Any, Any]:
        if not isinstance(node, dict) or "dict" not in node:
            raise _misfit(path, f"has no dict there, and a {type(into).__name__} was given")
        return dict(node["dict"])

    def _fit_tensor(self, node: Any, into: torch.Tensor, path: tuple[Any, ...]) -> None:
        if not isinstance(node, dict) or "tensor" not in node:
            raise _misfit(path, "has no tensor there")
        stored = self._reader.tensors[node["tensor"]]
        if stored.shape != tuple(into.shape):
            raise _misfit(
                path, f"has shape {list(stored.shape)}, and a tensor of {list(into.shape)} was given"
            )
        if DTYPES[stored.dtype] != into.dtype:
            raise _misfit(
                path,
                f"has dtype {DTYPES[stored.dtype]}, and a tensor of {into.dtype} was given; convert the model first: "
                f"model.to({DTYPES[stored.dtype]})",
            )
        if isinstance(into, Tensor):
            self.fills.append(lambda: into.copy_(_placed(self._reader, stored, into)))
        else:
            self.fills.append(lambda: into.copy_(_whole(self._reader, stored)))

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
            self.fills.append(lambda: into.load_state_dict(extra, strict=False))

    def _fit_optimizer(self, node: Any, into: torch.optim.Optimizer, path: tuple[Any, ...]) -> None:
        groups = unpacked(self._dict(node, into, path).get("param_groups"), _no_tensor)
        parameters = [parameter for group in into.param_groups for parameter in group["params"]]
        sizes = [len(group["params"]) for group in groups or ()]
        if sizes != [len(group["params"]) for group in into.param_groups]:
            raise _misfit(
                path, f"is of an optimizer with {sizes} parameters in its groups, of which this has others"
            )
        numbers = [number for group in groups for number in group["params"]]
        by_number = dict(zip(numbers, parameters, strict=True))

        def tensor(name: str, inner: tuple[Any, ...]) -> torch.Tensor:
            stored = self._reader.tensors[name]
            parameter = by_number.get(inner[1]) if inner[0] == "state" else None
            if isinstance(parameter, Tensor) and inner[2:] != ("step",) and stored.shape == parameter.shape:
                return _placed(self._reader, stored, parameter)
            return _whole(self._reader, stored)

        self.fills.append(lambda: into.load_state_dict(unpacked(node, tensor)))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _no_tensor(name: str, path: tuple[Any, ...]) -> Any:
    raise SettingError(f"the checkpoint has a tensor, {name}, where a number or a string is kept")


def _misfit(path: tuple[Any, ...], what: str) -> SettingError:
    return SettingError(f"load(): the checkpoint{' at ' + '/'.join(map(str, path)) if path else ''} {what}")


# ---- values ----


def _placed(reader: Reader, stored: Stored, like: Tensor) -> Tensor:
    """A stored tensor on the mesh of another and cut as that is, without ever being whole in this process."""
    whole = tuple(Replicate() if isinstance(p, Partial) else p for p in like.placements)
    spec = intern_spec(stored.shape, DTYPES[stored.dtype], Layout(like.device_mesh, whole))
    made: Tensor = upload_boxes(
        Tensor,
        Graph.default_graph(),
        spec,
        lambda box: _blocks(reader, stored, box),
        "dtorch.checkpoint.load",
        capture(sys._getframe(1)),
    )
    return made if whole == like.placements else made.redistribute(placements=like.placements)


def _whole(reader: Reader, stored: Stored) -> torch.Tensor:
    blocks = list(_blocks(reader, stored, tuple((0, size) for size in stored.shape)))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _blocks(reader: Reader, stored: Stored, box: Box) -> Iterator[torch.Tensor]:
    """The elements of ``box`` in row-major order, as contiguous tensors of whole rows of about ``BLOCK_BYTES``."""
    dtype = DTYPES[stored.dtype]
    if not box:
        yield _read(reader, stored, box, dtype)
        return
    row_bytes = max(1, dtype.itemsize * math.prod(box_shape(box[1:])))
    num_rows = max(1, BLOCK_BYTES // row_bytes)
    first, last = box[0]
    for start in range(first, max(last, first + 1), num_rows):
        yield _read(reader, stored, ((start, min(start + num_rows, last)), *box[1:]), dtype)


def _read(reader: Reader, stored: Stored, box: Box, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(box_shape(box), dtype=dtype, device="cpu")
    for piece in stored.pieces:
        common = intersect(box, piece.box)
        if common is None:
            continue
        inner = relative(common, piece.box)
        shape = box_shape(piece.box)
        # Whole rows of the piece lie one behind the other in the file.
        low, high = inner[0] if inner else (0, 1)
        row_bytes = dtype.itemsize * math.prod(shape[1:])
        data = reader.read(piece.file, piece.start + low * row_bytes, piece.start + high * row_bytes)
        rows = torch.frombuffer(data, dtype=dtype).view((high - low, *shape[1:]) if shape else ())
        part = cut(rows, ((0, high - low), *inner[1:])) if inner else rows
        cut(out, relative(common, box)).copy_(part)
    return out
