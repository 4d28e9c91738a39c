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
=========================  ==================  =====================================================================
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from dtorch.parallel.cuts import Axis, cut_along
from dtorch_runtime.errors import MeshError, PlacementError, SettingError
from dtorch_runtime.ir.layout import resolve_placements
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Placements, Replicate, Shard

DP_AXIS: Final = "dp"
TP_AXIS: Final = "tp"
PP_AXIS: Final = "pp"
#: The axes that ``parallelize`` knows what to do with.
AXES: Final = (DP_AXIS, TP_AXIS, PP_AXIS, "ulysses_cp", "ulysess_cp", "ring_cp")

Style: TypeAlias = Literal[
    "colwise", "colwise_gather_output", "rowwise", "rowwise_split_input", "embedding_rowwise", "replicate"
]
ModuleKind: TypeAlias = Literal["linear", "embedding", "other"]
Plan: TypeAlias = Mapping[str, "str | Sequence[Placement]"]

#: Styles, and the kinds of module that they fit.
STYLES: Final[Mapping[str, tuple[ModuleKind, ...]]] = {
    "colwise": ("linear",),
    "colwise_gather_output": ("linear",),
    "rowwise": ("linear",),
    "rowwise_split_input": ("linear",),
    "embedding_rowwise": ("embedding",),
    "replicate": ("linear", "embedding", "other"),
}
#: Other words for the same, found in configs. The gradient of a replicated weight is reduced by autograd itself.
SYNONYMS: Final[Mapping[str, str]] = {
    "colwise_rep": "colwise_gather_output",
    "replicated_with_grad_allreduce": "replicate",
    "replicated": "replicate",
}
_SHARDED_OUTPUT: Final = ("colwise_gather_output", "rowwise", "rowwise_split_input", "embedding_rowwise")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleFacts:
    """What planning needs to know of one module that has parameters of its own.

    ``num_head_groups`` is the number of key/value heads where the module is part of an attention layer: no cut may
    separate query heads from the key/value head that they share. ``weights`` holds the global shapes of its own
    parameters. ``tied`` names, for each parameter, the object it is, so that tied ones are recognised. ``cut`` is what
    a module of ``dtorch.nn`` says by itself: the axis, and the placement on it of each parameter that is not whole.
    """

    name: str
    kind: ModuleKind
    weights: Mapping[str, tuple[int, ...]]
    num_head_groups: int | None = None
    tied: Mapping[str, int] = field(default_factory=dict)
    cut: tuple[Axis, Mapping[str, Placement]] | None = None


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """What happens to one module. ``placements`` are those of its own parameters, on the whole mesh.

    ``splits_input`` and ``restores_output`` ask for the hooks of the table above.
    """

    style: str
    placements: Mapping[str, Placements]
    splits_input: Shard | None = None
    restores_output: bool = False


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuse meshes whose axes ``parallelize`` has no use for.

    Raises:
        MeshError: the axes have no names, or one has a name that is not in ``AXES``.
    """
    if mesh.mesh_dim_names is None:
        names = f"({TP_AXIS!r},)" if mesh.ndim == 1 else f"({DP_AXIS!r}, {TP_AXIS!r})"
        raise MeshError(
            f"parallelize() decides by the names of a mesh's axes, and {mesh!r} has none; "
            f"write mesh_dim_names={names}"
        )
    unknown = [name for name in mesh.mesh_dim_names if name not in AXES]
    if unknown:
        raise MeshError(
            f"parallelize() uses the axes {', '.join(map(repr, AXES))}; {mesh!r} also has {unknown}. "
            f"Give it a mesh without them, e.g. one of mesh.unbind({unknown[0]!r})"
        )


def expand_plan(plan: Plan, facts: Sequence[ModuleFacts], prefix: str = "") -> dict[str, str | Placements]:
    """The entry of each module that the plan names. Where several patterns match a module, the last one counts.

    A pattern is matched against the whole name of a module and against the name without ``prefix`` (the base
    model's: configs leave it out).

    Raises:
        SettingError: a pattern matches no module, or a style does not exist.
    """
    found: dict[str, str | Placements] = {}
    for pattern, entry in plan.items():
        named = [f.name for f in facts if matches(pattern, f.name, prefix)]
        if not named:
            raise SettingError(_no_match(pattern, [f.name for f in facts], prefix))
        found.update(dict.fromkeys(named, _check_entry(pattern, entry)))
    return found


def plan_modules(
    facts: Sequence[ModuleFacts], plan: Plan, mesh: DeviceMesh, prefix: str = ""
) -> dict[str, ModulePlan]:
    """The plan of every module, by name; modules that ``plan`` does not name are replicated.

    A module that shares its weight with a planned one (tied embeddings) follows it.

    Raises:
        SettingError: a pattern matches nothing, a style does not exist or does not fit the module, or tied weights
            would be cut in two ways.
        PlacementError: explicit placements do not fit the mesh or the weight.
    """
    entries = expand_plan(plan, facts, prefix)
    _follow_tied(facts, entries)
    result = {f.name: _plan_module(f, entries.get(f.name), mesh) for f in facts}
    _check_tied(facts, result)
    return result


def _plan_module(facts: ModuleFacts, entry: str | Placements | None, mesh: DeviceMesh) -> ModulePlan:
    if facts.cut is not None:
        if entry is not None:
            raise SettingError(
                f"the plan names {facts.name!r}, a module of dtorch.nn, which says by itself how it is cut; "
                f"leave it out, or use the module of torch.nn"
            )
        axis, cuts = facts.cut
        return ModulePlan("own", cut_along(mesh, axis, cuts, facts.weights))
    if entry is None:
        entry = "replicate"
    if not isinstance(entry, str):
        return ModulePlan("placements", _explicit(facts, entry, mesh))
    if facts.kind not in STYLES[entry]:
        fitting = [style for style, kinds in STYLES.items() if facts.kind in kinds]
        raise SettingError(
            f"style {entry!r} is for {' and '.join(STYLES[entry])} modules; {facts.name!r} is of kind "
            f"{facts.kind!r}, for which there {'is' if len(fitting) == 1 else 'are'} {', '.join(fitting)}"
        )
    if entry == "replicate" or not has_ranks(mesh, TP_AXIS):
        return ModulePlan("replicate", {name: _on_tp(mesh, Replicate()) for name in facts.weights})
    dim = 1 if entry.startswith("rowwise") else 0
    cut = Shard(dim, _unit(facts, dim))
    by_name: dict[str, Placement] = {"weight": cut, "bias": _bias_placement(cut)}
    return ModulePlan(
        entry,
        {name: _on_tp(mesh, by_name.get(name, Replicate())) for name in facts.weights},
        splits_input=Shard(-1, cut.unit) if entry == "rowwise_split_input" else None,
        restores_output=entry in _SHARDED_OUTPUT,
    )


def _bias_placement(weight: Placement) -> Placement:
    if not isinstance(weight, Shard):
        return Replicate()
    # Beside partial sums the bias must count once: as a partial sum itself, it is whole on one rank and zero elsewhere.
    return weight if weight.dim == 0 else Partial("sum")


def _unit(facts: ModuleFacts, dim: int) -> int:
    """Rows of a cut that stay together: the features of one key/value head and of the query heads that share it."""
    size = facts.weights["weight"][dim]
    groups = facts.num_head_groups
    return size // groups if groups and size % groups == 0 else 1


def has_ranks(mesh: DeviceMesh, axis: str) -> bool:
    """Whether the mesh has an axis of that name with several ranks along it."""
    return mesh.has_axis(axis) and mesh.size(axis) > 1


def _on_tp(mesh: DeviceMesh, placement: Placement) -> Placements:
    names = mesh.mesh_dim_names or ()
    return tuple(placement if name == TP_AXIS else Replicate() for name in names)


def _explicit(facts: ModuleFacts, entry: Placements, mesh: DeviceMesh) -> dict[str, Placements]:
    """Placements that the caller chose for ``weight`` (or for the only parameter); others are replicated."""
    main = "weight" if "weight" in facts.weights else next(iter(facts.weights))
    chosen = resolve_placements(entry, mesh, len(facts.weights[main]))
    if any(isinstance(p, Partial) for p in chosen):
        raise PlacementError(
            f"a weight is Replicate() or Shard(dim), the plan gives {list(entry)} for {facts.name!r}"
        )
    result = {name: (Replicate(),) * mesh.ndim for name in facts.weights} | {main: chosen}
    if facts.kind == "linear" and "bias" in facts.weights:
        result["bias"] = tuple(map(_bias_placement, chosen))
    return result


# ---- patterns ----


def matches(pattern: str, name: str, prefix: str = "") -> bool:
    """Whether a pattern names a module, with or without the base model's prefix; ``*`` is one part of a name."""
    expression = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
    short = name.removeprefix(f"{prefix}.")
    return expression.fullmatch(name) is not None or expression.fullmatch(short) is not None


def _check_entry(pattern: str, entry: str | Sequence[Placement]) -> str | Placements:
    if isinstance(entry, str):
        style = SYNONYMS.get(entry, entry)
        if style not in STYLES:
            raise SettingError(
                f"the plan gives {pattern!r} the style {entry!r}; styles are {', '.join(STYLES)}, "
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
