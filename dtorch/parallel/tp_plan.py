"""How the modules of a model are cut for a mesh: from patterns and styles to placements. Pure decisions.

A plan maps module names to styles, in the words of Hugging Face configs (``base_model_tp_plan``). ``*`` stands
for one part of a dotted name. The styles are those of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053):

=========================  ==================  =====================================================================
style                      weight on ``tp``    what the module's hooks do to activations on ``tp``
=========================  ==================  =====================================================================
``colwise``                ``Shard(0)``        nothing: the output is sharded on its last dim
``colwise_gather_output``  ``Shard(0)``        the output is gathered
``rowwise``                ``Shard(1)``        the partial sums of the output are reduced
``rowwise_split_input``    ``Shard(1)``        the input is cut on its last dim, the partial sums are reduced
``embedding_rowwise``      ``Shard(0)``        each rank looks up its part of the vocabulary; the sums are reduced
``replicate``              ``Replicate()``     nothing
``moe_tp_experts``         by parameter        the module runs its experts on the mesh: see ``experts``
=========================  ==================  =====================================================================

A module of experts holds the weights of all of them in 3-D parameters, ``[experts, out, in]``, which the plan names one
by one: ``colwise`` and ``packed_colwise`` cut what comes out, ``rowwise`` what goes in.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from dtorch.parallel.cuts import Axis, cut_along
from dtorch_runtime.errors import MeshError, PlacementError, SettingError
from dtorch_runtime.ir.layout import resolve_placements
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Placements, Replicate, Shard

DP_AXIS: Final = "dp"
TP_AXIS: Final = "tp"
PP_AXIS: Final = "pp"
#: Cuts experts, so ``parallelize`` takes it for models that have some. For all else it is one more ``dp``.
EP_AXIS: Final = "ep"
#: The axes that cut the batch.
BATCH_AXES: Final = (DP_AXIS, EP_AXIS)
#: The axes that ``parallelize`` knows what to do with.
AXES: Final = (DP_AXIS, TP_AXIS, PP_AXIS, "ulysses_cp", "ulysess_cp", "ring_cp")

#: ``conv1d`` is the Linear of GPT-2, whose weight is ``[in, out]``; ``experts`` see above.
ModuleKind: TypeAlias = Literal["linear", "conv1d", "embedding", "experts", "other"]
Plan: TypeAlias = Mapping[str, "str | Sequence[Placement]"]

#: Styles, and the kinds of module that they fit.
STYLES: Final[Mapping[str, tuple[ModuleKind, ...]]] = {
    "colwise": ("linear", "conv1d"),
    "colwise_gather_output": ("linear", "conv1d"),
    "rowwise": ("linear", "conv1d"),
    "rowwise_split_input": ("linear", "conv1d"),
    "embedding_rowwise": ("embedding",),
    "moe_tp_experts": ("experts",),
    "replicate": ("linear", "conv1d", "embedding", "experts", "other"),
}
#: Styles of a parameter of experts, and the dim that they cut.
EXPERT_STYLES: Final[Mapping[str, int | None]] = {
    "colwise": 1,
    "packed_colwise": 1,
    "rowwise": 2,
    "replicate": None,
}
#: Other words for the same, found in configs. The gradient of a replicated weight is reduced by autograd itself.
SYNONYMS: Final[Mapping[str, str]] = {
    "colwise_rep": "colwise_gather_output",
    "replicated_with_grad_allreduce": "replicate",
    "replicated": "replicate",
}
#: What is between these two is whole, so that heads need not stay together.
_WHOLE_BETWEEN: Final = ("colwise_gather_output", "rowwise_split_input")
_SHARDED_OUTPUT: Final = ("colwise_gather_output", "rowwise", "rowwise_split_input", "embedding_rowwise")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleFacts:
    """What planning needs to know of one module that has parameters of its own.

    ``num_head_groups`` is the number of key/value heads where the module is part of an attention layer: no cut may
    separate query heads from the key/value head that they share. ``weights`` holds the global shapes of its own
    parameters. ``tied`` names, for each parameter, the object it is, so that tied ones are recognised. ``cut`` is what
    a module of ``dtorch.nn`` says by itself: for each axis, the placement on it of each parameter that is not whole.
    """

    name: str
    kind: ModuleKind
    weights: Mapping[str, tuple[int, ...]]
    num_head_groups: int | None = None
    tied: Mapping[str, int] = field(default_factory=dict)
    cut: Mapping[Axis, Mapping[str, Placement]] | None = None


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """What happens to one module. ``placements`` are those of its own parameters, on the whole mesh.

    ``splits_input`` and ``restores_output`` ask for the hooks of the table above.
    """

    style: str
    placements: Mapping[str, Placements]
    splits_input: Shard | None = None
    restores_output: bool = False


def check_mesh(mesh: DeviceMesh, own_axes: Iterable[Axis] = ()) -> None:
    """Refuse meshes whose axes ``parallelize`` has no use for.

    Args:
        own_axes: those that modules of ``dtorch.nn`` cut over.

    Raises:
        MeshError: the axes have no names, or one is neither in ``AXES`` nor in ``own_axes``.
    """
    own = tuple(own_axes)
    allowed = tuple(dict.fromkeys((*AXES, *(axis for axis in own if isinstance(axis, str)))))
    if mesh.mesh_dim_names is None:
        names = f"({TP_AXIS!r},)" if mesh.ndim == 1 else f"({DP_AXIS!r}, {TP_AXIS!r})"
        raise MeshError(
            f"parallelize() decides by the names of a mesh's axes, and {mesh!r} has none; "
            f"write mesh_dim_names={names}"
        )
    unknown = [
        name for axis, name in enumerate(mesh.mesh_dim_names) if name not in allowed and axis not in own
    ]
    if unknown:
        raise MeshError(
            f"parallelize() uses the axes {', '.join(map(repr, allowed))}; {mesh!r} also has {unknown}. "
            f"Give it a mesh without them, e.g. one of mesh.unbind({unknown[0]!r})"
        )


def expand_plan(plan: Plan, facts: Sequence[ModuleFacts], prefix: str = "") -> dict[str, str | Placements]:
    """The entry of each module, and of each parameter of experts, that the plan names. The last of several counts.

    A pattern is matched against the whole name and against the name without ``prefix`` (the base model's: configs
    leave it out).

    Raises:
        SettingError: a pattern matches nothing, or a style does not exist.
    """
    names = plannable(facts)
    found: dict[str, str | Placements] = {}
    for pattern, entry in plan.items():
        named = [name for name in names if matches(pattern, name, prefix)]
        if not named:
            raise SettingError(_no_match(pattern, names, prefix))
        found.update(dict.fromkeys(named, _check_entry(pattern, entry)))
    return found


def plannable(facts: Sequence[ModuleFacts]) -> list[str]:
    """What a plan may name: modules with weights, and each parameter of experts."""
    of_experts = [f"{f.name}.{weight}" for f in facts if f.kind == "experts" for weight in f.weights]
    return [*(f.name for f in facts), *of_experts]


def plan_modules(
    facts: Sequence[ModuleFacts], plan: Plan, mesh: DeviceMesh, prefix: str = ""
) -> dict[str, ModulePlan]:
    """The plan of every module, by name; modules that ``plan`` does not name are replicated.

    A module that shares its weight with a planned one (tied embeddings) follows it.

    Raises:
        SettingError: a pattern matches nothing, a style does not exist or does not fit the module, heads cannot be
            cut, or tied weights would be cut in two ways.
        PlacementError: explicit placements do not fit the mesh or the weight.
    """
    entries = expand_plan(plan, facts, prefix)
    _follow_tied(facts, entries)
    result = {
        f.name: _plan_experts(f, entries, mesh)
        if f.kind == "experts"
        else _plan_module(f, entries.get(f.name), mesh)
        for f in facts
    }
    _lend_to_others(facts, result)
    _check_tied(facts, result)
    return result


def _plan_module(facts: ModuleFacts, entry: str | Placements | None, mesh: DeviceMesh) -> ModulePlan:
    if facts.cut is not None:
        if entry is not None:
            raise SettingError(
                f"the plan names {facts.name!r}, a module of dtorch.nn, which says by itself how it is cut; "
                f"leave it out, or use the module of torch.nn"
            )
        return ModulePlan("own", cut_along(mesh, facts.cut, facts.weights))
    if entry is None:
        entry = "replicate"
    if not isinstance(entry, str):
        return ModulePlan("placements", _explicit(facts, entry, mesh))
    _check_kind(facts, entry)
    if entry == "replicate" or not has_ranks(mesh, TP_AXIS):
        return ModulePlan("replicate", {name: _on_tp(mesh, Replicate()) for name in facts.weights})
    cut = _cut(facts, entry)
    by_name: dict[str, Placement] = {"weight": cut, "bias": _bias_placement(facts, cut)}
    return ModulePlan(
        entry,
        {name: _on_tp(mesh, by_name.get(name, Replicate())) for name in facts.weights},
        splits_input=Shard(-1, cut.unit) if entry == "rowwise_split_input" else None,
        restores_output=entry in _SHARDED_OUTPUT,
    )


def _check_kind(facts: ModuleFacts, style: str) -> None:
    if facts.kind in STYLES.get(style, ()):
        return
    if style not in STYLES:
        raise SettingError(
            f"style {style!r} is for parameters of experts, the plan gives it to the module {facts.name!r}"
        )
    fitting = [name for name, kinds in STYLES.items() if facts.kind in kinds]
    raise SettingError(
        f"style {style!r} is for {' and '.join(STYLES[style])} modules; {facts.name!r} is of kind "
        f"{facts.kind!r}, for which there {'is' if len(fitting) == 1 else 'are'} {', '.join(fitting)}"
    )


def _plan_experts(
    facts: ModuleFacts, entries: Mapping[str, str | Placements], mesh: DeviceMesh
) -> ModulePlan:
    """Each parameter as its own entry says; the module's says that the experts run where their weights are."""
    style = entries.get(facts.name, "replicate")
    if isinstance(style, str):
        _check_kind(facts, style)
    placements: dict[str, Placements] = {}
    for name, shape in facts.weights.items():
        entry = entries.get(f"{facts.name}.{name}", "replicate")
        if not isinstance(entry, str):
            placements[name] = _chosen(f"{facts.name}.{name}", entry, mesh, len(shape))
            continue
        if entry not in EXPERT_STYLES:
            raise SettingError(
                f"style {entry!r} is not for a parameter of experts; for {facts.name + '.' + name!r} there are "
                f"{', '.join(EXPERT_STYLES)}"
            )
        dim = EXPERT_STYLES[entry]
        is_cut = dim is not None and dim < len(shape) and has_ranks(mesh, TP_AXIS)
        on_tp = _on_tp(mesh, Shard(dim) if dim is not None and is_cut else Replicate())
        placements[name] = _experts_on_ep(on_tp, mesh, shape[0])
    return ModulePlan(style if isinstance(style, str) else "placements", placements)


def _experts_on_ep(placements: Placements, mesh: DeviceMesh, num_experts: int) -> Placements:
    """Dim 0 of every parameter of experts are the experts. Where there are enough, ``tp`` cuts it too, not features.

    Then each expert has the whole of a row, and nothing has to be exchanged inside of it.
    """
    if not has_ranks(mesh, EP_AXIS):
        return placements
    num_parts = mesh.size(EP_AXIS) * (mesh.size(TP_AXIS) if mesh.has_axis(TP_AXIS) else 1)
    is_enough = num_experts >= num_parts
    return tuple(
        Shard(0) if name == EP_AXIS or (is_enough and isinstance(placement, Shard)) else placement
        for name, placement in zip(mesh.mesh_dim_names or (), placements, strict=True)
    )


def features_of(facts: ModuleFacts) -> tuple[int, int]:
    """The numbers of features that go into a linear module and come out of it."""
    first, second = facts.weights["weight"]
    return (first, second) if facts.kind == "conv1d" else (second, first)


def _cut(facts: ModuleFacts, style: str) -> Shard:
    """How the weight is cut: by the features that come out, or by those that go in."""
    if facts.kind == "embedding":
        return Shard(0)
    by_input = style.startswith("rowwise")
    dim = 1 if by_input != (facts.kind == "conv1d") else 0
    groups = facts.num_head_groups
    if not groups or style in _WHOLE_BETWEEN:
        return Shard(dim)
    # Features of a key/value head, and of the query heads that share it, stay together.
    size = features_of(facts)[0 if by_input else 1]
    if size % groups:
        raise SettingError(
            f"heads cannot be cut: {facts.name!r} has {size} features for {groups} key/value heads, which do not "
            f"divide them. Leave its attention layer out of the plan, or give it 'replicate'"
        )
    return Shard(dim, size // groups)


def _bias_placement(facts: ModuleFacts, weight: Placement) -> Placement:
    """A bias is cut with the features that come out; beside partial sums it is whole, and added once."""
    of_output = 1 if facts.kind == "conv1d" else 0
    is_cut = isinstance(weight, Shard) and weight.dim == of_output
    return Shard(0, weight.unit) if isinstance(weight, Shard) and is_cut else Replicate()


def has_ranks(mesh: DeviceMesh, axis: str) -> bool:
    """Whether the mesh has an axis of that name with several ranks along it."""
    return mesh.has_axis(axis) and mesh.size(axis) > 1


def _on_tp(mesh: DeviceMesh, placement: Placement) -> Placements:
    names = mesh.mesh_dim_names or ()
    return tuple(placement if name == TP_AXIS else Replicate() for name in names)


def _explicit(facts: ModuleFacts, entry: Placements, mesh: DeviceMesh) -> dict[str, Placements]:
    """Placements that the caller chose for ``weight`` (or for the only parameter); others are replicated."""
    main = "weight" if "weight" in facts.weights else next(iter(facts.weights))
    chosen = _chosen(facts.name, entry, mesh, len(facts.weights[main]))
    result = {name: (Replicate(),) * mesh.ndim for name in facts.weights} | {main: chosen}
    if facts.kind in ("linear", "conv1d") and "bias" in facts.weights:
        result["bias"] = tuple(_bias_placement(facts, placement) for placement in chosen)
    return result


def _chosen(name: str, entry: Placements, mesh: DeviceMesh, ndim: int) -> Placements:
    chosen = resolve_placements(entry, mesh, ndim)
    if any(isinstance(p, Partial) for p in chosen):
        raise PlacementError(
            f"a weight is Replicate() or Shard(dim), the plan gives {list(entry)} for {name!r}"
        )
    return chosen


# ---- patterns ----


def matches(pattern: str, name: str, prefix: str = "") -> bool:
    """Whether a pattern names a module, with or without the base model's prefix; ``*`` is one part of a name."""
    expression = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
    short = name.removeprefix(f"{prefix}.")
    return expression.fullmatch(name) is not None or expression.fullmatch(short) is not None


def is_style(word: str) -> bool:
    """Whether a plan may give a module, or a parameter of experts, this style."""
    style = SYNONYMS.get(word, word)
    return style in STYLES or style in EXPERT_STYLES


def _check_entry(pattern: str, entry: str | Sequence[Placement]) -> str | Placements:
    if isinstance(entry, str):
        style = SYNONYMS.get(entry, entry)
        if not is_style(style):
            raise SettingError(
                f"the plan gives {pattern!r} the style {entry!r}; styles are {', '.join({**STYLES, **EXPERT_STYLES})}, "
                f"or a list of placements, one for each mesh axis"
            )
        return style
    if isinstance(entry, Replicate | Shard | Partial):
        raise PlacementError(f"the plan gives {pattern!r} one placement; write a list: [{entry!r}]")
    return tuple(entry)


def _no_match(pattern: str, names: Iterable[str], prefix: str) -> str:
    generic = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix(f"{prefix}.")) for name in names})
    close = difflib.get_close_matches(pattern, generic, n=3, cutoff=0.3) or generic[:3]
    return (
        f"the plan's pattern {pattern!r} matches no module that has weights. "
        f"Close ones: {', '.join(map(repr, close))}; '*' stands for one part of a dotted name"
    )


# ---- tied weights ----


def _tied_groups(facts: Sequence[ModuleFacts]) -> list[list[tuple[ModuleFacts, str]]]:
    groups: dict[int, list[tuple[ModuleFacts, str]]] = {}
    for module in facts:
        for name, identity in module.tied.items():
            groups.setdefault(identity, []).append((module, name))
    return [group for group in groups.values() if len(group) > 1]


def _follow_tied(facts: Sequence[ModuleFacts], entries: dict[str, str | Placements]) -> None:
    styles: dict[ModuleKind, str] = {"linear": "colwise_gather_output", "embedding": "embedding_rowwise"}
    cut = ("colwise", "colwise_gather_output", "embedding_rowwise")
    for group in _tied_groups(facts):
        planned = [entries[module.name] for module, _ in group if module.name in entries]
        if not planned:
            continue
        for module, _ in group:
            if module.name not in entries and module.kind in styles:
                if planned[0] in cut:
                    entries[module.name] = styles[module.kind]
                elif not isinstance(planned[0], str):
                    entries[module.name] = planned[0]


def _lend_to_others(facts: Sequence[ModuleFacts], plans: dict[str, ModulePlan]) -> None:
    """A bias that stands in a module without a plan as well lies where its Linear has it."""
    for group in _tied_groups(facts):
        cut = [plans[m.name].placements[name] for m, name in group if m.kind in ("linear", "conv1d")]
        for module, name in group:
            if cut and module.kind == "other":
                plan = plans[module.name]
                plans[module.name] = replace(plan, placements={**plan.placements, name: cut[0]})


def _check_tied(facts: Sequence[ModuleFacts], plans: Mapping[str, ModulePlan]) -> None:
    for group in _tied_groups(facts):
        first, *others = [(f"{m.name}.{name}", plans[m.name].placements[name]) for m, name in group]
        for other in others:
            if other[1] != first[1]:
                raise SettingError(
                    f"{first[0]} and {other[0]} are one tied weight, and the plan would cut it in two ways: "
                    f"{list(first[1])} and {list(other[1])}. Give both modules styles that cut the same dim, e.g. "
                    f"'embedding_rowwise' and 'colwise_gather_output', or 'replicate'"
                )
