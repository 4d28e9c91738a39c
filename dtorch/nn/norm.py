"""Norms of activations that are cut along the sequence (Korthikanti et al., 2022, arXiv:2205.05198)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dtorch.nn.sharding import PlacedModule, made_on_mesh, moved, on_axis
from dtorch.parallel.cuts import Axis
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Shard


class _SequenceParallel(PlacedModule):
    """Makes the input ``Shard(dim)`` on the axis: each device norms its part of the sequence. The weights are whole."""

    dim: int

    def cuts(self) -> Mapping[str, Placement]:
        """See ``ShardedParameters``."""
        return {}

    def _cut(self, input: torch.Tensor) -> torch.Tensor:
        if on_axis(input, self.axis) is None:
            return input
        return moved(input, self.axis, Shard(self.dim % input.ndim))


class SequenceParallelLayerNorm(_SequenceParallel, nn.LayerNorm):
    """``torch.nn.LayerNorm`` whose input and output are cut along the sequence.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in ``torch.nn.LayerNorm``.
        axis: of the mesh, by name or number. On a mesh that has no such axis nothing is cut.
        dim: of the sequence in the input; not one of those that are normalized.
        device_mesh: where it is made; see ``ColumnParallelLinear``.

    Raises:
        MeshError: ``axis`` or ``device_mesh`` is not what it says.
    """

    def __init__(
        self,
        normalized_shape: int | list[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        axis: Axis = "tp",
        dim: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        is_placed = made_on_mesh(device, device_mesh)
        self.axis = axis
        self.dim = dim
        where = "meta" if is_placed else device
        super().__init__(normalized_shape, eps, elementwise_affine, bias, where, dtype)
        if is_placed:
            self._place(device_mesh, dtype)
            self.reset_parameters()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., *normalized_shape]`` to the same."""
        return super().forward(self._cut(input))


class SequenceParallelRMSNorm(_SequenceParallel, nn.RMSNorm):
    """``torch.nn.RMSNorm`` whose input and output are cut along the sequence. See ``SequenceParallelLayerNorm``."""

    def __init__(
        self,
        normalized_shape: int | list[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        axis: Axis = "tp",
        dim: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        is_placed = made_on_mesh(device, device_mesh)
        self.axis = axis
        self.dim = dim
        super().__init__(normalized_shape, eps, elementwise_affine, "meta" if is_placed else device, dtype)
        if is_placed:
            self._place(device_mesh, dtype)
            self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., *normalized_shape]`` to the same."""
        return super().forward(self._cut(x))
