"""``generate()`` where sequences are cut: the tokens are plain PyTorch's, and a device keeps its part of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

import dtorch
from dtorch import Replicate, Shard
from dtorch_runtime.errors import UnsupportedError
from tests.support.captured import replays
from tests.support.clusters import cluster_of
from tests.support.leaks import LeakWatch
from tests.support.tiny_llama import prompt, tiny_llama
from tests.support.tiny_models import FAMILIES

NUM_TOKENS = 6
MESHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ulysses=2": ([0, 1], ("ulysses_cp",)),
    "ring=2": ([2, 1], ("ring_cp",)),
    "ring=3": ([0, 1, 3], ("ring_cp",)),
    "ring=2 x ulysses=2": ([[0, 1], [2, 3]], ("ring_cp", "ulysses_cp")),
    "dp=2 x ring=2": ([[0, 1], [2, 3]], ("dp", "ring_cp")),
    "tp=2 x ulysses=2": ([[0, 1], [2, 3]], ("tp", "ulysses_cp")),
    "pp=2 x ring=2": ([[0, 1], [2, 3]], ("pp", "ring_cp")),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "beams with a static cache": {"num_beams": 2, "cache_implementation": "static"},
}
#: Gemma 2 needs another attention than theirs.
CUT = [name for name in FAMILIES if name not in ("bert", "vit", "gemma2")]
#: What runs by default; the rest of the table is slow.
QUICK = {
    ("llama", "ring=2 x ulysses=2", "greedy"),
    ("llama", "pp=2 x ring=2", "beams"),
    ("mistral", "dp=2 x ring=2", "beams"),
    ("mistral", "ring=3", "static cache"),
    ("phi3", "tp=2 x ulysses=2", "beams with a static cache"),
    ("t5", "ulysses=2", "greedy"),
    ("gpt2", "ring=2 x ulysses=2", "static cache"),
    ("mixtral", "dp=2 x ring=2", "greedy"),
    ("t5", "dp=2 x ring=2", "static cache"),
    ("t5", "pp=2 x ring=2", "beams with a static cache"),
}


@pytest.fixture(scope="module", autouse=True)
def cluster(leak_watch: LeakWatch) -> Iterator[None]:
    yield from cluster_of(leak_watch, num_nodes=2, devices_per_node=2)


def mesh_of(name: str) -> dtorch.DeviceMesh:
    devices, axes = MESHES[name]
    return dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes)


def table() -> list[Any]:
    rows = [(family, mesh, way) for family in CUT for mesh in MESHES for way in WAYS]
    return [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in rows]


@pytest.mark.parametrize(("family", "mesh", "way"), table())
def test_every_way_to_generate(family: str, mesh: str, way: str) -> None:
    """Two prompts, and two of which one is shorter."""
    plain, ids = FAMILIES[family].build(), FAMILIES[family].batch(rows=2)["input_ids"]
    model = dtorch.parallelize(FAMILIES[family].build(), mesh_of(mesh))
    padded = torch.ones_like(ids)
    padded[0, :2] = 0
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, **WAYS[way]}
    for batch in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": padded}):
        on_mesh: Any = {name: tensor.to("dtorch") for name, tensor in batch.items()}
        assert model.generate(**on_mesh, **options).tolist() == plain.generate(**batch, **options).tolist()


@pytest.mark.parametrize("mesh", ["ring=3", "ring=2 x ulysses=2"])
def test_the_cache_stays_cut_while_it_grows_and_a_conversation_goes_on(mesh: str) -> None:
    plain, model = tiny_llama(), dtorch.parallelize(tiny_llama(), mesh_of(mesh))
    ids, more = prompt(batch=1, length=9), prompt(batch=1, length=4, seed=2)
    theirs: Any = DynamicCache(config=plain.config)
    with torch.no_grad():
        first = model(ids)  # which makes a cache by itself
        plain(ids, cache=theirs)
        ours = first.cache
        for new in (more[:, :1], more, more[:, :1]):
            found = model(new, cache=ours).logits
            torch.testing.assert_close(found.cpu(), plain(new, cache=theirs).logits, rtol=0, atol=1e-4)
            keys = ours.layers[1].keys
            assert keys.placements == (Shard(2),) * keys.device_mesh.ndim
            torch.testing.assert_close(keys.cpu(), theirs.layers[1].keys, rtol=0, atol=1e-4)
        for cache in (ours, theirs):
            cache.crop(-3)
        found = model(more, cache=ours).logits
        torch.testing.assert_close(found.cpu(), plain(more, cache=theirs).logits, rtol=0, atol=1e-4)


def test_a_cache_without_a_configuration_is_cut_and_its_own_gradients_are_plain() -> None:
    plain, model = tiny_llama(), dtorch.parallelize(tiny_llama(), mesh_of("ulysses=2"))
    ids, losses = prompt(batch=2, length=9), []
    for owner in (plain, model):
        cache: Any = DynamicCache()
        owner(ids[:, :5], cache=cache)
        loss = owner(ids[:, 5:], cache=cache).logits.square().mean()
        loss.backward()
        losses.append(loss.item())
    assert cache.layers[0].keys.placements == (Shard(2),)
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", ["dp=2 x ring=2", pytest.param("ulysses=2", marks=pytest.mark.slow)])
def test_a_static_cache_is_cut_and_its_step_is_replayed(family: str, mesh: str) -> None:
    plain, batch = FAMILIES[family].build(), FAMILIES[family].batch(rows=2)
    model = dtorch.parallelize(FAMILIES[family].build(), mesh_of(mesh))
    cache = dtorch.parallel.static_cache(model, 16, batch_size=2)
    sliding = [getattr(layer, "is_sliding", False) for layer in cache.layers]
    assert [layer.keys.placements[-1] for layer in cache.layers] == [
        Replicate() if is_sliding else Shard(2) for is_sliding in sliding
    ]

    @dtorch.capture
    def captured(model: Any, token: Any, cache: Any) -> Any:
        return model(input_ids=token, cache=cache).logits[:, -1:].argmax(-1)

    step = captured.__wrapped__ if any(sliding) else captured  # type: ignore[attr-defined]
    with torch.no_grad():
        tokens = [model(input_ids=batch["input_ids"].to("dtorch"), cache=cache).logits[:, -1:].argmax(-1)]
        for _ in range(NUM_TOKENS - 1):
            tokens.append(step(model, tokens[-1], cache).clone())
    found = torch.cat([batch["input_ids"], *(t.cpu() for t in tokens)], 1)
    assert found.tolist() == plain.generate(**batch, max_new_tokens=NUM_TOKENS, do_sample=False).tolist()
    assert any(sliding) or replays(captured) >= 2


def test_a_prompt_that_is_longer_than_the_window_of_a_static_cache() -> None:
    plain, ids = FAMILIES["mistral"].build(), FAMILIES["mistral"].batch(rows=2, length=9)["input_ids"]
    model = dtorch.parallelize(FAMILIES["mistral"].build(), mesh_of("ring=2"))
    found = []
    with torch.no_grad():
        for owner, given in ((model, ids.to("dtorch")), (plain, ids)):
            cache: Any = StaticCache(config=plain.config, max_cache_len=16)
            logits = [owner(given[:, :7], cache=cache).logits]
            logits += [owner(given[:, start : start + 1], cache=cache).logits for start in (7, 8)]
            found.append([x.cpu() for x in logits])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", ["sampling", pytest.param("sampling beams", marks=pytest.mark.slow)])
def test_a_seed_gives_the_samples_of_one_device(way: str) -> None:
    options = {"sampling": {"top_k": 20}, "sampling beams": {"num_beams": 2}}[way]
    ids, found = prompt(batch=2).to("dtorch"), []
    for mesh in (dtorch.DeviceMesh("cpu", [3], mesh_dim_names=("tp",)), mesh_of("ring=2 x ulysses=2")):
        model = dtorch.parallelize(tiny_llama(), mesh)
        torch.manual_seed(7)
        found.append(model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=True, **options).tolist())
    assert found[0] == found[1]


class OtherLayer(DynamicLayer):
    """One that DTorch does not know."""


def test_layers_of_another_kind_are_refused_and_the_model_goes_on() -> None:
    model = dtorch.parallelize(tiny_llama(), mesh_of("ring=2"))
    ids = prompt(batch=1, length=9).to("dtorch")
    with torch.no_grad():
        with pytest.raises(UnsupportedError, match=r"got OtherLayer; write use_cache=False"):
            model(ids, cache=Cache(layers=[OtherLayer(), OtherLayer()]))
        assert model(ids, use_cache=False).cache is None
        assert model.generate(ids, max_new_tokens=2).shape == (1, 11)


QUICK_LOSSES = {("t5", "dp=2 x ring=2"), ("gpt2", "ulysses=2"), ("mixtral", "ring=2 x ulysses=2")}


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        pytest.param(family, mesh, marks=() if (family, mesh) in QUICK_LOSSES else pytest.mark.slow)
        for family in ("t5", "gpt2", "mixtral", "deepseek v3")
        for mesh in ("ulysses=2", "ring=2 x ulysses=2", "dp=2 x ring=2", "tp=2 x ulysses=2")
    ],
)
def test_a_loss_and_its_gradients_are_those_of_one_device(family: str, mesh: str) -> None:
    """Encoders with decoders, and layers that merge batch and sequence."""
    plain, batch = FAMILIES[family].build(), FAMILIES[family].labelled()
    model = dtorch.parallelize(FAMILIES[family].build(), mesh_of(mesh))
    seen = []
    base = model.encoder if family == "t5" else getattr(model, model.base_model_prefix)
    norm = next(m for name, m in base.named_modules() if name in ("final_layer_norm", "ln_f", "norm"))
    norm.register_forward_hook(lambda module, args, output: seen.append(output.placements))
    loss = model(**{name: x.to("dtorch") for name, x in batch.items()}).loss
    assert Shard(1) in seen[0], "the sequence is cut"
    expected = plain(**batch).loss
    assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
    loss.backward()
    expected.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            continue
        torch.testing.assert_close(
            ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
