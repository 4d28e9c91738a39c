"""What is read from a model: modules, head groups, tied weights, the plan it carries, buffers without values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from dtorch.parallel.buffers import restore_buffers
from dtorch.parallel.facts import auto_plan, base_prefix, collect_facts
from dtorch_runtime.errors import UnsupportedError

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=72,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=8,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(CONFIG)


def test_modules_with_weights_are_collected(model: nn.Module) -> None:
    facts = {f.name: f for f in collect_facts(model)}
    assert facts["model.embed_tokens"].kind == "embedding"
    assert facts["model.norm"].kind == "other"
    query = facts["model.layers.1.self_attn.q_proj"]
    assert (query.kind, query.weights, query.num_head_groups) == ("linear", {"weight": (72, 72)}, 3)
    assert facts["model.layers.0.self_attn.o_proj"].num_head_groups == 3
    assert facts["model.layers.0.mlp.up_proj"].num_head_groups is None
    assert facts["lm_head"].tied == facts["model.embed_tokens"].tied


def test_the_plan_of_a_config_and_of_the_head_are_joined(model: nn.Module) -> None:
    assert base_prefix(model) == "model"
    plan = auto_plan(model, collect_facts(model)).plan
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"
    assert plan["lm_head"] in ("colwise_gather_output", "colwise_rep")


def test_a_base_model_has_no_prefix() -> None:
    with torch.device("meta"):
        base = LlamaModel(CONFIG)
    assert base_prefix(base) == ""
    assert auto_plan(base, collect_facts(base)).plan["layers.*.self_attn.q_proj"] == "colwise"


def test_a_model_without_a_plan_says_how_to_write_one() -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match=r"Sequential carries no .* plan=\{'0': 'colwise'\}"):
        auto_plan(plain, collect_facts(plain))


def test_styles_that_are_not_known_are_replicated_with_a_warning(model: nn.Module) -> None:
    class Mixture(LlamaForCausalLM):
        _tp_plan = {"lm_head": "grouped_gemm", "model.gone": "grouped_gemm"}

    with torch.device("meta"):
        mixture = Mixture(CONFIG)
    with pytest.warns(UserWarning, match=r"\{'lm_head': 'grouped_gemm'\}"):
        assert "lm_head" not in auto_plan(mixture, collect_facts(mixture)).plan


def test_buffers_without_values_get_what_the_constructor_gives() -> None:
    with torch.device("meta"):
        empty = LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        restore_buffers(empty)
    expected = dict(LlamaForCausalLM(CONFIG).named_buffers())
    assert expected
    for name, buffer in empty.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    assert empty.lm_head.weight.is_meta


class Positions(nn.Module):
    def __init__(self, config: int) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("positions", torch.arange(config), persistent=False)


class Masked(nn.Module):
    def __init__(self, length: int, mask: torch.Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(length), persistent=False)
        self.register_buffer("stored", torch.ones(length), persistent=True)


def test_a_module_made_from_a_config_is_built_again() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Positions(5))
    restore_buffers(model)
    assert model.get_buffer("0.positions").tolist() == [0, 1, 2, 3, 4]


def test_a_buffer_that_nobody_can_make_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Masked(3))
    with pytest.raises(UnsupportedError, match=r"0\.mask is on 'meta'.*outside torch\.device"):
        restore_buffers(model)
