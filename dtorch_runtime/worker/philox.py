"""Philox4x32-10: random bits as a function of a key and a position, so that any device makes any part of a stream.

J. Salmon, M. Moraes, R. Dror, D. Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11. A block cipher with few
rounds encrypts a counter: four 32-bit words (a *block*) from four words of counter and two of key. The counter holds
the number of the block (words 0 and 1) and of the draw (word 2), for samplers that need more than one block an element.

The arithmetic is that of arrays: NumPy's on a CPU, where its calls cost least, and torch's on other devices.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
#: What the words of the key grow by in every round.
_WEYL = (0x9E3779B9, 0xBB67AE85)

#: int64 of NumPy or torch.
_Array = Any


def chunk_blocks(device: torch.device) -> int:
    """How many blocks to make at once: few enough for the cache of a CPU, enough to keep a GPU busy."""
    return 8192 if device.type == "cpu" else 1 << 21


def words(blocks: range | torch.Tensor, key: int, device: torch.device, draw: int = 0) -> torch.Tensor:
    """The words of some blocks, one block after the other: int32 [4 * number of blocks], every bit random.

    Args:
        blocks: numbers of blocks, from 0; a tensor is int64 [n] on ``device``.
        key: 64 bits.
        draw: which of the 2**32 streams of this key.
    """
    count = len(blocks)
    pairs = torch.empty((count, 2), dtype=torch.int64, device=device)
    target: _Array = pairs
    numbers: _Array = blocks
    if device.type == "cpu":
        target = pairs.numpy()
        numbers = np.arange(blocks.start, blocks.stop) if isinstance(blocks, range) else blocks.numpy()
        even, odd = np.empty((2, count), np.int64), np.empty((2, count), np.int64)
    else:
        if isinstance(blocks, range):
            numbers = torch.arange(blocks.start, blocks.stop, device=device)
        even, odd = torch.empty((2, 2, count), dtype=torch.int64, device=device)
    even[0], even[1], odd[0], odd[1] = numbers & _MASK, draw, numbers >> 32, 0
    even, odd = encrypt(even, odd, key)
    # Two words make one int64, so that interleaving moves half as many elements.
    odd <<= 32
    odd |= even
    target[:, 0], target[:, 1] = odd[0], odd[1]
    return pairs.view(torch.int32).view(-1)


def encrypt(even: _Array, odd: _Array, key: int) -> tuple[_Array, _Array]:
    """Encrypt counters, int64 [2, n] each.

    Args:
        even: words 0 and 2 of each counter, from 0 to 2**32 - 1.
        odd: words 1 and 3.
        key: 64 bits.

    Returns:
        Words 0 and 2 of each block, and words 1 and 3, of which only the lower 32 bits count.
    """
    is_torch = isinstance(even, torch.Tensor)
    multipliers, weyl, first_key, second_key = _constants(even.device if is_torch else None)
    keys = weyl + first_key * (key & _MASK)
    keys += second_key * (key >> 32 & _MASK)
    keys &= _MASK
    # The upper halves of the products, mixed with the odd words and the key, change places and are the new even words;
    # the lower halves are the new odd ones. Rows stay where they are: after every second round row 0 is word 2.
    for multiplier, round_key in zip(multipliers, keys, strict=True):
        product = even * multiplier
        even = product >> 32
        even ^= odd.flip(0) if is_torch else odd[::-1]
        even ^= round_key
        even &= _MASK
        odd = product
    return even, odd


@lru_cache
def _constants(device: torch.device | None) -> tuple[_Array, _Array, _Array, _Array]:
    """What rounds multiply by, what keys grow by, and which word of the key goes where: int64 [rounds, 2, 1]."""
    turns = np.arange(_ROUNDS)
    is_first_row = np.stack((turns % 2 == 0, turns % 2 == 1), 1)
    multipliers = np.where(is_first_row, *_MULTIPLIERS)
    # Row 0 of the first round becomes word 2, which takes the second word of the key.
    weyl = turns[:, None] * np.where(is_first_row, _WEYL[1], _WEYL[0])
    arrays = (a.astype(np.int64)[..., None] for a in (multipliers, weyl, ~is_first_row, is_first_row))
    found = tuple(a if device is None else torch.from_numpy(a).to(device) for a in arrays)
    return found[0], found[1], found[2], found[3]
