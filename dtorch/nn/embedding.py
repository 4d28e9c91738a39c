"""Embeddings whose table is cut by rows along an axis of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dtorch.factory import arange
from dtorch.nn.sharding import PlacedModule, made_on_mesh, moved
from dtorch.parallel.cuts import Axis
from dtorch.tensors import Tensor
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Replicate, Shard


class VocabParallelEmbedding(PlacedModule, nn.Embedding):
    """``torch.nn.Embedding`` cut by rows: the output is a partial sum on the axis, zero where a row is elsewhere.

    Args:
        num_embeddings, embedding_dim, device, dtype, kwargs: as in ``torch.nn.Embedding``.
        axis: of the mesh, by name or number. A mesh that has no such axis leaves the table whole.
        device_mesh: where it is made; see ``ColumnParallelLinear``.

    Raises:
        MeshError: ``axis`` or ``device_mesh`` is not what it says.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        axis: Axis = "tp",
        device: Any = None,
        dtype: torch.dtype | None = None,
        device_mesh: DeviceMesh | None = None,
        **kwargs: Any,
    ) -> None:
        is_placed = made_on_mesh(device, device_mesh)
        self.axis = axis
        where = "meta" if is_placed else device
        super().__init__(num_embeddings, embedding_dim, device=where, dtype=dtype, **kwargs)
        if is_placed:
            self._place(device_mesh, dtype)
            self.reset_parameters()

    def cuts(self) -> Mapping[str, Placement]:
        """See ``ShardedParameters``."""
        return {"weight": Shard(0)}

    def _fill_padding_idx_with_zero(self) -> None:
        """Torch's own picks the row, which one device has."""
        weight = self.weight
        if self.padding_idx is None or not isinstance(weight, Tensor):
            super()._fill_padding_idx_with_zero()
            return
        with torch.no_grad():
            rows = arange(self.num_embeddings, device_mesh=weight.device_mesh).unsqueeze(1)
            weight.masked_fill_(rows == self.padding_idx, 0)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{super().extra_repr()}, axis={self.axis!r}"


class EmbeddingWithReplicateOutput(VocabParallelEmbedding):
    """Cut by rows, and the partial sums of the output reduced."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Ids ``[...]`` to ``[..., embedding_dim]``."""
        return moved(super().forward(input), self.axis, Replicate())
