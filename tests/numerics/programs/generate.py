"""Writes random programs, each line after the one before has run: what a variable holds decides what fits it."""

from __future__ import annotations

import random

import torch

from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from tests.numerics.programs.draft import Draft, NothingFits
from tests.numerics.programs.execute import Difference, Ended, Mode, Program, Run, is_leaf
from tests.numerics.programs.lines import EXACT, ROUGH, ROUGH_WRITES, SHARP, WRITES, Line

MESH_SHAPES = ((1,), (2,), (3,), (4,), (2, 2), (2, 3))
MAX_DEVICES = 6
_DTYPES = (torch.float64,) * 4 + (torch.float32, torch.int64, torch.int64, torch.bool, torch.complex128)
#: (lines, how often, makes rough values, takes exact ones only, writes)
_TABLES: tuple[tuple[dict[str, Line], int, bool, bool, bool], ...] = (
    (EXACT, 50, False, False, False),
    (WRITES, 25, False, False, True),
    (SHARP, 8, False, True, False),
    (ROUGH, 9, True, False, False),
    (ROUGH_WRITES, 4, True, False, True),
)
#: Larger values are not computed with: their sums would not be exact.
_MOST = {torch.float32: 300.0}
_MOST_OF_OTHERS = 1e5
_MAX_ELEMENTS = 600


class Author:
    """Writes one program and runs it.

    Attributes:
        lines: what has been written so far.
    """

    def __init__(self, rng: random.Random, mode: Mode) -> None:
        self._rng = rng
        self._mode = mode
        self._mesh_shape = rng.choice(MESH_SHAPES)
        self._run = Run(self._mesh_shape, mode)
        self._num_names = 0
        self._rough: set[str] = set()
        self.lines: list[str] = []

    @property
    def program(self) -> Program:
        """The program so far."""
        return Program(self._mesh_shape, self._mode, tuple(self.lines))

    def write(self, num_lines: int) -> None:
        """Write and run so many lines and a backward pass, and compare.

        Raises:
            Difference: the sides differ.
        """
        for _ in range(self._rng.randint(2, 4)):
            self._try(self._input())
        for _ in range(num_lines):
            for _ in range(20):
                if self._write_line():
                    break
        self._backward()
        self._run.compare()

    def _try(self, line: str) -> bool:
        self.lines.append(line)
        return self._run.step(line)

    def _new_name(self) -> str:
        self._num_names += 1
        return f"v{self._num_names - 1}"

    # ---- lines ----

    def _input(self) -> str:
        dtype = self._rng.choice(_DTYPES)
        shape = tuple(
            self._rng.choice((1, 2, 3, 4, 4, 5, 6, 7, 0) if d else (4, 4, 5, 6, 7))
            for d in range(self._rng.randint(1, 3))
        )
        if self._rng.random() < 0.5:
            shape = self._rng.choice(((4, 6), (6, 4), (4,), (6,), (4, 4)))
        tensor = torch.empty(shape, dtype=dtype)
        needs_grad = dtype.is_floating_point and self._rng.random() < 0.3
        return (
            f"{self._new_name()} = make({self._rng.randrange(1000)}, {shape}, {dtype}, "
            f"{self._placements(tensor)!r}, {needs_grad})"
        )

    def _placements(self, tensor: torch.Tensor) -> list[Placement]:
        def one() -> Placement:
            kind = self._rng.random()
            if kind < 0.55 and tensor.ndim:
                return Shard(self._rng.randrange(tensor.ndim), self._rng.choice((1, 1, 1, 2, 3)))
            if kind < 0.75:
                ops = ["sum", "sum"]
                ops += ["avg"] if tensor.dtype.is_floating_point or tensor.dtype.is_complex else []
                ops += [] if tensor.dtype.is_complex else ["max", "min"]
                return Partial(self._rng.choice(ops))
            return Replicate()

        return [one() for _ in self._mesh_shape]

    def _write_line(self) -> bool:
        if self._rng.random() < 0.04 and len(self._values()) > 4:
            return self._try(f"del {self._rng.choice(list(self._values()))}")
        table, _, is_rough, only_exact, writes = self._rng.choices(
            _TABLES, [weight for _, weight, *_ in _TABLES]
        )[0]
        draft = Draft(self._rng, self._tame(), self._rough.__contains__, self._placements, only_exact)
        try:
            made = self._rng.choice(list(table.values()))(draft)
        except NothingFits:
            return False
        becomes_rough = is_rough or any(name in self._rough for name in draft.used)
        if writes:
            assert isinstance(made, str)
            return self._write_into(made, draft.used[0], becomes_rough)
        count, expression = made if isinstance(made, tuple) else (1, made)
        names = [self._new_name() for _ in range(count)]
        if not self._try(f"{', '.join(names)} = {expression}"):
            return False
        if becomes_rough:
            self._rough.update(names)
        for name in names:
            if self._run.plain[name].numel() > _MAX_ELEMENTS:
                self._try(f"del {name}")
        return True

    def _write_into(self, line: str, target: str, becomes_rough: bool) -> bool:
        if not self._try(line):
            return False
        if becomes_rough:
            storage = self._run.plain[target].untyped_storage()._cdata
            self._rough.update(
                name for name, value in self._values().items() if value.untyped_storage()._cdata == storage
            )
        return True

    def _backward(self) -> None:
        found = [
            name
            for name, value in self._tame().items()
            if value.requires_grad and value.is_floating_point() and not is_leaf(value)
        ]
        if found and self._rng.random() < 0.7:
            self._try(f"backward({', '.join(found[-3:])})")

    # ---- variables ----

    def _values(self) -> dict[str, torch.Tensor]:
        return {
            name: value
            for name, value in self._run.plain.items()
            if isinstance(value, torch.Tensor) and name[0] == "v"
        }

    def _tame(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self._values().items() if _is_tame(value)}


def _is_tame(value: torch.Tensor) -> bool:
    if value.dtype is torch.bool or not value.numel():
        return True
    return float(value.detach().abs().max()) <= _MOST.get(value.dtype, _MOST_OF_OTHERS)


def write_and_run(rng: random.Random, mode: Mode) -> tuple[Program, Difference | None]:
    """One random program of 5 to 30 lines, and in what the sides differ."""
    author = Author(rng, mode)
    try:
        author.write(rng.randint(5, 30))
    except Ended:
        pass
    except Difference as difference:
        return author.program, difference
    return author.program, None
