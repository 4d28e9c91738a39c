"""Kernels of neural networks on pieces: what the operators of torch do not do on a piece as it is.

Importing this module registers them. Shapes are local unless a name says whole.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch_runtime.worker.kernels import find_kernel, kernel

# ------------------------------------------------------------------------------------------------- groups


@kernel("grouped_convolution")
def grouped_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    group_inputs: int,
) -> torch.Tensor:
    """A convolution of the groups that this device holds.

    Args:
        x: [batch, local channels, ...].
        group_inputs: input channels of a group.
    """
    groups = x.shape[1] // group_inputs
    result: torch.Tensor = torch.ops.aten.convolution.default(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )
    return result


@kernel("convolution_or_bias")
def convolution_or_bias(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    shape: list[int],
) -> torch.Tensor:
    """A convolution where devices may hold no rows or no channels: what is left then is the bias.

    Args:
        shape: of the local result.
    """
    if x.numel() and weight.numel():
        options = (stride, padding, dilation, transposed, output_padding, groups)
        result: torch.Tensor = torch.ops.aten.convolution.default(x, weight, bias, *options)
        return result
    result = x.new_zeros(shape)
    return result if bias is None else result.add_(bias.view(-1, *[1] * (x.ndim - 2)))


@kernel("grouped_convolution_backward", num_returns=3)
def grouped_convolution_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    group_inputs: int,
    output_mask: list[bool],
) -> Any:
    """The derivatives of ``grouped_convolution``."""
    groups = x.shape[1] // group_inputs
    options = (stride, padding, dilation, transposed, output_padding, groups, output_mask)
    return torch.ops.aten.convolution_backward.default(gradient, x, weight, bias_sizes, *options)


def _sizes(x: torch.Tensor, group_channels: int) -> tuple[int, int, int, int]:
    """Batch, channels, elements of a channel, and groups of a piece."""
    batch, channels = x.shape[:2]
    return batch, channels, x[0, 0].numel(), channels // group_channels


@kernel("group_norm", num_returns=3)
def group_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, group_channels: int, eps: float
) -> Any:
    """The norms of the groups that this device holds: the result, and the groups' means and deviations.

    Args:
        x: [local batch, local channels, ...].
        group_channels: channels of a group.
    """
    sizes = _sizes(x, group_channels)
    return torch.ops.aten.native_group_norm.default(x, weight, bias, *sizes, eps)


@kernel("group_norm_backward", num_returns=3)
def group_norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    group_channels: int,
    output_mask: list[bool],
) -> Any:
    """The derivatives of ``group_norm``."""
    sizes = _sizes(x, group_channels)
    return torch.ops.aten.native_group_norm_backward.default(
        gradient, x, mean, rstd, weight, *sizes, output_mask
    )


# ------------------------------------------------------------------------------------------------- losses


@kernel("first_divided", num_returns=2)
def first_divided(operator: str, args: list[Any], divisor: float) -> tuple[torch.Tensor, ...]:
    """A local sum as a part of a global mean, and what else ``operator`` gives."""
    total, *rest = find_kernel(operator).function(*args)
    return (total / divisor, *rest)


@kernel("nll_loss_shard", num_returns=2)
def nll_loss_shard(
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    starts: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """This device's term of a mean loss over all rows, and the global sum of weights.

    Args:
        log_probabilities: [local rows, classes, local height, local width], the last two or none.
        target: [global rows, global height, global width], on every device.
        weight: [classes] or None.
        starts: global place in ``target`` of the first row, line and column.
    """
    kept = target != ignore_index
    each = kept.to(log_probabilities.dtype)
    if weight is not None:
        each = each * weight[target.masked_fill(~kept, 0)]
    total = each.sum()
    sizes = (log_probabilities.shape[0], *log_probabilities.shape[2:])
    mine = target[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
    summed = torch.nn.functional.nll_loss(
        log_probabilities, mine, weight, ignore_index=ignore_index, reduction="sum"
    )
    return summed / total, total


class _Rows:
    """The rows of a connectionist temporal classification that a device holds."""

    def __init__(self, targets: torch.Tensor, lengths: list[list[int]], start: int, count: int) -> None:
        rows = slice(start, start + count)
        self.lengths = [of_all[rows] for of_all in lengths]
        if targets.ndim == 1:  # the targets of all rows, one after the other
            skipped = sum(lengths[1][:start])
            targets = targets[skipped : skipped + sum(self.lengths[1])]
        self.targets = targets
        self.width = 2 * max(lengths[1]) + 1


@kernel("ctc_loss_shard", num_returns=2)
def ctc_loss_shard(
    log_probabilities: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: list[int],
    target_lengths: list[int],
    start: int,
    blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of this device's rows, and their tables, as wide as the longest target of all rows needs.

    Args:
        log_probabilities: [time, local rows, classes].
        targets: [local rows, length], or the concatenated targets of all rows.
        input_lengths, target_lengths: of all rows.
        start: global number of the first row.
    """
    rows = _Rows(targets, [input_lengths, target_lengths], start, log_probabilities.shape[1])
    loss, table = torch.ops.aten._ctc_loss.default(
        log_probabilities, rows.targets, *rows.lengths, blank, zero_infinity
    )
    missing = rows.width - table.shape[2]
    return loss, torch.nn.functional.pad(table, (0, missing), value=float("-inf"))


@kernel("ctc_loss_shard_backward")
def ctc_loss_shard_backward(
    gradient: torch.Tensor,
    log_probabilities: torch.Tensor,
    targets: torch.Tensor,
    loss: torch.Tensor,
    table: torch.Tensor,
    input_lengths: list[int],
    target_lengths: list[int],
    start: int,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The derivative of ``ctc_loss_shard`` by ``log_probabilities``."""
    rows = _Rows(targets, [input_lengths, target_lengths], start, log_probabilities.shape[1])
    result: torch.Tensor = torch.ops.aten._ctc_loss_backward.default(
        gradient, log_probabilities, rows.targets, *rows.lengths, loss, table, blank, zero_infinity
    )
    return result
