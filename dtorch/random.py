"""The state behind random ops: a seed and a count in the client, so that numbers do not depend on mesh or placement.

Each random op takes the next seed of the sequence, whatever it draws, and a worker's numbers are a function of that
seed and of their index in the global tensor (``dtorch_runtime/worker/philox.py``). There is one sequence in a
process, as PyTorch has one default generator a device; a ``generator=`` gives a sequence of its own.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1
_STATE_BYTES = 16
_lock = threading.Lock()
_seed = secrets.randbits(63)
_count = 0


class Generator(torch.Generator):
    """A sequence of seeds of its own: ``torch.rand(3, device="dtorch", generator=g)``.

    Takes the place of ``torch.Generator(device="dtorch")``, which torch lets no backend in Python make. A
    ``torch.Generator()`` of the CPU will do as well; both move on by the same step for each random op.
    """

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # declared writable, which it is not
        """The device whose ops it is for."""
        return torch.device("privateuseone:0")


def manual_seed(seed: int) -> torch.Generator:
    """Seed DTorch's and torch's own generators; the same as ``torch.manual_seed``.

    The same seed gives the same numbers on every mesh and with every placement.

    Raises:
        TypeError: the seed is no number.
    """
    try:
        number = int(seed)
    except (TypeError, ValueError):
        raise TypeError(f"manual_seed takes an integer, got {seed!r}; write dtorch.manual_seed(0)") from None
    return torch.manual_seed(number)


def get_rng_state() -> torch.Tensor:
    """The state of DTorch's generator: 16 bytes, uint8 on the CPU."""
    seed, count = get_state()
    data = seed.to_bytes(8, "little") + count.to_bytes(8, "little")
    return torch.tensor(list(data), dtype=torch.uint8, device="cpu")


def set_rng_state(new_state: torch.Tensor) -> None:
    """Go back to a state that ``get_rng_state`` gave.

    Raises:
        ValueError, TypeError: it is none.
    """
    if not isinstance(new_state, torch.Tensor):
        raise TypeError(
            f"set_rng_state takes what get_rng_state gave, got {new_state!r}; write manual_seed(n) to seed"
        )
    if new_state.dtype is not torch.uint8 or new_state.numel() != _STATE_BYTES:
        raise ValueError(
            f"set_rng_state takes what get_rng_state gave, {_STATE_BYTES} bytes (uint8); "
            f"got {new_state.dtype} of shape {list(new_state.shape)}"
        )
    data = bytes(new_state.tolist())
    set_state(int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little"))


@contextmanager
def fork_rng(enabled: bool = True) -> Iterator[None]:
    """Afterwards DTorch's generator and torch's CPU generator are where they were before."""
    with torch.random.fork_rng(devices=[0], enabled=enabled, device_type="dtorch"):
        yield


def set_seed(seed: int) -> None:
    """Seed DTorch's generator alone."""
    set_state(seed & _MASK, 0)


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
    device = "cpu" if isinstance(generator, Generator) else generator.device
    return lambda: int(torch.randint(2**63 - 1, (), dtype=torch.int64, generator=generator, device=device))


def get_state() -> tuple[int, int]:
    """Seed, and how many random ops have drawn from it."""
    with _lock:
        return _seed, _count


def set_state(seed: int, count: int) -> None:
    """Go back to a state that ``get_state`` gave."""
    global _seed, _count
    with _lock:
        _seed, _count = seed & _MASK, count


def branches(num_branches: int) -> list[tuple[int, int]]:
    """States of sequences of their own, which follow from the place in this one and leave it where it is."""
    with _lock:
        base = _mix(_seed, _count + 1)
    return [(_mix(base, index + 1), 0) for index in range(num_branches)]


def _mix(seed: int, count: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014), without its top bit."""
    z = (seed + count * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1
