"""``dtorch.capture``: captured calls give what the same function gives without, as long as it would."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import CaptureError, DeviceMesh, Partial, Replicate, Shard
from tests.support.captured import NUM_CALLS, numbers, replays, same, send

OTHER = DeviceMesh("cpu", [1, 2], mesh_dim_names=("tp",))
SCALE = 2.0


pytestmark = pytest.mark.usefixtures("cluster")


# ---- functions of tensors ----


def views(x: Any, y: Any) -> Any:
    z = x * 2
    return z[0], z.T, z.unsqueeze(0)[..., 1:]


def write_through_views(x: Any, y: Any) -> Any:
    x[1].add_(1)
    y.mul_(0.5).T.add_(y.sum(0).sum())
    return x + y


def write_inside(x: Any, y: Any) -> Any:
    z = x.clone()
    z.T[0].zero_()
    z += y
    return z


def write_and_return_inputs(x: Any, y: Any) -> Any:
    x.add_(y)
    return x, y, x[0], x.detach()


def containers(x: Any, y: Any) -> Any:
    return {"sum": x + y, "rest": [x - y, (3, None, "name", 2.5)]}


def branches(x: Any, y: Any) -> Any:
    return x.relu() if x.shape[0] == 4 and not x.requires_grad else y


def no_inputs(x: Any, y: Any) -> Any:
    return torch.zeros(3, dtype=torch.float64, device=x.device), torch.arange(4, device=x.device)


def unused_values(x: Any, y: Any) -> Any:
    x.exp().log().sum()
    return x.sin()


def several_outputs(x: Any, y: Any) -> Any:
    values, _ = x.sort(dim=0)
    first, *_, last = y.unbind(0)
    return values, first + last


FUNCTIONS = [
    views,
    write_through_views,
    write_inside,
    write_and_return_inputs,
    containers,
    branches,
    no_inputs,
    unused_values,
    several_outputs,
]


#: Those that return no views of a dim that may be cut.
WITHOUT_VIEWS = [f for f in FUNCTIONS if f not in (views, write_and_return_inputs)]
CASES = [
    *((function, placements) for function in FUNCTIONS for placements in (None, [Replicate()])),
    *((function, [Shard(dim)]) for function in WITHOUT_VIEWS for dim in (0, 1)),
]


@pytest.mark.parametrize(("function", "placements"), CASES)
def test_it_gives_what_the_function_gives(function: Callable[..., Any], placements: Any) -> None:
    captured = dtorch.capture(function)
    with torch.no_grad(), dtorch.auto_redistribute():
        for call in range(NUM_CALLS):
            x, y = numbers(4, 4, seed=call), numbers(4, 4, seed=call + 10)
            sent = [send(x, placements), send(y, placements)]
            same(captured(*sent), function(x, y))
            same(sent, [x, y])
    assert replays(captured) == NUM_CALLS - 1, dtorch.capture.explain(captured)


def test_a_result_that_is_a_linked_view_is_refused() -> None:
    captured = dtorch.capture(views)
    with dtorch.auto_redistribute(), pytest.raises(CaptureError, match=r"Return x.clone\(\)"):
        captured(send(numbers(4, 4), [Shard(0)]), None)


def test_a_replayed_view_shares_memory_with_its_base() -> None:
    @dtorch.capture
    def rows(x: Any) -> Any:
        y = x * 1
        return x[1], y, y[0]

    for _ in range(3):
        x = send(numbers(3, 4))
        of_input, made, of_made = rows(x)
        before = made.to_torch()
        of_input.zero_()
        of_made.fill_(7.0)
        assert not x.to_torch()[1].any()
        assert (made.to_torch()[0] == 7.0).all()
        assert torch.equal(made.to_torch()[1:], before[1:])
        assert of_input._handle.root is x._handle
        assert of_made._handle.root is made._handle
    assert replays(rows) == 2


def test_partial_values_and_two_meshes() -> None:
    @dtorch.capture
    def mixed(x: Any, w: Any) -> Any:
        product = x @ w
        return product, product.redistribute(device_mesh=OTHER, placements=[Shard(0)]).exp()

    for call in range(3):
        x, w = numbers(4, 6, seed=call), numbers(6, 3)
        product, moved = mixed(send(x, [Shard(1)]), send(w, [Shard(0)]))
        assert product.placements == (Partial(),)
        assert moved.device_mesh == OTHER
        same((product, moved), (x @ w, (x @ w).exp()))
    assert replays(mixed) == 2


def test_random_numbers_are_those_of_the_function_without() -> None:
    generator = dtorch.Generator()

    def noise(x: Any) -> Any:
        torch.rand(2, device=x.device)  # of no use, but it draws
        return F.dropout(x, 0.5), torch.rand(3, device=x.device), x.new_empty(3).normal_(generator=generator)

    def three(function: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(3)
        generator.manual_seed(4)
        return [[value.to_torch() for value in function(x)] for _ in range(NUM_CALLS)]

    x = send(torch.ones(8, dtype=torch.float64))
    captured = dtorch.capture(noise)
    found, expected = three(captured), three(noise)
    for one, other in zip(found, expected, strict=True):
        for value, wanted in zip(one, other, strict=True):
            assert torch.equal(value, wanted)
    assert not torch.equal(found[1][1], found[2][1])
    assert replays(captured) == NUM_CALLS - 1


def test_calls_nest() -> None:
    @dtorch.capture
    def inner(x: Any) -> Any:
        return F.dropout(x, 0.5) * SCALE, x.sum()

    @dtorch.capture
    def outer(x: Any) -> Any:
        y, total = inner(x)
        z, _ = inner(y + total)
        return z, torch.rand(2, device=x.device)

    x = send(numbers(6))
    torch.manual_seed(0)
    expected = []
    for _ in range(NUM_CALLS):
        y, total = F.dropout(x, 0.5) * SCALE, x.sum()
        z = F.dropout(y + total, 0.5) * SCALE
        expected.append([z.to_torch(), torch.rand(2, device=x.device).to_torch()])
    inner(x)
    torch.manual_seed(0)
    for wanted in expected:
        same(outer(x), tuple(wanted))
    assert replays(outer) == NUM_CALLS - 1
    assert replays(inner) == 2  # while the outer one was recorded


def test_a_method_and_a_module() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4).double()
            self.scale = 1.5

        @dtorch.capture
        def forward(self, x: Any) -> Any:
            return F.dropout(self.linear(x), 0.5, self.training) * self.scale

    plain = torch.nn.Linear(4, 4).double()
    block = Block()
    block.linear.load_state_dict(plain.state_dict())
    block = block.to("dtorch").eval()
    x = numbers(2, 4)
    with torch.no_grad():
        for _ in range(3):
            same(block(x.to("dtorch")), plain(x) * 1.5)
        block.scale = 2.5
        for _ in range(2):
            same(block(x.to("dtorch")), plain(x) * 2.5)
    assert replays(Block.forward) == 3
    assert "scale" in dtorch.capture.explain(block.forward)


# ---- what a recording depends on ----


def test_other_arguments_are_other_recordings() -> None:
    @dtorch.capture
    def power(x: Any, exponent: Any = 2, *, names: Any = ()) -> Any:
        return x**exponent if "skip" not in names else x * 0

    x = numbers(3, 4).abs() + 1
    calls: list[tuple[Any, dict[str, Any]]] = [
        (send(x), {}),
        (send(x), {"exponent": 3}),
        (send(x), {"exponent": 3.0}),
        (send(x), {"exponent": True}),
        (send(x), {"names": ["skip"]}),
        (send(x), {"names": ["skip", "more"]}),
        (send(x, [Shard(0)]), {}),
        (send(x.float()), {}),
        (send(x[:2]), {}),
        (send(x, mesh=OTHER), {}),
        (send(x).requires_grad_(), {}),
    ]
    for _ in range(2):
        for given, kwargs in calls:
            same(power(given, **kwargs), power.__wrapped__(given, **kwargs).to_torch())
    assert len(power._signatures) == len(calls)
    assert replays(power) == len(calls)


def test_arguments_that_are_the_same_tensor() -> None:
    @dtorch.capture
    def add(x: Any, y: Any) -> Any:
        x.add_(1)
        return x * y

    for _ in range(2):
        a, b = numbers(3), numbers(3, seed=1)
        one, other = send(a), send(b)
        same(add(one, one), (a + 1) * (a + 1))
        same(add(one, other), (a + 2) * b)
        same(add(one, one[:]), (a + 3) * (a + 3))
    assert replays(add) == 3


class Settings:
    def __init__(self) -> None:
        self.factors = [2.0, 3.0]
        self.by_name = {"bias": 1.0}


def test_what_the_function_reaches_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    factor, settings = 3.0, Settings()
    weight = send(numbers(4))

    def helper(x: Any) -> Any:
        return x * SCALE

    @dtorch.capture
    def scaled(x: Any) -> Any:
        return helper(x) * factor * settings.factors[1] + settings.by_name["bias"] + weight

    x = numbers(4, seed=5)

    def check(*, num_replays: int) -> None:
        expected = x * SCALE * factor * settings.factors[1] + settings.by_name["bias"] + weight.to_torch()
        before = replays(scaled)
        same(scaled(send(x)), expected)
        assert replays(scaled) - before == num_replays, dtorch.capture.explain(scaled)

    check(num_replays=0)
    check(num_replays=1)
    changes: list[Callable[[], Any]] = [
        lambda: monkeypatch.setitem(globals(), "SCALE", 5.0),
        lambda: settings.factors.__setitem__(1, 7.0),
        lambda: settings.by_name.update(bias=-1.0),
        lambda: setattr(settings, "factors", [1.0, 1.5]),
    ]
    for change in changes:
        change()
        check(num_replays=0)
        check(num_replays=1)
    factor = 4.0
    check(num_replays=0)
    weight = send(numbers(4, seed=9))
    check(num_replays=0)
    check(num_replays=1)
    weight.mul_(2.0)  # the same tensor with other values
    check(num_replays=1)
    weight.data = send(numbers(4, seed=10))
    check(num_replays=1)
    settings.factors[1] = float(settings.factors[1])  # equal
    check(num_replays=1)


def test_modes_of_torch_are_watched() -> None:
    @dtorch.capture
    def product(x: Any, y: Any) -> Any:
        return x @ y, torch.ones(2, device=x.device)

    x = send(numbers(4, 4).float())
    assert product(x, x)[0].dtype is torch.float32
    with torch.autocast("dtorch", dtype=torch.bfloat16):
        assert product(x, x)[0].dtype is torch.bfloat16
        assert product(x, x)[0].dtype is torch.bfloat16
    torch.set_default_dtype(torch.float64)
    try:
        assert product(x, x)[1].dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        assert product(x, x)[0].is_inference()
        assert product(x, x)[0].is_inference()
    assert product(x, x)[1].dtype is torch.float32
    assert replays(product) == 3


def test_train_and_eval_are_kept_side_by_side() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).double()
    plain = copy.deepcopy(model)
    model = model.to("dtorch")
    captured = dtorch.capture(model)
    with torch.no_grad():
        for call in range(4):
            for mode in (True, False):
                x = numbers(5, 4, seed=call)
                same(captured.__wrapped__.train(mode) and captured(x.to("dtorch")), plain.train(mode)(x))
    same(list(model.buffers()), list(plain.buffers()))
    assert replays(captured) == 6


def test_recordings_hold_no_values() -> None:
    graph = dtorch.Graph.default_graph()
    captured = dtorch.capture(lambda x: (x.exp() + 1).sum())
    for _ in range(3):
        captured(send(numbers(4)).requires_grad_()).backward()
    gc.collect()
    graph.sync()
    assert graph.freed is None
    assert graph.recording is None


async def test_inside_an_async_program() -> None:
    captured = dtorch.capture(lambda x: x * 3)
    for call in range(3):
        x = numbers(4, seed=call)
        torch.testing.assert_close(await captured(send(x)).value(), x * 3)
    assert replays(captured) == 2


def test_several_graphs_record_for_themselves() -> None:
    captured = dtorch.capture(lambda x: x * 3 + 1)
    for _ in range(2):
        with dtorch.Graph():
            for _ in range(2):
                same(captured(send(numbers(4))), numbers(4) * 3 + 1)
    assert replays(captured) == 2


def test_transforms_of_torch_func_inside() -> None:
    @dtorch.capture
    def slopes(x: Any) -> Any:
        return torch.func.vmap(torch.func.grad(lambda y: (y**3).sum()))(x)

    for call in range(3):
        x = numbers(3, 2, seed=call)
        same(slopes(send(x)), 3 * x**2)
    assert replays(slopes) == 2


class Holder:
    def __init__(self, value: float) -> None:
        self.tensor = send(torch.full((2,), value, dtype=torch.float64))


def test_objects_that_are_not_used_any_more_are_let_go() -> None:
    @dtorch.capture
    def doubled(holder: Any, x: Any) -> Any:
        return holder.tensor * 2 + x

    x, held = send(numbers(2)), []
    for number in range(10):
        holder = Holder(number)
        held.append(weakref.ref(holder))
        for _ in range(2):
            same(doubled(holder, x), torch.full((2,), number * 2.0, dtype=torch.float64) + numbers(2))
        del holder
    gc.collect()
    assert [reference() is not None for reference in held] == [False] * 6 + [True] * 4
    first = held[-1]()
    for length in (1, 3):  # other shapes with the same object count with it
        doubled(first, send(numbers(length, 1)))
    assert len(doubled._signatures) == 6


def test_signatures_have_a_limit() -> None:
    plus = dtorch.capture(lambda x, n: x + n)
    x = send(numbers(1))
    for number in range(300):
        plus(x, number)
        plus(x, 0)
    assert len(plus._signatures) == 256
    same(plus(x, 0), numbers(1))
    assert replays(plus) == 301


def test_the_programs_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "capture.md").read_text()
    names: dict[str, Any] = {}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
        exec(compile(block, f"docs/capture.md, program {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "2 replays" in printed
    assert "True\n" in printed
    assert "outputs: sent as one" in printed
    assert replays(names["step"]) == 2
