"""GPipe: all micro-batches forward, then all of them backward."""

from __future__ import annotations

from dtorch.parallel.pipeline.steps import Orders, Step


def gpipe(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Orders:
    """All micro-batches forward, then all backward, the last one first (Huang et al., 2019, arXiv:1811.06965).

    Each rank holds what all micro-batches need for their backward. With several chunks a rank, a chunk has all
    micro-batches before the next one begins.
    """
    orders = forward_only(num_ranks, num_micro_batches, num_chunks)
    return [
        [*order, *(Step("backward", step.stage, step.micro_batch) for step in reversed(order))]
        for order in orders
    ]


def forward_only(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Orders:
    """The order of inference: each chunk has all micro-batches, one after the other."""
    return [
        [
            Step("forward", chunk * num_ranks + rank, micro_batch)
            for chunk in range(num_chunks)
            for micro_batch in range(num_micro_batches)
        ]
        for rank in range(num_ranks)
    ]
