"""``parallelize`` on meshes with stages: outputs, tokens and gradients are plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtorch
from dtorch.parallel import LinkCosts, measure
from dtorch_runtime.errors import DTorchError, MeshError, SettingError
from tests.support.tiny_llama import VOCABULARY, prompt, tiny_llama
from tests.support.tiny_models import FAMILIES

NUM_TOKENS = 5

MESHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "pp=2": ([0, 2], ("pp",)),
    "tp=2 x pp=2": ([[0, 1], [2, 3]], ("tp", "pp")),
    "pp=2 x dp=2": ([[0, 1], [2, 3]], ("pp", "dp")),
}

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}


def made(name: str, **fields: Any) -> Callable[[], Any]:
    """A maker of a tiny causal model of transformers; the same weights each time."""

    def make() -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**(_SIZES | fields))
        head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        return getattr(transformers, name + head)(config).eval()

    return make


MODELS: dict[str, Callable[[], Any]] = {
    "llama": made("Llama", tie_word_embeddings=False),
    "llama with a tied head": made("Llama", tie_word_embeddings=True),
    "qwen2": made("Qwen2"),
    "mistral": made("Mistral", sliding_window=5),
}


#: Each model and each mesh once; the other pairs are slow tests.
QUICK = (("llama with a tied head", "pp=2"), ("llama", "pp=2 x dp=2"), ("mistral", "tp=2 x pp=2"))


def mesh_of(name: str) -> dtorch.DeviceMesh:
    devices, axes = MESHES[name]
    return dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes)


def tokens(model: Any, ids: torch.Tensor) -> list[list[int]]:
    return model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0).tolist()


def check_model(plain: Any, model: Any) -> None:
    """Logits, greedy tokens, loss and gradients of one training step."""
    ids = prompt(batch=2)
    with torch.no_grad():
        torch.testing.assert_close(model(ids.to("dtorch")).logits.cpu(), plain(ids).logits, rtol=0, atol=1e-4)
    assert tokens(model, ids.to("dtorch")) == tokens(plain, ids)
    expected = plain(input_ids=ids, labels=ids).loss
    expected.backward()
    remote = ids.to("dtorch")
    loss = model(input_ids=remote, labels=remote).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad.placements == ours.placements, key
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if (name, mesh) in QUICK else pytest.mark.slow)
        for name in MODELS
        for mesh in MESHES
    ],
)
def test_a_model_in_stages_is_the_model(name: str, mesh: str) -> None:
    check_model(MODELS[name](), dtorch.parallelize(MODELS[name](), mesh_of(mesh)))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("mesh", ["pp=2", pytest.param("pp=2 x dp=2", marks=pytest.mark.slow)])
def test_a_model_whose_config_has_no_plan_is_in_stages_too(mesh: str) -> None:
    make = made("GPT2", **_GPT2)
    check_model(make(), dtorch.parallelize(make(), mesh_of(mesh), plan={}))


@pytest.mark.usefixtures("cluster")
def test_weights_and_caches_live_on_the_mesh_of_their_stage() -> None:
    mesh = mesh_of("tp=2 x pp=2")
    first, last = mesh.unbind("pp")
    model = dtorch.parallelize(made("Llama", tie_word_embeddings=False)(), mesh)
    places = {name: parameter.device_mesh for name, parameter in model.named_parameters()}
    assert {places[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1)} == {first}
    assert places["model.embed_tokens.weight"] == first
    assert places["model.layers.2.mlp.up_proj.weight"] == last
    assert places["model.norm.weight"] == places["lm_head.weight"] == last
    with torch.inference_mode():
        output = model(prompt(batch=2).to("dtorch"))
        assert model(prompt(batch=2)).logits.device_mesh == last, (
            "a plain caller's results stay where they are"
        )
    assert [layer.keys.device_mesh for layer in output.cache.layers] == [first, first, last]


@pytest.mark.usefixtures("cluster")
def test_a_captured_step_with_a_static_cache_goes_through_the_stages() -> None:
    @dtorch.capture
    def step(model: Any, token: Any, cache: Any) -> Any:
        return model(input_ids=token, cache=cache).logits[:, -1:].argmax(-1)

    ids = prompt(batch=2)
    model = dtorch.parallelize(tiny_llama(), mesh_of("tp=2 x pp=2"))
    with torch.no_grad():
        cache = dtorch.parallel.static_cache(model, 32, batch_size=2)
        assert len({layer.keys.device_mesh for layer in cache.layers}) == 2
        found = [ids.to("dtorch"), step.__wrapped__(model, ids.to("dtorch"), cache)]
        for _ in range(NUM_TOKENS - 1):
            found.append(step(model, found[-1], cache))
    assert torch.cat(found, 1).tolist() == tokens(tiny_llama(), ids)


class Net(nn.Module):
    """Makes tensors of its own in front of, between and behind its layers; may compute these again for backward."""

    def __init__(self, computes_again: bool = False) -> None:
        super().__init__()
        self.computes_again = computes_again
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + torch.ones(8, device=x.device)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.computes_again else layer(x)
            x = x.relu() * torch.linspace(0, 1, 8, device=x.device)
        return F.cross_entropy(self.head(x), labels)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("computes_again", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_plain_model_follows_its_layers_and_is_trained(mesh: str, computes_again: bool) -> None:
    torch.manual_seed(0)
    plain = Net(computes_again)
    model = dtorch.parallelize(copy.deepcopy(plain), mesh_of(mesh), plan={})
    x, labels = torch.randn(6, 6), torch.randint(0, 4, (6,))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(3):
        losses = [plain(x, labels=labels), model(x, labels=labels)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-4)


@pytest.mark.usefixtures("cluster")
def test_an_error_inside_a_stage_leaves_the_mesh_of_the_thread_as_it_was() -> None:
    model = dtorch.parallelize(nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3)), mesh_of("pp=2"), plan={})
    before = dtorch.Graph.default_graph().default_mesh
    for _ in range(2):  # the next call is one again
        with pytest.raises(RuntimeError, match="reduction dim"):
            model(torch.ones(1, 2))
        assert dtorch.Graph.default_graph().default_mesh == before


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("devices", "axes", "error", "message"),
    [
        ([0, 1, 2, 3], ("pp",), SettingError, "3 layers are too few for 4 stages"),
        ([[0, 1], [2, 9]], ("pp", "tp"), MeshError, "9"),
        ([0, 1], ("mp",), MeshError, "'mp'"),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_stays_as_it_is(
    devices: Any, axes: tuple[str, ...], error: type[DTorchError], message: str
) -> None:
    model = MODELS["llama"]()
    with pytest.raises(error, match=message):
        dtorch.parallelize(model, dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes))
    assert not any(isinstance(parameter, dtorch.Tensor) for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.usefixtures("cluster")
def test_a_plan_that_is_searched_for_gives_the_same_and_the_cluster_is_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[str] = []

    def counted(graph: Any, mesh: dtorch.DeviceMesh, axis: str) -> LinkCosts:
        measured.append(axis)
        return link(graph, mesh, axis)

    def counted_products(graph: Any, mesh: dtorch.DeviceMesh) -> float:
        measured.append("products")
        return products(graph, mesh)

    link, products = measure._link, measure._flops_per_s
    monkeypatch.setattr(measure, "_link", counted)
    monkeypatch.setattr(measure, "_flops_per_s", counted_products)
    plain, mesh = MODELS["llama"](), dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    found = dtorch.plan(plain, mesh, "search", batch_size=2, sequence_length=7).found
    assert found is not None
    assert found.chosen.seconds <= min(found.auto.seconds, found.replicated.seconds) * (1 + 1e-12)
    # Some layers have to be cut, and there is room for others.
    limit = (found.auto.memory_bytes + found.replicated.memory_bytes) // 2
    model = dtorch.parallelize(MODELS["llama"](), mesh, "search", memory_limit_bytes=limit)
    assert measured == ["products", "tp"]
    other = dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    assert dtorch.plan(plain, other, "search").found is not None
    assert measured == ["products", "tp", "dp"], "the same devices"
    report = dtorch.parallel.describe(model)
    assert 0 < 4 * max(report.bytes_by_device.values()) <= limit, "with gradients and moments of AdamW"
    assert "searched for" in str(report)
    check_model(plain, model)


@pytest.mark.usefixtures("cluster")
def test_a_plan_that_cuts_the_heads_of_some_layers_has_caches_to_fit() -> None:
    plain, mesh = MODELS["llama"](), dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    attention: dict[str, Any] = {f"layers.1.self_attn.{name}_proj": "colwise" for name in "qkv"}
    model = dtorch.parallelize(MODELS["llama"](), mesh, {**attention, "layers.1.self_attn.o_proj": "rowwise"})
    cache = dtorch.parallel.static_cache(model, 16, batch_size=2)
    placements = [layer.keys.placements for layer in cache.layers]
    assert placements == [(dtorch.Replicate(),), (dtorch.Shard(1),), (dtorch.Replicate(),)]
    ids = prompt(batch=2)
    with torch.inference_mode():
        logits = model(input_ids=ids.to("dtorch"), cache=cache).logits
        torch.testing.assert_close(logits.cpu(), plain(ids).logits, rtol=0, atol=1e-4)
    assert [layer.keys.placements for layer in cache.layers] == placements


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("mesh", ["pp=2", "tp=2 x pp=2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_transformers_is_itself_in_stages(family: str, mesh: str) -> None:
    made = FAMILIES[family]
    plain, batch = made.build(), made.batch(rows=2)
    model = dtorch.parallelize(made.build(), mesh_of(mesh))
    remote = {name: value.to("dtorch") for name, value in batch.items()}
    with torch.no_grad():
        expected = plain(**batch).logits
        torch.testing.assert_close(model(**remote).logits.cpu(), expected, rtol=0, atol=1e-4)
        if "input_ids" in batch and plain.can_generate():
            assert tokens(model, remote["input_ids"]) == tokens(plain, batch["input_ids"])
