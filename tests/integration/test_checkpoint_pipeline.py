"""A run that began with tp=2 goes on with dp=2 x pp=2 as if nothing had happened: dropout and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtorch
import dtorch.checkpoint as checkpoint
from dtorch.parallel.pipeline import Pipeline

WIDTH = 8
PLAN = {"*.up": "colwise", "*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(torch.relu(self.up(x))))


class Run:
    """A model of four blocks on the meshes of its stages, and what trains it."""

    def __init__(self, mesh: dtorch.DeviceMesh, seed: int) -> None:
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        names = mesh.mesh_dim_names or ()
        meshes = mesh.unbind("pp") if "pp" in names else [mesh]
        stage_of = dtorch.assign_layers_to_stages(len(self.blocks), len(meshes))
        stages = []
        for number, stage_mesh in enumerate(meshes):
            own = [block for block, stage in zip(self.blocks, stage_of, strict=True) if stage == number]
            plan = PLAN if "tp" in names else {}
            stages.append(dtorch.parallelize(nn.Sequential(*own), stage_mesh, plan))
        self.pipeline = Pipeline(stages, list(meshes), num_micro_batches=2, loss=F.mse_loss)
        self.optimizer = torch.optim.AdamW(self.blocks.parameters(), lr=0.02, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.step = 0

    def state(self) -> dict[str, Any]:
        parts = {"model": self.blocks, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return parts | {"step": self.step, "random": dtorch.get_rng_state()}

    def resume(self, folder: Path) -> None:
        loaded = checkpoint.load(folder, self.state())
        self.step = loaded["step"]
        dtorch.set_rng_state(loaded["random"])

    def train(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            batch = torch.Generator().manual_seed(self.step)
            x, y = torch.randn(2, 8, WIDTH, generator=batch)
            self.optimizer.zero_grad()
            loss = self.pipeline.step(x, target=y)
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
        return losses


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("format", ["dtorch", "dcp"])
def test_a_run_goes_on_with_other_parallelism(tmp_path: Path, format: Any) -> None:
    first = Run(dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), 1)
    first.train(3)
    checkpoint.save(tmp_path, first.state(), format=format)
    expected = first.train(5)
    second = Run(dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), 2)
    second.resume(tmp_path)
    assert second.step == 3
    assert second.train(5) == pytest.approx(expected, abs=1e-4)
    assert second.scheduler.get_last_lr() == first.scheduler.get_last_lr()
