"""What stands around a training loop: torch's own, on parameters and batches of the cluster, beside plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import dtorch
import dtorch.nn as dnn
from dtorch_runtime.errors import PlacementError, SettingError

WIDTH, CLASSES, ROWS = 6, 3, 8
R, S0 = dtorch.Replicate(), dtorch.Shard(0)
#: Tolerances: a capturable optimizer computes its bias correction in float32.
CAPTURABLE = (1e-4, 1e-5)
Make = Callable[[Any], torch.optim.Optimizer]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        dnn.ColumnParallelLinear(WIDTH, 8),
        nn.Tanh(),
        dnn.RowParallelLinearWithReplicateOutput(8, WIDTH),
        nn.Linear(WIDTH, CLASSES),
    ).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(ROWS, CLASSES, generator=generator, dtype=torch.float64)


def both(grid: dtorch.DeviceMesh) -> Iterator[tuple[nn.Module, torch.Tensor, torch.Tensor]]:
    """The model and a batch in plain PyTorch, then on dp=2 x tp=2."""
    yield net(), *batch()
    x, y = (dtorch.from_torch(t, grid, [S0, R]) for t in batch())
    yield dtorch.parallelize(net(), grid, plan={}), x, y


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu() for parameter in model.parameters()]


def check(found: list[Any], rtol: float = 1e-7, atol: float = 1e-7) -> None:
    """Both runs gave the same."""
    plain, ours = found
    torch.testing.assert_close(ours, plain, rtol=rtol, atol=atol)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW, maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, fused=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "SGD without momentum, fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
    "LBFGS, line search": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=0.01),
}
#: They look along whole rows or columns, which a cut parameter has on several devices.
MOVES = frozenset(("Adafactor", "LBFGS", "LBFGS, line search", "Muon"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, grid: dtorch.DeviceMesh) -> None:
    found = []
    for model, x, y in both(grid):
        optimizer = OPTIMIZERS[name](model.parameters())

        def loss(model: nn.Module = model, x: Any = x, y: Any = y, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            value = F.mse_loss(model(x), y)
            value.backward()
            return value

        for _ in range(3):
            with dtorch.auto_redistribute() if name in MOVES else nullcontext():
                if isinstance(optimizer, torch.optim.LBFGS):
                    optimizer.step(loss)
                else:
                    loss()
                    optimizer.step()
        found.append(values_of(model))
    if name == "Muon":  # it is computed in bfloat16, which rounds by placements
        torch.testing.assert_close(*found, rtol=0, atol=5e-3)
    else:
        check(found)


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}], ids=["fused", "capturable"])
def test_counts_of_steps_are_where_their_parameters_are(options: Any, grid: dtorch.DeviceMesh) -> None:
    """Elsewhere each would be moved at every step."""
    *_, (model, x, y) = both(grid)
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    def meshes() -> set[Any]:
        return {state["step"].device_mesh for state in optimizer.state.values()}

    step()
    assert meshes() == {grid}
    optimizer.load_state_dict(optimizer.state_dict())
    step()
    assert meshes() == {grid}
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}
    more = nn.Parameter(dtorch.ones(3, device_mesh=grid))
    optimizer.add_param_group({"params": [more]})
    more.grad = torch.ones_like(more)
    step()
    assert meshes() == {grid}


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("is_tensor", [False, True])
def test_schedules(name: str, is_tensor: bool, grid: dtorch.DeviceMesh) -> None:
    found = []
    for model, x, y in both(grid):
        ours = isinstance(x, dtorch.Tensor)
        rate: Any = dtorch.tensor(0.05, dtype=torch.float64) if is_tensor and ours else 0.05
        extra = {"capturable": True} if is_tensor and ours else {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, **extra)
        schedule = SCHEDULES[name](optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step(*([loss.detach()] if name == "plateau" else []))
        found.append([torch.tensor(float(optimizer.param_groups[0]["lr"])), *values_of(model)])
    check(found, *CAPTURABLE)


def test_gradient_scaler_skips_steps_whose_gradients_are_not_finite(grid: dtorch.DeviceMesh) -> None:
    found = []
    for model, x, y in both(grid):
        model = model.float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        device = "dtorch" if isinstance(x, dtorch.Tensor) else "cpu"
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                loss = F.mse_loss(model(x.float()), y.float())
            scaler.scale(loss).backward()
            if step == 2:
                next(model.parameters()).grad.fill_(float("inf"))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [1024, 2048, 1024, 1024, 2048]
        found.append(values_of(model))
    torch.testing.assert_close(*found, rtol=0.05, atol=0.02)


def test_averages_of_models(grid: dtorch.DeviceMesh) -> None:
    found = []
    for model, x, y in both(grid):
        averages = [
            AveragedModel(model),
            AveragedModel(model, avg_fn=get_ema_avg_fn(0.9)),
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        ]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            for average in averages:
                average.update_parameters(model)
        found.append([value for average in averages for value in values_of(average)])
    check(found)


def test_gradients_that_are_clipped_and_made_one_vector(grid: dtorch.DeviceMesh) -> None:
    found = []
    for model, x, y in both(grid):
        F.mse_loss(model(x), y).backward()
        parameters = list(model.parameters())
        norms = [
            nn.utils.get_total_norm([p.grad for p in parameters]),
            nn.utils.clip_grad_norm_(parameters, 0.1, error_if_nonfinite=True),
            nn.utils.clip_grad_norm_(parameters, 0.05, norm_type=float("inf")),
        ]
        nn.utils.clip_grad_value_(parameters, 0.01)
        found.append([*(x.cpu() for x in norms), *(p.grad.cpu() for p in parameters)])
    check(found)


def test_anomalies_are_looked_for(grid: dtorch.DeviceMesh) -> None:
    model, x, y = list(both(grid))[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly detection warns of itself, and of where an error came from
        with torch.autograd.detect_anomaly():
            F.mse_loss(model(x), y).backward()
            loss = (model(x) * 0).sqrt().sum()  # its derivative is infinite, times zero
            with pytest.raises(RuntimeError, match="returned nan values"):
                loss.backward()


# ---- batches ----


@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_of_a_loader_are_sent_ahead(pin_memory: bool, grid: dtorch.DeviceMesh) -> None:
    x, y = batch()
    loader = DataLoader(TensorDataset(x, y), batch_size=2, pin_memory=pin_memory)
    ahead = dtorch.prefetch(loader, grid)
    assert len(ahead) == 4
    for _ in range(2):
        found = list(ahead)
        assert all(t.placements == (S0, R) and t.device_mesh == grid for pair in found for t in pair)
        torch.testing.assert_close(torch.cat([x.to_torch() for x, _ in found]), x)
        torch.testing.assert_close(torch.cat([y.to_torch() for _, y in found]), y)


@pytest.mark.parametrize(
    "num_ahead, taken", [(0, [1, 2, 3, 4]), (1, [2, 3, 4, 4]), (2, [3, 4, 4, 4]), (9, [4, 4, 4, 4])]
)
def test_how_far_ahead(num_ahead: int, taken: list[int], mesh: dtorch.DeviceMesh) -> None:
    asked: list[int] = []

    def batches() -> Iterator[dict[str, Any]]:
        for number in range(4):
            asked.append(number)
            yield {"ids": torch.full((2,), number), "number": number, "scale": torch.tensor(0.5)}

    ahead = dtorch.prefetch(batches(), mesh, [S0], num_ahead=num_ahead)
    seen = []
    for number, found in enumerate(ahead):
        seen.append(len(asked))
        assert found["number"] == number
        assert found["ids"].tolist() == [number] * 2
        assert (found["ids"].placements, found["scale"].placements) == ((S0,), (R,))
    assert seen == taken


def test_how_batches_are_placed(grid: dtorch.DeviceMesh) -> None:
    rows = torch.ones(4, 4)
    [found] = dtorch.prefetch([rows], grid, {"tp": dtorch.Shard(1)})
    assert found.placements == (R, dtorch.Shard(1))
    [found] = dtorch.prefetch([found], grid)
    assert found.placements == (R, dtorch.Shard(1)), "what is on the cluster stays as it is"
    with dtorch.Graph.default_graph().device_mesh_guard(grid):
        [[found, text]] = dtorch.prefetch([[rows, "name"]])
    assert (found.placements, text) == ((S0, R), "name")
    with pytest.raises(PlacementError, match="one for each axis"):
        list(dtorch.prefetch([rows], grid, [S0]))


def test_what_is_no_loader(mesh: dtorch.DeviceMesh) -> None:
    with pytest.raises(SettingError, match="torch.utils.data.DataLoader, got 3"):
        dtorch.prefetch(3)
    with pytest.raises(SettingError, match=r"num_ahead=\) is a number of batches, got -1"):
        dtorch.prefetch([], num_ahead=-1)
    with pytest.raises(TypeError, match="has no len"):
        len(dtorch.prefetch(iter([])))


# ---- a captured step ----


def test_a_captured_step_with_a_schedule(grid: dtorch.DeviceMesh) -> None:
    """Losses are those of plain PyTorch; the rate changes from step to step, and nothing is recorded anew for it."""
    found = []
    for model, x, y in both(grid):
        ours = isinstance(x, dtorch.Tensor)
        rate: Any = dtorch.tensor(0.05, dtype=torch.float64) if ours else 0.05
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, **({"capturable": True} if ours else {}))
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

        def step(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            loss = torch.where(y > 0, (model(x) - y).square(), 0.0).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = dtorch.capture(step) if ours else step
        losses = []
        for _ in range(6):
            losses.append(run(x, y))
            schedule.step()
        found.append([loss.cpu() for loss in losses])
        if ours:
            assert "1 recording, 4 replays" in str(dtorch.capture.explain(run)), dtorch.capture.explain(run)
    check(found, *CAPTURABLE)


def test_a_rate_that_is_a_tensor_is_loaded_where_it_was(grid: dtorch.DeviceMesh, tmp_path: Any) -> None:
    model, x, y = list(both(grid))[1]
    made = []
    for rate in (0.05, 0.01):
        optimizer = torch.optim.AdamW(model.parameters(), lr=dtorch.tensor(rate), capturable=True)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        made.append(optimizer)
    dtorch.checkpoint.save(tmp_path / "checkpoint", {"optimizer": made[0]})
    dtorch.checkpoint.load(tmp_path / "checkpoint", {"optimizer": made[1]})
    rate = made[1].param_groups[0]["lr"]
    assert isinstance(rate, dtorch.Tensor)
    assert rate.item() == pytest.approx(0.05)
    made[1].param_groups[0]["lr"].fill_(0.5)
    assert made[0].param_groups[0]["lr"].item() == pytest.approx(0.05)
