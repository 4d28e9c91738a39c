"""When gradients are reduced: each time or once, by the bytes that cross from one node to another."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtorch
import dtorch.nn as dnn
from dtorch.parallel.pipeline import Pipeline
from dtorch_runtime.errors import SettingError
from tests.support.clusters import cluster_of
from tests.support.leaks import LeakWatch

WIDTH, NUM_LAYERS, NUM_PARTS = 128, 2, 4
ROWS = 8
#: Of all weights. No biases, so that what is small is counted nowhere.
WEIGHT_BYTES = NUM_LAYERS * WIDTH * WIDTH * 4


@pytest.fixture(scope="module", autouse=True)
def cluster(leak_watch: LeakWatch) -> Iterator[None]:
    """Two nodes. What moves between the first devices of each crosses a link that is counted."""
    yield from cluster_of(leak_watch, num_nodes=2, devices_per_node=2)


def sent_bytes() -> int:
    """By both nodes since the cluster began."""
    links = dtorch.counters().link_bytes
    return sum(count for link, count in links.items() if not {"client", "controller"} & set(link))


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))


def rows() -> torch.Tensor:
    return torch.randn(NUM_PARTS * ROWS, WIDTH, generator=torch.Generator().manual_seed(4))


class Run:
    """A model on ``dp=2``, and a step that adds up the gradients of four micro-batches before the optimizer's."""

    def __init__(self, stage: int, how: str, once: bool) -> None:
        self.mesh = dtorch.DeviceMesh("cpu", [0, 2], mesh_dim_names=("dp",))
        self.model = dtorch.parallelize(net(), self.mesh, plan={})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        if stage:
            zero: Any = dtorch.parallel.zero
            zero(self.model, self.optimizer, stage=stage)
        self.pipeline = Pipeline(
            [self.model], [self.mesh], num_micro_batches=NUM_PARTS, loss=self.loss, schedule="1f1b"
        )
        self.how, self.once = how, once

    @staticmethod
    def loss(output: Any) -> Any:
        return output.pow(2).mean()

    def step(self) -> None:
        with dtorch.parallel.reduce_once(self.model) if self.once else nullcontext():
            self.optimizer.zero_grad()
            if self.how == "pipeline":
                self.pipeline.step(rows())
            else:
                for part in rows().chunk(NUM_PARTS):
                    x = dtorch.from_torch(part, device_mesh=self.mesh, placements=[dtorch.Shard(0)])
                    (self.loss(self.model(x)) / NUM_PARTS).backward()
        self.optimizer.step()
        dtorch.Graph.default_graph().sync()


#: Bytes that both nodes together send in a step, in bytes of the weights. A gather or a reduction to pieces is one, a
#: reduction to wholes two. Stages 1 and 2 gather the new parameters, stage 3 gathers for each forward pass, and for
#: each backward pass all weights but the first, on which no gradient of another depends.
GATHERS = NUM_PARTS * (1 + (NUM_LAYERS - 1) / NUM_LAYERS)
SENT: dict[tuple[int, str, bool], float] = {
    (0, "loop", False): 2 * NUM_PARTS,
    (0, "loop", True): 2,
    (0, "pipeline", False): 2,
    (1, "loop", True): 2 + 1,
    (1, "pipeline", False): 2 + 1,
    (2, "loop", False): NUM_PARTS + 1,
    (2, "loop", True): 1 + 1,
    (2, "pipeline", False): NUM_PARTS + 1,
    (2, "pipeline", True): 1 + 1,
    (3, "loop", False): GATHERS + NUM_PARTS,
    (3, "loop", True): GATHERS + 1,
    (3, "pipeline", False): GATHERS + NUM_PARTS,
    (3, "pipeline", True): GATHERS + 1,
}


@pytest.mark.parametrize(("stage", "how", "once"), SENT)
def test_how_much_a_step_sends_and_what_it_gives(stage: int, how: str, once: bool) -> None:
    run = Run(stage, how, once)
    plain = net()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    run.step()
    before = sent_bytes()
    run.step()
    sent = sent_bytes() - before
    assert sent == SENT[stage, how, once] * WEIGHT_BYTES
    for _ in range(2):
        theirs.zero_grad()
        run.loss(plain(rows())).backward()
        theirs.step()
    for ours, expected in zip(run.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.to_torch(), expected.detach())
        torch.testing.assert_close(ours.grad.to_torch(), expected.grad)


class Net(nn.Module):
    """Cut layers, whole ones with biases, and one that is computed again for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up = dnn.ColumnParallelLinear(6, 10)
        self.down = dnn.RowParallelLinearWithReplicateOutput(10, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.head, self.norm(x + self.down(torch.relu(self.up(x)))), use_reentrant=False)


def made(stage: int, **options: Any) -> tuple[Net, Any, torch.optim.Optimizer]:
    """Plain, and on dp=2 x tp=2 with an optimizer."""
    torch.manual_seed(6)
    plain = Net()
    mesh = dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    model = dtorch.parallelize(copy.deepcopy(plain), mesh, plan={})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage:
        zero: Any = dtorch.parallel.zero
        zero(model, optimizer, stage=stage, **options)
    return plain, model, optimizer


def backward(model: Any, number: int) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
    (model(x).float() - 1).pow(2).mean().backward()


def compare_gradients(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        gradient: Any = ours.grad
        torch.testing.assert_close(
            gradient.to_torch(), theirs.grad, msg=lambda text, key=key: f"{key}: {text}", **tolerance
        )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_before_count_unless_they_are_let_go(stage: int) -> None:
    plain, model, _ = made(stage)
    backward(model, 0)
    kept = {key: p.grad.placements for key, p in model.named_parameters()}
    with dtorch.parallel.reduce_once(model):
        backward(model, 1)
        with dtorch.parallel.reduce_once(model):
            backward(model, 2)
        assert dtorch.Partial() in model.head.weight.grad.placements, "the outer one ends it"
    assert {key: p.grad.placements for key, p in model.named_parameters()} == kept
    for number in range(3):
        backward(plain, number)
    compare_gradients(model, plain)
    with dtorch.parallel.reduce_once(model):
        model.zero_grad()
        backward(model, 3)
    assert {key: p.grad.placements for key, p in model.named_parameters()} == kept
    plain.zero_grad()
    backward(plain, 3)
    compare_gradients(model, plain)
    backward(model, 4)
    backward(plain, 4)
    compare_gradients(model, plain)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_error_inside_leaves_the_sum_of_what_was_done(stage: int) -> None:
    plain, model, _ = made(stage)

    def work() -> None:
        with dtorch.parallel.reduce_once(model):
            backward(model, 0)
            model(torch.ones(8, 7))

    with pytest.raises(RuntimeError, match="same reduction dim"):
        work()
    backward(plain, 0)
    compare_gradients(model, plain)


def test_gradients_are_added_up_in_the_dtype_of_the_parameters() -> None:
    plain, model, _ = made(3, compute_dtype=torch.bfloat16)
    with dtorch.parallel.reduce_once(model):
        for number in range(3):
            backward(model, number)
        assert model.head.weight.grad.dtype == torch.float32
    for number in range(3):
        backward(plain, number)
    compare_gradients(model, plain, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_captured_step(stage: int) -> None:
    def run(captures: bool) -> list[torch.Tensor]:
        _, model, optimizer = made(stage)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            losses = []
            with dtorch.parallel.reduce_once(model):
                for part in x.unbind():
                    losses.append(model(part).pow(2).mean())
                    losses[-1].backward()
            optimizer.step()
            return torch.stack(losses).detach()

        do = dtorch.capture(step) if captures else step
        x = dtorch.from_torch(torch.linspace(-1, 1, 2 * 8 * 6).view(2, 8, 6), model.up.weight.device_mesh)
        found = [do(x).to_torch() for _ in range(5)]
        if captures:
            assert "3 replays, 0 calls without" in dtorch.capture.explain(do)
        return found

    ours, expected = run(True), run(False)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert ours[-1].sum() < ours[0].sum()


def test_mistakes_are_named() -> None:
    given: Any = net().parameters()
    with pytest.raises(SettingError, match=r"takes a torch\.nn\.Module, got generator"):
        dtorch.parallel.reduce_once(given)
    with pytest.raises(SettingError, match=r"parallelize\(model, mesh\)"):
        dtorch.parallel.reduce_once(net())
