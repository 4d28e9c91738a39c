"""``parallelize`` on meshes that cut sequences: outputs, tokens and gradients are plain PyTorch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForMaskedLM, ViTConfig, ViTModel

import dtorch
from dtorch_runtime.errors import DTorchError, PlacementError, SettingError
from tests.support.tiny_llama import VOCABULARY, prompt, tiny_llama

LENGTH = 9  # which two devices share unevenly

MESHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ulysses=2": ([0, 1], ("ulysses_cp",)),
    "ring=2": ([0, 1], ("ring_cp",)),
    "ring=2 x ulysses=2": ([[0, 1], [2, 3]], ("ring_cp", "ulysses_cp")),
    "dp=2 x ring=2": ([[0, 1], [2, 3]], ("dp", "ring_cp")),
    "tp=2 x ulysess=2": ([[0, 1], [2, 3]], ("tp", "ulysess_cp")),
    "pp=2 x ring=2": ([[0, 1], [2, 3]], ("pp", "ring_cp")),
}
#: The others are slow tests.
QUICK = ("ulysses=2", "dp=2 x ring=2", "pp=2 x ring=2")


def mesh_of(name: str) -> dtorch.DeviceMesh:
    devices, axes = MESHES[name]
    return dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes)


def compare_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(
                ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
            )


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "mesh", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MESHES]
)
def test_a_llama_whose_sequences_are_cut_is_the_model(mesh: str) -> None:
    ids, plain = prompt(batch=2, length=LENGTH), tiny_llama()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    model = dtorch.parallelize(tiny_llama(), mesh_of(mesh))
    remote = ids.to("dtorch")
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}):
            output = model(remote, **{name: value.to("dtorch") for name, value in options.items()})
            expected = plain(ids, **options).logits
            torch.testing.assert_close(output.logits.cpu()[:, 3:], expected[:, 3:], rtol=0, atol=1e-4)
    expected = plain(input_ids=ids, labels=ids).loss
    expected.backward()
    loss = model(input_ids=remote, labels=remote).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
    compare_gradients(model, plain)
    decoding: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "use_cache": False}
    assert model.generate(remote, **decoding).tolist() == plain.generate(ids, **decoding).tolist()


@pytest.mark.usefixtures("cluster")
def test_activations_and_logits_are_cut_where_the_loss_is_computed() -> None:
    model = dtorch.parallelize(tiny_llama(), mesh_of("ring=2"))
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        if name in ("model.layers.1.self_attn.q_proj", "lm_head"):
            module.register_forward_hook(
                lambda m, args, output, name=name: seen.update({name: output.placements})
            )
    ids = prompt(batch=2, length=LENGTH).to("dtorch")
    model(input_ids=ids, labels=ids, num_items_in_batch=10)
    assert seen == dict.fromkeys(("model.layers.1.self_attn.q_proj", "lm_head"), (dtorch.Shard(1),))


@pytest.mark.usefixtures("cluster")
def test_a_loss_of_every_place_and_a_given_count_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    plain = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes)).eval()
    ids = prompt(batch=2, length=LENGTH)
    labels = ids.masked_fill(ids % 3 == 0, -100)
    model = dtorch.parallelize(copy.deepcopy(plain), mesh_of("ring=2 x ulysses=2"), plan={})
    loss = model(input_ids=ids.to("dtorch"), labels=labels.to("dtorch")).loss
    assert loss.item() == pytest.approx(plain(input_ids=ids, labels=labels).loss.item(), abs=1e-4)
    llama = dtorch.parallelize(tiny_llama(), mesh_of("ulysses=2"))
    counted = {"input_ids": ids, "labels": labels, "num_items_in_batch": 7}
    assert llama(**counted).loss.item() == pytest.approx(tiny_llama()(**counted).loss.item(), abs=1e-4)


class Block(nn.Module):
    """Attention written by hand, on ``[batch, sequence, features]``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("mesh", ["ulysses=2", "pp=2 x ring=2"])
def test_a_plain_model_has_its_sequences_cut_too(mesh: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block())
    model = dtorch.parallelize(copy.deepcopy(plain), mesh_of(mesh), plan={})
    x = torch.randn(2, LENGTH, 8)
    result = model(x)
    torch.testing.assert_close(result.detach().cpu(), plain(x).detach(), rtol=0, atol=1e-5)
    result.pow(2).mean().backward()
    plain(x).pow(2).mean().backward()
    compare_gradients(model, plain)


@pytest.mark.usefixtures("cluster")
def test_what_comes_out_is_cut_as_what_went_in() -> None:
    whole, rows, sequence = dtorch.Replicate(), dtorch.Shard(0), dtorch.Shard(1)
    mesh = mesh_of("dp=2 x ring=2")
    model = dtorch.parallelize(nn.Sequential(Block(), Block()), mesh, plan={})
    x = torch.randn(2, LENGTH, 8)
    for placements in ([whole, whole], [rows, whole], [whole, sequence], [rows, sequence]):
        result: Any = model(dtorch.from_torch(x, device_mesh=mesh, placements=placements))
        assert list(result.placements) == placements
    longer: Any = dtorch.parallelize(Twice(), mesh, plan={})(
        dtorch.from_torch(x, device_mesh=mesh, placements=[rows, sequence])
    )
    assert list(longer.placements) == [rows, whole], "another length is another dim"


class Twice(nn.Module):
    """What it gives has no dim of the length that went in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack((x, x), 1)


@pytest.mark.parametrize(
    ("make", "mesh", "error", "message"),
    [
        (tiny_llama, ([[*range(5)], [*range(5, 10)]], ("tp", "ulysses_cp")), PlacementError, "9 heads"),
        (lambda: tiny_llama(attn_implementation="eager"), MESHES["ring=2"], SettingError, "set_attn_impl"),
        (lambda: ViTModel(ViTConfig(num_hidden_layers=1)), MESHES["ring=2"], SettingError, "pixel_values"),
    ],
)
def test_what_cannot_be_cut_is_refused_and_the_model_stays_as_it_is(
    make: Any, mesh: Any, error: type[DTorchError], message: str
) -> None:
    with torch.device("meta"):
        model = make()
    with pytest.raises(error, match=message):
        dtorch.parallelize(model, dtorch.DeviceMesh("cpu", mesh[0], mesh_dim_names=mesh[1]))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(isinstance(parameter, dtorch.Tensor) for parameter in model.parameters())
