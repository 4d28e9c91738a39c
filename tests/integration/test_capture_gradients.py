"""Derivatives of captured calls, and captured training steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import CaptureError, Replicate, Shard
from tests.support.captured import NUM_CALLS, mlp, numbers, replays, same, send

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.parametrize("placements", [[Replicate()], [Shard(0)]], ids=str)
def test_gradients_flow_through_a_replay(placements: Any) -> None:
    plain = mlp()
    model = copy.deepcopy(plain).to("dtorch")
    captured = dtorch.capture(model)
    for call in range(NUM_CALLS):
        x = numbers(4, 6, seed=call).requires_grad_()
        sent = send(x, placements)
        for module, given, run in ((plain, x, plain), (model, sent, captured)):
            module.zero_grad()
            hidden = given * 2  # not a leaf
            (run(hidden).pow(2).sum() + run(hidden.exp()).sum()).backward()
        same(sent.grad, x.grad)
        same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert replays(captured) == 2 * NUM_CALLS - 1


def test_several_results_some_of_them_without_a_gradient() -> None:
    def split(x: Any) -> Any:
        y = x.exp()
        return y, y.detach() * 2, {"again": y, "index": x.argmax(), "squared": y * y}

    captured = dtorch.capture(split)
    for call in range(3):
        x = numbers(5, seed=call).requires_grad_()
        sent = send(x)
        for given, run in ((x, split), (sent, captured)):
            first, second, rest = run(given)
            assert not second.requires_grad
            assert not rest["index"].requires_grad
            assert rest["again"] is first
            (first.sum() * second.sum() + rest["squared"].sum()).backward()
        same(sent.grad, x.grad)
    assert replays(captured) == 2


def test_a_result_that_is_not_used_has_no_part_in_the_gradient() -> None:
    @dtorch.capture
    def two(x: Any) -> Any:
        return x.sin(), x.cos()

    for _ in range(3):
        x = send(numbers(4)).requires_grad_()
        two(x)[1].sum().backward()
        same(x.grad, -numbers(4).sin())


def test_double_backward_of_a_replay_is_refused() -> None:
    cube = dtorch.capture(lambda x: x**3)
    x = send(numbers(4)).requires_grad_()
    cube(x)
    with pytest.raises(CaptureError, match="create_graph=True"):
        torch.autograd.grad(cube(x).sum(), x, create_graph=True)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, capturable=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_step(name: str) -> None:
    """The same numbers as the same step without ``capture``, bit for bit."""
    captured_model = mlp().to("dtorch")
    model = mlp().to("dtorch")
    model.load_state_dict(captured_model.state_dict())

    def step(module: Any, optimizer: Any, x: Any) -> Any:
        loss = F.dropout(module(x), 0.2).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = dtorch.capture(step)
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (captured_model, model)]

    def check(call: int) -> None:
        x = numbers(4, 6, seed=call).to("dtorch")
        with dtorch.fork_rng():
            torch.manual_seed(call)
            loss = captured(captured_model, optimizers[0], x)
        torch.manual_seed(call)
        assert torch.equal(loss, step(model, optimizers[1], x))
        for one, other in zip(captured_model.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one.grad, other.grad)

    for call in range(6):
        check(call)
    assert replays(captured) == 4, dtorch.capture.explain(captured)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.5
    check(6)
    check(7)
    assert replays(captured) == 5
    assert "['lr'] was" in dtorch.capture.explain(captured)


def test_an_optimizer_that_counts_in_this_process_is_refused_with_what_to_write() -> None:
    model = mlp().to("dtorch")
    optimizer = torch.optim.Adam(model.parameters())

    @dtorch.capture
    def step(x: Any) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    x = numbers(4, 6).to("dtorch")
    step(x)
    step(x)
    fetches = dtorch.counters().fetches
    with pytest.raises(
        CaptureError, match=r"optimizer.state\[a tensor of shape .*\]\['step'\].*capturable=True"
    ):
        step(x)
    assert dtorch.counters().fetches == fetches, "a name of a tensor is not its value"


def test_gradients_that_add_up() -> None:
    plain = mlp()
    model = copy.deepcopy(plain).to("dtorch")

    def accumulate(module: Any, x: Any) -> None:
        module(x).sum().backward()

    captured = dtorch.capture(accumulate)
    for call in range(5):
        accumulate(plain, numbers(4, 6, seed=call))
        assert captured(model, numbers(4, 6, seed=call).to("dtorch")) is None
        same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert replays(captured) == 3, dtorch.capture.explain(captured)


def test_a_captured_loss_has_no_graph_when_its_backward_pass_was_captured() -> None:
    weight = send(numbers(4)).requires_grad_()

    @dtorch.capture
    def step(x: Any) -> Any:
        loss = (weight * x).sum()
        loss.backward()
        return loss

    for _ in range(3):
        weight.grad = None
        loss = step(send(numbers(4, seed=1)))
        same(weight.grad, numbers(4, seed=1))
    assert not loss.requires_grad


def test_a_derivative_that_cannot_be_placed_is_no_error_of_the_program() -> None:
    def function(x: Any, z: Any) -> Any:
        return x[:6] + z  # the gradient is cut as z is, and that of x[:6] has to be whole

    x = send(numbers(8)).requires_grad_()
    z = send(numbers(6, seed=1), [Shard(0)])
    expected = function(x, z).to_torch().detach()
    with pytest.raises(CaptureError, match="cannot be computed for a gradient placed as its result"):
        dtorch.capture(function)(x, z)
    same(dtorch.capture(fallback=True)(function)(x, z), expected)
    with torch.no_grad():
        captured = dtorch.capture(function)
        for _ in range(NUM_CALLS):
            same(captured(x, z), expected)
    assert replays(captured) == NUM_CALLS - 1
