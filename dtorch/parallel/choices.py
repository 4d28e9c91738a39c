"""The cheapest choice of one option for each of several blocks. Pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement


@dataclass(frozen=True, slots=True)
class Option:
    """One way to have a block: what a step takes, what a device holds, and how many modules are cut."""

    seconds: float
    memory_bytes: int
    num_cuts: int = 0


@dataclass(frozen=True, slots=True)
class _Choice:
    """Options of the blocks so far, as a chain; ``taken`` are those of the last group of blocks that are alike."""

    memory_bytes: int = 0
    seconds: float = 0.0
    num_cuts: int = 0
    taken: tuple[int, ...] = ()
    before: _Choice | None = None


def cheapest(blocks: Sequence[Sequence[Option]], limit_bytes: int | None = None) -> list[int] | None:
    """The option of each block with which all take the least time within the limit; None where none fits.

    Of equally fast ones that with fewer cuts. The first of several blocks that are alike have the options that are
    named first.
    """
    groups: dict[tuple[Option, ...], list[int]] = {}
    for index, options in enumerate(blocks):
        groups.setdefault(tuple(options), []).append(index)
    front = [_Choice()]
    for options, members in groups.items():
        combined = list(combinations_with_replacement(range(len(options)), len(members)))
        candidates = []
        for taken in combined:
            memory = sum(options[i].memory_bytes for i in taken)
            seconds = sum(options[i].seconds for i in taken)
            num_cuts = sum(options[i].num_cuts for i in taken)
            for old in front:
                total = old.memory_bytes + memory
                if limit_bytes is None or total <= limit_bytes:
                    new = _Choice(total, old.seconds + seconds, old.num_cuts + num_cuts, taken, old)
                    candidates.append(new)
        front = _unbeaten(candidates)
    if not front:
        return None
    best: _Choice | None = min(front, key=lambda c: (c.seconds, c.num_cuts, c.memory_bytes))
    result = [0] * len(blocks)
    for members in reversed(groups.values()):
        assert best is not None, "a choice has as many links as there are groups"
        for index, option in zip(members, best.taken, strict=True):
            result[index] = option
        best = best.before
    return result


def _unbeaten(choices: list[_Choice]) -> list[_Choice]:
    """Those for which none has as little memory, and takes less time, or as much with fewer cuts."""
    kept: list[_Choice] = []
    for choice in sorted(choices, key=lambda c: (c.memory_bytes, c.seconds, c.num_cuts)):
        if not kept or (choice.seconds, choice.num_cuts) < (kept[-1].seconds, kept[-1].num_cuts):
            kept.append(choice)
    return kept
