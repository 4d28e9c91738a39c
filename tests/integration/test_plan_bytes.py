"""What ``dtorch.plan`` says that a step sends is what goes over the wires."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dtorch
from dtorch.parallel.exchanges import moved_bytes
from dtorch_runtime.ir.layout import Layout
from tests.support.leaks import LeakWatch
from tests.support.tiny_llama import prompt, tiny_llama

BATCH, LENGTH = 8, 128
#: Heads, features and places that two devices share evenly: both send the same.
EVEN = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 98,
}


@pytest.fixture(scope="module", autouse=True)
def cluster(leak_watch: LeakWatch) -> Iterator[None]:
    """Two nodes of one device each, so that whatever moves crosses a link that is counted."""
    before = leak_watch.snapshot()
    dtorch.init(num_nodes=2, devices_per_node=1)
    dtorch.counters()
    leak_watch.declare_baseline(before)
    yield
    dtorch.shutdown()


def sent_bytes() -> int:
    """By the node that has sent most since the cluster began."""
    links = dtorch.counters().link_bytes
    return max(count for link, count in links.items() if not {"client", "controller"} & set(link))


@pytest.mark.parametrize("axis", ["tp", "dp", "ulysses_cp", "ring_cp"])
def test_a_training_step_sends_the_bytes_of_the_plan(axis: str) -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=(axis,))
    plan = dtorch.plan(tiny_llama(**EVEN), mesh, batch_size=BATCH, sequence_length=LENGTH)
    model = dtorch.parallelize(tiny_llama(**EVEN), mesh)
    ids = dtorch.from_torch(prompt(batch=BATCH, length=LENGTH), device_mesh=mesh)
    inner = []
    model.register_forward_hook(lambda m, args, output: inner.append(output.logits), prepend=True)

    def step() -> None:
        model(ids)
        inner[-1].pow(2).mean().backward()
        for parameter in model.parameters():
            parameter.grad.cpu()

    step()  # what only the first one sends
    before = sent_bytes()
    step()
    sent = sent_bytes() - before
    # The logits go back to the caller, whole.
    logits: torch.Tensor = inner[-1]
    whole = Layout(mesh, (dtorch.Replicate(),))
    back = moved_bytes(tuple(logits.shape), 4, logits._spec.layout, whole)
    expected = sum(exchange.num_bytes for exchange in plan.exchanges()) + back
    assert sent == pytest.approx(expected, rel=0.02)
