"""Models of transformers as they are, of every family, on meshes: logits, tokens and gradients are plain PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch_runtime.errors import DTorchError, MeshError, SettingError
from tests.support.clusters import cluster_of
from tests.support.leaks import LeakWatch
from tests.support.tiny_models import FAMILIES

NUM_TOKENS = 6
MESHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "one device": ([3], ("tp",)),
    "tp=2": ([0, 2], ("tp",)),
    "dp=2": ([1, 2], ("dp",)),
    "dp=2 x tp=2": ([[0, 1], [2, 3]], ("dp", "tp")),
}
CUT = ["tp=2", "dp=2", "dp=2 x tp=2"]
DECODERS = [name for name in FAMILIES if name not in ("bert", "vit")]
#: Ways to generate, as arguments of ``generate()``.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "beams with a static cache": {"num_beams": 2, "cache_implementation": "static"},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "sampling with top_p": {"do_sample": True, "top_p": 0.7},
    "sampling beams": {"do_sample": True, "num_beams": 2},
}

#: What runs by default; the rest of each table is slow.
QUICK_MODELS = {
    ("qwen3", "tp=2"),
    ("phi3", "tp=2"),
    ("gpt2", "dp=2 x tp=2"),
    ("bert", "tp=2"),
    ("t5 gated", "dp=2 x tp=2"),
    ("vit", "dp=2 x tp=2"),
    ("deepseek v3", "dp=2 x tp=2"),
}
QUICK_GRADIENTS = {("gpt2", "tp=2"), ("t5", "dp=2 x tp=2"), ("qwen2 moe", "dp=2 x tp=2")}
QUICK_WAYS = {
    ("mistral", "dp=2 x tp=2", "static cache"),
    ("mistral", "dp=2 x tp=2", "beams"),
    ("t5", "dp=2 x tp=2", "beams with a static cache"),
}


def table(*columns: Any, quick: set[Any]) -> list[Any]:
    """Every combination; those that are not quick are marked slow."""
    rows: list[tuple[Any, ...]] = [()]
    for column in columns:
        rows = [(*row, item) for row in rows for item in column]
    return [pytest.param(*row, marks=() if row in quick else pytest.mark.slow) for row in rows]


def mesh_of(name: str) -> dtorch.DeviceMesh:
    devices, axes = MESHES[name]
    return dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes)


@pytest.fixture(scope="module", autouse=True)
def cluster(leak_watch: LeakWatch) -> Iterator[None]:
    yield from cluster_of(leak_watch, num_nodes=2, devices_per_node=2)


def remote(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("dtorch") for name, tensor in batch.items()}


def generate(model: Any, batch: dict[str, torch.Tensor], **kwargs: Any) -> list[list[int]]:
    given = {name: tensor for name, tensor in batch.items() if not name.startswith("decoder")}
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, **kwargs}
    tokens: list[list[int]] = model.generate(**given, **options).tolist()
    return tokens


@pytest.mark.parametrize(("family", "mesh"), table(FAMILIES, CUT, quick=QUICK_MODELS))
def test_logits_and_greedy_tokens(family: str, mesh: str) -> None:
    plain, batch = FAMILIES[family].build(), FAMILIES[family].batch()
    model = dtorch.parallelize(FAMILIES[family].build(), mesh_of(mesh))
    with torch.no_grad():
        expected, found = plain(**batch), model(**remote(batch))
    assert type(found) is type(expected)
    torch.testing.assert_close(found.logits.cpu(), expected.logits, rtol=0, atol=1e-4)
    if family in DECODERS:
        assert generate(model, remote(batch)) == generate(plain, batch)
    report = dtorch.parallel.describe(model)
    total = sum(parameter.numel() * 4 for parameter in plain.parameters())
    if mesh_of(mesh).has_axis("tp"):
        assert max(report.bytes_by_device.values()) < 0.75 * total, "nothing is cut"


@pytest.mark.parametrize(("family", "mesh"), table(FAMILIES, CUT, quick=QUICK_GRADIENTS))
def test_a_loss_and_its_gradients(family: str, mesh: str) -> None:
    plain, batch = FAMILIES[family].build(), FAMILIES[family].labelled()
    model = dtorch.parallelize(FAMILIES[family].build(), mesh_of(mesh))
    check_loss(plain, model, batch)


def check_loss(plain: Any, model: Any, batch: dict[str, torch.Tensor], **kwargs: Any) -> None:
    expected, loss = plain(**batch, **kwargs).loss, model(**remote(batch), **kwargs).loss
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss.detach().cpu(), expected.detach(), rtol=0, atol=1e-4)
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        if reference.grad is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        found = parameter.grad.cpu()
        torch.testing.assert_close(
            found, reference.grad, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("family", table(["mixtral", "qwen3 moe"], quick=set()))
def test_a_loss_of_the_balance_of_experts(family: str) -> None:
    """It multiplies two sums over the tokens, which a strict program has reduced before."""
    plain, batch = FAMILIES[family].build(), FAMILIES[family].labelled()
    model = dtorch.parallelize(FAMILIES[family].build(), mesh_of("dp=2 x tp=2"))
    with dtorch.auto_redistribute():
        check_loss(plain, model, batch, output_router_logits=True)


@pytest.mark.parametrize(("family", "mesh", "way"), table(DECODERS, CUT, WAYS, quick=QUICK_WAYS))
def test_every_way_to_generate(family: str, mesh: str, way: str) -> None:
    plain, batch = FAMILIES[family].build(), FAMILIES[family].batch(rows=2)
    model = dtorch.parallelize(FAMILIES[family].build(), mesh_of(mesh))
    assert generate(model, remote(batch), **WAYS[way]) == generate(plain, batch, **WAYS[way])


@pytest.mark.parametrize(
    "family", table(["llama", "gemma2", "phi3", "gpt2", "deepseek v3"], quick={("phi3",)})
)
def test_a_cache_that_lies_where_keys_and_values_do(family: str) -> None:
    plain, batch = FAMILIES[family].build(), FAMILIES[family].batch(rows=2)
    model = dtorch.parallelize(FAMILIES[family].build(), mesh_of("dp=2 x tp=2"))
    cache = dtorch.parallel.static_cache(model, 16, batch_size=2)
    tokens = [batch["input_ids"].to("dtorch")]
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            tokens.append(model(input_ids=tokens[-1], cache=cache).logits[:, -1:].argmax(-1))
    assert torch.cat(tokens, 1).tolist() == generate(plain, batch)


@pytest.mark.parametrize(("family", "way"), table(["llama", "t5"], SAMPLING, quick={("llama", "sampling")}))
def test_a_seed_gives_the_same_samples_on_every_mesh(family: str, way: str) -> None:
    batch = remote(FAMILIES[family].batch())
    found = []
    for mesh in MESHES:
        model = dtorch.parallelize(FAMILIES[family].build(), mesh_of(mesh))
        torch.manual_seed(7)
        found.append(generate(model, batch, **SAMPLING[way]))
    assert found == [found[0]] * len(MESHES)
    assert generate(model, batch, **SAMPLING[way]) != found[0], "another draw gives other tokens"


def test_what_is_generated_comes_back_to_the_mesh_of_the_prompt() -> None:
    model = dtorch.parallelize(FAMILIES["llama"].build(), mesh_of("tp=2"))
    elsewhere = dtorch.DeviceMesh("cpu", [3, 1])
    ids = dtorch.from_torch(FAMILIES["llama"].batch()["input_ids"], device_mesh=elsewhere)
    output = model.generate(ids, num_beams=2, max_new_tokens=2, return_dict_in_generate=True)
    assert output.sequences.device_mesh == elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "vit", "mixtral"])
def test_training_with_an_optimizer_that_is_not_linear(family: str) -> None:
    """Biases of row-wise layers are whole, so that AdamW moves them as it does on one device."""
    plain, batch = FAMILIES[family].build(), FAMILIES[family].batch()
    model = dtorch.parallelize(FAMILIES[family].build(), mesh_of("dp=2 x tp=2"))
    losses = []
    for trained, given in ((plain, batch), (model, remote(batch))):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            loss = trained(**given).logits.square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[5:] == pytest.approx(losses[:5], abs=1e-4)
    assert losses[4] < losses[0]


def test_the_report_says_where_a_plan_comes_from_and_what_it_leaves_whole() -> None:
    derived = dtorch.parallelize(FAMILIES["bert"].build(), mesh_of("tp=2"))
    text = str(dtorch.parallel.describe(derived))
    assert "derived from the names and shapes" in text
    assert "are whole: cls.predictions.transform.dense" in text
    carried = dtorch.parallelize(FAMILIES["llama"].build(), mesh_of("tp=2"))
    assert "config carries" in str(dtorch.parallel.describe(carried))


@pytest.mark.parametrize(
    ("family", "mesh", "plan", "error", "message"),
    [
        (
            "deepseek v3",
            "tp=2",
            {"layers.*.self_attn.q_a_proj": "colwise"},
            SettingError,
            "heads cannot be cut",
        ),
        ("gpt2", "tp=2", {"h.*.mlp.c_fcc": "colwise"}, SettingError, r"Close ones: 'h\.\*\.mlp\.c_fc'"),
        ("mixtral", "tp=2", {"layers.*.mlp.experts.gate_up": "colwise"}, SettingError, "gate_up_proj"),
        ("mixtral", "tp=2", {"layers.*.mlp.experts.down_proj": "colwize"}, SettingError, "packed_colwise"),
        ("mixtral", "tp=2", {"layers.*.mlp.experts": "rowwise"}, SettingError, "of kind 'experts'"),
        ("bert", "tp=2", {"embeddings.LayerNorm": "colwise"}, SettingError, "of kind 'other'"),
        ("t5", ([0, 1], ("model",)), "auto", MeshError, "'model'"),
        ("vit", ([0, 7], ("tp",)), "auto", MeshError, "device 7"),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_stays_as_it_is(
    family: str, mesh: Any, plan: Any, error: type[DTorchError], message: str
) -> None:
    model = FAMILIES[family].build()
    devices, axes = MESHES[mesh] if isinstance(mesh, str) else mesh
    before, hooks = dict(model.named_parameters()), [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(error, match=message):
        dtorch.parallelize(model, dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes), plan)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert not any("forward" in vars(m) or "generate" in vars(m) for m in model.modules())
