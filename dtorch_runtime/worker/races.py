"""Which accesses to memory are ordered: vector clocks, one entry a stream, as in "Time, clocks, and the ordering of
events" (Lamport, 1978) and its vectors by Fidge and Mattern.

A stream's own work is in order. Work of another stream comes before it as far as the stream has waited for a point in
it. Two accesses to the same memory, at least one of them a write, that are not in order are a race: it depends on luck
which comes first. That is said whether or not luck was good this time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

#: How far each stream had come, as somebody knows.
Point: TypeAlias = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Access:
    """What an op did with some memory. ``epoch`` is that of its stream."""

    stream: str
    epoch: int
    op: str
    location_id: int
    is_write: bool

    def __str__(self) -> str:
        return f"{self.op} on {self.stream} {'writes' if self.is_write else 'reads'}"


class DataRace(Exception):
    """Two ops use the same memory, and nothing orders them. A fault of DTorch, not of the program."""

    def __init__(self, access: Access, other: Access) -> None:
        self.access = access
        self.other = other
        super().__init__(
            f"a data race: {access} memory that {other}, and neither waits for the other. The program is right; please "
            f"report this as a bug of DTorch"
        )


class Clocks:
    """What each stream knows of the others."""

    def __init__(self) -> None:
        self._clocks: dict[str, dict[str, int]] = {}

    def _clock(self, stream: str) -> dict[str, int]:
        return self._clocks.setdefault(stream, {stream: 1})

    def epoch(self, stream: str) -> int:
        """Of what a stream does now. It rises with each point that is recorded."""
        return self._clock(stream)[stream]

    def record(self, stream: str) -> Point:
        """The point behind everything that a stream has done or waited for."""
        clock = self._clock(stream)
        point = dict(clock)
        clock[stream] += 1
        return point

    def wait_for(self, stream: str, point: Point) -> None:
        """What a stream does from now on comes after a point."""
        clock = self._clock(stream)
        for other, epoch in point.items():
            if clock.get(other, 0) < epoch:
                clock[other] = epoch

    def is_before(self, stream: str, epoch: int, now: str) -> bool:
        """Whether what a stream did in an epoch comes before what the stream ``now`` does."""
        return stream == now or epoch <= self._clock(now).get(stream, 0)


@dataclass(slots=True)
class _Memory:
    """The last accesses to some memory of each stream. Those before them are before whatever these are before."""

    reads: dict[str, Access] = field(default_factory=dict)
    writes: dict[str, Access] = field(default_factory=dict)


class Accesses:
    """Remembers who used which memory, and finds those that no clock orders."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._memories: dict[int, _Memory] = {}

    def add(self, memory: int, access: Access) -> Access | None:
        """An access happens now; gives an earlier one that conflicts with it and is not ordered, if there is one."""
        known = self._memories.setdefault(memory, _Memory())
        conflicting = [known.writes, known.reads] if access.is_write else [known.writes]
        found = next(
            (
                other
                for accesses in conflicting
                for other in accesses.values()
                if not self._clocks.is_before(other.stream, other.epoch, access.stream)
            ),
            None,
        )
        (known.writes if access.is_write else known.reads)[access.stream] = access
        return found

    def forget(self, memory: int) -> None:
        """It is freed: whoever gets a memory of this number gets another one."""
        self._memories.pop(memory, None)
