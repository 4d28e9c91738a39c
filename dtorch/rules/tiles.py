"""Windows that tile a dim: each place of the result comes from a stretch of its own, so cuts between stretches hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtorch.rules.call import local_shape
from dtorch.rules.equation import layout_of
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Replicate, Shard
from dtorch_runtime.wire.records import Arg

BEFORE, AFTER = "pqr", "xyz"


def tiles(size: int, window: int, stride: int, padding: int = 0, dilation: int = 1) -> bool:
    """Whether windows neither overlap nor leave gaps nor look beyond the edges.

    A result of one place is left out: nothing tells its dim from one that is broadcast.
    """
    return padding == 0 and dilation == 1 and window == stride and size % stride == 0 and size > stride


def per_dim(value: Any, count: int) -> list[int]:
    """A list of options with one entry a dim; one entry stands for all."""
    given = list(value)
    return given if len(given) == count else given * count


def space_letters(tiled: Sequence[bool]) -> tuple[str, str, str]:
    """Letters of spatial dims before and after, and those of them that must be whole.

    A dim that is tiled has one letter on both sides, whose cuts correspond.
    """
    before = BEFORE[: len(tiled)]
    after = "".join(b if is_tiled else a for is_tiled, b, a in zip(tiled, before, AFTER))
    whole = "".join(b + a for is_tiled, b, a in zip(tiled, before, AFTER) if not is_tiled)
    return before, after, whole


def local_dims(shape: tuple[int, ...], layout: Layout, count: int) -> Arg:
    """The argument that is the sizes of the last ``count`` dims of a piece on a worker."""
    first = len(shape) - count
    placements = tuple(
        Shard(p.dim - first, p.unit) if isinstance(p, Shard) and p.dim >= first else Replicate()
        for p in layout.placements
    )
    return local_shape(shape[first:], layout_of(layout.mesh, placements))
