"""Interleaved 1F1B: several stages a rank, and a bubble that is smaller as many times."""

from __future__ import annotations

from dtorch.parallel.pipeline.steps import Kind, Orders, Step, alternate
from dtorch_runtime.errors import SettingError


def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Orders:
    """Megatron-LM's interleaved 1F1B (Narayanan et al., 2021, arXiv:2104.04473, section 2.2).

    Rank r has the stages r, r + num_ranks, ...; micro-batches go round in groups of ``num_ranks``.

    Raises:
        SettingError: the micro-batches are no multiple of the ranks.
    """
    if num_micro_batches % num_ranks:
        raise SettingError(
            f"schedule='interleaved' sends micro-batches round in groups of as many as there are meshes: "
            f"num_micro_batches={num_micro_batches} is no multiple of {num_ranks}; write num_micro_batches="
            f"{-(-num_micro_batches // num_ranks) * num_ranks}"
        )
    chunks = range(num_chunks)

    def rounds(rank: int, kind: Kind) -> list[Step]:
        return [
            Step(kind, chunk * num_ranks + rank, first + offset)
            for first in range(0, num_micro_batches, num_ranks)
            for chunk in (chunks if kind == "forward" else reversed(chunks))
            for offset in range(num_ranks)
        ]

    return [
        alternate(
            rounds(rank, "forward"),
            rounds(rank, "backward"),
            (num_chunks - 1) * num_ranks + (num_ranks - 1 - rank) * (2 if num_chunks > 1 else 1),
        )
        for rank in range(num_ranks)
    ]
