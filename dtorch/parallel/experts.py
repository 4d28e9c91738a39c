"""Mixtures of experts of transformers, on a mesh.

Their modules hold the weights of all experts in 3-D parameters, and sort the rows of all tokens by expert, which takes
tokens that are whole. Here each device does that with the rows that it has: tokens stay cut over ``dp``, and weights as
the plan says.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from dtorch.experts import expert_linear
from dtorch.tensors import Tensor
from dtorch_runtime.ir.placement import Placement, Replicate, Shard


def is_experts(module: nn.Module) -> bool:
    """Whether the module is one that ``transformers.integrations.use_experts_implementation`` has decorated."""
    return hasattr(module, "_apply_gate") and all(
        hasattr(module, name)
        for name in ("num_experts", "has_gate", "has_bias", "is_transposed", "down_proj")
    )


def run_on_mesh(module: nn.Module) -> None:
    """Let the module compute as ``_forward`` does. A copy of the module has it too."""
    object.__setattr__(module, "forward", types.MethodType(_forward, module))


def _forward(
    self: Any, hidden_states: Any, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """``[tokens, hidden]``, and the experts and weights of each token ``[tokens, k]``, to ``[tokens, hidden]``."""
    num_tokens, k = top_k_index.shape
    x = hidden_states.unsqueeze(1).expand(-1, k, -1).reshape(num_tokens * k, -1)
    ids = top_k_index.reshape(-1)
    out = _by_rows(_linear(self, "gate_up_proj" if self.has_gate else "up_proj", x, ids), x)
    out = self._apply_gate(out) if self.has_gate else self.act_fn(out)
    out = _linear(self, "down_proj", out, ids)
    if getattr(self, "has_post_expert_norm", False):
        out = self.post_expert_norm(_by_rows(out, x))
    out = out * top_k_weights.reshape(-1, 1).to(out.dtype)
    out = out.view(num_tokens, k, -1).sum(1).to(hidden_states.dtype)
    return out.redistribute(placements=hidden_states.placements) if isinstance(out, Tensor) else out


def _by_rows(out: Any, x: Any) -> Any:
    """Whole features of rows: where ``out`` has a part of them, or a term of a sum, each device gets some rows.

    A gate and what it multiplies are the halves of one weight, so a device that has a part of the features has no part
    of both.
    """
    if not isinstance(out, Tensor):
        return out
    pairs = zip(out.placements, x.placements, strict=True)
    return out.redistribute(
        placements=[p if p == of_x or isinstance(p, Replicate) else Shard(0) for p, of_x in pairs]
    )


def _linear(module: Any, name: str, x: Any, ids: Any) -> Any:
    """One of the two layers of every expert, on rows that are brought to where its weights are."""
    weight = getattr(module, name)
    weight = weight.transpose(1, 2) if module.is_transposed else weight
    if isinstance(x, Tensor):
        x = x.redistribute(placements=tuple(map(_input_placement, x.placements, weight.placements)))
        ids = ids.redistribute(placements=tuple(map(_ids_placement, x.placements)))
    out = expert_linear(x, weight, ids)
    return out + getattr(module, f"{name}_bias")[ids] if module.has_bias else out


def _input_placement(x: Placement, weight: Placement) -> Placement:
    """Of rows [rows, in], for a weight [experts, out, in]."""
    if not isinstance(weight, Shard):
        return x
    return Shard(1, weight.unit) if weight.dim == 2 else Replicate()


def _ids_placement(x: Placement) -> Placement:
    return x if isinstance(x, Shard) and x.dim == 0 else Replicate()
