"""``dtorch.capture``: captured calls give what the same function gives without, and what cannot be replayed is not."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import CaptureError, DeviceMesh, Partial, RemoteOpError, Replicate, Shard
from tests.support.leaks import LeakWatch

MESH = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
OTHER = DeviceMesh("cpu", [1, 2], mesh_dim_names=("tp",))
PLACEMENTS = [[Replicate()], [Shard(0)], [Shard(1)]]
SCALE = 2.0
NUM_CALLS = 4


@pytest.fixture(scope="module", autouse=True)
def cluster(leak_watch: LeakWatch) -> Iterator[None]:
    before = leak_watch.snapshot()
    dtorch.init(devices_per_node=3)
    leak_watch.declare_baseline(before)
    yield
    dtorch.shutdown()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def send(tensor: torch.Tensor, placements: Any = None, mesh: DeviceMesh = MESH) -> dtorch.Tensor:
    sent = dtorch.from_torch(tensor.detach(), device_mesh=mesh, placements=placements)
    return sent.requires_grad_(tensor.requires_grad)


def replays(function: Any) -> int:
    return sum(signature.num_replays for signature in function._signatures.values())


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert type(found) is dtorch.Tensor
        torch.testing.assert_close(found.to_torch(), expected.detach())
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        same(list(found.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert type(found) is type(expected)
        assert found == expected


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


# ---- derivatives ----


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
    ).double()


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


# ---- failures ----


def test_an_op_that_fails_in_a_replay_names_its_line_and_the_rest_goes_on() -> None:
    @dtorch.capture
    def pick(table: Any, index: Any) -> Any:
        wrong = table.index_select(0, index)  # this line
        return wrong * 2, table + 1

    table = send(numbers(3, 2))
    pick(table, send(torch.tensor([0])))
    found, other = pick(table, send(torch.tensor([7])))
    with pytest.raises(RemoteOpError, match="index_select") as error:
        found.to_torch()
    assert "# this line" in error.value.location
    same(other, numbers(3, 2) + 1)
    same(pick(table, send(torch.tensor([1])))[0], numbers(3, 2)[[1]] * 2)


def test_a_function_that_raises_is_not_recorded() -> None:
    @dtorch.capture
    def broken(x: Any, *, fail: bool) -> Any:
        y = x + 1
        if fail:
            raise KeyError("mine")
        return y

    x = send(numbers(3))
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            broken(x, fail=True)
    same(broken(x, fail=False), numbers(3) + 1)
    same(broken(x, fail=False), numbers(3) + 1)
    assert replays(broken) == 1


class Cache:
    kept: Any = None


def reads_a_value(x: Any) -> Any:
    return x * x.sum().item()


def prints(x: Any) -> Any:
    print(x)
    return x


def depends_on_data(x: Any) -> Any:
    return x[x > 0]


def sends_a_tensor(x: Any) -> Any:
    return x + torch.ones(4, dtype=torch.float64).to("dtorch")


def keeps_a_tensor(x: Any) -> Any:
    Cache.kept = x * 2
    return x


def keeps_in_a_list(x: Any, kept: list[Any] = []) -> Any:  # noqa: B006  as people write it
    kept.append(x + 1)
    return x


def counts(x: Any, state: Any = {"calls": 0}) -> Any:  # noqa: B006
    state["calls"] += 1
    return x * state["calls"]


STEP = torch.zeros(())


def writes_to_a_plain_tensor(x: Any) -> Any:
    STEP.add_(1)
    return x * float(STEP)


def returns_an_object(x: Any) -> Any:
    return Cache()


def hidden() -> Any:
    return _HIDDEN.pop()


_HIDDEN: list[Any] = []


def three_times(function: Callable[..., Any], x: Any) -> None:
    for _ in range(3):
        function(x)


REFUSED = [
    (reads_a_value, "reads the value of a tensor"),
    (prints, "reads the value of a tensor"),
    (depends_on_data, "reads the shape of a tensor"),
    (sends_a_tensor, r"sends a tensor of shape \[4\]"),
    (keeps_a_tensor, "changes what the next call sees: .*Cache"),
    (keeps_in_a_list, r"changes what the next call sees: .*__defaults__.* [0-9] items"),
    (counts, r"changes what the next call sees: .*'calls'\] was [0-9] and is [0-9]"),
    (writes_to_a_plain_tensor, "a tensor of this process, was written to"),
    (returns_an_object, "returns a Cache"),
]


@pytest.mark.parametrize(("function", "message"), REFUSED)
def test_what_cannot_be_replayed_is_refused_with_the_reason(
    function: Callable[..., Any], message: str
) -> None:
    x = send(numbers(4))
    captured = dtorch.capture(function)
    with pytest.raises(CaptureError, match=message) as error:
        three_times(captured, x)
    assert "fallback=True" in str(error.value)
    with_fallback = dtorch.capture(fallback=True)(function)
    for _ in range(5):
        with_fallback(x)
    assert replays(with_fallback) == 0
    assert "not recorded: it " in with_fallback.explain()
    Cache.kept = None


def test_the_refusal_names_the_line() -> None:
    captured = dtorch.capture(reads_a_value)
    with pytest.raises(
        CaptureError, match=r"test_capture.py:[0-9]+ in reads_a_value: return x \* x.sum\(\).item\(\)"
    ):
        captured(send(numbers(4)))
    same(send(numbers(4)) + 1, numbers(4) + 1)


def test_a_tensor_that_cannot_be_watched_is_refused() -> None:
    class Odd:
        __slots__ = ("tensor",)

    odd = Odd()
    odd.tensor = send(numbers(4))
    captured = dtorch.capture(lambda x: x + odd.tensor)
    with pytest.raises(CaptureError, match=r"cannot be watched, in aten::add.*Pass it as an argument"):
        captured(send(numbers(4)))


def test_wrong_uses_say_what_to_write() -> None:
    async def waits() -> None: ...

    with pytest.raises(dtorch.UnsupportedError, match="between two awaits"):
        dtorch.capture(waits)
    with pytest.raises(CaptureError, match="above a def"):
        dtorch.capture(3)  # type: ignore[call-overload]
    with pytest.raises(CaptureError, match="is not captured"):
        dtorch.capture.explain(numbers)
    with pytest.raises(CaptureError, match=r"t.to\('dtorch'\)"):
        dtorch.capture(torch.relu)(numbers(3))
    assert "not called yet" in dtorch.capture.explain(dtorch.capture(numbers))


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
