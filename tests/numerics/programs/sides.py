"""The two sides of a program: the names that its lines find, on plain torch and on DTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import dtorch
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard

#: Random numbers do not depend on the mesh; what they are is asked of one device.
_ALONE = DeviceMesh("cpu", [0])


def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-3, 4, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(numbers.double(), torch.randint(-3, 4, shape, generator=generator).double())
    return numbers > 0 if dtype is torch.bool else numbers.to(dtype)


def backward(*results: Any) -> None:
    """The derivatives of a weighted sum of all elements."""
    loss = 0
    for x in results:
        loss = loss + (x * (torch.arange(x.numel(), device=x.device).view(x.shape) % 5 + 1)).sum()
    loss.backward()  # type: ignore[attr-defined]  # there is one result at least


_COMMON = {
    "torch": torch,
    "F": F,
    "Shard": Shard,
    "Replicate": Replicate,
    "Partial": Partial,
    "backward": backward,
}


def plain_side() -> dict[str, Any]:
    """Plain torch: placements mean nothing."""

    def make(seed: int, shape: Any, dtype: torch.dtype, placements: Any, requires_grad: bool) -> torch.Tensor:
        return values(seed, shape, dtype).requires_grad_(requires_grad)

    def redistribute(x: torch.Tensor, placements: Any) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def drawn(seed: int, draw: Callable[[Any], Any], x: torch.Tensor) -> torch.Tensor:
        dtorch.manual_seed(seed)
        result: dtorch.Tensor = draw(dtorch.from_torch(x, device_mesh=_ALONE))
        # The numbers are DTorch's; how they lie in memory is for torch to say.
        numbers: torch.Tensor = draw(x.clone())
        return numbers.copy_(result.to_torch())

    return {**_COMMON, "make": make, "redistribute": redistribute, "drawn": drawn}


def dtorch_side(mesh: DeviceMesh) -> dict[str, Any]:
    """DTorch on a mesh."""

    def make(
        seed: int, shape: Any, dtype: torch.dtype, placements: Any, requires_grad: bool
    ) -> dtorch.Tensor:
        made = dtorch.from_torch(values(seed, shape, dtype), device_mesh=mesh, placements=placements)
        return made.requires_grad_(requires_grad)  # type: ignore[return-value]  # torch's stub says Tensor

    def redistribute(x: dtorch.Tensor, placements: list[Placement]) -> torch.Tensor:
        moved = x.redistribute(placements=placements)
        # To the same placements it is a view, which plain torch has no word for.
        return (
            moved.clone(memory_format=torch.contiguous_format) if moved.placements == x.placements else moved
        )

    def drawn(seed: int, draw: Callable[[Any], Any], x: dtorch.Tensor) -> Any:
        dtorch.manual_seed(seed)
        return draw(x.clone())  # dropout of nothing is its argument

    return {**_COMMON, "make": make, "redistribute": redistribute, "drawn": drawn}
