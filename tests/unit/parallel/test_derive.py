"""What is recognised in models that carry no plan, by names and shapes."""

from __future__ import annotations

import pytest
import torch

from dtorch.parallel.derive import Derived, derive_plan
from dtorch.parallel.facts import auto_plan, collect_facts
from dtorch.parallel.tp_plan import ModuleFacts, ModuleKind
from tests.support.tiny_models import FAMILIES


def layer(name: str, num_in: int, num_out: int, kind: ModuleKind = "linear") -> ModuleFacts:
    shape = (num_in, num_out) if kind == "conv1d" else (num_out, num_in)
    return ModuleFacts(name=name, kind=kind, weights={"weight": shape})


def norm(name: str) -> ModuleFacts:
    return ModuleFacts(name=name, kind="other", weights={"weight": (8,)})


#: Modules, and what is derived of them.
CASES: dict[str, tuple[list[ModuleFacts], dict[str, str]]] = {
    "attention in one module": (
        [layer(f"l.0.attn.{name}", 8, 8) for name in ("q_proj", "k_proj", "v_proj", "o_proj")],
        {
            "l.0.attn.q_proj": "colwise",
            "l.0.attn.k_proj": "colwise",
            "l.0.attn.v_proj": "colwise",
            "l.0.attn.o_proj": "rowwise",
        },
    ),
    "few key heads, and a norm of queries": (
        [
            layer("attn.q", 8, 16),
            layer("attn.k", 8, 4),
            norm("attn.q_norm"),
            layer("attn.v", 8, 4),
            layer("attn.o", 16, 8),
        ],
        {"attn.q": "colwise", "attn.k": "colwise", "attn.v": "colwise", "attn.o": "rowwise"},
    ),
    "the output of attention in a module beside": (
        [layer(f"attention.self.{name}", 8, 8) for name in ("query", "key", "value")]
        + [layer("attention.output.dense", 8, 8)],
        {
            "attention.self.query": "colwise",
            "attention.self.key": "colwise",
            "attention.self.value": "colwise",
            "attention.output.dense": "rowwise",
        },
    ),
    "queries, keys and values of one layer": (
        [layer("h.0.attn.c_attn", 8, 24, "conv1d"), layer("h.0.attn.c_proj", 8, 8, "conv1d")],
        {"h.0.attn.c_attn": "colwise_gather_output", "h.0.attn.c_proj": "rowwise_split_input"},
    ),
    "keys and values of one layer": (
        [
            layer("cross.c_attn", 8, 16, "conv1d"),
            layer("cross.q_attn", 8, 8, "conv1d"),
            layer("cross.c_proj", 8, 8, "conv1d"),
        ],
        {
            "cross.c_attn": "colwise_gather_output",
            "cross.q_attn": "colwise_gather_output",
            "cross.c_proj": "rowwise_split_input",
        },
    ),
    "a feed-forward block": (
        [norm("l.norm"), layer("l.fc1", 8, 32), layer("l.fc2", 32, 8)],
        {"l.fc1": "colwise", "l.fc2": "rowwise"},
    ),
    "a gated one": (
        [layer("m.wi_0", 8, 32), layer("m.wi_1", 8, 32), layer("m.wo", 32, 8)],
        {"m.wi_0": "colwise", "m.wi_1": "colwise", "m.wo": "rowwise"},
    ),
    "one in two modules": (
        [layer("l.intermediate.dense", 8, 32), layer("l.output.dense", 32, 8)],
        {"l.intermediate.dense": "colwise", "l.output.dense": "rowwise"},
    ),
    "a norm between is not elementwise": (
        [layer("m.up", 8, 32), norm("m.norm"), layer("m.down", 32, 8)],
        {},
    ),
    "nothing widens": ([layer("m.a", 8, 8), layer("m.b", 8, 8)], {}),
    "the two are far apart": ([layer("a.b.up", 8, 32), layer("c.d.down", 32, 8)], {}),
    "attention without an output": (
        [layer(f"l.attn.{name}", 8, 8) for name in ("q", "k", "v")] + [layer("l.fc", 8, 9)],
        {},
    ),
    "no values": ([layer("attn.q", 8, 8), layer("attn.k", 8, 8), layer("attn.o", 8, 8)], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_known_by_names_and_shapes(name: str) -> None:
    facts, plan = CASES[name]
    whole = tuple(f.name for f in facts if f.kind != "other" and f.name not in plan)
    assert derive_plan(facts) == Derived(plan, whole)


def test_the_layer_that_makes_logits_is_cut_by_classes_and_gathered() -> None:
    facts = [layer("up", 8, 32), layer("head", 32, 8)]
    assert derive_plan(facts, ["head"]) == Derived({"head": "colwise_gather_output"}, ("up",))


@pytest.mark.parametrize(
    ("family", "count", "whole"),
    [
        ("gpt2", 9, ()),
        ("bert", 13, ("cls.predictions.transform.dense",)),
        ("t5", 33, ()),
        ("t5 gated", 37, ()),
        ("vit", 12, ("classifier",)),
    ],
)
def test_models_that_carry_no_plan_get_one_and_a_note(
    family: str, count: int, whole: tuple[str, ...]
) -> None:
    with torch.device("meta"):
        model = FAMILIES[family].build()
    derived = auto_plan(model, collect_facts(model))
    assert len(derived.plan) == count
    assert "derived" in derived.notes[0]
    assert [note.partition(": ")[2] for note in derived.notes[1:]] == ([", ".join(whole)] if whole else [])
