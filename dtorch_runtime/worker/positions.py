"""Fills a box of a global tensor with random numbers, each a function of its row-major index in the whole.

Only the blocks that the box needs are made, and a few at a time, so that they stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dtorch_runtime.worker.distributions import Distribution
from dtorch_runtime.worker.philox import chunk_blocks, words


@dataclass(frozen=True)
class Part:
    """A box of a tensor: rows of neighbours in the row-major order of the whole, at regular distances.

    Attributes:
        first: index of the first element.
        length: elements of a row.
        rows: (number, distance in elements) of rows, one pair for each dim that is cut or lies outside a cut one.
    """

    first: int
    length: int
    rows: tuple[tuple[int, int], ...]

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return math.prod(count for count, _ in self.rows)

    def row_starts(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """The indices at which some rows start: int64 [stop - start]."""
        numbers = torch.arange(start, stop, device=device)
        found = torch.full_like(numbers, self.first)
        for count, distance in reversed(self.rows):
            found += numbers.remainder(count).mul_(distance)
            numbers = numbers.div(count, rounding_mode="floor")
        return found

    def indices(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """The indices of elements, counted in the order of the box: int64 [stop - start]."""
        numbers = torch.arange(start, stop, device=device)
        if not self.rows:
            return numbers.add_(self.first)
        first_row = start // self.length
        starts = self.row_starts(first_row, (stop - 1) // self.length + 1, device)
        row = numbers.div(self.length, rounding_mode="floor")
        return numbers.sub_(row * self.length).add_(starts[row.sub_(first_row)])


def part_of(shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> Part:
    """The box with these starts and sizes of a tensor of this shape; it is not empty."""
    first, distance, length = 0, 1, 1
    rows: list[tuple[int, int]] = []
    is_whole = True
    for size, start, count in zip(reversed(shape), reversed(starts), reversed(sizes), strict=True):
        first += start * distance
        if is_whole:
            length *= count
        elif count > 1:
            rows.insert(0, (count, distance))
        is_whole = is_whole and count == size
        distance *= size
    return Part(first, length, tuple(rows))


def fill(
    piece: torch.Tensor, shape: Sequence[int], starts: Sequence[int], key: int, numbers: Distribution
) -> None:
    """Write to a local piece what stands in its place in the global tensor.

    Args:
        piece: any strides and dtype; what was drawn is converted to it.
        shape: of the global tensor.
        starts: where the piece begins in each dim.
        key: what the stream depends on, 64 bits.
    """
    if piece.is_complex():
        return fill(torch.view_as_real(piece), [*shape, 2], [*starts, 0], key, numbers)
    if not piece.numel():
        return None
    if not piece.is_contiguous():
        contiguous = torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
        fill(contiguous, shape, starts, key, numbers)
        piece.copy_(contiguous)
        return None
    part = part_of(shape, starts, piece.shape)
    chunk = chunk_blocks(piece.device) * numbers.per_block
    if part.length >= chunk or not part.rows:
        for row, flat in enumerate(piece.view(part.num_rows, part.length)):
            start = part.first if not part.rows else int(part.row_starts(row, row + 1, torch.device("cpu")))
            _fill_row(flat, start, chunk, key, numbers)
    else:
        _fill_rows(piece.view(-1, part.length), part, chunk, key, numbers)
    return None


def _fill_row(flat: torch.Tensor, start: int, chunk: int, key: int, numbers: Distribution) -> None:
    """Elements that are neighbours in the whole, from index ``start`` on."""
    per_block, stop = numbers.per_block, start + len(flat)
    for low, high in _cuts(start, stop, chunk):
        first = low // per_block
        made = numbers.of_words(words(first, -(-high // per_block) - first, key, flat.device))
        skipped = low - first * per_block
        flat[low - start : high - start] = made[skipped : skipped + high - low]


def _cuts(start: int, stop: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Pieces of a range between multiples of ``chunk``."""
    while start < stop:
        end = min(stop, start - start % chunk + chunk)
        yield start, end
        start = end


def _fill_rows(target: torch.Tensor, part: Part, chunk: int, key: int, numbers: Distribution) -> None:
    """Many short rows: the blocks that each of some rows touches, made together."""
    per_block, length, device = numbers.per_block, part.length, target.device
    is_aligned = all(distance % per_block == 0 for _, distance in part.rows)
    skipped = part.first % per_block
    touched = -(-(skipped + length) // per_block) if is_aligned else (length + per_block - 2) // per_block + 1
    at_once = max(1, chunk // (touched * per_block))
    column = torch.arange(length, device=device)
    for low in range(0, len(target), at_once):
        high = min(low + at_once, len(target))
        starts = part.row_starts(low, high, device)
        blocks = starts.div(per_block, rounding_mode="floor")
        made = numbers.of_words(words(blocks, touched, key, device)).view(high - low, -1)
        if is_aligned:
            target[low:high] = made[:, skipped : skipped + length]
        else:
            target[low:high] = made.gather(1, starts.remainder_(per_block).unsqueeze(1) + column)
