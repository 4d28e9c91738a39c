"""Unmodified Hugging Face models on meshes: the tokens are plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import dtorch
from dtorch_runtime.errors import DTorchError, MeshError, SettingError, UnsupportedError
from tests.support.clusters import cluster_of
from tests.support.leaks import LeakWatch
from tests.support.tiny_llama import prompt, tiny_config, tiny_llama

NUM_TOKENS = 6

#: On two nodes of two devices: node 0 has devices 0 and 1, node 1 has 2 and 3.
MESHES: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "one device": ([0], ("tp",)),
    "tp=2": ([0, 1], ("tp",)),
    "tp=3": ([0, 1, 2], ("tp",)),
    "tp=2 across nodes": ([0, 2], ("tp",)),
    "tp=4, one device without heads": ([0, 1, 2, 3], ("tp",)),
    "dp=2": ([1, 2], ("dp",)),
    "dp=2 x tp=2, a copy on each node": ([[0, 1], [2, 3]], ("dp", "tp")),
    "dp=2 x tp=2, tp across nodes": ([[0, 2], [1, 3]], ("dp", "tp")),
}


def mesh_of(name: str) -> dtorch.DeviceMesh:
    devices, axes = MESHES[name]
    return dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes)


@pytest.fixture(scope="module", autouse=True)
def cluster(leak_watch: LeakWatch) -> Iterator[None]:
    yield from cluster_of(leak_watch, num_nodes=2, devices_per_node=2)


def generate(model: Any, ids: torch.Tensor, **kwargs: Any) -> list[list[int]]:
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, **kwargs}
    return model.generate(ids, **options).tolist()


@pytest.mark.parametrize("name", MESHES)
def test_a_tiny_llama_gives_the_tokens_of_plain_torch(name: str) -> None:
    ids = prompt(batch=1)
    expected = generate(tiny_llama(), ids)
    model = dtorch.parallelize(tiny_llama(), mesh_of(name))
    assert generate(model, ids.to("dtorch")) == expected


@pytest.mark.parametrize("name", ["tp=2", "dp=2", "dp=2 x tp=2, a copy on each node"])
def test_a_padded_batch_gives_the_tokens_of_plain_torch(name: str) -> None:
    ids = prompt(batch=3)
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    expected = generate(tiny_llama(), ids, attention_mask=mask)
    model = dtorch.parallelize(tiny_llama(), mesh_of(name))
    assert generate(model, ids.to("dtorch"), attention_mask=mask.to("dtorch")) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 9},
        {"attn_implementation": "eager"},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_variants_give_the_logits_of_plain_torch(overrides: dict[str, Any]) -> None:
    ids = prompt(batch=2)
    expected = tiny_llama(**overrides)(ids)
    model = dtorch.parallelize(tiny_llama(**overrides), mesh_of("dp=2 x tp=2, a copy on each node"))
    with torch.no_grad():
        output = model(ids.to("dtorch"))
    assert type(output) is type(expected)
    torch.testing.assert_close(output.logits.cpu(), expected.logits.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["one device", "tp=2", "tp=2 across nodes", "dp=2 x tp=2, a copy on each node"]
)
def test_a_captured_step_decodes_the_tokens_of_plain_torch(name: str) -> None:
    @dtorch.capture
    def step(model: Any, token: Any, cache: Any) -> Any:
        return model(input_ids=token, cache=cache).logits[:, -1:].argmax(-1)

    ids = prompt(batch=2)
    expected = generate(tiny_llama(), ids)
    model = dtorch.parallelize(tiny_llama(), mesh_of(name))
    with torch.no_grad():
        for _ in range(2):  # each answer has a cache of its own
            cache = dtorch.parallel.static_cache(model, 32, batch_size=2)
            token = step.__wrapped__(model, ids.to("dtorch"), cache)
            tokens = [ids.to("dtorch"), token]
            for _ in range(NUM_TOKENS - 1):
                token = step(model, token, cache)
                tokens.append(token)
            assert torch.cat(tokens, 1).tolist() == expected
    assert dtorch.capture.explain(step).count(f"1 recording, {NUM_TOKENS - 2} replays, 0 calls without") == 2


def test_a_cache_for_a_model_that_is_on_no_mesh_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="parallelize"):
        dtorch.parallel.static_cache(tiny_llama(), 8)
    with pytest.raises(UnsupportedError, match="got Perceptron"):
        dtorch.parallel.static_cache(dtorch.parallelize(Perceptron(), mesh_of("tp=2"), {}), 8)


class Perceptron(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"up": "colwise", "down": "rowwise"},
        {"up": "colwise_gather_output", "down": "rowwise_split_input"},
        {"up": "colwise_gather_output", "down": "replicate"},
        {"up": [dtorch.Replicate(), dtorch.Shard(0)], "down": "rowwise"},
    ],
    ids=str,
)
def test_any_module_runs_under_a_plan_of_its_own(plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Perceptron()
    x = torch.randn(5, 6)
    model = dtorch.parallelize(copy.deepcopy(plain), mesh_of("dp=2 x tp=2, a copy on each node"), plan)
    result = model(x)
    assert list(result.placements) == [dtorch.Replicate(), dtorch.Replicate()]
    torch.testing.assert_close(result.detach().cpu(), plain(x).detach())


def test_outputs_come_back_to_the_mesh_and_placements_of_the_caller() -> None:
    mesh = mesh_of("dp=2 x tp=2, a copy on each node")
    model = dtorch.parallelize(tiny_llama(), mesh)
    elsewhere = dtorch.DeviceMesh("cpu", [3, 1])
    with torch.no_grad():
        for placements in ([dtorch.Shard(0)], [dtorch.Replicate()]):
            ids = dtorch.from_torch(prompt(batch=2), device_mesh=elsewhere, placements=placements)
            logits = model(input_ids=ids).logits
            assert logits.device_mesh == elsewhere
            assert list(logits.placements) == placements
        plain = model(input_ids=prompt(batch=2)).logits
        assert plain.device_mesh == mesh


def test_an_error_inside_the_model_leaves_the_mesh_of_the_thread_as_it_was() -> None:
    model = dtorch.parallelize(tiny_llama(), mesh_of("tp=2"))
    before = dtorch.Graph.default_graph().default_mesh
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model()
    assert dtorch.Graph.default_graph().default_mesh == before


def test_weights_lie_where_the_report_says() -> None:
    model = dtorch.parallelize(tiny_llama(), mesh_of("dp=2 x tp=2, a copy on each node"))
    report = dtorch.parallel.describe(model)
    rows = {row.name: row for row in report.rows}
    query = rows["model.layers.1.self_attn.q_proj.weight"]
    assert query.shape == (72, 72)
    assert query.bytes_by_device == {0: 48 * 72 * 4, 1: 24 * 72 * 4, 2: 48 * 72 * 4, 3: 24 * 72 * 4}
    assert rows["model.norm.weight"].bytes_by_device == dict.fromkeys(range(4), 72 * 4)
    assert "lm_head.weight" not in rows, "it is the embedding's, counted once"
    assert len({report.node_by_device[d] for d in (0, 1)}) == 1
    assert report.node_by_device[0] != report.node_by_device[2]
    text = str(report)
    assert "model.layers.[0-1].self_attn.q_proj.weight" in text
    assert report.node_by_device[2] in text


def test_tied_weights_stay_one_tensor_and_are_trained_as_one() -> None:
    model = dtorch.parallelize(tiny_llama(), mesh_of("tp=2"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, torch.nn.Parameter)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["tp=2", "dp=2", "dp=2 x tp=2, tp across nodes"])
def test_gradients_of_a_training_step_are_those_of_plain_torch(name: str) -> None:
    ids = prompt(batch=2)
    expected = tiny_llama()
    expected_loss = expected(input_ids=ids, labels=ids).loss
    expected_loss.backward()
    model = dtorch.parallelize(tiny_llama(), mesh_of(name))
    remote = ids.to("dtorch")
    loss = model(input_ids=remote, labels=remote).loss
    loss.backward()
    torch.testing.assert_close(loss.detach().cpu(), expected_loss.detach())
    for (key, parameter), reference in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert parameter.grad is not None, key
        assert parameter.grad.shape == reference.shape
        torch.testing.assert_close(
            parameter.grad.cpu(),
            reference.grad,
            rtol=1e-3,
            atol=1e-5,
            msg=lambda text, key=key: f"{key}: {text}",
        )


# ---- weights from files ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("device", ["meta", "cpu", "dtorch"])
@pytest.mark.parametrize("name", ["tp=3", "dp=2 x tp=2, tp across nodes"])
def test_weights_from_safetensors_are_the_same(saved: Path, device: str, name: str) -> None:
    with torch.device(device):
        model = LlamaForCausalLM(tiny_config()).eval()
    model.generation_config.pad_token_id = 0
    model = dtorch.parallelize(model, mesh_of(name), checkpoint=saved)
    expected = tiny_llama()
    for (key, parameter), (_, reference) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert torch.equal(parameter.detach().cpu(), reference), key
    ids = prompt(batch=2)
    assert generate(model, ids.to("dtorch")) == generate(expected, ids)


def test_weights_from_several_files_in_another_dtype_are_converted(tmp_path: Path) -> None:
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_config())
    model = dtorch.parallelize(model, mesh_of("tp=2"), checkpoint=tmp_path)
    for (key, parameter), reference in zip(model.named_parameters(), tiny_llama().parameters(), strict=True):
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter.detach().cpu(), reference.to(torch.bfloat16).float()), key


# ---- refusals ----


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mesh": dtorch.DeviceMesh("cpu", [0, 1])}, MeshError, "mesh_dim_names"),
        ({"mesh": dtorch.DeviceMesh("cpu", [0, 9], mesh_dim_names=("tp",))}, MeshError, "9"),
        ({"mesh": dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("mp",))}, MeshError, "'dp', 'tp', 'pp'"),
        ({"mesh": [0, 1]}, SettingError, "init_device_mesh"),
        ({"plan": {"layers.*.mlp.up": "colwise"}}, SettingError, "matches no module"),
        ({"plan": {"norm": "rowwise"}}, SettingError, "of kind 'other'"),
        ({"model": "meta"}, SettingError, "checkpoint=folder"),
        ({"model": "plain"}, UnsupportedError, "carries no tensor-parallel plan"),
        ({"model": "string"}, SettingError, "torch.nn.Module, got str"),
        ({"checkpoint": "/nowhere"}, SettingError, "does not exist"),
        ({"checkpoint": "saved", "model": "deeper"}, SettingError, "lacks 9 of the model's tensors"),
        ({"checkpoint": "saved", "model": "wider"}, SettingError, "this checkpoint is of another model"),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_stays_as_it_is(
    saved: Path, arguments: dict[str, Any], error: type[DTorchError], message: str
) -> None:
    with torch.device("meta"):
        models: dict[str, Any] = {
            "tiny": tiny_llama(),
            "meta": LlamaForCausalLM(tiny_config()),
            "plain": torch.nn.Sequential(torch.nn.Linear(2, 2)),
            "string": "SmolLM2",
            "deeper": LlamaForCausalLM(tiny_config(num_hidden_layers=3)),
            "wider": LlamaForCausalLM(tiny_config(vocab_size=98)),
        }
    if arguments.get("checkpoint") == "saved":
        arguments = arguments | {"checkpoint": saved}
    model = models[arguments.get("model", "tiny")]
    call = {"mesh": mesh_of("tp=2"), **arguments, "model": model}
    kinds = {type(p) for p in model.parameters()} if isinstance(model, torch.nn.Module) else set()
    with pytest.raises(error, match=message):
        dtorch.parallelize(**call)
    if kinds:
        assert {type(p) for p in model.parameters()} == kinds
        assert not model._forward_pre_hooks


def test_a_parallel_model_is_not_made_parallel_again() -> None:
    model = dtorch.parallelize(tiny_llama(), mesh_of("tp=2"))
    with pytest.raises(SettingError, match="parallel already"):
        dtorch.parallelize(model, mesh_of("tp=3"))


# ---- real weights ----


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, torch.Tensor, list[list[int]]]:
    """The model on the CPU, a prompt of two rows, and the tokens of plain PyTorch."""
    from examples.language_model import load_model

    model, tokenizer = load_model()
    chats = [[{"role": "user", "content": "What is the capital of France?"}]] * 2
    template = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    ids = tokenizer.apply_chat_template(chats, **template)["input_ids"]
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tests share the cores, and threads that wait for each other spin
    tokens = generate(model, ids, max_new_tokens=8)
    torch.set_num_threads(before)
    assert "Paris" in tokenizer.decode(tokens[0][ids.shape[1] :])
    return model, ids, tokens


#: Heads that two devices have unequally many of, or that one has none of, and both axes between nodes. The tiny Llama,
#: which has the same heads, is on every mesh.
QUICK_MESHES = ("tp=4, one device without heads", "dp=2 x tp=2, tp across nodes")


@pytest.mark.model
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK_MESHES else pytest.mark.slow) for name in MESHES]
)
def test_smollm2_gives_the_tokens_of_plain_torch(
    smollm2: tuple[Any, torch.Tensor, list[list[int]]], name: str
) -> None:
    plain, ids, expected = smollm2
    model = dtorch.parallelize(copy.deepcopy(plain), mesh_of(name))
    assert generate(model, ids.to("dtorch"), max_new_tokens=8) == expected
