"""Passes over captured calls: the same values and failures of fewer ops, and ``explain`` says so."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dtorch
from dtorch import Replicate, Settings, Shard
from dtorch_runtime.local import LocalCluster
from tests.support.captured import NUM_CALLS, mlp, numbers, replays, same, send

pytestmark = pytest.mark.usefixtures("cluster")


def move(x: Any, *placements: Any) -> Any:
    return x.redistribute(placements=placements)


def repeated(x: Any) -> Any:
    return torch.relu(x) * torch.relu(x) + x.t().sum() - x.t().sum()


def moved_back(x: Any) -> Any:
    y = torch.relu(x)
    return move(move(y, Shard(0)), Replicate()) + move(move(y, Shard(1)), Replicate())


def written(x: Any) -> Any:
    y, z = torch.relu(x), torch.relu(x)
    z[0].add_(1)
    return y, z, move(move(z, Shard(0)), Replicate())


def outputs_apart(x: Any) -> Any:
    return torch.relu(x), torch.relu(x), x.t(), x.t()


def trained(model: Any, x: Any) -> Any:
    loss = model(x).pow(2).mean() + model(x).abs().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("function", "removed"),
    [
        (repeated, "dead removed 0, common removed 3, redistribute removed 0"),
        (moved_back, "dead removed 0, common removed 1, redistribute removed 4"),
        (written, "dead removed 0, common removed 0, redistribute removed 1"),
        (outputs_apart, "dead removed 0, common removed 0, redistribute removed 0"),
    ],
)
def test_values_stay_and_explain_tells_what_was_removed(function: Any, removed: str) -> None:
    captured = dtorch.capture(function)
    x = send(numbers(4, 4), [Replicate()])
    for _ in range(NUM_CALLS):
        found, expected = captured(x), function(x)
        for one, other in zip(_list(found), _list(expected), strict=True):
            same(one, other.to_torch())
    assert replays(captured) == NUM_CALLS - 1
    assert f"passes: {removed}" in dtorch.capture.explain(captured)


def test_outputs_share_memory_as_without_passes() -> None:
    captured = dtorch.capture(outputs_apart)
    x = send(numbers(4, 4), [Replicate()])
    for _ in range(2):
        one, other, turned, also_turned = captured(x)
        one.zero_()
        turned[0].fill_(7)
        assert other.abs().sum().item() > 0
        assert also_turned[0].tolist() == x[:, 0].tolist() == [7.0] * 4


def test_two_forward_passes_in_a_training_step() -> None:
    plain, model = mlp(), mlp().to("dtorch")
    captured = dtorch.capture(trained)
    x = numbers(5, 6)
    for _ in range(NUM_CALLS):
        for one in (plain, model):
            one.zero_grad()
        same(captured(model, x.to("dtorch")), trained(plain, x))
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            same(found.grad, expected.grad)
    removed = re.search(r"common removed (\d+)", dtorch.capture.explain(captured))
    assert removed is not None
    assert int(removed[1]) >= 4, "the second forward pass is the first one"


def segment(x: Any) -> Any:
    for _ in range(30):
        x = torch.tanh(x)
    return x


def checkpointed(x: Any) -> Any:
    y = checkpoint(segment, checkpoint(segment, x, use_reentrant=False), use_reentrant=False)
    y.sum().backward()
    return y.detach()


def test_what_a_checkpoint_has_dropped_is_computed_anew() -> None:
    captured = dtorch.capture(checkpointed)
    for _ in range(NUM_CALLS):
        x, y = numbers(4).requires_grad_(), send(numbers(4).requires_grad_(), [Replicate()])
        same(captured(y), checkpointed(x))
        same(y.grad, x.grad)
    assert replays(captured) == NUM_CALLS - 1
    # The second segment is there still when its backward pass begins, the first one is not.
    assert "common removed 30," in dtorch.capture.explain(captured)


def fails(x: Any, index: Any) -> Any:
    y = torch.relu(x) + torch.relu(x)
    return move(move(y.index_select(0, index), Shard(0)), Replicate()), y  # the line that fails


def test_a_failure_after_passes_is_that_of_its_line() -> None:
    captured = dtorch.capture(fails)
    x = send(numbers(4, 4), [Replicate()])
    good, bad = (send(torch.tensor([index]), [Replicate()]) for index in (1, 9))
    captured(x, good)
    result, other = captured(x, bad)
    assert replays(captured) == 1
    assert "common removed 1, redistribute removed 2" in dtorch.capture.explain(captured)
    with pytest.raises(dtorch.RemoteOpError, match="index_select") as raised:
        result.to_torch()
    line = fails.__code__.co_firstlineno + 2
    assert f"test_passes.py:{line}" in str(raised.value)
    same(other, 2 * torch.relu(numbers(4, 4)))


def elementwise(x: Any, y: Any) -> Any:
    a = torch.tanh(x * 2) + y
    view = a.t()
    b = torch.sigmoid(a - y)
    wide = torch.relu(x[0]) + y  # of another shape than its first operand
    return b * view, torch.relu(wide).exp() / b, (x + 1).t().neg()


def test_elementwise_ops_write_to_what_dies() -> None:
    captured = dtorch.capture(elementwise)
    x, y = (send(numbers(4, 4, seed=seed), [Replicate()]) for seed in range(2))
    for _ in range(NUM_CALLS):
        for one, other in zip(captured(x, y), elementwise(x, y), strict=True):
            torch.testing.assert_close(one.to_torch(), other.to_torch(), rtol=0, atol=0)
    same([x, y], [numbers(4, 4, seed=seed) for seed in range(2)])
    assert "reuse changed 6" in dtorch.capture.explain(captured)


def computes_meanwhile(x: Any, w: Any) -> Any:
    y = torch.tanh(x)
    z = torch.exp(x).sin()
    total = move(x @ w, Replicate())
    return total.relu() + 1, y * z, (w * 2).cos()


def test_a_redistribution_begins_early_and_its_reader_comes_late() -> None:
    captured = dtorch.capture(computes_meanwhile)
    x, w = send(numbers(4, 8), [Shard(1)]), send(numbers(8, 3, seed=1), [Shard(0)])
    for _ in range(NUM_CALLS):
        for one, other in zip(captured(x, w), computes_meanwhile(x, w), strict=True):
            torch.testing.assert_close(one.to_torch(), other.to_torch(), rtol=0, atol=0)
    assert "reorder moved 3" in dtorch.capture.explain(captured)


def test_regions_give_the_same(shared_processes: LocalCluster) -> None:
    """Of small tensors, so op by op: what compilers make of them is tested in ``test_regions.py``."""
    local, settings = shared_processes, Settings(compile=True)
    with dtorch.connect(local.address, session_key=local.session_key, settings=settings):
        captured = dtorch.capture(elementwise)
        x, y = (send(numbers(4, 4, seed=seed), [Replicate()]) for seed in range(2))
        for _ in range(NUM_CALLS):
            for one, other in zip(captured(x, y), elementwise(x, y), strict=True):
                torch.testing.assert_close(one.to_torch(), other.to_torch(), rtol=0, atol=0)
        assert "compile joined 12" in dtorch.capture.explain(captured)


def _list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]
