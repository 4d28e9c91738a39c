"""Philox4x64-10: random bits as a function of a key and a position, so that any device makes any part of a stream.

J. Salmon, M. Moraes, R. Dror, D. Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11. A block cipher with few
rounds encrypts a counter: four 64-bit words (a *block*) from four words of counter and two of key. The counter holds
the number of the block and that of the draw, for samplers that need more than one block an element.

NumPy has it in C, which makes runs of blocks on a CPU; blocks here and there, and those of other devices, are made with
the arithmetic of tensors. Both give the same bits.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

#: Words of 32 bits in a block.
WORDS = 8
_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
#: What the words of the key grow by in every round.
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_MASK_32, _MASK_64, _COUNTERS = (1 << 32) - 1, (1 << 64) - 1, 1 << 256
#: From so many blocks on, moving NumPy's generator to a run is quicker than the arithmetic.
_LONG_RUN = 32
#: Up to so many blocks between two runs, making them and letting them go is quicker than moving the generator on.
_SHORT_GAP = 256


def chunk_blocks(device: torch.device) -> int:
    """How many blocks to make at once: few enough for the cache of a CPU, enough to be worth the calls."""
    return 16384 if device.type == "cpu" else 1 << 20


def words(
    first: int | torch.Tensor, count: int, key: int, device: torch.device, draw: int = 0
) -> torch.Tensor:
    """The words of a run of blocks, or of several runs: int32 [number of runs * count * WORDS], all bits random.

    Args:
        first: the number of the first block of each run; several are int64 [n] on ``device``, in ascending order.
        count: blocks of a run.
        key: 64 bits.
        draw: which of the streams of this key, from 0 to 2**64 - 1.
    """
    if device.type == "cpu":
        if isinstance(first, int):
            return _run(first, count, key, draw)
        if count >= _LONG_RUN:
            return _runs(first.tolist(), count, key, draw)
    starts = torch.tensor([first], device=device) if isinstance(first, int) else first
    blocks = (starts.unsqueeze(1) + torch.arange(count, device=device)).view(-1)
    zero = torch.zeros_like(blocks)
    made = encrypt((blocks, zero + _signed(draw), zero, zero), (key, 0))
    return torch.stack(made, 1).view(torch.int32).view(-1)


def _run(first: int, count: int, key: int, draw: int) -> torch.Tensor:
    """A run of blocks by NumPy, which lets other threads run meanwhile."""
    generator = np.random.Generator(_numpy_generator(first, key, draw))
    made = generator.integers(0, _MASK_64, size=count * 4, dtype=np.uint64, endpoint=True)
    return torch.from_numpy(made.view(np.int32))


def _runs(starts: list[int], count: int, key: int, draw: int) -> torch.Tensor:
    """Runs of equal length, the generator moved on from one to the next."""
    steps = {after - before for before, after in itertools.pairwise(starts)}
    if len(steps) == 1 and 0 < (step := steps.pop()) <= count + _SHORT_GAP:
        together = _run(starts[0], step * (len(starts) - 1) + count, key, draw)
        return together.as_strided((len(starts), count * WORDS), (step * WORDS, 1)).reshape(-1)
    made = np.empty((len(starts), count * 4), np.uint64)
    generator = _numpy_generator(starts[0], key, draw)
    reached = starts[0]
    for row, start in zip(made, starts, strict=True):
        if start != reached:
            generator.advance(start - reached)
        row[:] = generator.random_raw(count * 4)
        reached = start + count
    return torch.from_numpy(made.reshape(-1).view(np.int32))


def _numpy_generator(first: int, key: int, draw: int) -> np.random.Philox:
    """NumPy counts before it encrypts."""
    return np.random.Philox(key=key & _MASK_64, counter=((draw << 64) + first - 1) % _COUNTERS)


def encrypt(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encrypt counters: the four words of each, int64 [n] that stand for 64 bits, and so of the result."""
    a, b, c, d = counter
    first, second = key
    for _ in range(_ROUNDS):
        high, low = _product(a, _MULTIPLIERS[0])
        other_high, other_low = _product(c, _MULTIPLIERS[1])
        a, b = other_high ^ b ^ _signed(first), other_low
        c, d = high ^ d ^ _signed(second), low
        first, second = first + _WEYL[0], second + _WEYL[1]
    return a, b, c, d


def _product(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and the lower half of an unsigned product of 64 bits by 64 bits."""
    b_low, b_high = b & _MASK_32, b >> 32
    a_low, a_high = a & _MASK_32, a >> 32 & _MASK_32
    across, along = a_low * b_high, a_high * b_low
    middle = ((a_low * b_low) >> 32 & _MASK_32) + (across & _MASK_32) + (along & _MASK_32)
    high = a_high * b_high + (across >> 32 & _MASK_32) + (along >> 32 & _MASK_32) + (middle >> 32)
    return high, a * _signed(b)


def _signed(bits: int) -> int:
    """The lower 64 bits as torch's int64 takes them."""
    bits &= _MASK_64
    return bits - (1 << 64) if bits >> 63 else bits
