"""``plan="search"`` by costs that are given: what is cut, what is whole, and what does not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import dtorch
from dtorch.parallel import ClusterCosts, LinkCosts
from dtorch.parallel.choices import Option, cheapest
from dtorch.parallel.cuts import piece_placements
from dtorch.parallel.decide import decide
from dtorch.parallel.distribute import _warn_of_zero
from dtorch.parallel.measure import line_through, time_of_one
from dtorch.parallel.search import find_blocks
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.layout import Layout
from tests.support.tiny_models import FAMILIES

GRID = [[0, 1], [2, 3]]
FAST = LinkCosts(latency_s=0, bytes_per_s=1e12)
SLOW = LinkCosts(latency_s=1e-3, bytes_per_s=1e6)
MODELS = ("llama", "gpt2", "mixtral")
#: Elements of a parameter of float32 that is trained with AdamW take so many bytes: itself, a gradient, two moments.
TRAINED_BYTES = 16


def mesh(devices: Any, *axes: str) -> dtorch.DeviceMesh:
    return dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes)


def costs(tp: LinkCosts, dp: LinkCosts = FAST, flops_per_s: float = 1e9) -> ClusterCosts:
    links = {"tp": tp, "dp": dp, "ulysses_cp": dp, "ring_cp": dp}
    return ClusterCosts(flops_per_s=flops_per_s, links=links)


def built(family: str, **fields: Any) -> Any:
    with torch.device("meta"):
        return FAMILIES[family].build(**fields)


def searched(
    model: nn.Module, on: dtorch.DeviceMesh, given: ClusterCosts, **arguments: Any
) -> tuple[dtorch.parallel.ModelPlan, dtorch.parallel.Found]:
    plan = dtorch.plan(model, on, "search", costs=given, batch_size=4, sequence_length=16, **arguments)
    assert plan.found is not None
    return plan, plan.found


# ---- the choice ----

OPTIONS = st.builds(
    Option, st.integers(0, 6).map(float), st.integers(0, 6), st.integers(0, 2)
)  # whole numbers, so that sums are exact


@settings(max_examples=100, deadline=None)
@given(
    blocks=st.lists(st.lists(OPTIONS, min_size=1, max_size=3), max_size=5),
    limit=st.none() | st.integers(0, 20),
)
def test_the_choice_is_that_of_trying_all(blocks: list[list[Option]], limit: int | None) -> None:
    def total(choice: Any) -> tuple[float, int, int]:
        taken = [options[index] for options, index in zip(blocks, choice, strict=True)]
        return (
            sum(o.seconds for o in taken),
            sum(o.num_cuts for o in taken),
            sum(o.memory_bytes for o in taken),
        )

    every = [total(choice) for choice in product(*(range(len(options)) for options in blocks))]
    fitting = [one for one in every if limit is None or one[2] <= limit]
    found = cheapest(blocks, limit)
    assert (None if found is None else total(found)) == min(fitting, default=None)


def test_many_blocks_that_are_alike_are_decided_together() -> None:
    pairs = [[Option(2.0, 4), Option(3.0, 1, 1)], [Option(1.0, 2), Option(1.5, 1, 1)]]
    found = cheapest(pairs * 200, limit_bytes=900)
    assert found is not None
    taken = [options[index] for options, index in zip(pairs * 200, found, strict=True)]
    # Cutting one of the first kind saves 3 bytes a second, one of the second kind 2.
    assert sum(option.memory_bytes for option in taken) <= 900
    assert (sum(found[0::2]), sum(found[1::2])) == (100, 0)


# ---- blocks ----


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]]),
        ("gpt2", [["c_attn", "c_proj"], ["c_fc", "c_proj"]]),
        ("bert", [["query", "key", "value", "dense"], ["dense", "dense"]]),
        ("mixtral", [["q_proj", "k_proj", "v_proj", "o_proj"]]),
    ],
)
def test_what_is_right_only_together_is_one_block(family: str, expected: list[list[str]]) -> None:
    decision = decide(built(family), mesh([0, 1], "tp"), "auto")
    blocks = find_blocks(decision.facts, decision.plans)
    assert sorted(f.name for block in blocks for f in block) == sorted(f.name for f in decision.facts)
    for layer in ("0", "1"):
        in_layer = [[f.name for f in b] for b in blocks if f".{layer}." in b[0].name and len(b) > 1]
        assert [[name.rpartition(".")[2] for name in names] for names in in_layer] == expected


def test_tied_weights_are_one_block_and_layers_in_an_unknown_order_are_all_one() -> None:
    model = built("llama", tie_word_embeddings=True)
    decision = decide(model, mesh([0, 1], "tp"), "auto")
    names = [[f.name for f in block] for block in find_blocks(decision.facts, decision.plans)]
    assert ["model.embed_tokens", "lm_head"] in names
    odd = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    decision = decide(
        odd, mesh([0, 1], "tp"), {"0": "rowwise", "1": "colwise", "2": "colwise", "3": "rowwise"}
    )
    assert len(find_blocks(decision.facts, decision.plans)) == 1


# ---- models ----


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_links_decide_between_cut_and_whole(family: str, training: bool) -> None:
    model, on = built(family), mesh(GRID, "dp", "tp")
    plan, found = searched(model, on, costs(FAST), training=training)
    assert all(v.num_cut == v.num_blocks for v in found.verdicts if v.name != "model.embed_tokens")
    assert found.chosen.compute_s == pytest.approx(found.auto.compute_s)
    assert dtorch.plan(model, on, plan.plan).plan == plan.plan, "it can be given back"
    plan, found = searched(model, on, costs(SLOW), training=training)
    assert (plan.plan, found.chosen) == ({}, found.replicated)
    assert all(row.layout.placements == (dtorch.Replicate(),) * 2 for row in plan.rows)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    "axes", [("tp",), ("dp", "tp"), ("pp", "tp"), ("ulysses_cp", "tp"), ("ring_cp", "tp"), ("dp",)]
)
@pytest.mark.parametrize("bytes_per_s", [1e7, 1e9])
def test_it_is_never_worse_than_auto_and_than_whole_weights(
    family: str, axes: tuple[str, ...], bytes_per_s: float
) -> None:
    on = mesh(GRID if len(axes) == 2 else [0, 1], *axes)
    link = LinkCosts(latency_s=1e-5, bytes_per_s=bytes_per_s)
    _, found = searched(built(family), on, costs(link, link))
    assert found.chosen.seconds <= min(found.auto.seconds, found.replicated.seconds) * (1 + 1e-12)
    # The limit at which just one of the two fits, and any that lies between.
    low, high = found.auto.memory_bytes, found.replicated.memory_bytes
    for limit in {low, (low + high) // 2, high}:
        _, limited = searched(built(family), on, costs(link, link), memory_limit_bytes=limit)
        assert limited.chosen.memory_bytes <= limit
        fitting = [c.seconds for c in (found.auto, found.replicated) if c.memory_bytes <= limit]
        assert limited.chosen.seconds <= min(fitting) * (1 + 1e-12)


@pytest.mark.parametrize("family", MODELS)
def test_costs_of_auto_are_the_bytes_of_its_plan(family: str) -> None:
    on, model = mesh(GRID, "dp", "tp"), built(family)
    link = LinkCosts(latency_s=0, bytes_per_s=1)
    _, found = searched(model, on, costs(link, link))
    auto = dtorch.plan(model, on, batch_size=4, sequence_length=16)
    sent = sum(exchange.num_bytes for exchange in auto.exchanges())
    assert found.auto.communication_s == pytest.approx(sent)
    assert found.auto.memory_bytes == max(auto.bytes_by_device.values()) * TRAINED_BYTES // 4


def test_a_limit_forces_no_more_cuts_than_it_needs() -> None:
    model, on, dear = built("llama"), mesh([0, 1], "tp"), costs(SLOW)
    plan, free = searched(model, on, dear)
    assert plan.plan == {}
    limit = (free.auto.memory_bytes + free.replicated.memory_bytes) // 2
    plan, found = searched(model, on, dear, memory_limit_bytes=limit)
    num_cut = sum(verdict.num_cut for verdict in found.verdicts)
    assert 0 < num_cut < sum(verdict.num_blocks for verdict in found.verdicts)
    assert found.auto.seconds > found.chosen.seconds > found.replicated.seconds
    assert max(plan.bytes_by_device.values()) * TRAINED_BYTES // 4 == found.chosen.memory_bytes <= limit
    lines = str(plan).splitlines()
    assert lines[-len(found.lines()) :] == list(found.lines()), "the explanation is at the end"
    assert [line for line in lines if "does not fit" in line] == [
        line for line in lines if "all replicated" in line
    ]


def test_a_tighter_limit_forces_zero_and_the_tightest_is_refused() -> None:
    model, on = built("llama"), mesh(GRID, "dp", "tp")
    dear = costs(SLOW, SLOW)
    _, free = searched(model, on, dear)
    assert free.zero_stage == 0
    _, found = searched(model, on, dear, memory_limit_bytes=free.auto.memory_bytes - 1)
    assert found.zero_stage > 0
    zero = f"dtorch.parallel.zero(model, optimizer, stage={found.zero_stage})"
    assert any(zero in line for line in found.lines())
    with pytest.warns(UserWarning, match=re.escape(zero)):
        _warn_of_zero(found)
    _warn_of_zero(free)
    assert any("auto" in line and line.endswith("does not fit") for line in found.lines())
    least = free.auto.memory_bytes // 2  # of every weight some dim that is not cut yet is even
    with pytest.raises(
        SettingError, match=rf"{least} bytes with ZeRO stage 3, and memory_limit_bytes={least - 1}"
    ):
        searched(model, on, dear, memory_limit_bytes=least - 1)
    _, found = searched(model, on, dear, memory_limit_bytes=least)
    assert (found.zero_stage, found.chosen.memory_bytes) == (3, least)


def test_what_is_not_trained_and_what_an_optimizer_keeps_count() -> None:
    model, on = built("llama"), mesh([0, 1], "tp")
    _, inference = searched(model, on, costs(FAST), training=False)
    _, sgd = searched(model, on, costs(FAST), optimizer_bytes=0)
    _, adamw = searched(model, on, costs(FAST))
    sizes = [found.auto.memory_bytes for found in (inference, sgd, adamw)]
    assert sizes == [sizes[0], 2 * sizes[0], 4 * sizes[0]]
    # Linear layers multiply 3 times as much, attention 3.5 times.
    scores = model.config.num_hidden_layers * 4 * 16**2 * model.config.hidden_size
    attention_s = 4 * scores / 2 / 1e9
    expected = 3 * inference.auto.compute_s + 0.5 * attention_s
    assert adamw.auto.compute_s == pytest.approx(expected)
    model.requires_grad_(False)
    _, frozen = searched(model, on, costs(FAST))
    assert frozen.auto.memory_bytes == sizes[0]


def test_pieces_of_zero_are_cut_by_the_dim_whose_largest_piece_is_smallest() -> None:
    layout = Layout(mesh(GRID, "dp", "tp"), (dtorch.Replicate(), dtorch.Shard(0)))
    assert piece_placements((4, 6), layout, "dp") == (dtorch.Shard(1), dtorch.Shard(0))
    assert piece_placements((4, 3, 8), layout, 0) == (dtorch.Shard(2), dtorch.Shard(0))
    assert piece_placements((4,), layout, "dp") is None, "its only dim is cut"
    assert piece_placements((4, 6), layout, "tp") is None, "it is not whole there"


class Widening(nn.Module):
    """8 features to 32 and back: a feed-forward block, which ``"auto"`` cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)


@pytest.mark.parametrize(
    ("arguments", "num_accesses"),
    [
        # Of AdamW: the parameter is read, decayed, read and written, its gradient too, and its two moments.
        ({}, 22),
        ({"optimizer_bytes": 0}, 4),
        ({"optimizer_bytes": 4}, 13),
        ({"training": False}, 0),
    ],
)
def test_what_ops_and_the_optimizer_read_and_write_takes_time(
    arguments: dict[str, Any], num_accesses: int
) -> None:
    free = costs(LinkCosts(latency_s=0, bytes_per_s=1e30), flops_per_s=1e30)
    given = replace(free, memory_bytes_per_s=4.0)  # a number of float32 a second
    passes = 1 if arguments.get("training") is False else 3
    num_tokens = 4 * 16
    _, found = searched(Widening(), mesh([0, 1], "tp"), given, **arguments)
    numbers = {
        "replicated": ((32 + 8) * num_tokens, 8 * 32 + 32 + 32 * 8 + 8),
        "auto": ((16 + 8) * num_tokens, 8 * 16 + 16 + 16 * 8 + 8),
    }
    for name, (made, parameters) in numbers.items():
        expected = made * passes * 6 + parameters * num_accesses
        assert getattr(found, name).compute_s == pytest.approx(expected), name
    assert found.chosen == found.auto


@pytest.mark.parametrize(("training", "passes"), [(True, 3.5), (False, 1.0)])
def test_attention_multiplies_with_the_square_of_the_length(training: bool, passes: float) -> None:
    """Of twice the tokens, linear layers multiply twice as much, and attention four times."""
    model, on, batch, length = built("llama"), mesh([0, 1], "tp"), 4, 16
    free = costs(LinkCosts(latency_s=0, bytes_per_s=1e30), flops_per_s=1.0)
    config = model.config
    one, two = (
        dtorch.plan(
            model, on, "search", batch_size=batch, sequence_length=size, training=training, costs=free
        ).found
        for size in (length, 2 * length)
    )
    assert one is not None
    assert two is not None
    scores = config.num_hidden_layers * batch * length**2 * config.hidden_size
    for name, num_ranks in (("replicated", 1), ("auto", 2)):
        found = getattr(two, name).compute_s - 2 * getattr(one, name).compute_s
        assert found / 2 == pytest.approx(4 * scores * passes / num_ranks), name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_are_read_and_written_by_each_head(family: str) -> None:
    model, on, length = built(family), mesh([0, 1], "tp"), 16
    given = replace(costs(LinkCosts(latency_s=0, bytes_per_s=1e30), flops_per_s=1e30), memory_bytes_per_s=4.0)
    one, two = (
        dtorch.plan(
            model, on, "search", batch_size=4, sequence_length=size, training=False, costs=given
        ).found
        for size in (length, 2 * length)
    )
    assert one is not None
    assert two is not None
    config = model.config
    num_scores = config.num_hidden_layers * config.num_attention_heads * 4 * length**2
    for name, num_ranks in (("replicated", 1), ("auto", 2)):
        found = getattr(two, name).compute_s - 2 * getattr(one, name).compute_s
        assert found / 2 == pytest.approx(6 * num_scores / num_ranks), name


def test_a_cut_that_products_are_not_worth_may_be_worth_what_memory_takes() -> None:
    model, on = Widening(), mesh([0, 1], "tp")
    given = costs(LinkCosts(latency_s=1e-3, bytes_per_s=1e9), flops_per_s=1e9)
    plan, without = searched(model, on, given)
    assert plan.plan == {}
    plan, found = searched(model, on, replace(given, memory_bytes_per_s=1e6))
    assert found.chosen == found.auto
    assert found.auto.communication_s == without.auto.communication_s


def test_pieces_of_zero_are_optimized_by_a_device_each() -> None:
    given = replace(costs(FAST, flops_per_s=1e30), memory_bytes_per_s=1e6)
    _, free = searched(built("llama"), mesh([0, 1], "dp"), given)
    _, found = searched(
        built("llama"), mesh([0, 1], "dp"), given, memory_limit_bytes=free.chosen.memory_bytes - 1
    )
    assert found.zero_stage > 0
    assert found.chosen.compute_s < free.chosen.compute_s


@pytest.mark.parametrize(
    ("one_s", "all_s", "expected"),
    [(1.0, 5.0, 1.0), (0.0, 8.0, 2.0), (3.0, 2.5, 0.5), (1.0, 1.0, 0.2)],
    ids=["a wait left out", "no wait", "noise", "nothing between"],
)
def test_the_time_of_one_call_is_never_nothing(one_s: float, all_s: float, expected: float) -> None:
    assert time_of_one(one_s, all_s, 4) == pytest.approx(expected)


def test_the_line_through_two_measurements_is_never_below_zero() -> None:
    link = line_through((1e3, 2e-3), (1e6, 3e-3))
    assert link.latency_s + 1e3 / link.bytes_per_s == pytest.approx(2e-3)
    assert link.latency_s + 1e6 / link.bytes_per_s == pytest.approx(3e-3)
    for noise in [((1e3, 2e-3), (1e6, 1e-3)), ((1e3, 1e-6), (1e6, 1e-1))]:
        link = line_through(*noise)
        assert link.latency_s >= 0
        assert link.bytes_per_s == pytest.approx(1e6 / noise[1][1], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"plan": "auto", "memory_limit_bytes": 10}, "memory_limit_bytes= is for plan='search'"),
        ({"plan": {}, "training": False}, "training= is for plan='search'"),
        ({"memory_limit_bytes": 0}, "a number of bytes, 1 or more"),
        ({"memory_limit_bytes": True}, "a number of bytes, 1 or more"),
        ({"optimizer_bytes": -1}, "a number of bytes, 0 or more"),
        ({"training": "yes"}, "training= takes True or False"),
        ({"costs": 3.0}, "ClusterCosts"),
        ({"costs": ClusterCosts(flops_per_s=1.0)}, "no link for the mesh axis 'tp'"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: dict[str, Any], message: str) -> None:
    call = {
        "plan": "search",
        **({"costs": costs(FAST)} if arguments.get("plan") is None else {}),
        **arguments,
    }
    with pytest.raises(SettingError, match=message):
        dtorch.plan(built("llama"), mesh([0, 1], "tp"), **call)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinkCosts(latency_s=-1.0, bytes_per_s=1.0), "latency_s= takes a number 0 or more"),
        (lambda: LinkCosts(latency_s=0.0, bytes_per_s=0.0), "bytes_per_s= takes a number above 0"),
        (lambda: ClusterCosts(flops_per_s=float("nan")), "flops_per_s= takes a number above 0"),
        (
            lambda: ClusterCosts(flops_per_s=1.0, memory_bytes_per_s=0.0),
            "memory_bytes_per_s= takes a number above",
        ),
    ],
)
def test_costs_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()
