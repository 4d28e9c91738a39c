"""What ``dtorch.plan`` says that a step sends is what goes over the wires."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch.parallel.exchanges import moved_bytes
from dtorch_runtime.ir.layout import Layout
from tests.support.clusters import cluster_of
from tests.support.leaks import LeakWatch
from tests.support.tiny_llama import prompt, tiny_llama
from tests.support.tiny_models import FAMILIES

BATCH, LENGTH = 8, 128
#: Heads, features and places that two devices share evenly: both send the same.
EVEN = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 98,
}


#: The same with experts, of which a token goes to one, or to two.
EXPERTS = {**EVEN, "num_local_experts": 4, "intermediate_size": 32}


@pytest.fixture(scope="module", autouse=True)
def cluster(leak_watch: LeakWatch) -> Iterator[None]:
    """Nodes of one device each, so that whatever moves crosses a link that is counted."""
    yield from cluster_of(leak_watch, num_nodes=4, devices_per_node=1)


def received_bytes() -> Counter[str]:
    """By each node from the others, since the cluster began."""
    result: Counter[str] = Counter()
    for (source, target), count in dtorch.counters().link_bytes.items():
        if not {"client", "controller"} & {source, target}:
            result[target] += count
    return result


def bytes_of_a_step(model: Any, ids: torch.Tensor) -> tuple[int, int]:
    """Into the node that received most, and the part of it that brings the caller the logits."""
    inner: list[Any] = []
    model.register_forward_hook(lambda m, args, output: inner.append(output.logits), prepend=True)

    def step() -> None:
        model(ids)
        inner[-1].pow(2).mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.cpu()

    step()  # what only the first one sends
    before = received_bytes()
    step()
    received = received_bytes() - before
    layout = inner[-1]._spec.layout
    whole = Layout(layout.mesh, (dtorch.Replicate(),) * layout.mesh.ndim)
    return max(received.values()), moved_bytes(tuple(inner[-1].shape), 4, layout, whole)


@pytest.mark.parametrize("axis", ["tp", "dp", "ulysses_cp", "ring_cp"])
def test_a_training_step_sends_the_bytes_of_the_plan(axis: str) -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=(axis,))
    plan = dtorch.plan(tiny_llama(**EVEN), mesh, batch_size=BATCH, sequence_length=LENGTH)
    model = dtorch.parallelize(tiny_llama(**EVEN), mesh)
    ids = dtorch.from_torch(prompt(batch=BATCH, length=LENGTH), device_mesh=mesh)
    received, back = bytes_of_a_step(model, ids)
    expected = sum(exchange.num_bytes for exchange in plan.exchanges()) + back
    assert received == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("devices", "axes", "k", "rel"),
    [
        ([0, 1], ("ep",), 1, 0),  # rows travel
        ([0, 1], ("ep",), 2, 0),  # tokens are gathered
        ([[0, 1], [2, 3]], ("ep", "tp"), 2, 0.02),  # and experts are cut over both
        pytest.param([[0, 1], [2, 3]], ("dp", "ep"), 1, 0, marks=pytest.mark.slow),
        pytest.param([0, 1, 2, 3], ("ep",), 2, 0, marks=pytest.mark.slow),
        pytest.param([0, 1], ("tp",), 2, 0.02, marks=pytest.mark.slow),
    ],
)
def test_experts_that_are_chosen_alike_send_the_bytes_of_the_plan(
    devices: Any, axes: tuple[str, ...], k: int, rel: float
) -> None:
    made = FAMILIES["mixtral"]
    mesh = dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes)
    fields = {**EXPERTS, "num_experts_per_tok": k}
    plan = dtorch.plan(made.build(**fields), mesh, batch_size=BATCH, sequence_length=LENGTH)
    model = dtorch.parallelize(made.build(**fields), mesh)

    def choose_in_turn(router: Any, args: Any, output: Any) -> Any:
        logits, weights, chosen = output
        in_turn = (torch.arange(chosen.numel()) % 4).reshape(chosen.shape)
        placed = dtorch.from_torch(in_turn, device_mesh=mesh).redistribute(placements=chosen.placements)
        return logits, weights, placed

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(choose_in_turn)
    ids = dtorch.from_torch(made.batch(BATCH, LENGTH)["input_ids"], device_mesh=mesh)
    received, back = bytes_of_a_step(model, ids)
    expected = sum(exchange.num_bytes for exchange in plan.exchanges()) + back
    assert received == pytest.approx(expected, rel=rel, abs=0)
    if axes == ("ep",):
        share = (mesh.size() - 1) / mesh.size()
        whole = BATCH * LENGTH * EXPERTS["hidden_size"] * 4 * share  # all tokens, into one device
        of_experts = [e for e in plan.exchanges("forward") if e.name == "model.layers.0.mlp.experts"]
        numbers = sum(e.num_bytes for e in of_experts if e.num_bytes < whole / 4)
        each_way = min(k / mesh.size(), 1)
        assert sum(e.num_bytes for e in of_experts) == pytest.approx(2 * each_way * whole + numbers)
