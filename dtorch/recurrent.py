"""Cells of recurrent layers in plain ops, and packed sequences.

Torch takes fused kernels for devices like ours; a CPU has none. Cells without gates write to what they made of the
hidden state, which starts whole and on the default mesh; here they add, so that it follows the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decompositions

aten = torch.ops.aten

Gates = torch.Tensor


def lstm_cell(
    input_gates: Gates,
    hidden_gates: Gates,
    cx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``aten::_thnn_fused_lstm_cell``: new hidden state, new cell state, and the gates.

    Shapes (global): gates (batch, 4 * hidden), states (batch, hidden).
    """
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    enter, forget, cell, leave = gates.chunk(4, 1)
    cy = forget.sigmoid() * cx + enter.sigmoid() * cell.tanh()
    return leave.sigmoid() * cy.tanh(), cy, gates


def gru_cell(
    input_gates: Gates,
    hidden_gates: Gates,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten::_thnn_fused_gru_cell``: new hidden state, and the gates.

    Shapes (global): gates (batch, 3 * hidden), states (batch, hidden).
    """
    of_input = _biased(input_gates, input_bias).chunk(3, 1)
    of_hidden = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    reset = (of_input[0] + of_hidden[0]).sigmoid()
    update = (of_input[1] + of_hidden[1]).sigmoid()
    new = (of_input[2] + reset * of_hidden[2]).tanh()
    return new + update * (hx - new), torch.cat([reset, update, new], 1)


def _biased(gates: Gates, bias: torch.Tensor | None) -> Gates:
    return gates if bias is None else gates + bias


def _plain_cell(nonlinearity: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def cell(
        x: torch.Tensor,
        hx: torch.Tensor,
        w_ih: torch.Tensor,
        w_hh: torch.Tensor,
        b_ih: torch.Tensor | None = None,
        b_hh: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """New hidden state (batch, hidden) of x (batch, features) and the one before."""
        linear = torch.nn.functional.linear
        return nonlinearity(linear(x, w_ih, b_ih) + linear(hx, w_hh, b_hh))

    return cell


def pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten::_pack_padded_sequence``: rows of a padded batch in the order of time, and how many rows each time has.

    Torch packs the numbers of the rows, which are picked then. Lengths are plain tensors, as torch asks for, and so
    are the batch sizes. Shapes (global): x (time, batch, ...), result (sum of lengths, ...).
    """
    numbers = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[0], x.shape[1], 1)
    order, batch_sizes = aten._pack_padded_sequence.default(numbers, lengths, batch_first)
    return x.flatten(0, 1)[order.squeeze(1)], batch_sizes


def pad(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten::_pad_packed_sequence``: the opposite of ``pack``, and the lengths. A row of padding comes last."""
    numbers = torch.arange(data.shape[0]).unsqueeze(1)
    order, lengths = aten._pad_packed_sequence.default(
        numbers, batch_sizes, batch_first, data.shape[0], total_length
    )
    padding = data.new_full((1, *data.shape[1:]), padding_value)
    return torch.cat([data, padding])[order.squeeze(2)], lengths


#: What torch makes of other ops, made otherwise. Layers are torch's own decompositions.
CELLS_AND_LAYERS: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten.rnn_tanh_cell.default: _plain_cell(torch.tanh),
    aten.rnn_relu_cell.default: _plain_cell(torch.relu),
    aten.rnn_tanh.input: decompositions.rnn_tanh_input,
    aten.rnn_relu.input: decompositions.rnn_relu_input,
    aten.rnn_tanh.data: decompositions.rnn_tanh_data,
    aten.rnn_relu.data: decompositions.rnn_relu_data,
    aten._pack_padded_sequence.default: pack,
    aten._pad_packed_sequence.default: pad,
}
