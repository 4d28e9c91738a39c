"""``prefetch``: batches of a loader, sent to the cluster before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeAlias

import torch

from dtorch.factory import from_torch
from dtorch.graph import Graph
from dtorch.tensors import Tensor
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.layout import resolve_placements
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Placements, Replicate, Shard

#: Placements of a batch: one for each axis, or by the names of axes.
BatchPlacements: TypeAlias = Sequence[Placement] | Mapping[str, Placement]
_BATCH_AXES = ("dp", "ep")


class Prefetcher:
    """An iterable like the loader that it was made of, whose tensors are on the cluster. See ``prefetch``."""

    def __init__(
        self,
        loader: Iterable[Any],
        device_mesh: DeviceMesh | None,
        placements: BatchPlacements | None,
        num_ahead: int,
    ) -> None:
        self.loader = loader
        self._mesh = device_mesh
        self._placements = placements
        self._num_ahead = num_ahead

    def __len__(self) -> int:
        if not isinstance(self.loader, Sized):
            raise TypeError(f"object of type {type(self.loader).__name__} has no len()")
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        mesh = Graph.default_graph().default_mesh if self._mesh is None else self._mesh
        sent: deque[Any] = deque()
        for batch in self.loader:
            sent.append(self._send(batch, mesh))
            if len(sent) > self._num_ahead:
                yield sent.popleft()
        while sent:
            yield sent.popleft()

    def _send(self, tree: Any, mesh: DeviceMesh) -> Any:
        if isinstance(tree, torch.Tensor):
            if isinstance(tree, Tensor):
                return tree
            return from_torch(tree, mesh, self._placements_of(tree, mesh))
        if isinstance(tree, Mapping):
            return {key: self._send(value, mesh) for key, value in tree.items()}
        if isinstance(tree, tuple | list):
            items = [self._send(item, mesh) for item in tree]
            return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
        return tree

    def _placements_of(self, tensor: torch.Tensor, mesh: DeviceMesh) -> Placements:
        """A number has no dim to cut: it is whole."""
        if tensor.ndim == 0:
            return (Replicate(),) * mesh.ndim
        given = self._placements
        if given is None:
            given = {axis: Shard(0) for axis in _BATCH_AXES if mesh.has_axis(axis)}
        if isinstance(given, Mapping):
            by_axis = {mesh.axis(name): placement for name, placement in given.items()}
            given = [by_axis.get(axis, Replicate()) for axis in range(mesh.ndim)]
        return resolve_placements(given, mesh, tensor.ndim)


def prefetch(
    loader: Iterable[Any],
    device_mesh: DeviceMesh | None = None,
    placements: BatchPlacements | None = None,
    *,
    num_ahead: int = 1,
) -> Prefetcher:
    """The batches of a loader with their tensors on the cluster, the next ones sent while the program works on one.

    Tensors of global shape in tuples, lists and dicts are sent, each device its own rows; everything else, and tensors
    of the cluster, stay as they are. The loader is asked in this thread: to make batches beside the program, use the
    workers of a ``torch.utils.data.DataLoader``.

    Args:
        loader: gives batches; it may be iterated over once for each epoch.
        device_mesh: the graph's default mesh when None.
        placements: one for each axis, or a dict by names of axes, the others being Replicate(). When None, rows
            (dim 0) are cut over axes named ``dp`` and ``ep``.
        num_ahead: how many batches are sent before they are asked for.

    Raises:
        SettingError: no loader, or a ``num_ahead`` below 0.
        MeshError, PlacementError: when it is iterated over: axes or dims that there are not.
    """
    if not isinstance(loader, Iterable):
        raise SettingError(
            f"prefetch() takes something that gives batches, e.g. a torch.utils.data.DataLoader, got {loader!r}"
        )
    if not isinstance(num_ahead, int) or num_ahead < 0:
        raise SettingError(
            f"prefetch(num_ahead=) is a number of batches, got {num_ahead!r}; write num_ahead=1"
        )
    return Prefetcher(loader, device_mesh, placements, num_ahead)
