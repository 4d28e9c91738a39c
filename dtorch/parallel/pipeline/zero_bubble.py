"""ZB-H1: gradients of weights fill the bubbles of 1F1B, in the memory of 1F1B."""

from __future__ import annotations

from dtorch.parallel.pipeline.steps import Orders, Step, alternate


def zero_bubble(num_ranks: int, num_micro_batches: int) -> Orders:
    """ZB-H1 (Qi, Wan, Huang, Lin, 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241).

    The backward pass is cut in two. The gradient of the input is passed on at once; that of the weights, for which
    nobody waits, is computed r micro-batches later on rank r, so that no rank holds more micro-batches than
    ``num_ranks``, the peak of 1F1B.
    """
    return [_of_rank(rank, num_ranks, num_micro_batches) for rank in range(num_ranks)]


def _of_rank(rank: int, num_ranks: int, num_micro_batches: int) -> list[Step]:
    micro_batches = range(num_micro_batches)
    forwards = [Step("forward", rank, micro_batch) for micro_batch in micro_batches]
    inputs = [Step("backward_input", rank, micro_batch) for micro_batch in micro_batches]
    order = []
    for step in alternate(forwards, inputs, num_ranks - 1 - rank):
        order.append(step)
        if step.kind == "backward_input" and step.micro_batch >= rank:
            order.append(Step("backward_weight", rank, step.micro_batch - rank))
    num_done = max(0, num_micro_batches - rank)
    return order + [Step("backward_weight", rank, late) for late in range(num_done, num_micro_batches)]
