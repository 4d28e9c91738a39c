"""Cells of recurrent layers in plain ops: torch takes fused kernels for devices like ours; a CPU has none."""

from __future__ import annotations

import torch

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
