"""ZeRO: the training of one device, with optimizer state, gradients and parameters in pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtorch
import dtorch.nn as dnn
from dtorch.parallel.cuts import piece_placements
from dtorch_runtime.errors import MeshError, SettingError
from dtorch_runtime.ir.layout import Layout
from tests.support.tiny_llama import VOCABULARY, tiny_llama

Stage: TypeAlias = Literal[1, 2, 3]
R, S0, S1 = dtorch.Replicate(), dtorch.Shard(0), dtorch.Shard(1)
WIDTH, HIDDEN, CLASSES = 6, 10, 5
MESHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "dp=2": ([0, 1], ("dp",)),
    "dp=4": ([0, 1, 2, 3], ("dp",)),
    "dp=2 x tp=2": ([[0, 1], [2, 3]], ("dp", "tp")),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, fused=True),
}


class Net(nn.Module):
    """Cut layers, whole ones, a parameter of its own, and a weight that it reads from a child."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.up = dnn.ColumnParallelLinear(WIDTH, HIDDEN)
        self.down = dnn.RowParallelLinearWithReplicateOutput(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if self.checkpoints else self.block(x)
        return self.head(x) + 0.1 * (x @ self.head.weight.T)


def mesh_of(name: str) -> dtorch.DeviceMesh:
    devices, axes = MESHES[name]
    return dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes)


def pieces_of(tensor: Any, axis: str | int) -> object:
    """The placements of the pieces that ZeRO makes of a tensor; None where it stays whole."""
    return piece_placements(tensor.shape, Layout(tensor.device_mesh, tuple(tensor.placements)), axis)


def batch(mesh: dtorch.DeviceMesh, tensor: torch.Tensor) -> torch.Tensor:
    on_dp = [S0 if name == "dp" else R for name in mesh.mesh_dim_names or ()]
    return dtorch.from_torch(tensor, device_mesh=mesh, placements=on_dp)


@pytest.fixture
def plain(cluster: dtorch.Cluster) -> Net:
    torch.manual_seed(3)
    return Net()


@pytest.fixture
def data(cluster: dtorch.Cluster) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, WIDTH, generator=generator), torch.randint(0, CLASSES, (8,), generator=generator))
        for _ in range(3)
    ]


def losses_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[tuple[Any, Any]],
    *,
    num_steps: int = 5,
    accumulate: int = 1,
    clip: float | None = None,
) -> list[float]:
    losses = []
    for step in range(num_steps):
        for part in range(accumulate):
            x, y = data[(step * accumulate + part) % len(data)]
            loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def zeroed(plain: Net, mesh: dtorch.DeviceMesh, stage: Stage, kind: str) -> tuple[Net, torch.optim.Optimizer]:
    model = dtorch.parallelize(copy.deepcopy(plain), mesh, {})
    optimizer = OPTIMIZERS[kind](model.parameters())
    return dtorch.parallel.zero(model, optimizer, stage=stage), optimizer


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_and_weights_are_those_of_one_device(
    stage: Stage, name: str, kind: str, plain: Net, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    mesh = mesh_of(name)
    model, optimizer = zeroed(plain, mesh, stage, kind)
    ours = losses_of(model, optimizer, [(batch(mesh, x), batch(mesh, y)) for x, y in data])
    theirs = losses_of(plain, OPTIMIZERS[kind](plain.parameters()), data)
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert theirs[len(data)] < theirs[0], "the same batch again"
    for (key, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.to_torch(), expected.detach(), rtol=1e-4, atol=1e-5, msg=key)
        pieces = pieces_of(parameter, "dp") if stage < 3 else parameter.placements
        tensors = [v for v in optimizer.state[parameter].values() if isinstance(v, dtorch.Tensor)]
        state = [value for value in tensors if value.shape == parameter.shape]  # a number of steps is not cut
        assert state
        assert pieces is None or {value.placements for value in state} == {pieces}, key


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_and_clipping(
    stage: Stage, plain: Net, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    mesh = mesh_of("dp=2 x tp=2")
    model, optimizer = zeroed(plain, mesh, stage, "adamw")
    options: dict[str, Any] = {"accumulate": 3, "clip": 0.3}
    ours = losses_of(model, optimizer, [(batch(mesh, x), batch(mesh, y)) for x, y in data], **options)
    theirs = losses_of(plain, OPTIMIZERS["adamw"](plain.parameters()), data, **options)
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_cut_at_which_stage(stage: Stage, plain: Net, data: list[Any]) -> None:
    mesh = mesh_of("dp=2 x tp=2")
    model, optimizer = zeroed(plain, mesh, stage, "sgd")
    x, y = data[0]
    F.cross_entropy(model(batch(mesh, x)), batch(mesh, y)).backward()
    pieces = {"up.weight": (S1, S0), "down.weight": (S0, S1), "norm.bias": (S0, R), "head.weight": (S1, R)}
    whole = {"up.weight": (R, S0), "down.weight": (R, S1), "norm.bias": (R, R), "head.weight": (R, R)}
    parameters = dict(model.named_parameters())
    assert {key: parameters[key].placements for key in pieces} == (pieces if stage == 3 else whole)
    assert {key: parameters[key].grad.placements for key in pieces} == (pieces if stage > 1 else whole)
    optimizer.step()
    assert {key: parameters[key].placements for key in pieces} == (pieces if stage == 3 else whole)
    buffers = {key: optimizer.state[parameters[key]]["momentum_buffer"].placements for key in pieces}
    assert buffers == pieces


def test_stage_3_with_checkpointing(plain: Net, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    mesh = mesh_of("dp=2")
    model, optimizer = zeroed(plain, mesh, 3, "adamw")
    model.checkpoints = True
    ours = losses_of(model, optimizer, [(batch(mesh, x), batch(mesh, y)) for x, y in data])
    theirs = losses_of(plain, OPTIMIZERS["adamw"](plain.parameters()), data)
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("name", ["dp=2", "dp=2 x tp=2"])
def test_stage_3_computes_in_another_dtype(
    name: str, plain: Net, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    mesh = mesh_of(name)
    model = dtorch.parallelize(copy.deepcopy(plain), mesh, {})
    dtorch.parallel.zero(model, stage=3, compute_dtype=torch.bfloat16)
    assert model(batch(mesh, data[0][0])).dtype == torch.bfloat16
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    ours = losses_of(model, optimizer, [(batch(mesh, x), batch(mesh, y)) for x, y in data], num_steps=9)
    theirs = losses_of(plain, OPTIMIZERS["adamw"](plain.parameters()), data, num_steps=9)
    assert ours == pytest.approx(theirs, abs=0.05)
    assert ours[2 * len(data)] < ours[0], "the same batch again"
    kept = [model.head.weight, model.head.weight.grad, *optimizer.state[model.head.weight].values()]
    assert {t.dtype for t in kept if t is not None} == {torch.float32}


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_that_evaluates_by_itself(
    stage: Stage, plain: Net, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> list[float]:
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return losses

    mesh = mesh_of("dp=2")
    x, y = data[0]
    model, optimizer = zeroed(plain, mesh, stage, "sgd")
    ours = train(model, optimizer, batch(mesh, x), batch(mesh, y))
    assert ours == pytest.approx(train(plain, OPTIMIZERS["sgd"](plain.parameters()), x, y), abs=1e-5)


def test_state_that_an_optimizer_has_is_cut(
    plain: Net, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    mesh = mesh_of("dp=2")
    model = dtorch.parallelize(copy.deepcopy(plain), mesh, {})
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    ours = [(batch(mesh, x), batch(mesh, y)) for x, y in data]
    first = losses_of(model, optimizer, ours, num_steps=2)
    dtorch.parallel.zero(model, optimizer, stage=3)
    assert optimizer.state[model.up.weight]["exp_avg"].placements == model.up.weight.placements == (S0,)
    theirs = OPTIMIZERS["adamw"](plain.parameters())
    assert first == pytest.approx(losses_of(plain, theirs, data, num_steps=2), abs=1e-5)
    assert losses_of(model, optimizer, ours) == pytest.approx(losses_of(plain, theirs, data), abs=1e-5)


def held_bytes(mesh: dtorch.DeviceMesh) -> int:
    """What the fullest device holds."""
    stats = dtorch.memory_stats()
    return max(stats[device].current_bytes for device in mesh.devices)


def test_stage_3_holds_one_part_of_n_and_nothing_gathered_between_the_passes(cluster: dtorch.Cluster) -> None:
    width, depth, num_devices = 256, 5, 4
    mesh = mesh_of("dp=4")
    before = held_bytes(mesh)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = dtorch.parallelize(nn.Sequential(*layers), mesh, {})
    dtorch.parallel.zero(model, stage=3)
    whole = sum(p.numel() * p.itemsize for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    x = batch(mesh, torch.ones(4, width))
    dtorch.reset_peak_memory_stats()
    loss = model(x).sum()
    assert held_bytes(mesh) - before <= 1.15 * whole / num_devices
    peak = max(dtorch.memory_stats()[device].peak_bytes or 0 for device in mesh.devices)
    assert peak - before <= 1.15 * whole / num_devices + 2 * whole / depth, "two layers are whole at a time"
    loss.backward()
    peak = max(dtorch.memory_stats()[device].peak_bytes or 0 for device in mesh.devices)
    dtorch.reset_peak_memory_stats(measure=False)
    optimizer.step()
    optimizer.zero_grad()
    del loss, x
    assert held_bytes(mesh) - before <= 1.15 * 3 * whole / num_devices, "parameters and two moments"
    # Pieces of parameters and gradients, two whole weights, and the gradient of one as a partial sum.
    assert peak - before <= 1.15 * 2 * whole / num_devices + 4 * whole / depth


def test_stage_3_gathers_ahead(plain: Net, data: list[Any]) -> None:
    """From the second pass on, each gather is issued before the op of the module before it."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    mesh = mesh_of("dp=2")
    dtorch.parallel.zero(dtorch.parallelize(model, mesh, {}), stage=3)
    x = batch(mesh, data[0][0])
    names = {"dtorch::redistribute": "gather", "aten::linear.default": "linear"}
    passes = []
    for _ in range(2):
        with dtorch.profile() as profile:
            model(x)
            dtorch.Graph.default_graph().sync()
        spans = sorted(
            (s for s in profile.spans if s.lane == "device 0" and s.name in names), key=lambda s: s.start_ns
        )
        passes.append([names[span.name] for span in spans])
    assert passes == [["gather", "linear"] * 3, ["gather", "gather", "linear", "gather", "linear", "linear"]]


def test_stage_3_outside_of_a_module_is_the_parameter(plain: Net, data: list[Any]) -> None:
    mesh = mesh_of("dp=2")
    model, _ = zeroed(plain, mesh, 3, "sgd")
    assert model.head.weight is dict(model.named_parameters())["head.weight"]
    assert isinstance(model.head, nn.Linear)
    assert type(model.head).__name__ == "Linear"
    assert list(model.state_dict()) == list(plain.state_dict())
    with pytest.raises(RuntimeError, match="shape"):
        model(batch(mesh, torch.ones(8, WIDTH + 1)))
    assert model.head.weight.placements == (S1,), "an error leaves no module running"
    model.load_state_dict({key: value + 1 for key, value in plain.state_dict().items()})
    torch.testing.assert_close(model.head.weight.to_torch(), plain.head.weight.detach() + 1)
    assert model.head.weight.placements == (S1,)


def test_stage_3_refuses_weights_that_changed_since_the_forward_pass(plain: Net, data: list[Any]) -> None:
    mesh = mesh_of("dp=2")
    model, _ = zeroed(plain, mesh, 3, "sgd")
    loss = model(batch(mesh, data[0][0])).sum()
    with torch.no_grad():
        model.down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Blocks(nn.Module):
    """Modules that read the weights of their children, or read theirs more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.parts = nn.ParameterList([torch.ones(8), torch.zeros(8)])
        self.head = nn.Linear(8, CLASSES, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.conv(x.mT).mT * self.parts[0] + self.parts[1]
        return self.head(x)


@pytest.mark.usefixtures("cluster")
def test_stage_3_of_torchs_modules_and_tied_weights() -> None:
    torch.manual_seed(1)
    plain = Blocks()
    mesh = mesh_of("dp=2")
    model = dtorch.parallel.zero(dtorch.parallelize(copy.deepcopy(plain), mesh, {}), stage=3)
    assert model.head.weight is model.table.weight
    ids = torch.randint(0, CLASSES, (4, 6))
    target = torch.randint(0, CLASSES, (4, 6))
    losses = []
    for net, x, y in ((plain, ids, target), (model, batch(mesh, ids), batch(mesh, target))):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(2):
            with dtorch.auto_redistribute():  # the attention of torch.nn merges the batch behind the sequence
                loss = F.cross_entropy(net(x).movedim(-1, 1), y)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    with torch.no_grad(), dtorch.auto_redistribute():
        torch.testing.assert_close(model(batch(mesh, ids)).to_torch(), plain(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_captured_step(stage: Stage, plain: Net, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Bit by bit what the same lines give as they are: with clipping, momenta and a rate that changes."""
    mesh = mesh_of("dp=2 x tp=2")

    def run(captures: bool) -> tuple[list[float], nn.Module]:
        model = dtorch.parallelize(copy.deepcopy(plain), mesh, {})
        optimizer = torch.optim.AdamW(model.parameters(), lr=dtorch.tensor(0.02), capturable=True)
        dtorch.parallel.zero(model, optimizer, stage=stage)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            return loss.detach()

        do = dtorch.capture(step) if captures else step
        losses = []
        for number in range(20):
            x, y = data[number % len(data)]
            losses.append(do(batch(mesh, x), batch(mesh, y)))
            schedule.step()
        if captures:
            assert "1 recording, 18 replays, 1 call without" in dtorch.capture.explain(do)
        return [loss.item() for loss in losses], model

    (ours, captured), (expected, eager) = run(True), run(False)
    assert ours == expected
    assert expected[-1] < expected[0] - 0.3
    for (key, one), other in zip(captured.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.to_torch(), other.to_torch()), key


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_writes_to_the_parameters_as_any_optimizer(stage: Stage, plain: Net, data: list[Any]) -> None:
    mesh = mesh_of("dp=2")
    model, optimizer = zeroed(plain, mesh, stage, "sgd")
    weight, alias = model.head.weight, model.state_dict()["head.weight"]
    loss = model(batch(mesh, data[0][0])).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert torch.equal(alias.to_torch(), weight.to_torch())
    assert not torch.equal(weight.to_torch(), plain.head.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_closure_that_raises_leaves_parameters_whole(stage: Stage, plain: Net, data: list[Any]) -> None:
    mesh = mesh_of("dp=2")
    model, optimizer = zeroed(plain, mesh, stage, "sgd")

    def closure() -> float:
        raise KeyError("no more batches")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert {p.placements for p in model.parameters()} == {(R,)}
    ours = losses_of(model, optimizer, [(batch(mesh, x), batch(mesh, y)) for x, y in data])
    assert ours == pytest.approx(losses_of(plain, OPTIMIZERS["sgd"](plain.parameters()), data), abs=1e-5)


def test_stage_3_of_a_language_model(cluster: dtorch.Cluster) -> None:
    mesh = mesh_of("dp=2 x tp=2")
    plain = tiny_llama()
    model = dtorch.parallel.zero(dtorch.parallelize(copy.deepcopy(plain), mesh), stage=3)
    ids = torch.arange(4 * 7).view(4, 7) * 13 % VOCABULARY
    losses = []
    for net, x in ((plain, ids), (model, ids)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for _ in range(3):
            loss = net(input_ids=x, labels=x).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids.to("dtorch"), **options).cpu(), plain.generate(ids, **options))


def test_pieces_are_even_where_a_dim_allows(cluster: dtorch.Cluster) -> None:
    mesh = mesh_of("dp=4")

    def placed(*shape: int) -> dtorch.Tensor:
        return dtorch.zeros(*shape, device_mesh=mesh)

    assert pieces_of(placed(8, 8), "dp") == (S0,)
    assert pieces_of(placed(6, 8), "dp") == (S1,)
    assert pieces_of(placed(7, 9), "dp") == (S0,), "2 of 7 is less than 3 of 9"
    assert pieces_of(placed(1, 1), "dp") is pieces_of(placed(), 0) is None
    cut = dtorch.zeros(8, device_mesh=mesh_of("dp=2 x tp=2"), placements=[R, S0])
    assert pieces_of(cut, "dp") is None


@pytest.mark.parametrize("order", [0, 1, 2, 3, 2.5, float("inf"), -float("inf")])
def test_norms_of_many_cut_tensors(order: float, cluster: dtorch.Cluster) -> None:
    mesh = mesh_of("dp=2 x tp=2")
    torch.manual_seed(0)
    placed = [
        (torch.randn(5, 3), [S0, S1]),
        (torch.randn(7).bfloat16(), [R, S0]),
        (torch.randn(()), [R, R]),
        (torch.randn(4, 4, dtype=torch.complex64), [S1, S1]),
        (torch.randn(1, 2), [S0, R]),
    ]
    ours = [dtorch.from_torch(t, device_mesh=mesh, placements=p) for t, p in placed]
    norms = torch._foreach_norm(ours, order)
    for norm, expected in zip(norms, torch._foreach_norm([t for t, _ in placed], order), strict=True):
        torch.testing.assert_close(norm.to_torch(), expected)


def test_mistakes_are_named(plain: Net) -> None:
    mesh = mesh_of("dp=2")
    model = dtorch.parallelize(copy.deepcopy(plain), mesh, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero: Any = dtorch.parallel.zero
    for call, error, says in (
        (lambda: zero(plain, stage=3), SettingError, "parallelize"),
        (lambda: zero(model, stage=4), SettingError, "got 4"),
        (lambda: zero(model, stage=2), SettingError, "was given none"),
        (lambda: zero(model, "sgd", stage=2), SettingError, "got str"),
        (lambda: zero(model.parameters(), stage=3), SettingError, "takes a torch.nn.Module"),
        (lambda: zero(model, stage=3, axis="tp"), MeshError, "no such axis"),
        (lambda: zero(model, optimizer, stage=1, compute_dtype=torch.bfloat16), SettingError, "autocast"),
        (lambda: zero(model, stage=3, compute_dtype=torch.int8), SettingError, "torch.bfloat16"),
        (
            lambda: zero(model, torch.optim.SGD(plain.parameters()), stage=1),
            SettingError,
            "none of the param",
        ),
    ):
        with pytest.raises(error, match=says):
            call()
    assert all(p.placements == (R,) for p in model.parameters()), "nothing was moved"
    zero(model, optimizer, stage=1)
    with pytest.raises(SettingError, match="stage 1 already"):
        zero(model, optimizer, stage=2)
