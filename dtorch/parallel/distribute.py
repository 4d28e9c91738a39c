"""``parallelize``: an unmodified model onto a mesh whose axes say by their names what is cut along them."""

from __future__ import annotations

import os
import warnings
from typing import TypeVar

import torch
from torch import nn

from dtorch.graph import Graph
from dtorch.parallel.buffers import restore_buffers
from dtorch.parallel.decide import PlanChoice, SearchRequest, decide
from dtorch.parallel.experts import is_experts, run_on_mesh
from dtorch.parallel.facts import base_prefix
from dtorch.parallel.found import Found, zero_call
from dtorch.parallel.hooks import add_entry_hooks, add_module_hooks, generate_on
from dtorch.parallel.place import Progress, check_sources, collect_homes, find_stored, place
from dtorch.parallel.reduction import add_gradient_hook
from dtorch.parallel.sequence import add_sequence_hooks
from dtorch.parallel.stage_hooks import add_stage_hooks
from dtorch.parallel.weights import Checkpoint
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.mesh import DeviceMesh

Module = TypeVar("Module", bound=nn.Module)


def parallelize(
    model: Module,
    mesh: DeviceMesh,
    plan: PlanChoice = "auto",
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    memory_limit_bytes: int | None = None,
    on_progress: Progress | None = None,
) -> Module:
    """Put the weights of ``model`` on ``mesh`` and make it run there; the code that calls it stays as it is.

    On the ``tp`` axis Linear and Embedding weights are cut as ``plan`` says and the rest is replicated; on the
    ``dp`` axis inputs are split by batch, on ``ulysses_cp`` and ``ring_cp`` by sequence; along the ``pp`` axis layers
    are shared out, and activations go from stage to stage. Cuts fall between groups of query heads that share a
    key/value head.

    Args:
        model: changed in place. Its weights may be on the CPU, where each is released once it is placed, or on
            ``"meta"`` or ``"dtorch"`` with ``checkpoint`` to say what they are.
        mesh: axes named ``dp``, ``tp``, ``pp``, ``ulysses_cp`` or ``ring_cp``, any of them; ``ep`` where the model has
            experts; and those that its modules of ``dtorch.nn`` cut over.
        plan: ``"auto"`` reads the plan that a Hugging Face model carries. Otherwise a dict from patterns of module
            names (``"layers.*.mlp.up_proj"``) to a style of ``dtorch.parallel.tp_plan`` or to the placements of
            the weight, one for each mesh axis. Modules that it does not name are replicated. ``"search"`` takes what
            ``dtorch.plan(model, mesh, "search")`` finds for a training step, by costs measured on the cluster.
        checkpoint: a safetensors file, or a folder with one or with an index of several. Read a few rows at a time.
        memory_limit_bytes: of a search: what a device may hold of weights, gradients and the optimizer's state.
            Warns where only ZeRO keeps it.
        on_progress: called after each tensor with its name and its number of elements.

    Returns:
        ``model`` itself.

    Raises:
        MeshError: axes without names, axes with others, or devices that the cluster does not have.
        SettingError: a pattern that matches nothing, a style that does not exist or does not fit, a checkpoint that
            lacks weights or has them in another shape, more stages than layers, a model that is already parallel or
            has ZeRO, or a memory limit that nothing found fits, or that comes without ``"search"``.
        PlacementError: placements that do not fit the mesh or the weight, or heads that ``ulysses_cp`` cannot cut.
        UnsupportedError: ``"auto"`` for a model that carries no plan, or a buffer whose values cannot be made again.
    """
    if hasattr(model, "dtorch_mesh"):
        raise SettingError(
            f"this {type(model).__name__} is parallel already, on {model.dtorch_mesh!r}; "
            f"build it again to put it on another mesh"
        )
    decision = decide(model, mesh, plan, SearchRequest(memory_limit_bytes=memory_limit_bytes))
    if any(hasattr(module, "dtorch_zero") for module in model.modules()):
        raise SettingError(
            f"this {type(model).__name__} has ZeRO, which cuts what is on a mesh; write "
            f"dtorch.parallelize(model, mesh) first, and dtorch.parallel.zero(model, ...) behind it"
        )
    stages, plans = decision.stages, decision.plans
    first, last = stages.meshes[0], stages.meshes[stages.end]
    source = None if checkpoint is None else Checkpoint(checkpoint)
    with torch.no_grad(), Graph.default_graph().device_mesh_guard(mesh):
        restore_buffers(model)
        homes = collect_homes(model, stages.mesh_of, plans)
        if source is not None:
            find_stored(homes, source, base_prefix(model))
        check_sources(homes)
        place(homes, on_progress)
    for name, module in model.named_modules():
        if name in plans:
            add_module_hooks(module, plans[name])
        if is_experts(module):
            run_on_mesh(module)
    for parameter in model.parameters():
        add_gradient_hook(parameter)
    add_entry_hooks(model, first, last)
    add_sequence_hooks(model, first)
    add_stage_hooks(model, stages)
    generate_on(model, first)
    object.__setattr__(model, "dtorch_mesh", mesh)
    object.__setattr__(model, "dtorch_notes", decision.notes)
    cut = frozenset(f.name for f in decision.facts if f.num_head_groups and plans[f.name].style == "colwise")
    object.__setattr__(model, "dtorch_cut_by_heads", cut)
    if decision.found is not None:
        _warn_of_zero(decision.found)
    return model


def _warn_of_zero(found: Found) -> None:
    """What was found is for a step that only ZeRO makes fit, and that is the caller's to write."""
    if found.zero_stage:
        warnings.warn(
            f"a training step fits in memory_limit_bytes={found.limit_bytes} with ZeRO only; make the optimizer and "
            f"write {zero_call(found.zero_stage)}",
            stacklevel=3,
        )
