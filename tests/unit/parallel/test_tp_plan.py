"""Patterns and styles to placements, and the errors that say what to write instead."""

from __future__ import annotations

import re

import pytest

from dtorch.parallel.tp_plan import STYLES, ModuleFacts, Plan, check_mesh, matches, plan_modules
from dtorch_runtime.errors import DTorchError, MeshError, PlacementError, SettingError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard, split

R = Replicate()
TP = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
DP_TP = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
DP = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))

#: SmolLM2-135M: 9 query heads and 3 key/value heads of 64 features.
EMBED = ModuleFacts(
    name="model.embed", kind="embedding", weights={"weight": (49152, 576)}, tied={"weight": 1}
)
QUERY = ModuleFacts(
    name="model.layers.0.attn.q", kind="linear", weights={"weight": (576, 576)}, num_head_groups=3
)
KEY = ModuleFacts(
    name="model.layers.0.attn.k", kind="linear", weights={"weight": (192, 576)}, num_head_groups=3
)
OUT = ModuleFacts(
    name="model.layers.0.attn.o",
    kind="linear",
    weights={"weight": (576, 576), "bias": (576,)},
    num_head_groups=3,
)
UP = ModuleFacts(
    name="model.layers.1.mlp.up", kind="linear", weights={"weight": (1536, 576), "bias": (1536,)}
)
DOWN = ModuleFacts(name="model.layers.1.mlp.down", kind="linear", weights={"weight": (576, 1536)})
NORM = ModuleFacts(name="model.norm", kind="other", weights={"weight": (576,)})
HEAD = ModuleFacts(name="lm_head", kind="linear", weights={"weight": (49152, 576)}, tied={"weight": 1})
#: The Linear of GPT-2, whose weight is transposed.
CONV = ModuleFacts(name="h.0.mlp.c_fc", kind="conv1d", weights={"weight": (64, 256), "bias": (256,)})
EXPERTS = ModuleFacts(
    name="model.layers.0.mlp.experts",
    kind="experts",
    weights={"gate_up_proj": (8, 96, 32), "down_proj": (8, 32, 48)},
)
UNEVEN = ModuleFacts(
    name="model.layers.0.attn.uneven", kind="linear", weights={"weight": (64, 64)}, num_head_groups=3
)
FACTS = [EMBED, QUERY, KEY, OUT, UP, DOWN, NORM, HEAD]


@pytest.mark.parametrize(
    ("facts", "style", "expected"),
    [
        (QUERY, "colwise", {"weight": Shard(0, 192)}),
        (KEY, "colwise", {"weight": Shard(0, 64)}),
        (OUT, "rowwise", {"weight": Shard(1, 192), "bias": R}),
        (UP, "colwise", {"weight": Shard(0), "bias": Shard(0)}),
        (UP, "colwise_rep", {"weight": Shard(0), "bias": Shard(0)}),
        (DOWN, "rowwise_split_input", {"weight": Shard(1)}),
        (EMBED, "embedding_rowwise", {"weight": Shard(0)}),
        (NORM, "replicated_with_grad_allreduce", {"weight": R}),
        (UP, "replicate", {"weight": R, "bias": R}),
        (CONV, "colwise", {"weight": Shard(1), "bias": Shard(0)}),
        (CONV, "rowwise", {"weight": Shard(0), "bias": R}),
        (QUERY, "colwise_gather_output", {"weight": Shard(0)}),
        (OUT, "rowwise_split_input", {"weight": Shard(1), "bias": R}),
    ],
)
def test_a_style_says_how_each_parameter_is_cut(
    facts: ModuleFacts, style: str, expected: dict[str, Placement]
) -> None:
    on_tp = plan_modules([facts], {facts.name: style}, TP)[facts.name].placements
    assert on_tp == {name: (placement,) for name, placement in expected.items()}
    on_both = plan_modules([facts], {facts.name: style}, DP_TP)[facts.name].placements
    assert on_both == {name: (R, placement) for name, placement in expected.items()}


@pytest.mark.parametrize(
    ("style", "splits", "restores"),
    [
        ("colwise", None, False),
        ("colwise_gather_output", None, True),
        ("rowwise", None, True),
        ("rowwise_split_input", Shard(-1), True),
        ("replicate", None, False),
    ],
)
def test_a_style_says_what_hooks_do(style: str, splits: Shard | None, restores: bool) -> None:
    plan = plan_modules([UP], {"layers.*.mlp.up": style}, TP, "model")[UP.name]
    assert (plan.splits_input, plan.restores_output) == (splits, restores)


@pytest.mark.parametrize(("num_ranks", "heads"), [(2, [6, 3]), (3, [3, 3, 3]), (4, [3, 3, 3, 0])])
def test_no_cut_separates_query_heads_from_their_key_head(num_ranks: int, heads: list[int]) -> None:
    mesh = DeviceMesh("cpu", list(range(num_ranks)), mesh_dim_names=("tp",))
    plans = plan_modules([QUERY, KEY, OUT], {"layers.*.attn.q": "colwise", "layers.*.attn.k": "colwise",
                                             "layers.*.attn.o": "rowwise"}, mesh, "model")  # fmt: skip
    sizes = []
    for facts, dim in ((QUERY, 0), (KEY, 0), (OUT, 1)):
        (cut,) = plans[facts.name].placements["weight"]
        assert isinstance(cut, Shard)
        assert cut.dim == dim
        pieces = split(facts.weights["weight"][dim], num_ranks, cut.unit)
        sizes.append([(stop - start) // 64 for start, stop in pieces])
    assert sizes == [heads, [head // 3 for head in heads], heads]


MOE_PLAN = {
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
}


def test_weights_of_experts_are_planned_one_by_one() -> None:
    plan = plan_modules([EXPERTS], MOE_PLAN, DP_TP, "model")[EXPERTS.name]
    assert plan.style == "moe_tp_experts"
    assert plan.placements == {"gate_up_proj": (R, Shard(1)), "down_proj": (R, Shard(2))}
    chosen = plan_modules([EXPERTS], {f"{EXPERTS.name}.down_proj": [Shard(0), R]}, DP_TP)[EXPERTS.name]
    assert chosen.placements == {"gate_up_proj": (R, R), "down_proj": (Shard(0), R)}
    on_dp = plan_modules([EXPERTS], MOE_PLAN, DP, "model")[EXPERTS.name]
    assert set(on_dp.placements.values()) == {(R,)}


def test_a_bias_that_stands_in_two_modules_is_cut_as_its_linear_has_it() -> None:
    head = ModuleFacts(
        name="cls.decoder", kind="linear", weights={"weight": (97, 8), "bias": (97,)}, tied={"bias": 1}
    )
    other = ModuleFacts(name="cls", kind="other", weights={"bias": (97,)}, tied={"bias": 1})
    plans = plan_modules([other, head], {"cls.decoder": "colwise_gather_output"}, TP)
    assert plans["cls"].placements == {"bias": (Shard(0),)}


def test_without_a_tp_axis_everything_is_replicated_and_nothing_is_hooked() -> None:
    plans = plan_modules(
        FACTS, {"layers.*.mlp.up": "colwise", "lm_head": "colwise_gather_output"}, DP, "model"
    )
    assert {p for plan in plans.values() for p in plan.placements.values()} == {(R,)}
    assert not any(plan.restores_output or plan.splits_input for plan in plans.values())


def test_a_tied_weight_follows_the_module_that_the_plan_names() -> None:
    for plan in ({"lm_head": "colwise_gather_output"}, {"embed": "embedding_rowwise"}):
        plans = plan_modules(FACTS, plan, TP, "model")
        assert plans["model.embed"].placements == plans["lm_head"].placements == {"weight": (Shard(0),)}
        assert plans["model.embed"].restores_output
        assert plans["lm_head"].restores_output


def test_explicit_placements_are_for_the_weight_and_ask_for_no_hooks() -> None:
    plans = plan_modules(
        FACTS, {"layers.*.mlp.up": [R, Shard(-1)], "layers.*.mlp.down": [Shard(0), R]}, DP_TP, "model"
    )
    assert plans[UP.name].placements == {"weight": (R, Shard(1)), "bias": (R, R)}
    assert plans[DOWN.name].placements == {"weight": (Shard(0), R)}
    assert not plans[UP.name].restores_output


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.*.mlp.up", "model.layers.17.mlp.up", True),
        ("model.layers.*.mlp.up", "model.layers.17.mlp.up", True),
        ("layers.*.up", "model.layers.17.mlp.up", False),
        ("layers.*.mlp.up", "model.layers.17.mlp.up_proj", False),
        ("mlp.up", "model.layers.17.mlp.up", False),
        ("layersx0", "layers.0", False),
        ("*", "lm_head", True),
    ],
)
def test_a_star_stands_for_one_part_of_a_name(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name, "model") is expected


def test_the_last_matching_pattern_counts() -> None:
    plans = plan_modules([UP], {"layers.*.mlp.up": "colwise", "layers.1.mlp.up": "replicate"}, TP, "model")
    assert plans[UP.name].placements["weight"] == (R,)


@pytest.mark.parametrize(
    ("plan", "error", "fragments"),
    [
        (
            {"layers.*.mlp.upp": "colwise"},
            SettingError,
            ["matches no module", "Close ones: 'layers.*.mlp.up'"],
        ),
        ({"lm_head": "colwize"}, SettingError, ["'colwize'", *STYLES]),
        (
            {"norm": "colwise"},
            SettingError,
            ["'model.norm' is of kind 'other', for which there is replicate"],
        ),
        ({"embed": "rowwise"}, SettingError, ["there are embedding_rowwise, replicate"]),
        (
            {"lm_head": "colwise", "embed": "replicate"},
            SettingError,
            ["one tied weight", "Give both modules"],
        ),
        ({"lm_head": "rowwise"}, SettingError, ["one tied weight"]),
        (
            {"layers.*.mlp.experts.gate_up": "packed_colwise"},
            SettingError,
            ["matches no module", "'layers.*.mlp.experts.gate_up_proj'"],
        ),
        ({"layers.*.mlp.experts": "packed_colwise"}, SettingError, ["is for parameters of experts"]),
        ({"layers.*.mlp.experts": "colwise"}, SettingError, ["there are moe_tp_experts, replicate"]),
        (
            {"layers.*.mlp.experts.down_proj": "rowwise_split_input"},
            SettingError,
            ["not for a parameter of experts", "colwise, packed_colwise, rowwise, replicate"],
        ),
        ({"layers.*.attn.uneven": "colwise"}, SettingError, ["heads cannot be cut", "64 features for 3"]),
        ({"layers.*.mlp.up": Shard(0)}, PlacementError, ["write a list: [Shard(dim=0)]"]),
        ({"layers.*.mlp.up": [Shard(0)]}, PlacementError, ["1 entries for a mesh with 2 axes"]),
        ({"layers.*.mlp.up": [R, Shard(2)]}, PlacementError, ["does not fit a tensor of 2 dims"]),
        ({"layers.*.mlp.up": [R, Partial()]}, PlacementError, ["a weight is Replicate() or Shard(dim)"]),
    ],
)
def test_a_wrong_plan_is_refused_with_what_to_write(
    plan: Plan, error: type[DTorchError], fragments: list[str]
) -> None:
    with pytest.raises(error) as caught:
        plan_modules([*FACTS, EXPERTS, UNEVEN], plan, DP_TP, "model")
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (DeviceMesh("cpu", [0, 1]), "write mesh_dim_names=('tp',)"),
        (DeviceMesh("cpu", [[0, 1]]), "write mesh_dim_names=('dp', 'tp')"),
        (DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("mp", "tp")), "mesh.unbind('mp')"),
    ],
)
def test_a_mesh_is_judged_by_the_names_of_its_axes(mesh: DeviceMesh, message: str) -> None:
    with pytest.raises(MeshError, match=re.escape(message)):
        check_mesh(mesh)
