"""A program of PyTorch alone, on two processes: goes on from a checkpoint with FSDP2, and writes another one."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """Sizes that two processes cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    """The losses of a few steps on the same batch."""
    x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0))
    target = y[:, :5].contiguous()
    losses = []
    for _ in range(num_steps):
        weight = next(model.parameters())
        if weight.device.type != "cpu":
            import dtorch  # the peer has none

            mesh = weight.device_mesh  # type: ignore[attr-defined]  # a tensor of dtorch
            x, target = (
                t if isinstance(t, dtorch.Tensor) else dtorch.from_torch(t, device_mesh=mesh)
                for t in (x, target)
            )
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def peer(rank: int, source: str, target: str, store: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    mesh = init_device_mesh("cpu", (2,))
    model = Net()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    extra = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)])
    state: dict[str, Any] = {"model": model.state_dict(), "extra": extra, "step": 0}
    dcp.load(state, checkpoint_id=source)
    model.load_state_dict(state["model"])
    raw: dict[str, Any] = {}
    _take_optimizer(raw, model, optimizer, source)
    losses = trained(model, optimizer, 2)
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": model_state, "optim": optim_state, "extra": extra + 1, "step": state["step"] + 2},
        checkpoint_id=target,
    )
    if rank == 0:
        files = len(list(Path(target).glob("*.distcp")))
        print(json.dumps({"losses": losses, "step": state["step"], "files": files}))
    dist.destroy_process_group()


def _take_optimizer(raw: dict[str, Any], model: nn.Module, optimizer: Any, source: str) -> None:
    """State by number, as ``optimizer.state_dict()`` has it, into pieces."""
    import torch.distributed.checkpoint as dcp

    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    raw["optim"] = {"state": optimizer.state_dict()["state"]}
    dcp.load(raw, checkpoint_id=source)


def main() -> None:
    source, target = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(peer, (source, target, f"{folder}/store"), nprocs=2)


if __name__ == "__main__":
    main()
