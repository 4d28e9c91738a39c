"""Pipelines on a cluster: under every schedule and on every mesh the loss and the gradients of one device."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtorch
import dtorch.nn as dnn
from dtorch.parallel.pipeline import Pipeline, Step, clip_grad_norm_, make_orders
from dtorch_runtime.errors import CaptureError, MeshError, SettingError, UnsupportedError

WIDTH, HIDDEN, CLASSES, NUM_BLOCKS = 8, 12, 5, 4
R, S0 = dtorch.Replicate(), dtorch.Shard(0)
MESHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "pp=1": ([0], ("pp",)),
    "pp=2": ([0, 1], ("pp",)),
    "pp=4": ([0, 1, 2, 3], ("pp",)),
    "pp=2 x tp=2": ([[0, 1], [2, 3]], ("pp", "tp")),
    "dp=2 x pp=2": ([[0, 1], [2, 3]], ("dp", "pp")),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class Block(nn.Module):
    """One layer of a transformer without attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = dnn.ColumnParallelLinear(WIDTH, HIDDEN)
        self.down = dnn.RowParallelLinearWithReplicateOutput(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def layers(dropout: float = 0.0) -> list[nn.Module]:
    torch.manual_seed(3)
    return [*(Block(dropout) for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, CLASSES)]


def meshes_of(name: str) -> list[dtorch.DeviceMesh]:
    devices, axes = MESHES[name]
    return dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes).unbind("pp")


def staged(plain: list[nn.Module], meshes: list[dtorch.DeviceMesh], num_chunks: int = 1) -> nn.ModuleList:
    """Copies of the layers, in stages on their meshes."""
    stage_of = dtorch.assign_layers_to_stages(len(plain), len(meshes) * num_chunks)
    stages = nn.ModuleList()
    for number in range(len(meshes) * num_chunks):
        own = [copy.deepcopy(layer) for layer, stage in zip(plain, stage_of, strict=True) if stage == number]
        mesh = meshes[number % len(meshes)]
        stage = own[0] if len(own) == 1 else nn.Sequential(*own)
        if mesh.mesh_dim_names is None:
            with dtorch.Graph.default_graph().device_mesh_guard(mesh):
                stages.append(stage.to("dtorch"))
        else:
            stages.append(dtorch.parallelize(stage, mesh, plan={}))
    return stages


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.fixture
def batch(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    return (
        torch.randn(10, WIDTH, generator=generator),
        torch.randint(0, CLASSES, (10,), generator=generator),
    )


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MESHES)
def test_loss_and_gradients_are_those_of_the_whole_batch_on_one_device(
    name: str, schedule: Any, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x, y = batch
    plain, meshes = layers(), meshes_of(name)
    model = nn.Sequential(*plain)
    expected = F.cross_entropy(model(x), y)
    num_chunks = 2 if schedule == "interleaved" and len(meshes) == 2 else 1
    stages = staged(plain, meshes, num_chunks)
    pipeline = Pipeline(stages, meshes, num_micro_batches=4, loss=F.cross_entropy, schedule=schedule)
    loss = pipeline.step(x, target=y)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for ours, theirs in zip(gradients(stages), gradients(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_gradients_on_dp_are_reduced_once(schedule: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Until all micro-batches are done they are terms; a second step adds to them."""
    x, y = batch
    plain, meshes = layers(), meshes_of("dp=2 x pp=2")
    model, stages = nn.Sequential(*plain), staged(plain, meshes)
    pipeline = Pipeline(stages, meshes, num_micro_batches=4, loss=F.cross_entropy, schedule=schedule)
    first: Any = stages[0]
    weight = first[0].up.weight
    seen: list[Any] = []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.placements))
    for _ in range(2):
        pipeline.step(x, target=y)
        F.cross_entropy(model(x), y).backward()
    assert seen == [(dtorch.Partial(),)] * 8
    assert weight.grad.placements == (R,)
    for ours, theirs in zip(gradients(stages), gradients(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def two_steps(
    name: str, schedule: Any, num_chunks: int, batch: tuple[torch.Tensor, torch.Tensor]
) -> list[Any]:
    """Loss and gradients after each of two steps with dropout."""
    meshes = meshes_of(name)
    stages = staged(layers(dropout=0.5), meshes, num_chunks)
    pipeline = Pipeline(stages, meshes, num_micro_batches=4, loss=F.cross_entropy, schedule=schedule)
    dtorch.manual_seed(11)
    found: list[Any] = []
    for _ in range(2):
        stages.zero_grad()
        found += [pipeline.step(batch[0], target=batch[1]).cpu(), *gradients(stages)]
    return found


@pytest.mark.usefixtures("cluster")
def test_dropouts_are_the_same_under_every_schedule_and_on_every_mesh(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    expected = two_steps("pp=1", "gpipe", 1, batch)
    assert expected[0] != expected[len(expected) // 2], "the next step draws others"
    for name in ("pp=2", "pp=2 x tp=2", "dp=2 x pp=2"):
        for schedule in SCHEDULES:
            found = two_steps(name, schedule, 2 if schedule == "interleaved" else 1, batch)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=f"{name}, {schedule}")


@pytest.mark.usefixtures("cluster")
def test_each_micro_batch_has_numbers_of_its_own(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    meshes = meshes_of("pp=2")
    with dtorch.Graph.default_graph().device_mesh_guard(meshes[0]):
        stages = [nn.Dropout(0.5), nn.Identity()]
    pipeline = Pipeline(stages, meshes, num_micro_batches=2, loss=torch.mean)
    state = dtorch.get_rng_state()
    masks = pipeline.infer(torch.ones(2, 64)).to_torch()
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(dtorch.get_rng_state(), state)
    state = dtorch.get_rng_state()
    stages[0].eval()
    assert torch.equal(pipeline.infer(torch.ones(2, 64)).to_torch(), torch.ones(2, 64))
    assert torch.equal(dtorch.get_rng_state(), state), "nothing was drawn"


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", ["pp=2", "dp=2 x pp=2"])
def test_training_goes_as_on_one_device(
    name: str, is_fused: bool, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x, y = batch
    plain, meshes = layers(), meshes_of(name)
    model = nn.Sequential(*plain)
    stages = staged(plain, meshes)
    pipeline = Pipeline(stages, meshes, num_micro_batches=3, loss=F.cross_entropy, schedule="zero_bubble")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05, fused=is_fused) for each in (model, stages)]
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = F.cross_entropy(model(x), y)
        expected.backward()
        losses: list[dtorch.Tensor] = []
        loss = pipeline.step(x, target=y, losses=losses)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
        assert len(losses) == 3
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(pipeline.infer(x).to_torch(), model(x).detach(), rtol=1e-4, atol=1e-4)


class First(nn.Module):
    """Gives a tuple: what is computed on, numbers without gradients, and what the last stage does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        return y, mask, y.relu()


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, y: torch.Tensor, mask: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return self.linear(y.masked_fill(mask, 0.0))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stages_pass_on_several_tensors(schedule: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = batch
    mask = x > 1
    torch.manual_seed(2)
    plain, meshes = [First(), Second()], meshes_of("pp=2")
    expected = F.cross_entropy(plain[1](*plain[0](x, mask)), y, reduction="sum")
    expected.backward()
    stages = staged(plain, meshes)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="sum")

    pipeline = Pipeline(stages, meshes, num_micro_batches=4, loss=loss, schedule=schedule, reduction="sum")
    placed = dtorch.from_torch(x, meshes[1]), dtorch.from_torch(mask, meshes[0])
    assert pipeline.step(*placed, target=[y]).item() == pytest.approx(expected.item(), abs=1e-5)
    for ours, theirs in zip(gradients(stages), gradients(nn.ModuleList(plain)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("cluster")
def test_a_schedule_of_ones_own(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = batch
    plain, meshes = layers(), meshes_of("pp=2")
    model = nn.Sequential(*plain)
    F.cross_entropy(model(x), y).backward()
    stages = staged(plain, meshes)
    orders = make_orders("gpipe", 2, 2)
    orders[1][2:] = [Step("backward_input", 1, 1), Step("backward", 1, 0), Step("backward_weight", 1, 1)]
    pipeline = Pipeline(stages, meshes, num_micro_batches=2, loss=F.cross_entropy, schedule=orders)
    assert [str(step) for step in pipeline.order[:3]] == ["F0@0", "F1@0", "F0@1"]
    pipeline.step(x, target=y)
    for ours, theirs in zip(gradients(stages), gradients(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", ["pp=2", "pp=2 x tp=2", "dp=2 x pp=2"])
def test_gradients_of_all_stages_are_clipped_by_one_norm(
    name: str, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x, y = batch
    plain, meshes = layers(), meshes_of(name)
    model = nn.Sequential(*plain)
    F.cross_entropy(model(x), y).backward()
    stages = staged(plain, meshes)
    assert clip_grad_norm_(stages.parameters(), 1.0).item() == 0, "there are no gradients"
    Pipeline(stages, meshes, num_micro_batches=2, loss=F.cross_entropy).step(x, target=y)
    for norm_type in (2.0, float("inf"), 1.0):
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        norm = clip_grad_norm_(stages.parameters(), 0.1, norm_type)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-4)
        for ours, theirs in zip(gradients(stages), gradients(model), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    with pytest.raises(SettingError, match="max_norm takes a number"):
        clip_grad_norm_(stages.parameters(), -1.0)
    with pytest.raises(SettingError, match="torch.nn.utils.clip_grad_norm_"):
        clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", ["pp=4", "pp=2 x tp=2", "dp=2 x pp=2"])
def test_inference(name: str, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, _ = batch
    plain, meshes = layers(), meshes_of(name)
    expected = nn.Sequential(*plain)(x).detach()
    pipeline = Pipeline(staged(plain, meshes), meshes, num_micro_batches=3)
    for num in (None, 1, 4):
        output = pipeline.infer(x, num_micro_batches=num)
        assert output.device_mesh == meshes[-1]
        assert not output.requires_grad
        torch.testing.assert_close(output.to_torch(), expected, rtol=1e-5, atol=1e-5)
    chunks = Pipeline(staged(plain, meshes[:2], 2), meshes[:2], num_micro_batches=2, schedule="interleaved")
    torch.testing.assert_close(chunks.infer(x).to_torch(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", ["pp=4", "pp=2 x tp=2"])
def test_layers_on_stage_meshes_without_a_pipeline(
    name: str, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x, y = batch
    plain, meshes = layers(), meshes_of(name)
    stage_of = dtorch.assign_layers_to_stages(len(plain), len(meshes))
    placed = nn.ModuleList()
    for layer, stage in zip(plain, stage_of, strict=True):
        with dtorch.Graph.default_graph().device_mesh_guard(meshes[stage]):
            placed.append(copy.deepcopy(layer).to("dtorch"))
    hidden = dtorch.from_torch(x, device_mesh=meshes[0])
    for layer, stage in zip(placed, stage_of, strict=True):
        hidden = layer(hidden.redistribute(device_mesh=meshes[stage]))
    model = nn.Sequential(*plain)
    torch.testing.assert_close(hidden.to_torch(), model(x).detach(), rtol=1e-5, atol=1e-5)
    F.cross_entropy(hidden, dtorch.from_torch(y, device_mesh=meshes[-1])).backward()
    F.cross_entropy(model(x), y).backward()
    for ours, theirs in zip(gradients(placed), gradients(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


KEPT_BYTES = 1 << 17


class Wide(nn.Module):
    """Keeps ``KEPT_BYTES`` for its backward for each micro-batch of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(KEPT_BYTES // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).exp().sum(1, keepdim=True) * 1e-6


def peaks(schedule: Any, num_micro_batches: int) -> list[float]:
    """By stage, what values held at most in a step, in ``KEPT_BYTES``, beyond those that were there before it."""
    meshes = meshes_of("pp=2")
    stages = staged([Wide(), Wide()], meshes)
    pipeline = Pipeline(
        stages, meshes, num_micro_batches=num_micro_batches, loss=torch.mean, schedule=schedule
    )
    x = torch.ones(num_micro_batches, 1)
    pipeline.step(x)
    stages.zero_grad(set_to_none=False)
    before = dtorch.memory_stats()
    dtorch.reset_peak_memory_stats()
    pipeline.step(x)
    stats = dtorch.memory_stats()
    dtorch.reset_peak_memory_stats(measure=False)
    return [((stats[i].peak_bytes or 0) - before[i].current_bytes) / KEPT_BYTES for i in range(2)]


@pytest.mark.usefixtures("cluster")
def test_memory_follows_the_schedule() -> None:
    few, many = 3, 9
    all_of_them = peaks("gpipe", many)[0]
    assert all_of_them - peaks("gpipe", few)[0] > 5, "gpipe holds every micro-batch"
    for schedule in ("1f1b", "zero_bubble"):
        before, after = peaks(schedule, few)[0], peaks(schedule, many)[0]
        assert abs(after - before) < 1.5, "the others hold two, however many there are"
        assert after < all_of_them * 0.6


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("name", "schedule"), [("pp=2", "1f1b"), ("pp=2", "zero_bubble"), ("dp=2 x pp=2", "1f1b")]
)
def test_a_captured_step(name: str, schedule: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    meshes = meshes_of(name)
    x, y = dtorch.from_torch(batch[0], meshes[0]), dtorch.from_torch(batch[1], meshes[1])

    def make() -> Any:
        stages = staged(layers(), meshes)
        optimizer = torch.optim.SGD(stages.parameters(), lr=0.1)
        pipeline = Pipeline(stages, meshes, num_micro_batches=2, loss=F.cross_entropy, schedule=schedule)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = pipeline.step(x, target=y)
            optimizer.step()
            return loss

        return step

    eager, captured = make(), dtorch.capture(make())
    expected = [eager(x, y).item() for _ in range(3)]
    assert [captured(x, y).item() for _ in range(3)] == expected
    assert expected[2] < expected[0]


@pytest.mark.usefixtures("cluster")
def test_a_captured_step_with_dropout_is_refused(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    meshes = meshes_of("pp=2")
    pipeline = Pipeline(
        staged(layers(dropout=0.5), meshes), meshes, num_micro_batches=2, loss=F.cross_entropy
    )
    x, y = dtorch.from_torch(batch[0], meshes[0]), dtorch.from_torch(batch[1], meshes[1])
    step = dtorch.capture(lambda x, y: pipeline.step(x, target=y))
    with pytest.raises(CaptureError, match="random numbers in a pipeline"):
        step(x, y)


@pytest.mark.usefixtures("cluster")
def test_sequences_stay_cut_from_stage_to_stage() -> None:
    mesh = dtorch.DeviceMesh("cpu", [[[0, 1]], [[2, 3]]], mesh_dim_names=("pp", "dp", "ring_cp"))
    meshes, plain = mesh.unbind("pp"), [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    expected = F.mse_loss(nn.Sequential(*plain)(torch.ones(4, 6, WIDTH)), torch.zeros(4, 6, WIDTH))
    stages = staged(plain, meshes)
    seen: list[Any] = []
    for stage in stages:
        stage.register_forward_pre_hook(lambda module, args: seen.append(args[0].placements), prepend=True)
    pipeline = Pipeline(stages, meshes, num_micro_batches=2, loss=F.mse_loss)
    sequence = [R, R, dtorch.Shard(1)]
    x = dtorch.ones(4, 6, WIDTH, device_mesh=mesh, placements=sequence)
    target = dtorch.zeros(4, 6, WIDTH, device_mesh=mesh, placements=[R, S0, dtorch.Shard(1)])
    loss = pipeline.step(x, target=target)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert seen == [(R, dtorch.Shard(1))] * 4


class Bare(nn.Module):
    """A stage that gives what no mesh has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(2, WIDTH)


@pytest.mark.usefixtures("cluster")
def test_mistakes_are_told(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = batch
    meshes = meshes_of("pp=2")
    stages = staged(layers(), meshes)
    mean = {"num_micro_batches": 2, "loss": F.cross_entropy}
    for error, text, make in (
        (MeshError, r"mesh\.unbind\('pp'\)", lambda: Pipeline(stages, [], **mean)),
        (SettingError, "torch.nn.Modules", lambda: Pipeline(["a", "b"], meshes, **mean)),  # type: ignore[list-item]
        (SettingError, "3 stages do not lie evenly", lambda: Pipeline([*stages, stages[0]], meshes, **mean)),
        (MeshError, "weight of stage 0 is on DeviceMesh", lambda: Pipeline(stages[::-1], meshes, **mean)),
        (MeshError, "of stage 0 is on device", lambda: Pipeline([Block(), Block()], meshes, **mean)),
        (SettingError, "'mean' or 'sum'", lambda: Pipeline(stages, meshes, reduction="max", **mean)),
        (
            SettingError,
            "loss= takes a function",
            lambda: Pipeline(stages, meshes, num_micro_batches=2, loss=3),
        ),
        (SettingError, "num_micro_batches takes", lambda: Pipeline(stages, meshes, num_micro_batches=0)),
        (SettingError, "no backward", lambda: Pipeline(stages, meshes, schedule="forward_only", **mean)),
    ):
        with pytest.raises(error, match=text):
            make()
    pipeline = Pipeline(stages, meshes, **mean)
    with pytest.raises(SettingError, match="needs a loss"):
        Pipeline(stages, meshes, num_micro_batches=2).step(x)
    with pytest.raises(SettingError, match="10 rows and the target 9"):
        pipeline.step(x, target=y[:9])
    with pytest.raises(SettingError, match="cannot be cut into 2 micro-batches"):
        pipeline.step(x[:1], target=y[:1])
    with pytest.raises(SettingError, match=r"batch as dim 0, got \[10, 8\], float"):
        pipeline.step(x, 1.0, target=y)
    with torch.no_grad(), pytest.raises(SettingError, match="leave torch.no_grad"):
        pipeline.step(x, target=y)
    with pytest.raises(SettingError, match=r"one number .* got a tensor of shape \[5, 5\];"):
        Pipeline(stages, meshes, num_micro_batches=2, loss=lambda output: output).step(x)
    with pytest.raises(SettingError, match=r"shape \[\], that depends on none"):
        Pipeline(stages, meshes, num_micro_batches=2, loss=lambda output: output.detach().sum()).step(x)
    with pytest.raises(UnsupportedError, match=r"plain tensor, cpu of shape \[2, 8\]"):
        Pipeline([Bare(), nn.Identity()], meshes, num_micro_batches=5).infer(x)
    assert all(parameter.grad is None for parameter in stages[0].parameters())


@pytest.mark.usefixtures("cluster")
def test_ops_on_lists_of_tensors_of_several_meshes() -> None:
    """As optimizers call them: results are in the order of the list."""
    one, other = meshes_of("pp=2")

    def lists() -> list[torch.Tensor]:
        return [dtorch.ones(n, device_mesh=mesh) for n, mesh in ((2, one), (3, other), (4, one))]

    xs, ys = lists(), lists()
    sums = torch._foreach_add(xs, ys, alpha=2)
    assert [(x.shape[0], x.device_mesh) for x in sums] == [(2, one), (3, other), (4, one)]
    assert [x.tolist() for x in sums] == [[3.0] * 2, [3.0] * 3, [3.0] * 4]
    torch._foreach_mul_(xs, [1.0, 2.0, 3.0])
    assert [x.tolist() for x in xs] == [[1.0] * 2, [2.0] * 3, [3.0] * 4]
    assert [x.tolist() for x in torch._foreach_pow(2.0, xs)] == [[2.0] * 2, [4.0] * 3, [8.0] * 4]
    assert [x.tolist() for x in torch._foreach_pow(3.0, ys[:1])] == [[3.0] * 2]
    lists_on_one = [dtorch.ones(len(y), device_mesh=one) for y in ys]
    with pytest.raises(MeshError):
        torch._foreach_add_(xs, lists_on_one)


DOCUMENT = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()


@pytest.mark.usefixtures("cluster")
def test_the_programs_of_the_document_run(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    exec(first, {})
    assert "shape=(32, 16)" in capsys.readouterr().out
    exec(second, {})
    assert f"```\n{capsys.readouterr().out}```\n" in DOCUMENT
