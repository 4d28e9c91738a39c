"""Which placements along one mesh axis an op bears, found by trying: cut the inputs, run the op on the pieces of each
rank, and see whether the results are pieces of the result.

Nothing here knows a rule. What it finds holds for the sample's sizes and arguments, with two and with three ranks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard, split
from tests.support.rule_checks import Sample, expected, replace_tensors, tensors_of

#: How the results of ranks may be terms of the result, in the order in which they are tried.
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}
_NUM_RANKS = (2, 3)
#: An op of many tensors has too many combinations: these many are drawn, the most regular first.
_MAX_COMBINATIONS = 160


@dataclass(frozen=True, slots=True)
class Found:
    """One signature. ``outputs`` are the results in order, then the inputs that the op wrote to."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def find_signatures(sample: Sample) -> list[Found]:
    """Every signature with a placed input that holds with two and with three ranks."""
    want = expected(sample)
    before = tensors_of((sample.make(), sample.kwargs))
    num_results = len(want) - len(before)
    changed = [i for i, t in enumerate(before) if not same(want[num_results + i], t)]
    kept = [*range(num_results), *(num_results + i for i in changed)]
    found = []
    for inputs in combinations(before):
        outputs = _outputs_on(sample, inputs, want, kept, changed)
        if outputs is not None:
            found.append(Found(inputs, outputs))
    return found


def combinations(tensors: Sequence[torch.Tensor]) -> list[tuple[Placement, ...]]:
    """Placements of inputs that are worth trying: something is cut or partial. No piece is empty: kernels may crash."""
    choices = [_choices(t) for t in tensors]
    num_all = 1
    for options in choices:
        num_all *= len(options)
    if num_all <= _MAX_COMBINATIONS:
        every = list(itertools.product(*choices))
    else:
        every = [*_regular(choices), *_drawn(choices)]
    whole = tuple(Replicate() for _ in tensors)
    return [c for c in dict.fromkeys(every) if c != whole]


def _choices(tensor: torch.Tensor) -> list[Placement]:
    cuts = [Shard(dim) for dim, size in enumerate(tensor.shape) if size >= max(_NUM_RANKS)]
    partial = [Partial("sum")] if tensor.dtype.is_floating_point or tensor.dtype.is_complex else []
    return [Replicate(), *cuts, *partial]


def _regular(choices: Sequence[Sequence[Placement]]) -> Iterator[tuple[Placement, ...]]:
    """One input placed and the others whole; every input placed alike where it can be."""
    for index, options in enumerate(choices):
        for option in options[1:]:
            yield tuple(option if i == index else Replicate() for i in range(len(choices)))
    for option in dict.fromkeys(o for options in choices for o in options[1:]):
        yield tuple(option if option in options else Replicate() for options in choices)


def _drawn(choices: Sequence[Sequence[Placement]]) -> Iterator[tuple[Placement, ...]]:
    rng = random.Random(0)
    for _ in range(_MAX_COMBINATIONS):
        yield tuple(rng.choice(options) for options in choices)


def _outputs_on(
    sample: Sample,
    inputs: tuple[Placement, ...],
    want: list[torch.Tensor],
    kept: Sequence[int],
    changed: Sequence[int],
) -> tuple[Placement, ...] | None:
    candidates: list[set[Placement]] | None = None
    for num_ranks in _NUM_RANKS:
        try:
            ranks = [_run_rank(sample, inputs, rank, num_ranks) for rank in range(num_ranks)]
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None  # torch refuses the pieces
        if any(len(rank) != len(want) for rank in ranks):
            return None
        fits = [set(_fits([rank[i] for rank in ranks], want[i])) for i in kept]
        candidates = fits if candidates is None else [a & b for a, b in zip(candidates, fits, strict=True)]
        if not all(candidates):
            return None
    assert candidates is not None
    num_results = len(want) - len(inputs)
    for position, index in enumerate(changed):
        if inputs[index] not in candidates[num_results + position]:
            return None  # what is written to keeps its placement
    return tuple(min(options, key=_preference) for options in candidates)


def _run_rank(sample: Sample, inputs: Sequence[Placement], rank: int, num_ranks: int) -> list[torch.Tensor]:
    whole = (
        sample.make(),
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in sample.kwargs.items()},
    )
    pieces = [piece(t, p, rank, num_ranks) for t, p in zip(tensors_of(whole), inputs, strict=True)]
    args, kwargs = replace_tensors(whole, list(pieces))
    with torch.no_grad():
        result = sample.func(*args, **kwargs)
    return [*tensors_of(result if isinstance(result, torch.Tensor | list | tuple) else []), *pieces]


def piece(tensor: torch.Tensor, placement: Placement, rank: int, num_ranks: int) -> torch.Tensor:
    """What one rank has of a tensor; terms of a sum are made up, the same on every call."""
    if isinstance(placement, Shard):
        start, stop = split(tensor.shape[placement.dim], num_ranks, placement.unit)[rank]
        return tensor.narrow(placement.dim, start, stop - start).clone()
    if isinstance(placement, Partial):
        rng = torch.Generator().manual_seed(5)
        terms = [
            3 * torch.randn(tensor.shape, generator=rng, dtype=tensor.dtype) for _ in range(num_ranks - 1)
        ]
        last = tensor - sum(terms, torch.zeros_like(tensor))
        return (last if rank == num_ranks - 1 else terms[rank]).clone()
    return tensor.clone()


def _fits(pieces: Sequence[torch.Tensor], whole: torch.Tensor) -> Iterator[Placement]:
    """Every placement of which these are the pieces."""
    first = pieces[0]
    if any(p.dtype is not whole.dtype or p.ndim != whole.ndim for p in pieces):
        return
    if all(p.shape == whole.shape for p in pieces):
        if all(same(p, whole) for p in pieces):
            yield Replicate()
        for op in _COMBINE:
            if _is_reduced(pieces, whole, op):
                yield Partial(op)  # type: ignore[arg-type]  # one of the kinds
    for dim in range(whole.ndim):
        ends = [stop - start for start, stop in split(whole.shape[dim], len(pieces), 1)]
        if [p.shape[dim] for p in pieces] == ends and all(
            p.shape[:dim] + p.shape[dim + 1 :] == first.shape[:dim] + first.shape[dim + 1 :] for p in pieces
        ):
            joined = torch.cat(list(pieces), dim)
            if same(joined, whole):
                yield Shard(dim)


def _is_reduced(pieces: Sequence[torch.Tensor], whole: torch.Tensor, op: str) -> bool:
    if whole.dtype is torch.bool or (op in ("max", "min") and whole.is_complex()):
        return False
    combine = _COMBINE[op]
    result = pieces[0]
    for term in pieces[1:]:
        result = combine(result, term)
    return same(result, whole)


def _preference(placement: Placement) -> tuple[int, str]:
    """Whole before cut before partial, where several fit."""
    order = 0 if isinstance(placement, Replicate) else 1 if isinstance(placement, Shard) else 2
    return order, str(placement)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to the order of sums."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) if a.numel() else True
