"""``plan``: what ``parallelize`` would do with a model, without touching it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dtorch.parallel.costs import ClusterCosts
from dtorch.parallel.decide import DEFAULT_WORK, Decision, PlanChoice, SearchRequest, decide
from dtorch.parallel.exchanges import (
    Exchange,
    Phase,
    Workload,
    attention_exchanges,
    boundary_exchanges,
    gradient_exchange,
    module_exchanges,
)
from dtorch.parallel.expert_traffic import expert_exchanges
from dtorch.parallel.facts import experts_per_token
from dtorch.parallel.found import Found
from dtorch.parallel.report import aligned, folded_name, size_text
from dtorch.parallel.stages import Stages
from dtorch.parallel.tp_plan import (
    ModuleFacts,
    ModulePlan,
    Plan,
    features_of,
)
from dtorch_runtime.ir.layout import Layout, local_shape, num_elements
from dtorch_runtime.ir.mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One parameter: its global shape, its layout, bytes of it on each device, and what it makes devices send."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    style: str
    layout: Layout
    bytes_by_device: Mapping[int, int]
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What ``parallelize`` would do with a model. ``str()`` folds layers that are alike into one row.

    Attributes:
        rows: the parameters. Tied ones have one row.
        others: exchanges that no parameter makes: attention over a sequence that is cut, activations between stages.
        plan: the styles, as ``parallelize(plan=)`` takes them.
        work: the step whose communication is counted.
        notes: where the plan comes from, and what is not counted.
        found: what a search has to say: costs of a step by its plan and by others, and the stage of ZeRO to use.
    """

    rows: tuple[PlanRow, ...]
    others: tuple[Exchange, ...]
    plan: Plan
    mesh: DeviceMesh
    work: Workload
    notes: tuple[str, ...] = ()
    found: Found | None = None

    @property
    def bytes_by_device(self) -> dict[int, int]:
        """Bytes of all weights on each device."""
        return {
            device: sum(row.bytes_by_device.get(device, 0) for row in self.rows)
            for device in sorted(self.mesh.devices)
        }

    def exchanges(self, phase: Phase | None = None) -> list[Exchange]:
        """All exchanges of a step, or those of one phase."""
        every = [*(exchange for row in self.rows for exchange in row.exchanges), *self.others]
        return [exchange for exchange in every if phase in (None, exchange.phase)]

    def __str__(self) -> str:
        lines = [["weight", "shape", "placements", "style", "a device", "forward", "backward"]]
        for name, rows in _folded(self.rows):
            first = rows[0]
            sizes = [sum(row.bytes_by_device.get(d, 0) for row in rows) for d in self.mesh.devices]
            shape = f"{first.dtype}[{', '.join(map(str, first.shape))}]"
            found = [exchange for row in rows for exchange in row.exchanges]
            placed = [shape, str(first.layout), first.style, size_text(max(sizes))]
            lines.append([name, *placed, _summed(found, "forward"), _summed(found, "backward")])
        for name, others in _by_folded_name(self.others):
            lines.append([name, "", "", "", "", _summed(others, "forward"), _summed(others, "backward")])
        return "\n".join([aligned(lines, num_left=4), "", *self._totals()])

    def _totals(self) -> Iterator[str]:
        by_size: dict[int, list[int]] = {}
        for device, num_bytes in self.bytes_by_device.items():
            by_size.setdefault(num_bytes, []).append(device)
        for num_bytes, devices in by_size.items():
            yield f"weights: {size_text(num_bytes)} on device{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"
        step = f"a step of {self.work.batch_size} x {self.work.sequence_length} tokens"
        for phase in ("forward", "backward"):
            found = self.exchanges(phase)
            total = size_text(sum(exchange.num_bytes for exchange in found))
            yield f"{step}, {phase}: {len(found)} exchanges, {total} into the busiest device of each"
        yield from self.notes


def plan(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: PlanChoice = "auto",
    *,
    batch_size: int = DEFAULT_WORK.batch_size,
    sequence_length: int = DEFAULT_WORK.sequence_length,
    memory_limit_bytes: int | None = None,
    training: bool | None = None,
    optimizer_bytes: int | None = None,
    costs: ClusterCosts | None = None,
) -> ModelPlan:
    """What ``parallelize(model, mesh, plan)`` would do: placements, bytes on each device, communication of a step.

    The model is not touched and may be on ``"meta"``; no cluster is needed, but by a search without ``costs``.

    Args:
        model, mesh, plan: as for ``parallelize``.
        batch_size, sequence_length: of a step on all devices, for the bytes of activations.
        memory_limit_bytes: of a search: what a device may hold of weights, gradients and the optimizer's state.
        training: of a search: whether a step has a backward pass, and an optimizer. True by default.
        optimizer_bytes: of a search: the optimizer's state for each element of a parameter. The two moments of AdamW
            in the parameter's dtype by default.
        costs: of a search: what devices and links can do. Measured on the cluster, once in a session, by default.

    Raises:
        MeshError, SettingError, PlacementError, UnsupportedError: as ``parallelize``; SettingError also for arguments
            of a search beside another plan, and for costs that lack an axis.
    """
    work = Workload(batch_size, sequence_length)
    request = SearchRequest(
        memory_limit_bytes=memory_limit_bytes, training=training, optimizer_bytes=optimizer_bytes, costs=costs
    )
    return describe_plan(model, decide(model, mesh, plan, request, work), mesh, work)


def describe_plan(model: nn.Module, decision: Decision, mesh: DeviceMesh, work: Workload) -> ModelPlan:
    """The report of what was decided."""
    facts, stages, plans = decision.facts, decision.stages, decision.plans
    first = stages.meshes[0]
    others = [
        *attention_exchanges(facts, plans, first, work),
        *boundary_exchanges(_path(facts, stages), work),
    ]
    by_module: dict[str, list[Exchange]] = {}
    of_modules = (
        *module_exchanges(facts, plans, first, work),
        *expert_exchanges(facts, plans, first, work, experts_per_token(model)),
    )
    for exchange in of_modules:
        by_module.setdefault(exchange.name, []).append(exchange)
    notes = decision.notes
    if any(exchange.is_expected for exchange in of_modules):
        notes = ("expected bytes are those of tokens that go to all experts alike", *notes)
    rows = tuple(_rows(model, stages, plans, by_module))
    return ModelPlan(rows, tuple(others), dict(decision.plan), mesh, work, notes, decision.found)


def _rows(
    model: nn.Module,
    stages: Stages,
    plans: Mapping[str, ModulePlan],
    by_module: dict[str, list[Exchange]],
) -> Iterator[PlanRow]:
    owners = {id(p): name for name, p in model.named_parameters()}
    aliases = {name: owners[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    main: dict[str, str] = {}
    for name, owner in aliases.items():
        main.setdefault(name.rpartition(".")[0], owner)
    lent: dict[str, list[Exchange]] = {}
    for module, found in by_module.items():  # what a tied module sends stands in the row of its weight
        lent.setdefault(main[module], []).extend(found)
    for name, parameter in model.named_parameters():
        module, _, key = name.rpartition(".")
        mesh = stages.mesh_of(module)
        layout = Layout(mesh, plans[module].placements[key])
        shape, itemsize = tuple(parameter.shape), parameter.dtype.itemsize
        gradient = None
        if parameter.requires_grad:
            gradient = gradient_exchange(name, shape, layout.placements, mesh, itemsize)
        yield PlanRow(
            name=name,
            shape=shape,
            dtype=str(parameter.dtype).removeprefix("torch."),
            style=plans[module].style,
            layout=layout,
            bytes_by_device={
                device: num_elements(local_shape(shape, layout, device)) * itemsize for device in mesh.devices
            },
            exchanges=(*lent.get(name, ()), *([gradient] if gradient is not None else ())),
        )


def _path(facts: Sequence[ModuleFacts], stages: Stages) -> Iterator[tuple[str, DeviceMesh, int]]:
    """Units with weights in order: where they are, and how many features go in."""
    for name in stages.units:
        own = [f for f in facts if f.name == name or f.name.startswith(f"{name}.")]
        if own:
            sizes = [features_of(f)[0] for f in own if f.kind in ("linear", "conv1d")]
            # A norm in front of the head has as many features as go into it.
            sizes += [shape[-1] for f in own for shape in f.weights.values()]
            yield name, stages.mesh_of(name), sizes[0]


def _folded(rows: tuple[PlanRow, ...]) -> Iterator[tuple[str, list[PlanRow]]]:
    groups: dict[tuple[object, ...], list[PlanRow]] = {}
    for row in rows:
        key = (_pattern(row.name), row.shape, row.dtype, row.layout, row.style)
        groups.setdefault(key, []).append(row)
    for group in groups.values():
        yield folded_name([row.name for row in group]), group


def _by_folded_name(exchanges: tuple[Exchange, ...]) -> Iterator[tuple[str, list[Exchange]]]:
    groups: dict[tuple[str, str], list[Exchange]] = {}
    for exchange in exchanges:
        groups.setdefault((_pattern(exchange.name), exchange.kind), []).append(exchange)
    for group in groups.values():
        yield folded_name(list(dict.fromkeys(exchange.name for exchange in group))), group


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _summed(exchanges: list[Exchange], phase: Phase) -> str:
    """``2 x all-reduce over tp, 3.1 MB``."""
    kinds: dict[tuple[str, tuple[str, ...], bool], list[int]] = {}
    for exchange in exchanges:
        if exchange.phase == phase:
            key = exchange.kind, exchange.axes, exchange.is_expected
            kinds.setdefault(key, []).append(exchange.num_bytes)
    return "; ".join(
        f"{len(sizes)} x {kind} over {', '.join(axes)}, {size_text(sum(sizes))}{' expected' * is_expected}"
        for (kind, axes, is_expected), sizes in kinds.items()
    )
