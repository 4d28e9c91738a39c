"""Mixture of experts: each token goes through a few of many networks, which lie on different devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from dtorch.expert_routes import bring, routed_linear, routes_of, send
from dtorch.graph import Graph
from dtorch.nn.linear import ColumnParallelLinear, RowParallelLinear
from dtorch.nn.moe_router import Router, Routing, Scoring, routing_of, within_capacity
from dtorch.nn.sharding import PlacedModule, made_on_mesh
from dtorch.parallel.cuts import Axis, axis_number
from dtorch.tensors import Tensor
from dtorch_runtime.errors import MeshError, PlacementError, SettingError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard

#: Elementwise.
Activation = Callable[[torch.Tensor], torch.Tensor]


class MoE(nn.Module):
    """A feed-forward layer of ``num_experts`` networks, of which each token goes through the ``top_k`` that it chooses.

    Experts are cut over the mesh axis ``axis``, the hidden features of each over ``tp_axis``; tokens may be cut over
    any axis. Rows of tokens go to the devices of their experts and back, as many as the router says; nobody waits for
    that number, and no device has all experts. Values and gradients are those of one device.

    Args:
        width: features of a token.
        hidden: features inside of an expert.
        num_experts, top_k: how many there are, and how many a token goes to.
        gated: an expert is ``down(activation(gate(x)) * up(x))``, SwiGLU with the default activation; without it
            ``down(activation(up(x)))``. There are no biases.
        activation: elementwise, as ``torch.nn.functional.silu``.
        num_shared_experts: experts of the same kind that every token goes through; they are one network of so many
            times ``hidden`` features, cut over ``tp_axis``.
        capacity_factor: an expert takes at most ``capacity_factor * tokens * top_k / num_experts`` tokens of a call,
            rounded up: first choices before second ones, in the order of the tokens. It adds nothing to a token that it
            does not take. None: it takes all that come.
        normalize_weights: whether the weights of a token are divided by their sum. By default where there are several.
        scoring: what makes scores of logits: "softmax" over experts, or "sigmoid" of each.
        scale: the weights are multiplied by it.
        num_groups, top_groups: experts are chosen from the best ``top_groups`` of so many groups of neighbours.
        has_selection_bias: a buffer ``router.selection_bias`` is added to the scores for the choice alone, and
            ``update_selection_bias`` moves it towards balance.
        axis, tp_axis: of the mesh, by name or number. A mesh without an axis of this name cuts nothing.
        device, dtype: of the parameters, as in ``torch.nn.Linear``.
        device_mesh: where it is made; see ``ColumnParallelLinear``.

    Raises:
        SettingError: a number that cannot be.
        MeshError: an axis is neither a name nor the number of an axis of the mesh, or both are the same.
        PlacementError: the axis has more devices than there are experts.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        top_k: int = 2,
        *,
        gated: bool = True,
        activation: Activation = F.silu,
        num_shared_experts: int = 0,
        capacity_factor: float | None = None,
        normalize_weights: bool | None = None,
        scoring: Scoring = "softmax",
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        has_selection_bias: bool = False,
        axis: Axis = "ep",
        tp_axis: Axis = "tp",
        device: Any = None,
        dtype: torch.dtype | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(width, hidden, num_experts, num_shared_experts, capacity_factor)
        self.width = width
        self.num_experts = num_experts
        self.top_k = top_k
        self.capacity_factor = capacity_factor
        self.axis = axis
        self.tp_axis = tp_axis
        if made_on_mesh(device, device_mesh):
            self._axes_on(Graph.default_graph().default_mesh if device_mesh is None else device_mesh)
        place: dict[str, Any] = {"device": device, "dtype": dtype, "device_mesh": device_mesh}
        self.router = Router(
            width,
            num_experts,
            top_k,
            scoring=scoring,
            normalize_weights=top_k > 1 if normalize_weights is None else normalize_weights,
            scale=scale,
            num_groups=num_groups,
            top_groups=top_groups,
            has_bias=has_selection_bias,
            axis=axis,
            **place,
        )
        self.experts = Experts(width, hidden, num_experts, gated, activation, axis, tp_axis, **place)
        self.shared: SharedExperts | None = None
        if num_shared_experts:
            self.shared = SharedExperts(
                width, num_shared_experts * hidden, gated, activation, tp_axis, **place
            )

    def forward(
        self, input: torch.Tensor, *, return_routing: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, Routing]:
        """Tokens ``[..., width]`` to the same shape and placements; terms of a sum are reduced.

        Args:
            return_routing: return ``(output, Routing)``: what a loss for balance is made of.

        Raises:
            SettingError: the tokens have another width.
            MeshError, PlacementError: as for the module, on the mesh of the tokens.
        """
        if input.ndim < 1 or input.shape[-1] != self.width:
            raise SettingError(
                f"MoE takes tokens [..., {self.width}], got {list(input.shape)}; its width is the last dim"
            )
        if input.ndim == 1:
            found: Any = self.forward(input.unsqueeze(0), return_routing=return_routing)
            return (found[0].squeeze(0), found[1]) if return_routing else found.squeeze(0)
        tokens, axis = self._tokens(input)
        choice = self.router(tokens)
        kept = None
        if self.capacity_factor is not None:
            num_pairs = choice.experts.numel()
            capacity = max(1, math.ceil(self.capacity_factor * num_pairs / self.num_experts))
            kept = within_capacity(choice.experts, self.num_experts, capacity)
        routed = self.experts(tokens, choice.experts if kept is None else kept, axis)
        output = (routed * choice.weights.to(routed.dtype).unsqueeze(-1)).sum(-2).to(routed.dtype)
        if self.shared is not None:
            output = output + self.shared(tokens)
        output = _placed_as(output, input)
        return (output, routing_of(choice, kept)) if return_routing else output

    @torch.no_grad()
    def update_selection_bias(self, tokens_per_expert: torch.Tensor, rate: float = 0.001) -> None:
        """Make experts with few tokens likelier to be chosen, and those with many less.

        Balance without a loss (Wang et al., 2024, arXiv:2408.15664).

        Args:
            tokens_per_expert: of one call, or the sum of several, ``[num_experts]``.
            rate: how far the bias moves.

        Raises:
            SettingError: the module has no such bias.
        """
        bias = self.router.selection_bias
        if bias is None:
            raise SettingError("this MoE has no selection bias; write MoE(..., has_selection_bias=True)")
        load = tokens_per_expert.to(bias.dtype)
        bias.add_(rate * (load.mean() - load).sign())

    def _axes_on(self, mesh: DeviceMesh) -> tuple[int | None, int | None]:
        """The numbers of the axis of experts and of that of their features.

        Raises:
            MeshError, PlacementError: the mesh does not go with them.
        """
        numbers = [axis_number(mesh, axis) for axis in (self.axis, self.tp_axis)]
        for name, axis, number in zip(("axis", "tp_axis"), (self.axis, self.tp_axis), numbers, strict=True):
            if number is None and isinstance(axis, int):
                raise MeshError(
                    f"MoE got {name}={axis}, and {mesh!r} has axes 0 to {mesh.ndim - 1}; write one of these, or a "
                    f"name, which a mesh need not have"
                )
        experts, features = numbers
        if experts is not None and experts == features:
            raise MeshError(
                f"MoE got axis={self.axis!r} and tp_axis={self.tp_axis!r}, which are the same axis of {mesh!r}; "
                f"experts are cut over one, and their features over another"
            )
        if experts is not None and mesh.shape[experts] > self.num_experts:
            raise PlacementError(
                f"MoE cuts {self.num_experts} experts over the mesh axis {self.axis!r} of {mesh.shape[experts]} "
                f"devices; allowed are at least as many experts. Write a shorter axis, and the rest as another one"
            )
        return experts, features

    def _tokens(self, input: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """The tokens where the experts want them, and the number of the axis of experts.

        They are cut over that axis, whole on the one of features, and elsewhere cut by tokens or whole.
        """
        if not isinstance(input, Tensor):
            return input, None
        mesh, last = input.device_mesh, input.ndim - 1
        axis, features = self._axes_on(mesh)
        wanted: list[Placement] = [
            p if isinstance(p, Shard) and p.dim < last and number != features else Replicate()
            for number, p in enumerate(input.placements)
        ]
        if axis is not None and isinstance(wanted[axis], Replicate):
            left = list(input.shape[:last])
            for size, p in zip(mesh.shape, wanted, strict=True):
                if isinstance(p, Shard):
                    left[p.dim] = -(-left[p.dim] // size)
            wanted[axis] = Shard(left.index(max(left)))
        return input if tuple(wanted) == input.placements else input.redistribute(placements=wanted), axis

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"axis={self.axis!r}, tp_axis={self.tp_axis!r}, capacity_factor={self.capacity_factor}"


class Experts(PlacedModule, nn.Module):
    """The networks of ``MoE`` in stacked weights: ``up``, ``gate`` [experts, hidden, width]; ``down`` the other way."""

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        gated: bool,
        activation: Activation,
        axis: Axis,
        tp_axis: Axis,
        *,
        device: Any,
        dtype: torch.dtype | None,
        device_mesh: DeviceMesh | None,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.tp_axis = tp_axis
        self.num_experts = num_experts
        self.activation = activation
        is_placed = made_on_mesh(device, device_mesh)
        where = "meta" if is_placed else device

        def stacked(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, rows, columns, device=where, dtype=dtype))

        self.up = stacked(hidden, width)
        self.gate = stacked(hidden, width) if gated else None
        self.down = stacked(width, hidden)
        if is_placed:
            self._place(device_mesh, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each matrix begins as that of ``torch.nn.Linear``."""
        for weight in self.parameters():
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def cuts(self) -> Mapping[str, Placement]:
        """See ``ShardedParameters``."""
        return dict.fromkeys(("up", "gate", "down"), Shard(0))

    def cuts_by_axis(self) -> Mapping[Axis, Mapping[str, Placement]]:
        """See ``ShardedParameters``."""
        return {self.axis: self.cuts(), self.tp_axis: {"up": Shard(1), "gate": Shard(1), "down": Shard(2)}}

    def forward(self, tokens: torch.Tensor, choices: torch.Tensor, axis: int | None) -> torch.Tensor:
        """``[..., width]`` and ``[..., top_k]`` to ``[..., top_k, width]``: partial sums on the axis of features."""
        if torch.is_autocast_enabled(tokens.device.type):
            tokens = tokens.to(torch.get_autocast_dtype(tokens.device.type))
        routes = routes_of(choices, self.num_experts, axis)
        rows = send(tokens.unsqueeze(-2).expand(*choices.shape, tokens.shape[-1]), routes)
        hidden = routed_linear(rows, self._ready("up", tokens), routes)
        if self.gate is not None:
            hidden = self.activation(routed_linear(rows, self._ready("gate", tokens), routes)) * hidden
        else:
            hidden = self.activation(hidden)
        return cast(torch.Tensor, bring(routed_linear(hidden, self._ready("down", tokens), routes), routes))

    def _ready(self, name: str, tokens: torch.Tensor) -> torch.Tensor:
        """A weight, placed as its cuts say, whatever it is stored as."""
        weight: torch.Tensor = getattr(
            self, name
        )  # which is none of the parameters while ZeRO has it gathered
        if isinstance(weight, Tensor):
            placements = self.placements_on(weight.device_mesh)[name]
            if weight.placements != placements:
                weight = weight.redistribute(placements=placements)
        return weight.to(tokens.dtype)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{self.num_experts} x {self.down.shape[1]} -> {self.down.shape[2]}, gated={self.gate is not None}"


class SharedExperts(nn.Module):
    """What every token goes through. The output is a partial sum on the axis of features."""

    def __init__(
        self, width: int, hidden: int, gated: bool, activation: Activation, axis: Axis, **place: Any
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = ColumnParallelLinear(width, hidden, bias=False, axis=axis, **place)
        self.gate = ColumnParallelLinear(width, hidden, bias=False, axis=axis, **place) if gated else None
        self.down = RowParallelLinear(hidden, width, bias=False, axis=axis, **place)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to the same."""
        hidden: torch.Tensor = self.up(tokens)
        hidden = self.activation(hidden) if self.gate is None else self.activation(self.gate(tokens)) * hidden
        return cast(torch.Tensor, self.down(hidden))


def _check_sizes(
    width: int, hidden: int, num_experts: int, num_shared_experts: int, capacity_factor: float | None
) -> None:
    if min(width, hidden, num_experts) < 1 or num_shared_experts < 0:
        raise SettingError(
            f"MoE takes positive numbers, and num_shared_experts of 0 or more, got width={width}, hidden={hidden}, "
            f"num_experts={num_experts}, num_shared_experts={num_shared_experts}"
        )
    if capacity_factor is not None and not capacity_factor > 0:
        raise SettingError(
            f"capacity_factor is positive, got {capacity_factor}; write 1.25, or None to drop no token"
        )


def _placed_as(output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """The output with the placements of the input; whole where that was terms of a sum."""
    if not isinstance(output, Tensor) or not isinstance(input, Tensor):
        return output
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in input.placements)
    return output if output.placements == placements else output.redistribute(placements=placements)
