"""1F1B: one forward, one backward, so that few micro-batches are alive."""

from __future__ import annotations

from dtorch.parallel.pipeline.steps import Orders, Step, alternate


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Orders:
    """PipeDream-Flush (Narayanan et al., 2021, arXiv:2006.09503), known as 1F1B.

    The bubble is that of GPipe. Rank r holds what ``num_ranks - r`` micro-batches need for their backward, however many
    there are.
    """
    micro_batches = range(num_micro_batches)
    return [
        alternate(
            [Step("forward", rank, micro_batch) for micro_batch in micro_batches],
            [Step("backward", rank, micro_batch) for micro_batch in micro_batches],
            num_ranks - 1 - rank,
        )
        for rank in range(num_ranks)
    ]
