"""What ``parallelize`` does with a model, decided before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from torch import nn

from dtorch.attention import sequence_axes
from dtorch.parallel.costs import ClusterCosts, CostModel, Step, Weight
from dtorch.parallel.cuts import ShardedParameters
from dtorch.parallel.exchanges import Workload
from dtorch.parallel.facts import AutoPlan, auto_plan, base_prefix, collect_facts, experts_per_token
from dtorch.parallel.found import Found
from dtorch.parallel.measure import measure
from dtorch.parallel.search import Space, search
from dtorch.parallel.sequence import check_sequence
from dtorch.parallel.stages import Stages, plan_stages
from dtorch.parallel.tp_plan import (
    DP_AXIS,
    EP_AXIS,
    TP_AXIS,
    ModuleFacts,
    ModulePlan,
    Plan,
    check_mesh,
    has_ranks,
    plan_modules,
)
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.mesh import DeviceMesh

PlanChoice: TypeAlias = Plan | Literal["auto", "search"]
#: The step that ``plan`` tells of by default, and that a search is for.
DEFAULT_WORK: Final = Workload(8, 512)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """What ``plan="search"`` is to keep to; other plans take none of it. None stands for what is usual.

    Raises:
        SettingError: a value that cannot be.
    """

    memory_limit_bytes: int | None = None
    training: bool | None = None
    optimizer_bytes: int | None = None
    costs: ClusterCosts | None = None

    def __post_init__(self) -> None:
        for name, least in (("memory_limit_bytes", 1), ("optimizer_bytes", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise SettingError(f"{name}= takes a number of bytes, {least} or more, got {value!r}")
        if self.training is not None and not isinstance(self.training, bool):
            raise SettingError(f"training= takes True or False, got {self.training!r}")
        if self.costs is not None and not isinstance(self.costs, ClusterCosts):
            raise SettingError(
                f"costs= takes dtorch.parallel.ClusterCosts(flops_per_s=..., links=...), "
                f"got {type(self.costs).__name__}"
            )

    def check_unused(self) -> None:
        """
        Raises:
            SettingError: something is asked of a plan that is not searched for.
        """
        names = ("memory_limit_bytes", "training", "optimizer_bytes", "costs")
        given = [name for name in names if getattr(self, name) is not None]
        if given:
            raise SettingError(f"{given[0]}= is for plan='search'; write plan='search', or leave it out")


@dataclass(frozen=True, slots=True)
class Decision:
    """The stage of each part of a model, and the plan of each of its modules, by name.

    ``plan`` has the styles by patterns of names, as they were given or found; ``notes`` say where they come from.
    ``found`` is what a search has to say.
    """

    facts: Sequence[ModuleFacts]
    stages: Stages
    plan: Plan
    plans: Mapping[str, ModulePlan]
    notes: tuple[str, ...]
    found: Found | None = None


def decide(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: PlanChoice,
    request: SearchRequest | None = None,
    work: Workload = DEFAULT_WORK,
) -> Decision:
    """See ``parallelize``, whose arguments these are.

    Raises:
        MeshError, SettingError, PlacementError, UnsupportedError: as ``parallelize``.
    """
    if not isinstance(model, nn.Module):
        raise SettingError(f"parallelize() takes a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise SettingError(
            f"parallelize() takes a mesh, e.g. dtorch.init_device_mesh('cpu', (2,), mesh_dim_names=('tp',)), "
            f"got {type(mesh).__name__}"
        )
    is_word = isinstance(plan, str) and plan in ("auto", "search")
    if not is_word and not isinstance(plan, Mapping):
        raise SettingError(
            f"parallelize(plan=) takes 'auto', 'search' or a dict from patterns of module names to styles, "
            f"got {plan!r}; write e.g. {{'layers.*.up': 'colwise'}}"
        )
    request = request or SearchRequest()
    if plan != "search":
        request.check_unused()
    facts = collect_facts(model)
    own = (module for module in model.modules() if isinstance(module, ShardedParameters))
    of_experts = [EP_AXIS] * any(f.kind == "experts" for f in facts)
    check_mesh(mesh, [*of_experts, *(axis for module in own for axis in module.cuts_by_axis())])
    check_sequence(model, mesh)
    stages = plan_stages(model, mesh)
    chosen = _choose(model, mesh, facts, plan)
    plans = plan_modules(facts, chosen.plan, stages.meshes[0], base_prefix(model))
    if plan != "search":
        return Decision(facts, stages, chosen.plan, plans, chosen.notes)
    space = _space(model, Decision(facts, stages, chosen.plan, plans, ()), request, work)
    found = search(space, request.memory_limit_bytes)
    plans = plan_modules(facts, found.plan, stages.meshes[0], base_prefix(model))
    return Decision(facts, stages, found.plan, plans, (*chosen.notes, *found.lines()), found)


def _choose(model: nn.Module, mesh: DeviceMesh, facts: Sequence[ModuleFacts], plan: PlanChoice) -> AutoPlan:
    """The plan that counts, or that a search begins with. A mesh without ``tp`` needs none."""
    if isinstance(plan, str):
        return auto_plan(model, facts) if has_ranks(mesh, TP_AXIS) else AutoPlan({})
    return AutoPlan(plan, ("the plan was given",))


def _space(model: nn.Module, auto: Decision, request: SearchRequest, work: Workload) -> Space:
    """What a search for a plan of ``model`` chooses from. Costs that were not given are measured."""
    facts, stages, first = auto.facts, auto.stages, auto.stages.meshes[0]
    axes = [
        *(axis for axis in (DP_AXIS, EP_AXIS, TP_AXIS) if has_ranks(first, axis)),
        *sequence_axes(first),
    ]
    if request.costs is not None:
        request.costs.check_axes(axes)
    costs = request.costs or measure(first, axes)
    step = Step(
        work=work,
        is_training=request.training is not False,
        optimizer_bytes=request.optimizer_bytes,
        num_experts_per_token=experts_per_token(model),
    )
    weights = {id(p): Weight(p.dtype.itemsize, p.requires_grad) for p in model.parameters()}
    prefix = base_prefix(model)
    may_use_zero = request.memory_limit_bytes is not None and step.is_training and has_ranks(first, DP_AXIS)
    return Space(
        facts=facts,
        plan=auto.plan,
        prefix=prefix,
        cut=auto.plans,
        whole=plan_modules(facts, {}, first, prefix),
        # What a device does depends on the shape of a stage's mesh alone, and stages have the same.
        model=CostModel(first, weights, step, costs),
        num_stages=len(stages.meshes),
        stage_of=lambda name: stages.meshes.index(stages.mesh_of(name)),
        zero_stages=(0, 1, 2, 3) if may_use_zero else (0,),
    )
