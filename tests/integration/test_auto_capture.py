"""``Graph(auto_capture=True)``: eager programs give the same bits as without, and most of their ops are replayed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Graph, Shard
from dtorch_runtime.errors import RemoteOpError
from tests.support.captured import MESH, numbers, send

pytestmark = pytest.mark.usefixtures("cluster")

NUM_STEPS = 8


def train(optimizer: Callable[..., Any], **options: Any) -> list[torch.Tensor]:
    """Steps of a small model that end with a value, then a few of other shapes, then the first ones again."""
    torch.manual_seed(0)
    parts = (torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.GELU(), torch.nn.Linear(8, 3))
    model = torch.nn.Sequential(*parts, torch.nn.BatchNorm1d(3)).double()
    model = dtorch.parallelize(model, MESH, {"0": "colwise", "3": "rowwise"})
    steps = optimizer(model.parameters(), **options)
    losses = []
    for step in range(3 * NUM_STEPS):
        batch = 6 if step // NUM_STEPS == 1 else 4
        x = send(numbers(batch, 6, seed=step))
        loss = model(x).square().mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.detach().to_torch())
    return [*losses, *(parameter.detach().to_torch() for parameter in model.parameters())]


def decode() -> list[torch.Tensor]:
    """Tokens one after the other, each of which is looked at; what is remembered grows by writes."""
    table, w = send(numbers(11, 8, seed=1)), send(numbers(8, 8, seed=2), [Shard(1)])
    memory = send(torch.zeros(40, 8, dtype=torch.float64))
    tokens = [torch.tensor([3])]
    for step in range(30):
        x = table[tokens[-1].to("dtorch")]
        for _ in range(3):
            x = torch.tanh(x @ w).redistribute(placements=x.placements) + x
        memory[step % 5].copy_(x[0])
        scores = (x + memory.sum(0)) @ table.T
        tokens.append(scores.argmax(-1).to_torch())
    return [*tokens, memory.to_torch()]


def draws_and_writes() -> list[torch.Tensor]:
    """A loop without a wait: random numbers, writes through views, values that live on now and then."""
    x, kept = send(numbers(4, 6)), []
    for step in range(60):
        noise = torch.randn_like(x)
        x.T[step % 2].add_(noise.T[1]).clamp_(-3, 3)
        y = torch.nn.functional.dropout(x * 0.9, 0.2)
        x = y + noise.sum(0)
        if step % 7 == 0:
            kept.append(y)
    return [x.to_torch(), *(y.to_torch() for y in kept)]


def other_dtypes() -> list[torch.Tensor]:
    """The same lines with another dtype in the middle."""
    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float64):
        x = send(numbers(4, 6)).to(dtype)
        for _ in range(30):
            x = torch.sin(x) * 1.5 + x.sum(1, keepdim=True) * 0.01
        found.append(x.to_torch())
    return found


def small_loops(seed: int) -> list[torch.Tensor]:
    """Loops of ops drawn at random, in one another."""
    rng = random.Random(seed)
    values: list[Any] = [send(numbers(4, 6, seed=n)) for n in range(3)]
    ops: list[Callable[[Any, Any], Any]] = [
        torch.add,
        torch.mul,
        lambda a, b: a.add_(b, alpha=0.1),
        lambda a, b: a.sin(),
        lambda a, b: a.T.clone().T,
        lambda a, b: a.redistribute(placements=[Shard(0)]).redistribute(placements=b.placements),
        lambda a, b: torch.rand_like(a) - b,
        lambda a, b: a[:2].mul_(0.5).sum() + b,
    ]
    for _ in range(3):
        body = [(rng.choice(ops), rng.randrange(3), rng.randrange(3), rng.randrange(3)) for _ in range(6)]
        for _ in range(40):
            for op, a, b, target in body:
                values[target] = torch.tanh(op(values[a], values[b]))
    return [value.to_torch() for value in values]


PROGRAMS = {
    "sgd": (lambda: train(torch.optim.SGD, lr=0.1, momentum=0.9), 0.4),
    "adamw": (lambda: train(torch.optim.AdamW, lr=0.01, capturable=True), 0.4),
    "decode": (decode, 0.5),
    "draws and writes": (draws_and_writes, 0.2),
    "other dtypes": (other_dtypes, 0.4),
    **{f"loops {seed}": (lambda seed=seed: small_loops(seed), 0.3) for seed in range(3)},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bits_are_those_of_an_eager_program(name: str) -> None:
    program, share = PROGRAMS[name]
    found = {}
    for auto_capture in (False, True):
        dtorch.manual_seed(5)
        with Graph(auto_capture=auto_capture) as graph:
            found[auto_capture] = program()
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert graph.replayer is not None
    graph.replayer.validate()
    assert graph.replayer.num_replayed_ops > share * graph.replayer.num_ops, dtorch.capture.explain(graph)


def test_a_failure_in_a_run_names_its_line_and_the_rest_goes_on() -> None:
    with Graph(auto_capture=True) as graph:
        table, places = send(numbers(5, 2)), [torch.tensor([n % 5]) for n in range(120)]
        places[100] = torch.tensor([7])
        sums = []
        for place in [place.to("dtorch") for place in places]:
            row = torch.nn.functional.embedding(place, table)  # the line that fails
            good = table.sum(0) * 2
            sums.append((row + good, good.exp()))
        assert graph.flush()
        failed, went_on = sums[100]
        with pytest.raises(RemoteOpError, match=r"the line that fails") as error:
            failed.to_torch()
        assert "embedding" in str(error.value)
        torch.testing.assert_close(went_on.to_torch(), (table.to_torch().sum(0) * 2).exp())
        torch.testing.assert_close(
            sums[101][0].to_torch()[0], (table.to_torch()[1] + table.to_torch().sum(0) * 2)
        )
        assert graph.replayer is not None
        assert graph.replayer.num_replays > 0, dtorch.capture.explain(graph)


def test_explain_and_counters_tell_of_runs() -> None:
    before = dtorch.counters()
    with Graph(auto_capture=True) as graph:
        x = send(numbers(4, 6))
        for _ in range(200):
            x = torch.sin(x) * 0.5 + 1
        x.to_torch()
        text = dtorch.capture.explain(graph)
        counters = dtorch.counters()
    assert counters.ops - before.ops >= 600, "ops of runs count each"
    assert counters.auto_replays > before.auto_replays
    assert re.search(rf"{re.escape(__file__)}:\d+ in test_explain_and_counters_tell_of_runs", text)
    assert re.search(r"ops, 1 inputs and \d outputs: sent as one \d+ times", text)
    assert "auto_capture=True" in dtorch.capture.explain(Graph())


def test_captured_functions_and_runs_go_together() -> None:
    @dtorch.capture
    def square(x: Any) -> Any:
        return (x * x).sin()

    found = {}
    for auto_capture in (False, True):
        with Graph(auto_capture=auto_capture) as graph:
            x = send(numbers(4, 6))
            for _ in range(40):
                x = square(x).cos() + 1 - x.tanh() * x
                x = x.sin() - 0.5
            found[auto_capture] = x.to_torch()
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=0)
    assert graph.replayer is not None
    assert graph.replayer.num_replays > 5, dtorch.capture.explain(graph)


def test_what_a_program_drops_is_freed() -> None:
    """What runs make inside and hand on is gone once its symbols are."""
    with Graph(auto_capture=True) as graph:
        before = sum(device.current_bytes for device in dtorch.memory_stats().devices.values())
        x = send(numbers(4, 6))
        for _ in range(300):
            x = torch.sin(x) * 0.5 + x.sum()
        x.to_torch()
        assert graph.replayer is not None
        assert graph.replayer.num_replays > 5
        del x
        graph.sync()
        after = sum(device.current_bytes for device in dtorch.memory_stats().devices.values())
    assert after == before
