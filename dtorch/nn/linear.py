"""Linear layers whose weight is cut along an axis of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dtorch.nn.sharding import PlacedModule, made_on_mesh, moved, on_axis
from dtorch.parallel.cuts import Axis
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard


class _ParallelLinear(PlacedModule, nn.Linear):
    """``torch.nn.Linear`` with a cut of its weight along one axis of a mesh.

    Global shapes, and the numbers that it starts with, are those of ``torch.nn.Linear`` on every mesh. It is made on
    a mesh inside ``graph.device_mesh_guard(mesh)``, with ``device_mesh=``, or where torch's default device is
    "dtorch"; otherwise it is a plain layer, which ``dtorch.parallelize(model, mesh)`` puts on one.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``.
        axis: of the mesh, by name or number. A mesh that has no such axis leaves the layer whole.
        unit: features of a cut that stay together, the features of a head for example.
        device_mesh: where it is made.

    Raises:
        SettingError: ``unit`` does not divide the features that are cut.
        MeshError: ``axis`` or ``device_mesh`` is not what it says.
    """

    #: The dim of the weight that is cut; None when it is whole.
    _cut_dim: int | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        axis: Axis = "tp",
        unit: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        is_placed = made_on_mesh(device, device_mesh)
        self.axis = axis
        self.unit = unit
        super().__init__(in_features, out_features, bias, "meta" if is_placed else device, dtype)
        if self._cut_dim is not None:
            features = (out_features, in_features)[self._cut_dim]
            if unit < 1 or features % unit:
                raise SettingError(
                    f"{type(self).__name__} cuts {features} features in units of {unit}, which does not divide them; "
                    f"write unit=1, or the number of features of a head"
                )
        if is_placed:
            self._place(device_mesh, dtype)
            self.reset_parameters()

    def cuts(self) -> Mapping[str, Placement]:
        """See ``ShardedParameters``."""
        if self._cut_dim is None:
            return {}
        # A bias beside partial sums is whole: it is added once they are, or as one of them.
        bias = Shard(0, self.unit) if self._cut_dim == 0 else Replicate()
        return {"weight": Shard(self._cut_dim, self.unit), "bias": bias}

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{super().extra_repr()}, axis={self.axis!r}"


class ColumnParallelLinear(_ParallelLinear):
    """Cut by output features: the output is ``Shard(-1)`` on the axis. See ``_ParallelLinear`` for the arguments."""

    _cut_dim = 0


class ColumnParallelLinearWithReplicateOutput(ColumnParallelLinear):
    """Cut by output features, and the output gathered."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return moved(super().forward(input), self.axis, Replicate())


class RowParallelLinear(_ParallelLinear):
    """Cut by input features: the output is a partial sum on the axis, to be reduced by whoever needs it whole.

    An input that is not cut by its last dim is: of a replicated one each device takes its part, without communication.
    """

    _cut_dim = 1

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        cut = on_axis(self.weight, self.axis)
        if not isinstance(cut, Shard):
            return F.linear(input, self.weight, self.bias)
        output = F.linear(moved(input, self.axis, Shard(input.ndim - 1, cut.unit)), self.weight)
        return self._with_bias(output)

    def _with_bias(self, output: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor | None = self.bias
        return output if bias is None else output + moved(bias, self.axis, Partial("sum"))


class RowParallelLinearWithReplicateOutput(RowParallelLinear):
    """Cut by input features, and the partial sums reduced."""

    def _with_bias(self, output: torch.Tensor) -> torch.Tensor:
        whole = moved(output, self.axis, Replicate())
        bias: torch.Tensor | None = self.bias
        return whole if bias is None else whole + bias


class ReplicateParallelLinear(_ParallelLinear):
    """Whole on every device. A cut input is gathered."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return super().forward(moved(input, self.axis, Replicate()))
