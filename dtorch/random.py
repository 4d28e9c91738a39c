"""Seeds of random ops: one counter in the client, so that numbers do not depend on mesh or placement."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

import torch

_MASK = (1 << 64) - 1
_lock = threading.Lock()
_seed = secrets.randbits(63)
_count = 0


def manual_seed(seed: int) -> torch.Generator:
    """Seed DTorch's and torch's own generators; the same as ``torch.manual_seed``.

    The same seed gives the same numbers on every mesh and with every placement.
    """
    return torch.manual_seed(seed)


def set_seed(seed: int) -> None:
    """Seed DTorch's generator alone."""
    global _seed, _count
    with _lock:
        _seed, _count = seed & _MASK, 0


def next_seed() -> int:
    """The seed of the next random op, an int64 that is not negative."""
    global _count
    with _lock:
        _count += 1
        return _mix(_seed, _count)


def seed_source(generator: torch.Generator | None) -> Callable[[], int]:
    """What gives the seeds of a random op that was called with ``generator``: it, or DTorch's own."""
    if generator is None:
        return next_seed
    return lambda: int(
        torch.randint(2**63 - 1, (), dtype=torch.int64, generator=generator, device=generator.device)
    )


def get_state() -> tuple[int, int]:
    """Seed, and how many random ops have drawn from it."""
    with _lock:
        return _seed, _count


def set_state(seed: int, count: int) -> None:
    """Go back to a state that ``get_state`` gave."""
    global _seed, _count
    with _lock:
        _seed, _count = seed & _MASK, count


def _mix(seed: int, count: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014), without its top bit."""
    z = (seed + count * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1
