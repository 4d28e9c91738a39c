"""A batch cut into micro-batches, and tensors that go from the mesh of one stage to that of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtorch.factory import from_torch
from dtorch.parallel.tp_plan import BATCH_AXES, has_ranks
from dtorch.tensors import Tensor
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard, split


class MicroBatches:
    """Tensors that have the batch as dim 0, cut into as many runs of rows as there are micro-batches.

    Those of the client are sent piece by piece, each when it is asked for. Those that are sharded on dim 0 are gathered
    first, since rows of one micro-batch are to be on all ranks of the ``dp`` axis; cuts of other dims stay.

    Raises:
        SettingError: no tensors, different numbers of rows, or fewer rows than micro-batches.
    """

    def __init__(self, tensors: Sequence[Any], num_micro_batches: int, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        rows = {tensor.shape[0] for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.ndim}
        if not tensors or len(rows) != 1 or not all(isinstance(t, torch.Tensor) and t.ndim for t in tensors):
            given = ", ".join(
                str(list(t.shape)) if isinstance(t, torch.Tensor) else type(t).__name__ for t in tensors
            )
            raise SettingError(
                f"a pipeline takes tensors that all have the batch as dim 0, got {given or 'none'}; write e.g. "
                f"pipeline.step(x, target=y), and let the stages make what all rows share"
            )
        self.num_rows: int = rows.pop()
        if self.num_rows < num_micro_batches:
            raise SettingError(
                f"a batch of {self.num_rows} rows cannot be cut into {num_micro_batches} micro-batches; write "
                f"num_micro_batches={max(1, self.num_rows)} or less, or give more rows"
            )
        self._bounds = split(self.num_rows, num_micro_batches)
        self._tensors = [_whole_rows(tensor) for tensor in tensors]

    def rows_of(self, micro_batch: int) -> int:
        """How many rows a micro-batch has."""
        start, stop = self._bounds[micro_batch]
        return stop - start

    def on_mesh(self, micro_batch: int) -> tuple[Tensor, ...]:
        """The rows of a micro-batch, sharded on the ``dp`` axis where the mesh has one."""
        start, stop = self._bounds[micro_batch]
        return tuple(
            from_torch(
                tensor[start:stop], device_mesh=self._mesh, placements=_placements_on(self._mesh, tensor)
            )
            for tensor in self._tensors
        )


def _whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if not isinstance(tensor, Tensor):
        return tensor
    cut = Shard(0)
    placements = [
        Replicate() if isinstance(p, Partial) or (isinstance(p, Shard) and p.dim == cut.dim) else p
        for p in tensor.placements
    ]
    return tensor.redistribute(placements=placements)


def _placements_on(mesh: DeviceMesh, tensor: torch.Tensor) -> list[Placement]:
    """Rows on ``dp`` and ``ep``; on other axes as it is placed, its sequence say."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    if isinstance(tensor, Tensor):
        placements = _as_placed(tensor.device_mesh, tensor.placements, mesh)
    for axis in BATCH_AXES:
        if has_ranks(mesh, axis):
            placements[mesh.axis(axis)] = Shard(0)
    return placements


def to_mesh(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor on another stage's mesh, placed as it was on axes of the same name, or on a mesh of the same shape.

    Partial sums are reduced before they travel; on other axes it is whole.
    """
    old = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
    return tensor.redistribute(device_mesh=mesh, placements=_as_placed(tensor.device_mesh, old, mesh))


def _as_placed(source: DeviceMesh, old: Sequence[Placement], mesh: DeviceMesh) -> list[Placement]:
    """What is placed so on ``source``, on another mesh: the same on axes of the same name, whole on others."""
    if source == mesh or (source.mesh_dim_names, source.shape) == (mesh.mesh_dim_names, mesh.shape):
        return list(old)
    return [
        old[source.axis(name)] if name is not None and source.has_axis(name) else Replicate()
        for name in mesh.mesh_dim_names or (None,) * mesh.ndim
    ]


def joined(pieces: Sequence[Any]) -> Any:
    """The outputs of all micro-batches as one: tensors are concatenated along dim 0, in tuples, lists and dicts too."""
    first = pieces[0]
    if isinstance(first, tuple | list):
        items = [joined(column) for column in zip(*pieces, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if isinstance(first, dict):
        return type(first)({key: joined([piece[key] for piece in pieces]) for key in first})
    if not isinstance(first, Tensor):
        return first
    if first.ndim == 0:
        return torch.stack(list(pieces))
    result: Any = torch.cat([_whole_rows(piece) for piece in pieces])
    placements = [
        old if old == Shard(0) else new for old, new in zip(first.placements, result.placements, strict=True)
    ]
    return result.redistribute(placements=placements)
