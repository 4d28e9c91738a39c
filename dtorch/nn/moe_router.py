"""Which experts a token goes to, how much each counts, who has room, and how well the experts are used.

All of it is ordinary ops on tensors whose last dim is experts or choices. Shapes are global.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from dtorch.expert_routes import expert_counts
from dtorch.factory import zeros
from dtorch.graph import Graph
from dtorch.nn.sharding import PlacedModule, made_on_mesh, reduced
from dtorch.parallel.cuts import Axis
from dtorch.tensors import Tensor
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Replicate

Scoring: TypeAlias = Literal["softmax", "sigmoid"]


class Choice(NamedTuple):
    """What a router decided.

    Attributes:
        logits, scores: ``[..., num_experts]``, float32 or wider.
        experts: the numbers of the experts that were chosen, the best first: ``[..., top_k]``, int64.
        weights: what each of them counts: ``[..., top_k]``, of the dtype of the scores.
    """

    logits: torch.Tensor
    scores: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


class Router(PlacedModule, nn.Module):
    """Scores every expert for a token, and chooses some. Its weight ``[num_experts, width]`` is whole on every device.

    Args: those of ``MoE``.
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: Scoring,
        normalize_weights: bool,
        scale: float,
        num_groups: int,
        top_groups: int,
        has_bias: bool,
        axis: Axis,
        device: Any,
        dtype: torch.dtype | None,
        device_mesh: DeviceMesh | None,
    ) -> None:
        super().__init__()
        _check(num_experts, top_k, scoring, num_groups, top_groups)
        self.axis = axis
        self.num_experts = num_experts
        self.top_k = top_k
        self.scoring = scoring
        self.normalize_weights = normalize_weights
        self.scale = scale
        self.num_groups = num_groups
        self.top_groups = top_groups
        is_placed = made_on_mesh(device, device_mesh)
        where = "meta" if is_placed else device
        self.weight = nn.Parameter(torch.empty(num_experts, width, device=where, dtype=dtype))
        self.selection_bias: torch.Tensor | None
        self.register_buffer("selection_bias", None)
        if is_placed:
            self._place(device_mesh, dtype)
        if has_bias and is_placed:
            mesh = Graph.default_graph().default_mesh if device_mesh is None else device_mesh
            self.selection_bias = zeros(num_experts, device_mesh=mesh)
        elif has_bias:
            self.selection_bias = torch.zeros(num_experts, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight begins as that of ``torch.nn.Linear``."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def cuts(self) -> Mapping[str, Placement]:
        """See ``ShardedParameters``."""
        return {}

    def forward(self, tokens: torch.Tensor) -> Choice:
        """``[..., width]``, not cut by the last dim, to the choice of each token."""
        logits: torch.Tensor = F.linear(tokens, self.weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        ranked = scores.detach()
        if self.selection_bias is not None:
            ranked = ranked + self.selection_bias
        if self.top_groups < self.num_groups:
            ranked = self._in_best_groups(ranked)
        experts = ranked.topk(self.top_k, -1).indices
        weights = scores.gather(-1, experts)
        if self.normalize_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Choice(logits, scores, experts, weights * self.scale if self.scale != 1 else weights)

    def _in_best_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        """-inf outside of the groups with the best two experts (DeepSeek-V3, 2024, arXiv:2412.19437)."""
        size = self.num_experts // self.num_groups
        groups = ranked.unflatten(-1, (self.num_groups, size))
        best = groups.topk(min(2, size), -1).values.sum(-1)
        chosen = best.topk(self.top_groups, -1).indices
        is_out = torch.ones_like(best).scatter(-1, chosen, 0.0).unsqueeze(-1) > 0
        left: torch.Tensor = groups.masked_fill(is_out, float("-inf")).flatten(-2)
        return left

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"top {self.top_k} of {self.num_experts}, scoring={self.scoring!r}"


def _check(num_experts: int, top_k: int, scoring: str, num_groups: int, top_groups: int) -> None:
    if not 1 <= top_k <= num_experts:
        raise SettingError(
            f"MoE sends a token to top_k experts, at least 1 and at most all, got top_k={top_k} of {num_experts}"
        )
    if scoring not in ("softmax", "sigmoid"):
        raise SettingError(f"scoring is 'softmax' or 'sigmoid', got {scoring!r}")
    if num_groups < 1 or num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise SettingError(
            f"MoE takes num_groups that divide its {num_experts} experts, and top_groups of them, got "
            f"num_groups={num_groups} and top_groups={top_groups}; write 1 and 1 for none"
        )
    if top_k > top_groups * (num_experts // num_groups):
        raise SettingError(
            f"top_k={top_k} experts are not in top_groups={top_groups} groups of {num_experts // num_groups}"
        )


# ---- capacity ----


def within_capacity(experts: torch.Tensor, num_experts: int, capacity: int) -> torch.Tensor:
    """The choices ``[..., top_k]`` with ``num_experts`` in the place of those that are dropped.

    An expert takes at most ``capacity`` pairs: first choices before second ones, and among those the tokens in their
    order (GShard, Lepikhin et al., 2020, arXiv:2006.16668). Tokens are all those of the call, so that the same are
    dropped on every mesh; their choices, and nothing else of them, are brought to every device for that.
    """
    if not isinstance(experts, Tensor):
        return experts.masked_fill(_is_late(experts, capacity), num_experts)
    placements = experts.placements
    whole = experts.redistribute(placements=[Replicate()] * len(placements))
    is_late: Any = _is_late(whole, capacity)
    return experts.masked_fill(is_late.redistribute(placements=placements), num_experts)


def _is_late(experts: torch.Tensor, capacity: int) -> torch.Tensor:
    """Whether so many came to the same expert before."""
    queue = experts.flatten(0, -2).mT.reshape(-1)
    order = queue.argsort(stable=True)
    ordered = queue.gather(0, order)
    place = torch.ones_like(ordered).cumsum(0) - 1 - torch.searchsorted(ordered, ordered)
    is_late = torch.zeros_like(place).scatter(0, order, place) >= capacity
    return is_late.reshape(experts.shape[-1], -1).mT.reshape(experts.shape)


# ---- how well the experts are used ----


class Routing(NamedTuple):
    """How the tokens of a call were spread; beside the output of ``MoE`` for ``return_routing=True``.

    Attributes:
        balance_loss: ``[]``, differentiable; 1 when all experts are used alike, up to ``num_experts`` when one is
            (Switch Transformer, Fedus et al., 2021, arXiv:2101.03961).
        z_loss: ``[]``, differentiable; the mean square of the logarithm of the sum of the exponentials of the logits
            (ST-MoE, Zoph et al., 2022, arXiv:2202.08906).
        tokens_per_expert: ``[num_experts]``, int64; how many tokens chose each, dropped ones too.
        num_dropped: ``[]``, int64; of the pairs of tokens and experts, those that found no room.
    """

    balance_loss: torch.Tensor
    z_loss: torch.Tensor
    tokens_per_expert: torch.Tensor
    num_dropped: torch.Tensor


def routing_of(choice: Choice, kept: torch.Tensor | None) -> Routing:
    """What became of a choice; ``kept`` are the choices after some were dropped."""
    num_experts = choice.scores.shape[-1]
    num_tokens = choice.experts[..., 0].numel()
    load = _count(choice.experts, num_experts)
    shares = choice.scores / choice.scores.sum(-1, keepdim=True)
    mean = _mean(shares, num_tokens)
    balance = num_experts * (load.to(mean.dtype) / choice.experts.numel() * mean).sum()
    z_loss = _mean(choice.logits.logsumexp(-1, keepdim=True).square(), num_tokens).squeeze(-1)
    num_kept = load.sum() if kept is None else _count(kept, num_experts).sum()
    return Routing(balance, z_loss, load, load.sum() - num_kept)


def _count(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    counts: torch.Tensor = expert_counts(experts, num_experts)
    return reduced(counts.sum(tuple(range(counts.ndim - 1)))) if counts.ndim > 1 else counts


def _mean(x: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Over all dims but the last."""
    return reduced(x.sum(tuple(range(x.ndim - 1)))) / num_tokens
