"""Calls of losses and their derivatives with every reduction."""

from __future__ import annotations

import torch

from tests.numerics.more_samples import unit
from tests.numerics.samples import aten, call, real, whole_numbers
from tests.support.rule_checks import Sample

NONE, MEAN, SUM = REDUCTIONS = (0, 1, 2)


def _gradient(reduction: int, *shape: int) -> torch.Tensor:
    return real(*shape) if reduction == NONE else real()


WITH_LOGITS = [
    call(
        aten.binary_cross_entropy_with_logits.default,
        real(4, 5),
        unit(4, 5),
        *weights,
        reduction,
        name=f"binary_cross_entropy_with_logits {reduction} {len(weights)}",
    )
    for reduction in REDUCTIONS
    for weights in ((None, None), (unit(4, 5), unit(5)))
]


def _nll2d(reduction: int) -> list[Sample]:
    target = whole_numbers(4, 3, 2, 3)
    target[1, 0, 2] = -100
    weight = unit(4)
    total = weight[target.clamp_min(0)][target >= 0].sum()
    return [
        call(
            aten.nll_loss2d_forward.default,
            real(3, 4, 2, 3),
            target,
            weight,
            reduction,
            -100,
            moves_bytes=reduction == MEAN,
            name=f"nll_loss2d with weights {reduction}",
        ),
        call(
            aten.nll_loss2d_backward.default,
            _gradient(reduction, 3, 2, 3),
            real(3, 4, 2, 3),
            target,
            weight,
            reduction,
            -100,
            total,
            name=f"nll_loss2d_backward with weights {reduction}",
        ),
    ]


def _margins(reduction: int, weight: torch.Tensor | None) -> list[Sample]:
    scores, target = real(5, 4), whole_numbers(4, 5)
    of_one, its_target = real(4), whole_numbers(4)
    options = (1, 1.0, weight, reduction)
    name = f"{reduction} {'with weights' if weight is not None else ''}"
    return [
        call(aten.multi_margin_loss.default, scores, target, *options, name=f"multi_margin_loss {name}"),
        call(
            aten.multi_margin_loss.default, of_one, its_target, *options, name=f"multi_margin_loss one {name}"
        ),
        call(
            aten.multi_margin_loss_backward.default,
            _gradient(reduction, 5),
            scores,
            target,
            *options,
            name=f"multi_margin_loss_backward {name}",
        ),
        call(
            aten.multi_margin_loss_backward.default,
            real(),
            of_one,
            its_target,
            *options,
            name=f"multi_margin_loss_backward one {name}",
        ),
    ]


def _multilabel(reduction: int) -> list[Sample]:
    scores = real(5, 4)
    target = torch.tensor([[1, 3, -1, 0], [0, -1, 2, 1], [-1, 2, 1, 0], [3, 2, 1, 0], [2, -1, -1, -1]])
    _, is_target = aten.multilabel_margin_loss_forward.default(scores, target, reduction)
    _, of_one = aten.multilabel_margin_loss_forward.default(scores[0], target[0], reduction)
    return [
        call(
            aten.multilabel_margin_loss_forward.default,
            scores,
            target,
            reduction,
            name=f"multilabel {reduction}",
        ),
        call(
            aten.multilabel_margin_loss_forward.default,
            scores[0],
            target[0],
            reduction,
            name=f"multilabel one {reduction}",
        ),
        call(
            aten.multilabel_margin_loss_backward.default,
            _gradient(reduction, 5),
            scores,
            target,
            reduction,
            is_target,
            name=f"multilabel_backward {reduction}",
        ),
        call(
            aten.multilabel_margin_loss_backward.default,
            real(),
            scores[0],
            target[0],
            reduction,
            of_one,
            name=f"multilabel_backward one {reduction}",
        ),
    ]


def _sequences() -> list[Sample]:
    """Every row as long as the longest: the rest of the tables is not initialized."""
    log_probabilities = real(6, 4, 5).log_softmax(-1)
    padded = whole_numbers(4, 4, 3) + 1
    lengths = ([6, 6, 6, 6], [3, 3, 3, 3])
    shorter = ([6, 5, 6, 4], [3, 2, 1, 3])
    joined = torch.cat([row[:count] for row, count in zip(padded, shorter[1], strict=True)])
    loss, table = aten._ctc_loss.default(log_probabilities, padded, *lengths)
    joined_loss, joined_table = aten._ctc_loss.default(log_probabilities, joined, *shorter)
    return [
        call(aten._ctc_loss.default, log_probabilities, padded, *lengths),
        call(
            aten._ctc_loss_backward.default,
            real(4),
            log_probabilities,
            padded,
            *lengths,
            loss,
            table,
            0,
        ),
        call(
            aten._ctc_loss_backward.default,
            real(4),
            log_probabilities,
            joined,
            *shorter,
            joined_loss,
            joined_table,
            0,
            name="_ctc_loss_backward of joined targets",
        ),
    ]


LOSSES = [
    *WITH_LOGITS,
    *(sample for reduction in REDUCTIONS for sample in _nll2d(reduction)),
    *(sample for r in REDUCTIONS for weight in (None, unit(4)) for sample in _margins(r, weight)),
    *(sample for reduction in REDUCTIONS for sample in _multilabel(reduction)),
    *_sequences(),
]
