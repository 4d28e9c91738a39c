"""Calls that read a tensor by place: by strides in its memory, or around its ends. Rules know cut dims, not places.

Where the tensor is cut, each device holds its piece among zeros, and the result is a sum.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.auto_issue import converted
from dtorch.dispatch import special
from dtorch.graph import guard_mesh_of
from dtorch.rules.equation import layout_of
from dtorch.shapes import is_contiguous
from dtorch_runtime.ir.placement import Partial, Shard

aten = torch.ops.aten


@special(aten.as_strided_copy.default, aten.as_strided_scatter.default)
def _as_strided(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """A copy of a window into a row-major tensor, or a tensor with such a window replaced."""
    x, *rest = args
    if type(x) is not cls or not is_contiguous(x._spec.shape, x._spec.stride):
        return NotImplemented
    layout = x._spec.layout
    terms = tuple(Partial() if isinstance(p, Shard) else p for p in layout.placements)
    size, stride, *given = rest[func is aten.as_strided_scatter.default :]
    offset = given[0] if given else kwargs.get("storage_offset")
    # In memory of its own the tensor begins at 0, and there is nothing around it.
    start = 0 if offset is None else offset - x.storage_offset()
    last = start + sum((n - 1) * step for n, step in zip(size, stride))
    if terms == layout.placements or start < 0 or (0 not in size and last >= x.numel()):
        return NotImplemented
    spread = converted(cls, x, layout_of(layout.mesh, terms), location)
    return func(spread, *rest[: len(rest) - len(given)], start)


def pad_circular(x: torch.Tensor, pad: list[int]) -> torch.Tensor:
    """``aten::_pad_circular``: each padded dim repeated around its ends, after what negative numbers cut off.

    Raises:
        RuntimeError: as torch raises it.
    """
    func = aten._pad_circular.default
    spec: Any = getattr(x, "_spec", None)
    padded = {x.ndim - 1 - i // 2 for i, n in enumerate(pad) if n}
    if spec is None or not padded & {p.dim for p in spec.layout.placements if isinstance(p, Shard)}:
        return func.decompose(x, pad)  # type: ignore[no-any-return]  # torch declares it without types
    func(torch.empty(x.shape, dtype=x.dtype, device="meta"), pad)  # looks at the sizes
    for dim in sorted(padded):
        before, after = pad[2 * (x.ndim - 1 - dim) : 2 * (x.ndim - dim)]
        first, size = max(-before, 0), x.shape[dim] + min(before, 0) + min(after, 0)
        with guard_mesh_of(x):
            places = torch.arange(-max(before, 0), size + max(after, 0), device=x.device) % size + first
        x = x.index_select(dim, places)
    return x
