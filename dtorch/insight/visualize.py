"""``visualize``: a picture of which device holds which block of a tensor."""

from __future__ import annotations

from dtorch.insight.blocks import Picture
from dtorch.tensors import Tensor
from dtorch_runtime.errors import MixedTensorError


def visualize(tensor: Tensor) -> Picture:
    """Which device holds which block of a tensor: text under ``print()``, an SVG in a notebook. Moves no data.

    Columns and rows are named by the indices of the global tensor, blocks by device ids. ``0 + 1`` says that the block
    is the sum of what devices 0 and 1 hold.

    Raises:
        MixedTensorError: a tensor that is not on the cluster.
    """
    if not isinstance(tensor, Tensor):
        raise MixedTensorError(
            f"visualize() takes a dtorch tensor, got {type(tensor).__name__}, which has no mesh; write "
            f"dtorch.from_torch(t, device_mesh=, placements=)"
        )
    return Picture(tuple(tensor.shape), tensor._spec.layout, str(tensor.dtype).removeprefix("torch."))
