"""What ``parallelize`` does with a model, decided before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from dtorch.parallel.cuts import ShardedParameters
from dtorch.parallel.facts import AutoPlan, auto_plan, base_prefix, collect_facts
from dtorch.parallel.sequence import check_sequence
from dtorch.parallel.stages import Stages, plan_stages
from dtorch.parallel.tp_plan import (
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


@dataclass(frozen=True, slots=True)
class Decision:
    """The stage of each part of a model, and the plan of each of its modules, by name.

    ``plan`` has the styles by patterns of names, as they were given or found; ``notes`` say where they come from.
    """

    facts: Sequence[ModuleFacts]
    stages: Stages
    plan: Plan
    plans: Mapping[str, ModulePlan]
    notes: tuple[str, ...]


def decide(model: nn.Module, mesh: DeviceMesh, plan: Plan | Literal["auto"]) -> Decision:
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
    if plan != "auto" and not isinstance(plan, Mapping):
        raise SettingError(
            f"parallelize(plan=) takes 'auto' or a dict from patterns of module names to styles, got {plan!r}; "
            f"write e.g. {{'layers.*.up': 'colwise'}}"
        )
    facts = collect_facts(model)
    own = (module for module in model.modules() if isinstance(module, ShardedParameters))
    of_experts = [EP_AXIS] * any(f.kind == "experts" for f in facts)
    check_mesh(mesh, [*of_experts, *(axis for module in own for axis in module.cuts_by_axis())])
    check_sequence(model, mesh)
    stages = plan_stages(model, mesh)
    chosen = _choose(model, mesh, facts, plan)
    plans = plan_modules(facts, chosen.plan, stages.meshes[0], base_prefix(model))
    return Decision(facts, stages, chosen.plan, plans, chosen.notes)


def _choose(
    model: nn.Module, mesh: DeviceMesh, facts: Sequence[ModuleFacts], plan: Plan | Literal["auto"]
) -> AutoPlan:
    """The plan that counts. A mesh without ``tp`` needs none."""
    if isinstance(plan, str):
        return auto_plan(model, facts) if has_ranks(mesh, TP_AXIS) else AutoPlan({})
    return AutoPlan(plan, ("the plan was given",))
