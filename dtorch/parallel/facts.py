"""What a model is, as planning sees it: its modules with weights, its attention geometry, the plan it carries."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dtorch.parallel.cuts import ShardedParameters
from dtorch.parallel.derive import derive_plan
from dtorch.parallel.experts import is_experts
from dtorch.parallel.tp_plan import ModuleFacts, ModuleKind, Plan, is_style, matches, plannable
from dtorch_runtime.errors import UnsupportedError

_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "num_heads")


def collect_facts(model: nn.Module) -> list[ModuleFacts]:
    """The modules of ``model`` that have parameters of their own."""
    groups = dict(_head_groups(model))
    facts = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if not own:
            continue
        kind = _kind(module)
        facts.append(
            ModuleFacts(
                name=name,
                kind=kind,
                weights={key: tuple(parameter.shape) for key, parameter in own.items()},
                num_head_groups=groups.get(name) if kind in ("linear", "conv1d") else None,
                tied={key: id(parameter) for key, parameter in own.items()},
                cut=module.cuts_by_axis() if isinstance(module, ShardedParameters) else None,
            )
        )
    return facts


def _kind(module: nn.Module) -> ModuleKind:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if is_experts(module):
        return "experts"
    return "conv1d" if is_conv1d(module) else "other"


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is ``transformers.pytorch_utils.Conv1D``, known by its name: models need no transformers."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def _head_groups(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Modules inside attention layers, each with the layer's number of key/value heads."""
    for name, module in model.named_modules():
        if "Attention" not in type(module).__name__:
            continue
        holders = (module, getattr(module, "config", None), getattr(model, "config", None))
        counts = [getattr(holder, field, None) for holder in holders for field in _HEAD_COUNTS]
        found = next((count for count in counts if isinstance(count, int) and count > 0), None)
        if found is not None:
            yield from ((f"{name}.{child}" if name else child, found) for child, _ in module.named_modules())


def experts_per_token(model: nn.Module) -> int:
    """How many experts a token goes to, by the configuration of the model; 1 where it does not say."""
    config: Any = getattr(model, "config", None)
    return getattr(config, "num_experts_per_tok", None) or 1


def base_prefix(model: nn.Module) -> str:
    """The name of the base model inside a Hugging Face model with a head, e.g. ``"model"``; else empty."""
    prefix = getattr(model, "base_model_prefix", "")
    return prefix if isinstance(prefix, str) and prefix and hasattr(model, prefix) else ""


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """The plan of a model, and what there is to say about it: where it comes from, and what it leaves out."""

    plan: Plan
    notes: tuple[str, ...] = ()


def auto_plan(model: nn.Module, facts: Sequence[ModuleFacts]) -> AutoPlan:
    """The plan that a Hugging Face model carries, or else one that is derived from its layers.

    A carried one is the config's for the base model and the class's for the head. Entries for modules that this model
    lacks are left out: a config's plan is for all variants of an architecture.

    Raises:
        UnsupportedError: the model carries no plan, and none of its layers is known.
    """
    prefix = base_prefix(model)
    of_config = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    carried: dict[str, str] = {
        f"{prefix}.{key}" if prefix else key: style for key, style in of_config.items()
    }
    carried |= getattr(type(model), "_tp_plan", None) or {}
    # The instance's plan also has what submodels add, a vision tower's, say.
    carried |= getattr(model, "_tp_plan", None) or {}
    if not carried:
        return _derived(model, facts)
    found = {key: style for key, style in carried.items() if _fits(key, facts, prefix)}
    known = {key: style for key, style in found.items() if is_style(style)}
    if len(known) < len(found):
        unknown = {key: style for key, style in found.items() if key not in known}
        warnings.warn(f"these modules are replicated, their styles are not known: {unknown}", stacklevel=3)
    return AutoPlan(known, ("the plan is the one that the model's config carries",))


def _fits(pattern: str, facts: Sequence[ModuleFacts], prefix: str) -> bool:
    return any(matches(pattern, name, prefix) for name in plannable(facts))


def _derived(model: nn.Module, facts: Sequence[ModuleFacts]) -> AutoPlan:
    if any(f.cut is not None for f in facts):
        return AutoPlan({})
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if find_head is not None else None
    derived = derive_plan(facts, [name for name, module in model.named_modules() if module is head])
    if not derived.plan:
        example = next((f.name for f in facts if f.kind == "linear"), "name.of.a.linear")
        raise UnsupportedError(
            f"{type(model).__name__} carries no tensor-parallel plan (base_model_tp_plan in its config), and none of "
            f"its layers looks like attention or a feed-forward block; write one, "
            f"e.g. parallelize(model, mesh, plan={{{example!r}: 'colwise'}}), or plan={{}} to replicate every weight"
        )
    notes = ["the plan is derived from the names and shapes of the model's layers: it carries none"]
    if derived.whole:
        notes.append(f"linear layers that were not recognised, and are whole: {', '.join(derived.whole)}")
    return AutoPlan(derived.plan, tuple(notes))
