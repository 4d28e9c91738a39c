"""Mixture of experts: on every mesh the values, gradients, losses and first weights of plain torch on one device."""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
import dtorch.nn as dnn
from dtorch_runtime.errors import MeshError, PlacementError, SettingError
from tests.support.clusters import cluster_of
from tests.support.leaks import LeakWatch

R, S = dtorch.Replicate(), dtorch.Shard
WIDTH, HIDDEN, EXPERTS = 8, 6, 4
#: Devices 0 and 1 are one node's, 2 and 3 another's.
MESHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ep=2": ([0, 2], ("ep",)),
    "ep=3": ([0, 1, 2], ("ep",)),
    "ep=4": ([3, 1, 0, 2], ("ep",)),
    "ep=2 x tp=2": ([[0, 1], [2, 3]], ("ep", "tp")),
    "tp=2 x ep=2": ([[0, 1], [2, 3]], ("tp", "ep")),
    "ep=2 x dp=2": ([[0, 1], [2, 3]], ("ep", "dp")),
    "dp=2 x ep=2": ([[0, 1], [2, 3]], ("dp", "ep")),
    "dp=2 x tp=2": ([[0, 1], [2, 3]], ("dp", "tp")),
    "one device": ([0], ("ep",)),
}
KINDS: dict[str, dict[str, Any]] = {
    "gated": {},
    "plain, shared": {"gated": False, "activation": F.gelu, "num_shared_experts": 2},
    "capacity": {"capacity_factor": 0.75},
    "top 1": {"top_k": 1, "capacity_factor": 1.0},
    "sigmoid, groups": {
        "top_k": 2,
        "scoring": "sigmoid",
        "num_groups": 2,
        "top_groups": 1,
        "has_selection_bias": True,
        "scale": 2.5,
    },
}


@pytest.fixture(scope="module", autouse=True)
def cluster(leak_watch: LeakWatch) -> Iterator[None]:
    yield from cluster_of(leak_watch, num_nodes=2, devices_per_node=2)


def mesh_of(name: str) -> dtorch.DeviceMesh:
    devices, axes = MESHES[name]
    return dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes)


def placed(mesh: dtorch.DeviceMesh, tensor: torch.Tensor, **on: dtorch.Placement) -> torch.Tensor:
    """Cut over ``dp`` by the batch; on other axes as ``on`` says."""
    placements = [on.get(name, S(0) if name == "dp" else R) for name in mesh.mesh_dim_names or ()]
    return dtorch.from_torch(tensor, device_mesh=mesh, placements=placements)


@pytest.fixture
def generator(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(32))


@pytest.fixture
def x(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 5, WIDTH, generator=generator)


def new_moe(generator: torch.Generator, **options: Any) -> dnn.MoE:
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(1 << 30, (), generator=generator)))
        moe = dnn.MoE(WIDTH, HIDDEN, EXPERTS, **options)
        with torch.no_grad():
            moe.router.weight.mul_(4)  # decided enough that rounding chooses no other expert
        if moe.router.selection_bias is not None:
            moe.router.selection_bias.copy_(torch.randn(EXPERTS) / 4)
        return moe


def dense(moe: dnn.MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """The same by every expert for every token, choices and drops by plain loops: output, losses, number of drops."""
    router, experts = moe.router, moe.experts
    logits = x @ router.weight.T
    scores = logits.softmax(-1) if router.scoring == "softmax" else logits.sigmoid()
    chosen = torch.empty(*x.shape[:-1], moe.top_k, dtype=torch.int64)
    flat_scores, flat_chosen = scores.detach().reshape(-1, EXPERTS), chosen.view(-1, moe.top_k)
    for token, row in enumerate(flat_scores):
        ranked = row + (0 if router.selection_bias is None else router.selection_bias)
        size = EXPERTS // router.num_groups
        groups = ranked.view(-1, size)
        best = groups.sort(descending=True).values[:, :2].sum(-1).argsort(descending=True)
        allowed = [e for e in range(EXPERTS) if e // size in best[: router.top_groups].tolist()]
        order = sorted(allowed, key=lambda e: -float(ranked[e]))
        flat_chosen[token] = torch.tensor(order[: moe.top_k])
    num_pairs, is_kept, load = chosen.numel(), torch.ones(chosen.shape).view(-1, moe.top_k), [0] * EXPERTS
    limit = math.inf
    if moe.capacity_factor is not None:
        limit = math.ceil(moe.capacity_factor * num_pairs / EXPERTS)
    for choice in range(moe.top_k):
        for token in range(len(flat_chosen)):
            expert = int(flat_chosen[token, choice])
            is_kept[token, choice] = load[expert] < limit
            load[expert] += 1
    weights = scores.gather(-1, chosen)
    if router.normalize_weights:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * router.scale * is_kept.view(chosen.shape)
    outputs = []
    for e in range(EXPERTS):
        hidden = x @ experts.up[e].T
        act = experts.activation
        hidden = act(hidden) if experts.gate is None else act(x @ experts.gate[e].T) * hidden
        outputs.append(hidden @ experts.down[e].T)
    picked = torch.stack(outputs, -2).gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, WIDTH))
    output = (picked * weights.unsqueeze(-1)).sum(-2)
    if moe.shared is not None:
        hidden = moe.shared.activation(x @ moe.shared.up.weight.T)
        output = output + hidden @ moe.shared.down.weight.T
    share = (scores / scores.sum(-1, keepdim=True)).reshape(-1, EXPERTS).mean(0)
    balance = EXPERTS * (torch.tensor(load) / num_pairs * share).sum()
    z_loss = logits.logsumexp(-1).square().mean()
    return output, balance, z_loss, int(num_pairs - is_kept.sum())


def gradients(module: dnn.MoE) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: g.to_torch() if isinstance(g, dtorch.Tensor) else g for name, g in found.items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(
    ("kind", "meshes"),
    [
        ("gated", ["ep=3", "ep=2 x tp=2", "dp=2 x ep=2"]),
        ("capacity", ["ep=3"]),
        ("sigmoid, groups", ["ep=2 x tp=2"]),
        *(pytest.param(kind, [*MESHES], marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_values_and_gradients_are_those_of_plain_torch(
    kind: str, meshes: list[str], x: torch.Tensor, generator: torch.Generator
) -> None:
    plain = new_moe(generator, **KINDS[kind])
    modules = [(name, dtorch.parallelize(copy.deepcopy(plain), mesh_of(name))) for name in meshes]
    given = x.clone().requires_grad_()
    output, balance, z_loss, num_dropped = dense(plain, given)
    (output.square().sum() + balance + z_loss).backward()
    expected = {"x": given.grad, "output": output.detach(), **gradients(plain)}
    if kind in ("capacity", "top 1"):
        assert num_dropped > 0
    for name, module in [("no mesh", copy.deepcopy(plain)), *modules]:
        module.zero_grad()
        again = (x.clone() if name == "no mesh" else placed(mesh_of(name), x)).requires_grad_()
        found, routing = module(again, return_routing=True)
        (found.square().sum() + routing.balance_loss + routing.z_loss).backward()
        results = {"x": again.grad, "output": found.detach(), **gradients(module)}
        local = {n: v.to_torch() if isinstance(v, dtorch.Tensor) else v for n, v in results.items()}
        assert_same(local, expected)
        assert routing.balance_loss.item() == pytest.approx(balance.item(), rel=1e-5)
        assert routing.z_loss.item() == pytest.approx(z_loss.item(), rel=1e-5)
        assert routing.num_dropped.item() == num_dropped
        assert routing.tokens_per_expert.sum().item() == x[..., 0].numel() * plain.top_k
        if isinstance(found, dtorch.Tensor):
            assert found.placements == again.placements


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("ep=3", (0, 1)),
        pytest.param("ep=3", (3, 0), marks=pytest.mark.slow),
        pytest.param("ep=2 x tp=2", (0, 1), marks=pytest.mark.slow),
        pytest.param("dp=2 x ep=2", (3, 2), marks=pytest.mark.slow),
    ],
)
def test_all_tokens_to_a_few_experts(
    name: str, experts: tuple[int, int], x: torch.Tensor, generator: torch.Generator
) -> None:
    """Some devices get every row, others none."""
    plain = new_moe(generator)
    with torch.no_grad():
        plain.router.weight.zero_()
        for rank, expert in enumerate(experts):
            plain.router.weight[expert, 0] = 3.0 - rank
    x[..., 0] = x[..., 0].abs() + 1
    module = dtorch.parallelize(copy.deepcopy(plain), mesh_of(name))
    expected, *_ = dense(plain, x)
    found, routing = module(placed(mesh_of(name), x), return_routing=True)
    torch.testing.assert_close(found.detach().to_torch(), expected.detach(), rtol=1e-4, atol=1e-5)
    assert [e for e, n in enumerate(routing.tokens_per_expert.tolist()) if n] == sorted(experts)
    expected.sum().backward()
    found.sum().backward()
    assert_same(gradients(module), gradients(plain))


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("ep=2 x tp=2", {"ep": S(1), "tp": S(1)}),
        pytest.param("ep=2", {"ep": S(0)}, marks=pytest.mark.slow),
        pytest.param("ep=3", {"ep": S(1)}, marks=pytest.mark.slow),
        pytest.param("ep=2", {"ep": S(2)}, marks=pytest.mark.slow),
        pytest.param("dp=2 x ep=2", {"dp": S(1), "ep": S(0)}, marks=pytest.mark.slow),
    ],
)
def test_tokens_may_be_cut_in_any_way(
    name: str, on: dict[str, dtorch.Placement], x: torch.Tensor, generator: torch.Generator
) -> None:
    plain = new_moe(generator, capacity_factor=1.0)
    mesh = mesh_of(name)
    module = dtorch.parallelize(copy.deepcopy(plain), mesh)
    given = placed(mesh, x, **on)
    found: Any = module.forward(given)
    torch.testing.assert_close(found.detach().to_torch(), dense(plain, x)[0].detach(), rtol=1e-4, atol=1e-5)
    assert found.placements == given.placements
    row = placed(mesh_of("ep=2"), x[0, 0])
    one: Any = dtorch.parallelize(copy.deepcopy(plain), mesh_of("ep=2")).forward(row)
    torch.testing.assert_close(one.detach().to_torch(), dense(plain, x[0, :1])[0][0].detach())


@pytest.mark.parametrize(
    "name", ["ep=2 x tp=2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ep=3", "dp=2 x ep=2"))]
)
def test_twenty_steps_have_the_losses_of_one_device(
    name: str, x: torch.Tensor, generator: torch.Generator
) -> None:
    plain = new_moe(generator, num_shared_experts=1, capacity_factor=1.5)
    target = torch.randn(x.shape, generator=generator)
    mesh = mesh_of(name)
    curves = []
    for module, given, wanted in (
        (copy.deepcopy(plain), x, target),
        (dtorch.parallelize(copy.deepcopy(plain), mesh), placed(mesh, x), placed(mesh, target)),
    ):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        losses = []
        for _ in range(20):
            output, routing = module(given, return_routing=True)
            loss = (output - wanted).square().mean() + 0.01 * routing.balance_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        curves.append([loss.item() for loss in losses])
    assert curves[1] == pytest.approx(curves[0], abs=1e-4)
    assert curves[0][-1] < curves[0][0]


def test_made_on_a_mesh_it_begins_with_the_numbers_of_one_device() -> None:
    def made(mesh: dtorch.DeviceMesh) -> dnn.MoE:
        dtorch.manual_seed(5)
        with dtorch.Graph.default_graph().device_mesh_guard(mesh):
            return dnn.MoE(WIDTH, HIDDEN, EXPERTS, num_shared_experts=1, has_selection_bias=True)

    expected = made(mesh_of("one device")).state_dict()
    for name in ("ep=3", "ep=2 x tp=2"):
        module = made(mesh_of(name))
        for key, value in module.state_dict().items():
            assert torch.equal(value.to_torch(), expected[key].to_torch()), key
    assert module.experts.up.placements == module.experts.gate.placements == (S(0), S(1))
    assert module.experts.down.placements == (S(0), S(2))
    assert module.router.weight.placements == module.router.selection_bias.placements == (R, R)
    assert module.shared.down.weight.placements == (R, S(1))


def between_nodes() -> int:
    """Bytes of tensors that the two nodes have sent each other."""
    links = dtorch.counters().link_bytes
    return sum(n for link, n in links.items() if not {"client", "controller"} & set(link))


def test_only_rows_whose_expert_is_elsewhere_travel(generator: torch.Generator) -> None:
    """Counted on a link between two nodes: rows there and back, their derivatives there and back, numbers of rows."""
    mesh = mesh_of("ep=2")
    plain = new_moe(generator)
    module = dtorch.parallelize(copy.deepcopy(plain), mesh)
    x = torch.randn(64, WIDTH, generator=generator)
    given = placed(mesh, x, ep=S(0)).requires_grad_()
    module(given).sum().backward()  # the first call also sends what is planned
    dtorch.Graph.default_graph().sync()
    chosen = (x @ plain.router.weight.T).topk(2, -1).indices
    homes = (chosen >= 2).int()
    num_rows = int((homes != torch.tensor([0] * 32 + [1] * 32).unsqueeze(-1)).sum())
    before = between_nodes()
    with torch.no_grad():
        module(given)
    dtorch.Graph.default_graph().sync()
    row_bytes, counts_bytes = WIDTH * 4, 2 * EXPERTS * 8
    assert between_nodes() - before == 2 * num_rows * row_bytes + counts_bytes
    before = between_nodes()
    output = module(given)
    loss = output.sum()
    dtorch.Graph.default_graph().sync()
    of_router = 2 * plain.router.weight.nbytes  # its gradient is a sum over all tokens
    module.zero_grad(set_to_none=True)
    between = between_nodes()
    loss.backward()
    dtorch.Graph.default_graph().sync()
    assert between - before == 2 * num_rows * row_bytes + counts_bytes + 0
    assert between_nodes() - between == 2 * num_rows * row_bytes + of_router


def test_nothing_is_fetched_in_a_step(x: torch.Tensor, generator: torch.Generator) -> None:
    mesh = mesh_of("ep=2 x tp=2")
    module = dtorch.parallelize(new_moe(generator, capacity_factor=1.0, num_shared_experts=1), mesh)
    before = dtorch.counters().fetches
    output, routing = module(placed(mesh, x), return_routing=True)
    (output.sum() + routing.balance_loss).backward()
    assert dtorch.counters().fetches == before


def test_no_device_has_all_experts(generator: torch.Generator) -> None:
    mesh = mesh_of("ep=4")
    module = dnn.MoE(64, 128, 8, device_mesh=mesh)
    x = torch.randn(16, 64, generator=generator)
    dtorch.reset_peak_memory_stats()
    module(placed(mesh, x, ep=S(0))).sum().backward()
    dtorch.Graph.default_graph().sync()
    experts_bytes = 3 * 8 * 64 * 128 * 4
    for held in dtorch.memory_stats().devices.values():
        # A quarter of the weights and of their gradients, and at most two experts of anything else, at any time.
        assert held.peak_bytes is not None
        assert held.peak_bytes < experts_bytes / 4 * 2 + experts_bytes / 4


def test_captured_steps_are_the_same(x: torch.Tensor, generator: torch.Generator) -> None:
    mesh = mesh_of("ep=2 x dp=2")
    plain = new_moe(generator, capacity_factor=1.0)
    module = dtorch.parallelize(copy.deepcopy(plain), mesh)

    @dtorch.capture
    def step(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, routing = module(tokens, return_routing=True)
        module.zero_grad()
        (output.square().sum() + routing.balance_loss).backward()
        return output.detach(), routing.tokens_per_expert

    for factor in (1.0, -1.0, 0.5, 2.0):  # other tokens, other numbers of rows
        tokens = x * factor
        plain.zero_grad()
        output, balance, *_ = dense(plain, tokens)
        (output.square().sum() + balance).backward()
        found, _ = step(placed(mesh, tokens))
        torch.testing.assert_close(found.to_torch(), output.detach(), rtol=1e-4, atol=1e-5)
        assert_same(gradients(module), gradients(plain))
    assert dtorch.counters().replays >= 1


def test_second_derivatives(generator: torch.Generator) -> None:
    plain = new_moe(generator).double()
    x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    mesh = mesh_of("ep=2")
    module = dtorch.parallelize(copy.deepcopy(plain), mesh)
    results = []
    for of, given in ((lambda t: dense(plain, t)[0], x), (module, placed(mesh, x.detach()).requires_grad_())):
        [first] = torch.autograd.grad(of(given).square().sum(), given, create_graph=True)
        [second] = torch.autograd.grad(first.square().sum(), given)
        results.append(second)
    torch.testing.assert_close(results[1].to_torch(), results[0], rtol=1e-6, atol=1e-9)


def test_under_autocast_the_experts_compute_in_bfloat16(x: torch.Tensor, generator: torch.Generator) -> None:
    plain = new_moe(generator)
    module = dtorch.parallelize(copy.deepcopy(plain), mesh_of("ep=2"))
    with torch.autocast("dtorch", dtype=torch.bfloat16):
        found = module(placed(mesh_of("ep=2"), x))
    found.float().sum().backward()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.float().detach().to_torch(), dense(plain, x)[0].detach(), rtol=0.1, atol=0.05
    )
    assert module.experts.up.grad.dtype == torch.float32


def test_a_failure_on_one_device_reaches_all_that_exchange_with_it(generator: torch.Generator) -> None:
    mesh = mesh_of("ep=4")
    module = dtorch.parallelize(new_moe(generator), mesh)
    ones = dtorch.ones((4,), dtype=torch.int64, device_mesh=mesh, placements=[S(0)])
    bad = torch.remainder(ones, dtorch.tensor([1, 1, 1, 0], device_mesh=mesh, placements=[S(0)]))
    x = dtorch.ones((4, WIDTH), device_mesh=mesh, placements=[S(0)])
    for given in (x * bad.unsqueeze(-1), x):
        output = module(given)
        if given is x:
            assert output.shape == output.to_torch().shape
        else:
            with pytest.raises(dtorch.RemoteOpError, match="remainder"):
                output.to_torch(timeout_s=20)


def test_an_expert_that_fails_is_heard_of_by_all_whose_rows_it_has(generator: torch.Generator) -> None:
    """Everybody knows how many rows are to come, and the device with expert 3 has none to give."""
    plain = new_moe(generator)
    with torch.no_grad():
        plain.experts.gate[3] = 0  # type: ignore[index]
    plain.experts.activation = lambda t: (
        t + torch.remainder(torch.ones_like(t, dtype=torch.int64), (t != 0).long())
    )
    module = dtorch.parallelize(plain, mesh_of("ep=4"))
    output = module(placed(mesh_of("ep=4"), torch.randn(16, WIDTH, generator=generator)))
    with pytest.raises(dtorch.RemoteOpError, match=r"remainder.*failed on device 2"):
        output.detach().to_torch(timeout_s=20)


def test_the_bias_moves_towards_balance(generator: torch.Generator) -> None:
    mesh = mesh_of("ep=2")
    module = dtorch.parallelize(new_moe(generator, scoring="sigmoid", has_selection_bias=True), mesh)
    x = placed(mesh, torch.randn(64, WIDTH, generator=generator) + 1)
    spreads = []
    for _ in range(30):
        _, routing = module(x, return_routing=True)
        module.update_selection_bias(routing.tokens_per_expert, rate=0.03)
        spreads.append(routing.tokens_per_expert.float().std())
    assert spreads[-1].item() < spreads[0].item() / 2


def test_the_program_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "experts.md").read_text()
    [block] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "docs/experts.md", "exec"), {})
    assert "(Shard(dim=0), Shard(dim=0)) (Replicate(), Shard(dim=0)) [" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"top_k": 5}, SettingError, "top_k=5 of 4"),
        ({"top_k": 0}, SettingError, "top_k=0 of 4"),
        ({"capacity_factor": 0}, SettingError, "capacity_factor is positive"),
        ({"capacity_factor": -1.0}, SettingError, "capacity_factor is positive"),
        ({"num_shared_experts": -1}, SettingError, "num_shared_experts=-1"),
        ({"scoring": "relu"}, SettingError, "'softmax' or 'sigmoid'"),
        ({"num_groups": 3}, SettingError, "num_groups=3"),
        ({"num_groups": 4, "top_groups": 1}, SettingError, "top_k=2 experts are not in"),
        ({"axis": None}, MeshError, "name or the number"),
        ({"axis": 2}, MeshError, "axis=2"),
        ({"tp_axis": 5}, MeshError, "tp_axis=5"),
        ({"axis": "tp"}, MeshError, "the same axis"),
        ({"axis": 0, "tp_axis": "ep"}, MeshError, "the same axis"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], says: str) -> None:
    before = dtorch.counters().ops
    with pytest.raises(error, match=says):
        dnn.MoE(WIDTH, HIDDEN, EXPERTS, device_mesh=mesh_of("ep=2 x tp=2"), **options)
    assert dtorch.counters().ops == before


def test_mistakes_in_a_call_are_named(generator: torch.Generator) -> None:
    mesh = mesh_of("ep=3")
    with pytest.raises(PlacementError, match="2 experts over the mesh axis 'ep' of 3 devices"):
        dnn.MoE(WIDTH, HIDDEN, 2, 1, device_mesh=mesh)
    few = dtorch.parallelize(dnn.MoE(WIDTH, HIDDEN, 2, 1), mesh_of("ep=2"))
    module = dtorch.parallelize(new_moe(generator), mesh)
    x = dtorch.ones((4, WIDTH), device_mesh=mesh)
    wide = dtorch.ones((4, WIDTH + 1), device_mesh=mesh)
    before = dtorch.counters().ops
    with pytest.raises(PlacementError, match="2 experts over"):
        few.forward(x)
    with pytest.raises(SettingError, match=r"takes tokens \[\.\.\., 8\], got \[4, 9\]"):
        module.forward(wide)
    with pytest.raises(SettingError, match="no selection bias"):
        module.update_selection_bias(torch.ones(EXPERTS))
    assert dtorch.counters().ops == before
