"""Mixtures of experts of transformers, on a mesh.

Their modules hold the weights of all experts in 3-D parameters, and sort the rows of all tokens by expert, which takes
tokens that are whole. Here each device does that with rows that it has, or is sent: tokens stay cut as they come, and
weights as the plan says. Where these are cut by experts, rows go to the experts or tokens to all of them, whichever
moves less (see ``expert_traffic``). Where they are cut by features, rows are whole on every device that has a part.
"""

from __future__ import annotations

import types
from typing import Any, cast

import torch
from torch import nn

from dtorch.expert_routes import Routes, bring, routed_linear, routes_of, send
from dtorch.experts import expert_linear
from dtorch.parallel.expert_traffic import axes_of_experts, axis_of_rows, cuts_features
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
    if not isinstance(hidden_states, Tensor):
        out = _on_rows_at_hand(self, hidden_states, top_k_index) * top_k_weights.unsqueeze(-1)
        return cast(torch.Tensor, out.sum(1).to(hidden_states.dtype))
    is_routed = _is_routed(self)
    weight, given = self.down_proj.placements, hidden_states.placements
    axis = None
    if is_routed:
        axis = axis_of_rows(weight, given, hidden_states.device_mesh, top_k_index.shape[1])
    whole = [number for number in axes_of_experts(weight) if number != axis]
    placements = [
        p if isinstance(p, Shard) and p.dim == 0 and number not in whole else Replicate()
        for number, p in enumerate(given)
    ]
    given_tensors: tuple[Any, ...] = (hidden_states, top_k_index, top_k_weights)
    x, ids, weights = (t.redistribute(placements=placements) for t in given_tensors)
    if is_routed:
        out = _on_routed_rows(self, x, ids, routes_of(ids, self.num_experts, axis, tuple(whole)))
    else:
        out = _on_rows_at_hand(self, x, ids)
    out = (out * weights.unsqueeze(-1).to(out.dtype)).sum(1).to(hidden_states.dtype)
    return cast(torch.Tensor, out.redistribute(placements=given))


def _is_routed(module: Any) -> bool:
    """Whether each device can compute by itself what it has of the experts: whole ones, which have no biases."""
    return not module.has_bias and not cuts_features(p.placements for p in module.parameters() if p.ndim == 3)


def _on_routed_rows(module: Any, x: Any, ids: Any, routes: Routes) -> Any:
    """Of each token and expert, the row that comes out: ``[tokens, k, hidden]``, rows going where the experts are."""

    def linear(name: str, rows: Any) -> Any:
        weight = getattr(module, name)
        return routed_linear(rows, weight.transpose(1, 2) if module.is_transposed else weight, routes)

    rows = send(x.unsqueeze(1).expand(*ids.shape, x.shape[1]), routes)
    rows = linear("gate_up_proj" if module.has_gate else "up_proj", rows)
    rows = linear("down_proj", module._apply_gate(rows) if module.has_gate else module.act_fn(rows))
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return bring(rows, routes)


def _on_rows_at_hand(module: Any, x: Any, ids: Any) -> Any:
    """The same by every device for all rows of ``x``, of what it has of the experts; terms where that is a part."""
    num_tokens, k = ids.shape
    x = x.unsqueeze(1).expand(-1, k, -1).reshape(num_tokens * k, -1)
    ids = ids.reshape(-1)
    out = _by_rows(_linear(module, "gate_up_proj" if module.has_gate else "up_proj", x, ids), x)
    out = module._apply_gate(out) if module.has_gate else module.act_fn(out)
    out = _linear(module, "down_proj", out, ids)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(_by_rows(out, x))
    return out.view(num_tokens, k, -1)


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
