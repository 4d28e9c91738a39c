"""``Draft``: picks variables and numbers for a line, knowing what the variables hold on the plain side."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtorch_runtime.ir.placement import Placement

_NAME = re.compile(r"\bv\d+\b")
_REAL = (torch.float64, torch.float32, torch.int64)
_FLOATING = (torch.float64, torch.float32)
_NUMBERS = (*_REAL, torch.complex128)


class NothingFits(Exception):
    """No variable is what a line asks for."""


class Draft:
    """One line in the making.

    Args:
        values: what the variables hold; wild ones (huge, infinite, not a number) left out.
        is_rough: whether a variable's values may differ in the last bits.
        placements_for: random placements for a tensor.
        only_exact: whether the line takes only values that are equal to the last bit.

    Attributes:
        used: the variables that were picked, first first.
    """

    def __init__(
        self,
        rng: random.Random,
        values: Mapping[str, torch.Tensor],
        is_rough: Callable[[str], bool],
        placements_for: Callable[[torch.Tensor], list[Placement]],
        only_exact: bool,
    ) -> None:
        self._rng = rng
        self._values = values
        self._is_rough = is_rough
        self._placements_for = placements_for
        self._only_exact = only_exact
        self._target: torch.Tensor | None = None
        self.used: list[str] = []

    # ---- variables ----

    def _pick(self, fits: Callable[[torch.Tensor], bool]) -> str:
        found = [
            name
            for name, value in self._values.items()
            if fits(value)
            and not (self._only_exact and self._is_rough(name))
            and not (self._target is not None and _is_entangled(value, self._target))
        ]
        if not found:
            raise NothingFits
        # Later ones more often, so that lines build on lines.
        name = found[max(self._rng.randrange(len(found)), self._rng.randrange(len(found)))]
        self.used.append(name)
        return name

    def _value(self, x: str) -> torch.Tensor:
        """The value of the variable in a picked expression."""
        found = _NAME.search(x)
        assert found is not None
        return self._values[found.group()]

    def _of(self, dtypes: tuple[torch.dtype, ...], least: int, most: int) -> str:
        return self._pick(lambda value: value.dtype in dtypes and least <= value.ndim <= most)

    def any(self, least: int = 0, most: int = 4) -> str:
        """A variable of any dtype with so many dims."""
        return self._pick(lambda value: least <= value.ndim <= most)

    def number(self, least: int = 0, most: int = 4) -> str:
        """One of any dtype but bool."""
        return self._of(_NUMBERS, least, most)

    def real(self, least: int = 0, most: int = 4) -> str:
        """One of a float or of an integer."""
        return self._of(_REAL, least, most)

    def floating(self, least: int = 0, most: int = 4) -> str:
        """One of a float."""
        return self._of(_FLOATING, least, most)

    def double(self) -> str:
        """One of float64."""
        return self._of((torch.float64,), 0, 4)

    def whole(self, least: int = 0, most: int = 4) -> str:
        """One of int64, made not negative."""
        return f"{self._of((torch.int64,), least, most)}.abs()"

    def boolean(self) -> str:
        """One of bool."""
        return self._of((torch.bool,), 0, 4)

    def complex(self) -> str:
        """One of complex128."""
        return self._of((torch.complex128,), 0, 4)

    def ramp(self, least: int = 1) -> str:
        """A float without ties, so that there is one order only: a variable plus small different amounts."""
        x = self.floating(least, 2)
        shape = tuple(self._value(x).shape)
        return f"({x} + torch.arange({math.prod(shape)}., device={x}.device).view({shape}) / 1024)"

    def target(
        self,
        least: int = 0,
        most: int = 4,
        dtypes: tuple[torch.dtype, ...] = _NUMBERS,
        with_grad: bool = True,
    ) -> str:
        """A variable to write to, whose elements do not share memory.

        Args:
            with_grad: whether autograd may follow it.
        """

        def fits(value: torch.Tensor) -> bool:
            return (
                value.dtype in dtypes
                and least <= value.ndim <= most
                and not _is_expanded(value)
                and (with_grad or not value.requires_grad)
            )

        name = self._pick(fits)
        self._target = self._values[name]
        return name

    def real_target(self) -> str:
        """One of a float or of an integer."""
        return self.target(dtypes=_REAL)

    def floating_target(self) -> str:
        """One of a float."""
        return self.target(dtypes=_FLOATING)

    def fits(self, x: str, same_kind: bool = False, into: bool = False) -> str:
        """A variable that broadcasts with another.

        Args:
            same_kind: of the same dtype.
            into: the result has the other's shape and dtype.
        """
        other = self._value(x)

        def fits(value: torch.Tensor) -> bool:
            if value.dtype is torch.bool:
                return False
            if (same_kind or into) and value.dtype is not other.dtype:
                return False
            try:
                shape = torch.broadcast_shapes(value.shape, other.shape)
            except RuntimeError:
                return False
            return shape == other.shape if into else math.prod(shape) <= 400

        return self._pick(fits)

    def twin(self, x: str, to_write: bool = False) -> str:
        """A variable of the same shape and dtype, maybe the same."""
        other = self._value(x)
        return self._pick(
            lambda value: (
                value.shape == other.shape
                and value.dtype is other.dtype
                and not (to_write and (_is_expanded(value) or value.requires_grad))
            )
        )

    def same_dtype(self, x: str, ndim: int) -> str:
        """A variable of the same dtype."""
        other = self._value(x)
        return self._pick(lambda value: value.ndim == ndim and value.dtype is other.dtype)

    def boolean_like(self, x: str) -> str:
        """A mask of the same shape."""
        shape = self._value(x).shape
        masks = [
            name for name, value in self._values.items() if value.dtype is torch.bool and value.shape == shape
        ]
        if masks and self._rng.random() < 0.5:
            return self._pick(lambda value: value.dtype is torch.bool and value.shape == shape)
        return f"(torch.arange({math.prod(shape)}, device={x}.device).view({tuple(shape)}) % {self.integer(2, 4)} == 0)"

    def product(self, transposed: bool = False) -> tuple[str, str]:
        """Two matrices that can be multiplied."""
        left = self.number(2, 2)
        a = self._value(left)
        dim = 1 if transposed else 0
        right = self._pick(
            lambda b: b.ndim == 2 and b.dtype is a.dtype and b.shape[dim] == a.shape[1] and b.numel() < 200
        )
        return left, right

    def joined(self) -> tuple[str, str, int]:
        """Two variables and the dim along which they can be joined."""
        first = self.any(1)
        a, dim = self._value(first), self.full_dim(first, or_empty=True)

        def fits(b: torch.Tensor) -> bool:
            return (
                b.dtype is a.dtype
                and b.ndim == a.ndim
                and all(b.shape[d] == a.shape[d] for d in range(a.ndim) if d != dim)
            )

        return first, self._pick(fits), dim

    # ---- numbers ----

    def choice(self, options: Any) -> Any:
        """One of several."""
        return self._rng.choice(options)

    def integer(self, start: int, stop: int) -> int:
        """From ``start`` up to but without ``stop``."""
        return self._rng.randrange(start, stop)

    def small(self) -> int:
        """A number to compute with."""
        return self._rng.choice((-2, -1, 2, 3))

    def ndim(self, x: str) -> int:
        """The number of dims of a variable."""
        return self._value(x).ndim

    def size(self, x: str, dim: int) -> int:
        """The size of a dim."""
        return self._value(x).shape[dim]

    def dim(self, x: str) -> int:
        """A dim of a variable."""
        return self._rng.randrange(self.ndim(x))

    def full_dim(self, x: str, or_empty: bool = False) -> int:
        """A dim of a variable that has elements."""
        shape = self._value(x).shape
        dims = [dim for dim, size in enumerate(shape) if size or or_empty]
        if not dims:
            raise NothingFits
        return self._rng.choice(dims)

    def keepdim(self) -> str:
        """An argument of reductions."""
        return self._rng.choice(("", ", keepdim=True"))

    def order(self, x: str) -> tuple[int, ...]:
        """The dims of a variable in another order."""
        return tuple(self._rng.sample(range(self.ndim(x)), self.ndim(x)))

    def position(self, x: str, dim: int) -> int:
        """An index into a dim."""
        if not self.size(x, dim):
            raise NothingFits
        return self._rng.randrange(self.size(x, dim))

    def positions(self, x: str, dim: int, beside: str) -> str:
        """Three indices into a dim, as a tensor."""
        indices = [self.position(x, dim) for _ in range(3)]
        return f"torch.tensor({indices}, device={beside}.device)"

    def index_like(self, x: str, dim: int) -> str:
        """Indices into a dim, in the shape of the variable; each once along the dim, so that writes do not meet."""
        value = self._value(x)
        size, shape = value.shape[dim], [1] * value.ndim
        shape[dim] = size
        shift = self.integer(0, size)
        return (
            f"(torch.arange({size}, device={x}.device).add({shift}) % {size})"
            f".view({shape}).expand({tuple(value.shape)})"
        )

    def index_of_rows(self, x: str) -> str:
        """A class for each row of a matrix."""
        rows, classes = self._value(x).shape
        if not rows or not classes:
            raise NothingFits
        return f"(torch.arange({rows}, device={x}.device) % {classes})"

    def span(self, x: str, dim: int) -> tuple[int, int]:
        """Start and length of a part of a dim."""
        size = self.size(x, dim)
        start = self._rng.randint(0, size)
        return start, self._rng.randint(0, size - start)

    def slices(self, x: str) -> str:
        """What stands in brackets: slices, steps, an index, None or an ellipsis."""
        value = self._value(x)
        parts = []
        for size in value.shape[: self._rng.randint(1, value.ndim)]:
            start = self._rng.randint(0, size)
            options = [":", f"{start}:", f":{start}", "::2", f"{-start}:"]
            parts.append(self._rng.choice(options + ([str(self._rng.randrange(size))] if size else [])))
        if self._rng.random() < 0.2:
            parts.insert(self._rng.randint(0, len(parts)), "None")
        if self._rng.random() < 0.1:
            parts.append("...")
        return ", ".join(parts)

    def shape(self) -> list[int]:
        """A new shape."""
        return [self._rng.randint(1, 6) for _ in range(self._rng.randint(0, 2))]

    def other_shape(self, x: str) -> list[int]:
        """Another shape of as many elements, maybe with a -1."""
        count = self._value(x).numel()
        shape: list[int] = []
        rest = count
        while rest > 1 and len(shape) < 3:
            factor = self._rng.choice([f for f in range(1, rest + 1) if rest % f == 0])
            shape.append(factor)
            rest //= factor
        shape.append(rest)
        if count and self._rng.random() < 0.3:
            shape[self._rng.randrange(len(shape))] = -1
        return shape

    def placements(self, x: str) -> str:
        """Placements for a variable."""
        return repr(self._placements_for(self._value(x)))


def _is_expanded(value: torch.Tensor) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True))


def _is_entangled(value: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a write to one changes some elements of the other: what torch reads then depends on its loops."""
    return value.untyped_storage()._cdata == target.untyped_storage()._cdata and (
        value.shape,
        value.stride(),
        value.storage_offset(),
    ) != (target.shape, target.stride(), target.storage_offset())
