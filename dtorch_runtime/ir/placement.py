"""How one mesh axis holds a tensor: ``Replicate``, ``Shard(dim)`` or ``Partial(op)``; and how a dim is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from dtorch_runtime.errors import PlacementError

ReduceOp = Literal["sum", "avg", "max", "min", "prod"]
REDUCE_OPS: Final[tuple[ReduceOp, ...]] = get_args(ReduceOp)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank i along the axis holds the i-th piece of tensor dim ``dim``.

    Args:
        dim: the tensor dim that is cut. Negative dims count from the end and are resolved against the
            tensor when the placement is used.
        unit: cuts fall only on multiples of this many rows, e.g. the size of a head.

    Raises:
        PlacementError: ``dim`` is not an int or ``unit`` is not a positive int.
    """

    dim: int
    unit: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise PlacementError(f"Shard(dim) takes an int, got {self.dim!r}; write e.g. Shard(0)")
        if not isinstance(self.unit, int) or isinstance(self.unit, bool) or self.unit < 1:
            raise PlacementError(
                f"Shard(unit=) takes a positive int, got {self.unit!r}; write Shard({self.dim}), or the rows that stay "
                f"together, e.g. unit=64"
            )

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})" if self.unit == 1 else f"Shard(dim={self.dim}, unit={self.unit})"

    def __str__(self) -> str:
        return f"S({self.dim})" if self.unit == 1 else f"S({self.dim}, unit={self.unit})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank along the axis holds a full-shape term; the tensor is their reduction by ``op``.

    Raises:
        PlacementError: ``op`` is not one of sum, avg, max, min, prod.
    """

    op: ReduceOp = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCE_OPS:
            raise PlacementError(
                f"Partial(op) takes one of {', '.join(REDUCE_OPS)}, got {self.op!r}; write e.g. Partial('sum')"
            )

    def __repr__(self) -> str:
        return f"Partial({self.op!r})"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


Placement: TypeAlias = Replicate | Shard | Partial
Placements: TypeAlias = tuple[Placement, ...]


def split(length: int, num_parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Cut ``range(length)`` into ``num_parts`` balanced pieces, as (start, stop).

    ``length`` is n = q * num_parts + r units (the last one may be short); the first r parts get one unit
    more. With more parts than units the last parts are empty.
    """
    num_units = -(-length // unit)
    quotient, remainder = divmod(num_units, num_parts)
    pieces = []
    start = 0
    for part in range(num_parts):
        stop = min(length, start + (quotient + (part < remainder)) * unit)
        pieces.append((start, stop))
        start = stop
    return pieces
