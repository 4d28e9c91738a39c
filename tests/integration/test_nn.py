"""Modules that are written for a mesh: on every mesh the values, gradients and first weights of one device."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtorch
import dtorch.nn as dnn
from dtorch.parallel.cuts import ShardedParameters
from dtorch_runtime.errors import MeshError, PlacementError, SettingError

R, P = dtorch.Replicate(), dtorch.Partial()
VOCABULARY, WIDTH, HIDDEN = 11, 8, 12
MESHES: dict[str, tuple[Any, tuple[str, ...] | None]] = {
    "tp=2": ([0, 1], ("tp",)),
    "tp=4": ([0, 1, 2, 3], ("tp",)),
    "dp=2": ([0, 1], ("dp",)),
    "dp=2 x tp=2": ([[0, 1], [2, 3]], ("dp", "tp")),
    "tp=2 x dp=2": ([[0, 1], [2, 3]], ("tp", "dp")),
    "one device": ([0], ("tp",)),
}


class Net(nn.Module):
    """Every layer once, in the order of a transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = dnn.EmbeddingWithReplicateOutput(VOCABULARY, WIDTH, padding_idx=3)
        self.norm = dnn.SequenceParallelLayerNorm(WIDTH)
        self.up = dnn.ColumnParallelLinear(WIDTH, HIDDEN, unit=3)
        self.down = dnn.RowParallelLinearWithReplicateOutput(HIDDEN, WIDTH, unit=3)
        self.rms = dnn.SequenceParallelRMSNorm(WIDTH)
        self.whole = dnn.ReplicateParallelLinear(WIDTH, WIDTH)
        self.gathered = dnn.ColumnParallelLinearWithReplicateOutput(WIDTH, WIDTH, bias=False)
        self.terms = dnn.RowParallelLinear(WIDTH, WIDTH)
        self.head = dnn.ColumnParallelLinear(WIDTH, VOCABULARY)
        for norm in (self.norm, self.up, self.rms):
            dnn.redistribute_output(norm, {"tp": R} if norm is not self.up else {})
        dnn.redistribute_input(self.head, {"tp": R})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        x = self.whole(self.rms(x)) + self.gathered(x)
        return self.head(self.terms(x))


def mesh_of(name: str) -> dtorch.DeviceMesh:
    devices, axes = MESHES[name]
    return dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes)


def batch(mesh: dtorch.DeviceMesh, tensor: torch.Tensor) -> torch.Tensor:
    on_dp = [dtorch.Shard(0) if name == "dp" else R for name in mesh.mesh_dim_names or ()]
    return dtorch.from_torch(tensor, device_mesh=mesh, placements=on_dp)


@pytest.fixture
def generator(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(32))


@pytest.fixture
def ids(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, 6), generator=generator)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", MESHES)
def test_a_training_step_is_that_of_one_device(
    name: str, ids: torch.Tensor, generator: torch.Generator
) -> None:
    torch.manual_seed(7)
    plain = Net()
    target = torch.randint(0, VOCABULARY, ids.shape, generator=generator)
    mesh = mesh_of(name)
    model = dtorch.parallelize(copy.deepcopy(plain), mesh)
    losses = []
    for net, x, y in ((plain, ids, target), (model, batch(mesh, ids), batch(mesh, target))):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = dnn.vocab_parallel_cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            ours.to_torch(), theirs, rtol=1e-4, atol=1e-5, msg=lambda text, k=key: f"{k}: {text}"
        )


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", MESHES)
def test_made_on_a_mesh_it_begins_with_the_numbers_of_one_device(name: str, ids: torch.Tensor) -> None:
    def made(mesh: dtorch.DeviceMesh) -> Net:
        dtorch.manual_seed(5)
        with dtorch.Graph.default_graph().device_mesh_guard(mesh):
            return Net()

    one, mesh = mesh_of("one device"), mesh_of(name)
    expected, model = made(one), made(mesh)
    for (key, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.to_torch(), theirs.to_torch()), key
    torch.testing.assert_close(model(batch(mesh, ids)).to_torch(), expected(batch(one, ids)).to_torch())


@pytest.mark.usefixtures("cluster")
def test_weights_and_activations_are_cut_on_the_axis_alone() -> None:
    mesh = mesh_of("dp=2 x tp=2")
    model = dtorch.parallelize(Net(), mesh)
    assert model.up.weight.placements == (R, dtorch.Shard(0, 3))
    assert model.up.bias.placements == (R, dtorch.Shard(0, 3))
    assert model.down.weight.placements == (R, dtorch.Shard(1, 3))
    assert (
        model.down.bias.placements == model.whole.weight.placements == model.norm.weight.placements == (R, R)
    )
    assert model.embedding.weight.placements == (R, dtorch.Shard(0))
    x = batch(mesh, torch.ones(4, 6, WIDTH))
    S0 = dtorch.Shard(0)
    assert model.up.forward(x).placements == (S0, dtorch.Shard(2, 3))
    assert model.terms(x).placements == (S0, P)
    assert model.down(model.up.forward(x)).placements == (S0, R)
    assert model.rms.forward(x).placements == (S0, dtorch.Shard(1))
    by_number = dnn.ColumnParallelLinear(4, 4, axis=1, device_mesh=mesh)
    assert by_number.weight.placements == (R, S0)
    assert dnn.ColumnParallelLinear(4, 4, axis=7, device_mesh=mesh).weight.placements == (R, R)


@pytest.mark.usefixtures("cluster")
def test_the_row_of_padding_is_zero_wherever_it_is() -> None:
    table = dnn.VocabParallelEmbedding(VOCABULARY, WIDTH, padding_idx=9, device_mesh=mesh_of("tp=4"))
    weight = table.weight.to_torch()
    assert not weight[9].any()
    assert weight[8].all()


def test_without_a_mesh_they_are_torchs_modules(ids: torch.Tensor) -> None:
    torch.manual_seed(1)
    ours = dnn.ColumnParallelLinear(4, 6)
    torch.manual_seed(1)
    theirs = nn.Linear(4, 6)
    x = torch.ones(2, 4)
    assert torch.equal(ours(x), theirs(x))
    assert ours.weight.device.type == "cpu"
    assert dnn.RowParallelLinear(4, 6, device="meta").weight.is_meta
    assert Net()(ids).shape == (*ids.shape, VOCABULARY)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_cut_classes(reduction: Any, smoothing: float, generator: torch.Generator) -> None:
    mesh = mesh_of("dp=2 x tp=2")
    logits = 30 * torch.randn(4, 5, VOCABULARY, generator=generator)
    target = torch.randint(0, VOCABULARY, (4, 5), generator=generator)
    target[0, :3] = -100
    plain = logits.clone().requires_grad_()
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    expected = F.cross_entropy(plain.movedim(-1, 1), target, **options)
    expected.sum().backward()
    cut = dtorch.from_torch(logits, device_mesh=mesh, placements=[dtorch.Shard(0), dtorch.Shard(2)])
    cut.requires_grad_()
    loss = dnn.VocabParallelCrossEntropyLoss(**options)(cut, batch(mesh, target))
    loss.sum().backward()
    torch.testing.assert_close(loss.to_torch(), expected.detach())
    torch.testing.assert_close(cut.grad.to_torch(), plain.grad)
    assert cut.grad.placements == cut.placements


@pytest.mark.usefixtures("cluster")
def test_cross_entropy_never_gathers_the_logits() -> None:
    mesh = mesh_of("tp=2")
    rows, classes = 8, 4096
    logits = dtorch.randn(rows, classes, device_mesh=mesh, placements=[dtorch.Shard(1)]).requires_grad_()
    target = dtorch.zeros(rows, dtype=torch.int64, device_mesh=mesh)
    dtorch.Graph.default_graph().sync()
    with dtorch.profile() as profile:
        dnn.vocab_parallel_cross_entropy(logits, target).backward()
        dtorch.Graph.default_graph().sync()
    moves = [span for span in profile.spans if span.name == "dtorch::redistribute"]
    assert moves, "the sums are reduced"
    assert all(span.num_bytes <= rows * 8 for span in moves)


@pytest.mark.usefixtures("cluster")
def test_they_can_be_captured() -> None:
    """Their parameters are found like those of the user's modules."""
    layer = dnn.ColumnParallelLinear(4, 6, device_mesh=mesh_of("tp=2"))
    captured = dtorch.capture(lambda x: layer(x))
    x = dtorch.ones((2, 4), device_mesh=mesh_of("tp=2"))
    for _ in range(2):
        assert torch.equal(captured(x).to_torch(), layer(x).to_torch())
        with torch.no_grad():
            layer.weight.mul_(2)
    assert dtorch.counters().replays == 1


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: dnn.ColumnParallelLinear(4, 10, unit=4), SettingError, "units of 4"),
        (lambda: dnn.RowParallelLinear(4, 10, unit=0), SettingError, "units of 0"),
        (lambda: dnn.ColumnParallelLinear(4, 4, device_mesh=[0, 1]), MeshError, "takes a DeviceMesh"),
        (lambda: dnn.redistribute_input(nn.Linear(1, 1), dtorch.Replicate()), PlacementError, "by axis"),
        (lambda: dnn.redistribute_output(nn.Linear(1, 1), {"tp": "shard"}), PlacementError, "by axis"),  # type: ignore[dict-item]
        (
            lambda: dnn.vocab_parallel_cross_entropy(torch.ones(2, 3), torch.ones(3, dtype=torch.int64)),
            SettingError,
            "num_classes",
        ),
        (
            lambda: dnn.vocab_parallel_cross_entropy(
                torch.ones(2, 3), torch.ones(2, dtype=torch.int64), reduction="max"
            ),
            SettingError,
            "'mean', 'sum' or 'none'",
        ),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


@pytest.mark.usefixtures("cluster")
def test_a_plan_may_not_cut_them_otherwise() -> None:
    model = Net()
    with pytest.raises(SettingError, match="'up', a module of dtorch.nn"):
        dtorch.parallelize(model, mesh_of("tp=2"), {"up": "colwise"})
    assert isinstance(model.up, ShardedParameters)
    assert model.up.weight.device.type == "cpu", "nothing was moved"
    with pytest.raises(MeshError, match="name or the number"):
        dnn.ColumnParallelLinear(4, 4, axis=None, device_mesh=mesh_of("tp=2"))  # type: ignore[arg-type]
