"""Cross-entropy of logits that are cut by classes; nobody ever holds them whole."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import nn

from dtorch.nn.sharding import reduced
from dtorch_runtime.errors import SettingError

Reduction: TypeAlias = Literal["mean", "sum", "none"]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``F.cross_entropy`` for logits that are ``Shard(-1)`` on an axis: what is communicated is one number a row.

    The log of the sum of exponentials is made of each device's own, as in Megatron-LM (Shoeybi et al., 2019,
    arXiv:1909.08053). Plain tensors and other placements give the same.

    Args:
        logits: global shape ``[..., num_classes]``, of a floating dtype.
        target: class ids, global shape ``[...]``. Those that are ``ignore_index`` count as nothing.
        label_smoothing: as in ``F.cross_entropy``.

    Returns:
        Global shape ``[]``, or ``[...]`` with ``reduction="none"``. NaN where a mean has nothing to average.

    Raises:
        SettingError: the shapes do not match, or there is no such reduction.
        PlacementError: target and logits are cut in ways that do not match.
    """
    if logits.ndim < 1 or logits.shape[:-1] != target.shape:
        raise SettingError(
            f"vocab_parallel_cross_entropy takes logits [..., num_classes] and target [...], got "
            f"{list(logits.shape)} and {list(target.shape)}; classes are the last dim"
        )
    if reduction not in ("mean", "sum", "none"):
        raise SettingError(f"reduction is 'mean', 'sum' or 'none', got {reduction!r}")
    highest = reduced(logits.detach().amax(-1, keepdim=True))
    shifted = logits - highest
    log_sum = reduced(shifted.exp().sum(-1)).log()
    is_counted = target != ignore_index
    ids = torch.where(is_counted, target, 0)
    losses = log_sum - reduced(shifted.gather(-1, ids.unsqueeze(-1))).squeeze(-1)
    if label_smoothing:
        smooth = log_sum - reduced(shifted.sum(-1)) / logits.shape[-1]
        losses = (1 - label_smoothing) * losses + label_smoothing * smooth
    losses = torch.where(is_counted, losses, 0.0)
    if reduction == "none":
        return losses
    total = reduced(losses.sum())
    return total if reduction == "sum" else total / reduced(is_counted.sum())


class VocabParallelCrossEntropyLoss(nn.Module):
    """``vocab_parallel_cross_entropy`` as a module."""

    def __init__(
        self, *, ignore_index: int = -100, reduction: Reduction = "mean", label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction
        self.label_smoothing = label_smoothing

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., num_classes]`` and class ids ``[...]`` to the loss."""
        return vocab_parallel_cross_entropy(
            logits,
            target,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
