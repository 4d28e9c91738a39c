"""Plans without a cluster: rows, bytes on each device, and what a step sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dtorch
from dtorch.parallel.exchanges import Exchange
from dtorch_runtime.errors import DTorchError, MeshError, SettingError
from tests.support.tiny_llama import tiny_llama
from tests.support.tiny_models import FAMILIES

GRID = [[0, 1], [2, 3]]
HIDDEN = 72
#: Of a hidden state of 2 x 8 tokens.
STATE = 2 * 8 * HIDDEN * 4


def mesh(devices: Any, *axes: str) -> dtorch.DeviceMesh:
    return dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes)


def planned(on: dtorch.DeviceMesh, **overrides: Any) -> dtorch.parallel.ModelPlan:
    with torch.device("meta"):
        model = tiny_llama(**overrides)
    return dtorch.plan(model, on, batch_size=2, sequence_length=8)


def test_a_row_says_where_a_weight_lies_and_what_it_makes_devices_send() -> None:
    rows = {row.name: row for row in planned(mesh(GRID, "dp", "tp")).rows}
    query = rows["model.layers.0.self_attn.q_proj.weight"]
    assert (query.shape, query.style, query.dtype) == ((72, 72), "colwise", "float32")
    assert query.bytes_by_device == {0: 48 * 72 * 4, 1: 24 * 72 * 4, 2: 48 * 72 * 4, 3: 24 * 72 * 4}
    per_device = STATE // 2  # of a state whose rows are cut over dp
    assert query.exchanges == (
        Exchange(query.name.removesuffix(".weight"), "backward", "all-reduce", ("tp",), per_device),
        Exchange(query.name, "backward", "all-reduce", ("dp",), 48 * 72 * 4),
    )
    assert "lm_head.weight" not in rows, "it is the embedding's"
    down = rows["model.layers.1.mlp.down_proj.weight"].exchanges
    assert [(e.phase, e.kind) for e in down] == [("forward", "all-reduce"), ("backward", "all-reduce")]
    assert rows["model.norm.weight"].exchanges[0].axes == ("dp",)


def test_totals_are_the_sums_of_the_rows() -> None:
    plan = planned(mesh(GRID, "pp", "tp"), tie_word_embeddings=False)
    for device, num_bytes in plan.bytes_by_device.items():
        assert num_bytes == sum(row.bytes_by_device.get(device, 0) for row in plan.rows)
    both = [*plan.exchanges("forward"), *plan.exchanges("backward")]
    assert sorted(map(str, plan.exchanges())) == sorted(map(str, both))
    sends = [exchange for exchange in plan.others if exchange.kind == "send"]
    assert sends == [
        Exchange("model.layers.1", phase, "send", ("pp",), STATE) for phase in ("forward", "backward")
    ]


@pytest.mark.parametrize(
    ("axis", "kind", "forward", "backward"),
    [
        # A device has 2 x 4 places of queries, outputs (72 features), keys and values (24), and gets half of the
        # features of the other 2 x 4; heads are 9 and 3, of which one device has 5 and 2.
        ("ulysses_cp", "all-to-all", 8 * (2 * 48 + 2 * 16) * 4, 8 * (2 * 48 + 2 * 16) * 4),
        ("ring_cp", "ring", 8 * 48 * 4, 3 * 8 * 48 * 4),
    ],
)
def test_attention_over_a_cut_sequence_sends(axis: str, kind: str, forward: int, backward: int) -> None:
    found = [e for e in planned(mesh([0, 1], axis)).others if e.name == "model.layers.0.self_attn"]
    assert found == [
        Exchange("model.layers.0.self_attn", "forward", kind, (axis,), forward),
        Exchange("model.layers.0.self_attn", "backward", kind, (axis,), backward),
    ]


def test_a_plan_prints_one_row_for_layers_that_are_alike() -> None:
    text = str(planned(mesh(GRID, "dp", "tp")))
    assert text.count("q_proj") == 1
    assert "model.layers.[0-1].self_attn.q_proj.weight" in text
    assert "2 x all-reduce over tp, 4.6 kB" in text
    assert "a step of 2 x 8 tokens, forward: 6 exchanges" in text


def test_the_model_is_not_touched_and_the_styles_can_be_given_back() -> None:
    model = tiny_llama()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    plan = dtorch.plan(model, mesh([0, 1], "tp"))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert dtorch.plan(model, mesh([0, 1], "tp"), plan.plan).rows == plan.rows


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mesh": mesh([0, 1], "mp")}, MeshError, "'mp'"),
        ({"mesh": mesh([0, 1, 2], "pp")}, SettingError, "2 layers are too few for 3 stages"),
        ({"plan": {"layers.*.up": "colwise"}}, SettingError, "matches no module"),
        ({"batch_size": 0}, SettingError, "batch_size= takes a number"),
        ({"plan": "fast"}, SettingError, "'auto'"),
        ({"model": "llama"}, SettingError, "torch.nn.Module"),
        ({"mesh": [0, 1]}, SettingError, "init_device_mesh"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: dict[str, Any], error: type[DTorchError], message: str
) -> None:
    with torch.device("meta"):
        call = {"model": tiny_llama(), "mesh": mesh([0, 1], "tp"), **arguments}
    with pytest.raises(error, match=message):
        dtorch.plan(**call)


def test_a_model_without_attention_or_a_plan_has_rows_too() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    plan = dtorch.plan(model, mesh([0, 1], "pp"), {}, batch_size=3, sequence_length=5)
    assert [row.bytes_by_device for row in plan.rows] == [{0: 96}, {0: 24}, {1: 48}, {1: 8}]
    assert [exchange.num_bytes for exchange in plan.others] == [3 * 5 * 6 * 4] * 2


@pytest.mark.parametrize(
    ("num_ranks", "forward", "backward"),
    [
        # Of 8 x 16 tokens a device has 64, and gets 64 others with the numbers and weights of two experts; terms of
        # 64 come back. So do gradients, those of the weights too.
        (2, [64 * 32 * 4, 64 * 2 * 8, 64 * 2 * 4, 64 * 32 * 4], [64 * 32 * 4, 64 * 32 * 4, 64 * 2 * 4]),
        # A device has 32. Of the others' 96 x 2 pairs a quarter is for its expert; of its own, the rest is for others.
        (4, [3 * 4 * 8, 48 * 32 * 4, 48 * 32 * 4], [48 * 32 * 4, 48 * 32 * 4]),
    ],
)
def test_what_experts_exchange(num_ranks: int, forward: list[int], backward: list[int]) -> None:
    with torch.device("meta"):
        model = FAMILIES["mixtral"].build(num_local_experts=4, num_experts_per_tok=2)
    on = mesh(list(range(num_ranks)), "ep")
    plan = dtorch.plan(model, on, batch_size=8, sequence_length=16)
    row = next(row for row in plan.rows if row.name.endswith("experts.down_proj"))
    assert row.bytes_by_device == dict.fromkeys(on.devices, 4 // num_ranks * 32 * 48 * 4)
    for phase, expected in (("forward", forward), ("backward", backward)):
        found = [e for e in plan.exchanges(phase) if e.name == "model.layers.0.mlp.experts"]
        assert [exchange.num_bytes for exchange in found] == expected
        assert {exchange.axes for exchange in found} == {("ep",)}
    travels = num_ranks > 2
    assert any(exchange.is_expected for exchange in plan.exchanges()) == travels
    assert ("expected bytes are those of tokens that go to all experts alike" in str(plan)) == travels
