"""What a step costs a device by a plan: seconds of compute and of communication, bytes of memory. Pure decisions.

Compute is what linear layers, attention and experts multiply, and, at the bandwidth of a device's own memory, what
elementwise ops and the optimizer read and write; communication is what ``exchanges`` counts, at a latency and a
bandwidth for each mesh axis; memory is weights and, in training, gradients and the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from dtorch.parallel.cuts import piece_placements
from dtorch.parallel.exchanges import (
    Exchange,
    Phase,
    Workload,
    activation_layout,
    attention_exchanges,
    attention_layers,
    gradient_exchange,
    module_exchanges,
    moved_bytes,
)
from dtorch.parallel.expert_traffic import axes_of_experts, expert_exchanges
from dtorch.parallel.tp_plan import DP_AXIS, ModuleFacts, ModulePlan
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.layout import Layout, local_shape, num_elements
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Replicate

#: Multiplications of a linear layer in training, by those of its forward pass: input and weight have gradients.
_TRAINING_PASSES: Final = 3
#: The same of attention, which computes the scores anew for the gradients (Dao 2023, "FlashAttention-2").
_ATTENTION_PASSES: Final = 3.5
#: How often elementwise ops read or write each number that a layer makes: it is made, normalised or activated, added.
_ACTIVATION_ACCESSES: Final = 6
#: And the optimizer each parameter: those of ``torch.optim.AdamW`` are 4, and 9 for each of its two moments.
_PARAMETER_ACCESSES: Final = 4
_STATE_ACCESSES: Final = 9
_COPY_ACCESSES: Final = 2
_PHASES: Final[tuple[Phase, ...]] = ("forward", "backward")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCosts:
    """What a collective over one mesh axis takes: ``latency_s``, and a second for each ``bytes_per_s``.

    Raises:
        SettingError: a latency below 0, or a bandwidth that is not above it.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check_number("latency_s", self.latency_s, is_zero_allowed=True)
        _check_number("bytes_per_s", self.bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterCosts:
    """What devices of a cluster can do: ``flops_per_s`` of each, and the link along each mesh axis by its name.

    ``memory_bytes_per_s`` is what a device reads and writes in its own memory, while all of them do; None leaves that
    time out.

    Raises:
        SettingError: a rate that is not above 0.
    """

    flops_per_s: float
    links: Mapping[str, LinkCosts] = field(default_factory=dict)
    memory_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        _check_number("flops_per_s", self.flops_per_s)
        if self.memory_bytes_per_s is not None:
            _check_number("memory_bytes_per_s", self.memory_bytes_per_s)

    def check_axes(self, axes: Sequence[str]) -> None:
        """
        Raises:
            SettingError: an axis has no link.
        """
        missing = [axis for axis in axes if axis not in self.links]
        if missing:
            raise SettingError(
                f"costs= has no link for the mesh axis {missing[0]!r}, only for {sorted(self.links)}; write "
                f"ClusterCosts(flops_per_s=..., links={{{missing[0]!r}: LinkCosts(latency_s=..., bytes_per_s=...)}}), "
                f"or leave costs= out to have them measured"
            )

    def seconds(self, exchange: Exchange) -> float:
        """Of one collective. One over several axes is as slow as its slowest."""
        links = [self.links[axis] for axis in exchange.axes]
        return max(link.latency_s + exchange.num_bytes / link.bytes_per_s for link in links)


def _check_number(name: str, value: object, is_zero_allowed: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not is_zero_allowed):  # type: ignore[operator]
        least = "0 or more" if is_zero_allowed else "above 0"
        raise SettingError(f"{name}= takes a number {least}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter: bytes of an element, and whether it has a gradient."""

    itemsize_bytes: int
    is_trained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The step whose costs are asked for.

    ``optimizer_bytes`` are those of the optimizer's state for each element of a parameter; None stands for the two
    moments of AdamW in the parameter's dtype.
    """

    work: Workload
    is_training: bool = True
    optimizer_bytes: int | None = None
    num_experts_per_token: int = 1

    def state_bytes(self, weight: Weight) -> int:
        """Of the optimizer, for an element."""
        return 2 * weight.itemsize_bytes if self.optimizer_bytes is None else self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a step, on the device that has most of it."""

    compute_s: float = 0.0
    communication_s: float = 0.0
    memory_bytes: int = 0

    @property
    def seconds(self) -> float:
        """One after the other."""
        return self.compute_s + self.communication_s

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.compute_s + other.compute_s,
            self.communication_s + other.communication_s,
            self.memory_bytes + other.memory_bytes,
        )


@lru_cache(maxsize=4096)
def _largest(shape: tuple[int, ...], layout: Layout) -> int:
    """Elements of the largest piece."""
    return max(num_elements(local_shape(shape, layout, device)) for device in layout.mesh.devices)


@dataclass(frozen=True, slots=True)
class CostModel:
    """The costs of modules on one mesh. ``weights`` are known by their identity in ``ModuleFacts.tied``."""

    mesh: DeviceMesh
    weights: Mapping[int, Weight]
    step: Step
    costs: ClusterCosts

    def cost(
        self, facts: Sequence[ModuleFacts], plans: Mapping[str, ModulePlan], zero_stage: int = 0
    ) -> Cost:
        """Of modules whose plans depend on no others'."""
        flops = sum(self._flops(f, plans[f.name]) for f in facts) + self._attention_flops(facts, plans)
        compute = flops / self.costs.flops_per_s
        found = [*self._activations(facts, plans)]
        accessed = sum(self._accessed_by_ops(f, plans[f.name]) for f in facts)
        accessed += self._accessed_by_attention(facts, plans)
        memory = 0
        counted: set[int] = set()
        for f in facts:
            for name, shape in f.weights.items():
                if f.tied[name] not in counted:
                    counted.add(f.tied[name])
                    layout = Layout(self.mesh, plans[f.name].placements[name])
                    weight = self.weights[f.tied[name]]
                    memory += self._memory(shape, layout, weight, zero_stage)
                    if self.step.is_training and weight.is_trained:
                        accessed += self._accessed_by_optimizer(shape, layout, weight, zero_stage)
                        found += self._gradients(f"{f.name}.{name}", shape, layout, weight, zero_stage)
        if self.costs.memory_bytes_per_s is not None:
            compute += accessed / self.costs.memory_bytes_per_s
        return Cost(compute, sum(map(self.costs.seconds, found)), memory)

    def _accessed_by_ops(self, facts: ModuleFacts, plan: ModulePlan) -> int:
        """Bytes of what a module makes, as often as they are read and written. Experts make it for some tokens."""
        num_rows = _largest(self.step.work.shape(1), activation_layout(self.mesh))
        dim = {"conv1d": 1, "embedding": 1}.get(facts.kind, 0)
        size = 0.0
        for name, shape in facts.weights.items():
            cut = local_shape(shape, Layout(self.mesh, plan.placements[name]), self.mesh.devices[0])
            if facts.kind == "experts" and len(shape) == 3:
                size += cut[0] * cut[1] * self.step.num_experts_per_token / shape[0]
            elif facts.kind != "experts" and (name == "weight" and len(shape) > dim):
                size += cut[dim]
        passes = _TRAINING_PASSES if self.step.is_training else 1
        return int(size * num_rows * passes * _ACTIVATION_ACCESSES * self.step.work.itemsize_bytes)

    def _accessed_by_optimizer(
        self, shape: tuple[int, ...], layout: Layout, weight: Weight, zero_stage: int
    ) -> int:
        pieces = self._pieces(shape, layout, zero_stage)
        num_state = self.step.state_bytes(weight) / weight.itemsize_bytes
        accesses = _PARAMETER_ACCESSES + _STATE_ACCESSES * num_state
        own = _largest(shape, pieces or layout)
        accessed = own * accesses
        if (
            pieces is not None and zero_stage < 3
        ):  # a piece is cut off before, and what was gathered is copied behind
            accessed += _COPY_ACCESSES * (own + _largest(shape, layout))
        return int(accessed * weight.itemsize_bytes)

    def _flops(self, facts: ModuleFacts, plan: ModulePlan) -> float:
        if facts.kind not in ("linear", "conv1d", "experts"):
            return 0.0
        # Those of experts come from all that have others, whose tokens go to each alike.
        cut = [] if facts.kind != "experts" else axes_of_experts(next(iter(plan.placements.values())))
        names = self.mesh.mesh_dim_names or ()
        tokens = activation_layout(self.mesh, {names[axis]: Replicate() for axis in cut})
        num_rows = _largest(self.step.work.shape(1), tokens)
        passes = _TRAINING_PASSES if self.step.is_training else 1
        size = 0.0
        for name, shape in facts.weights.items():
            num_local = _largest(shape, Layout(self.mesh, plan.placements[name]))
            if facts.kind == "experts" and len(shape) == 3:  # each token goes through some of them
                size += num_local * self.step.num_experts_per_token / shape[0]
            elif facts.kind != "experts" and len(shape) == 2:
                size += num_local
        return 2.0 * num_rows * size * passes

    def _accessed_by_attention(self, facts: Sequence[ModuleFacts], plans: Mapping[str, ModulePlan]) -> int:
        """Bytes of scores, which on CPU devices take as long as what elementwise ops read and write.

        Kernels of other devices compute on them beside the products.
        """
        if self.mesh.device_type != "cpu":
            return 0
        work = self.step.work
        num_scores = sum(
            _largest(work.shape(layer.num_heads), activation_layout(self.mesh, layer.on_tp))
            * work.sequence_length
            for layer in attention_layers(facts, plans)
            if layer.sizes
        )
        passes = _ATTENTION_PASSES if self.step.is_training else 1
        return int(num_scores * passes * _ACTIVATION_ACCESSES * work.itemsize_bytes)

    def _attention_flops(self, facts: Sequence[ModuleFacts], plans: Mapping[str, ModulePlan]) -> float:
        """Of scores and of the values that they weigh: of a token and all tokens, causal or not."""
        work = self.step.work
        passes = _ATTENTION_PASSES if self.step.is_training else 1
        num_made = sum(
            _largest(work.shape(layer.num_out), activation_layout(self.mesh, layer.on_tp))
            for layer in attention_layers(facts, plans)
            if layer.sizes
        )
        return 4.0 * num_made * work.sequence_length * passes

    def _activations(
        self, facts: Sequence[ModuleFacts], plans: Mapping[str, ModulePlan]
    ) -> Iterator[Exchange]:
        work = self.step.work
        every = [
            *module_exchanges(facts, plans, self.mesh, work),
            *attention_exchanges(facts, plans, self.mesh, work),
            *expert_exchanges(facts, plans, self.mesh, work, self.step.num_experts_per_token),
        ]
        yield from (e for e in every if self.step.is_training or e.phase == "forward")

    # ---- what training adds: stages of ZeRO cut it over ``dp`` ----

    def _pieces(self, shape: tuple[int, ...], layout: Layout, zero_stage: int) -> Layout | None:
        if not zero_stage:
            return None
        placements = piece_placements(shape, layout, DP_AXIS)
        return None if placements is None else Layout(self.mesh, placements)

    def _memory(self, shape: tuple[int, ...], layout: Layout, weight: Weight, zero_stage: int) -> int:
        num_local = _largest(shape, layout)
        whole = num_local * weight.itemsize_bytes
        if not self.step.is_training or not weight.is_trained:
            return whole
        pieces = self._pieces(shape, layout, zero_stage)
        num_in_piece = num_local if pieces is None else _largest(shape, pieces)
        state = num_in_piece * self.step.state_bytes(weight)
        gradient = (num_in_piece if zero_stage >= 2 else num_local) * weight.itemsize_bytes
        if zero_stage < 3:
            return whole + gradient + state
        # It is placed whole, before there are gradients.
        return max(whole, num_in_piece * weight.itemsize_bytes + gradient + state)

    def _gradients(
        self, name: str, shape: tuple[int, ...], layout: Layout, weight: Weight, zero_stage: int
    ) -> Iterator[Exchange]:
        size = weight.itemsize_bytes
        reduced = gradient_exchange(name, shape, layout.placements, self.mesh, size)
        pieces = self._pieces(shape, layout, zero_stage)
        if pieces is None or reduced is None:
            yield from () if reduced is None else (reduced,)
            return
        if zero_stage == 1:
            yield reduced
        else:
            named = zip(self.mesh.mesh_dim_names or (), layout.placements, strict=True)
            terms = tuple(Partial("sum") if axis in reduced.axes else p for axis, p in named)
            scattered = moved_bytes(shape, size, Layout(self.mesh, terms), pieces)
            yield Exchange(name, "backward", "reduce-scatter", reduced.axes, scattered)
        # Stages 1 and 2 gather what the optimizer has changed, 3 what each pass uses.
        gathered = moved_bytes(shape, size, pieces, layout)
        for phase in _PHASES if zero_stage == 3 else _PHASES[:1]:
            yield Exchange(name, phase, "all-gather", (DP_AXIS,), gathered)
