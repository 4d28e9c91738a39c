"""Trains a small language model, byte by byte, on the manual that Python carries, on any mesh.

Run: python examples/train_lm.py --dp 2 --tp 2 --zero 1 --steps 200
Run it again with more steps, and on another mesh if you like: it goes on from its checkpoint.
Other axes are --pp, with --micro-batches for its stages to share, and --ring-cp and --ulysses-cp for long sequences.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import dtorch
import dtorch.nn as dnn
from dtorch.parallel.pipeline import Pipeline

#: Of the mesh, from the outside in: neighbours along the last ones exchange most.
AXES = ("pp", "dp", "ring_cp", "ulysses_cp", "tp")
SEQUENCE = {"ring_cp": dtorch.Shard(1), "ulysses_cp": dtorch.Shard(1)}  # a pipeline cuts the batch by itself


class Embed(nn.Module):
    """Bytes and their positions to features."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.bytes = dnn.EmbeddingWithReplicateOutput(256, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ids (batch, length) to (batch, length, width)."""
        return self.bytes(x) + self.positions.weight[: x.shape[1]]


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, size = heads, width // heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (dnn.ColumnParallelLinear(width, width, unit=size) for _ in range(3))
        self.out = dnn.RowParallelLinearWithReplicateOutput(width, width, unit=size)
        self.up = dnn.ColumnParallelLinear(width, 4 * width)
        self.down = dnn.RowParallelLinearWithReplicateOutput(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, length, width)."""
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def language_model(layers: int, width: int, heads: int, context: int) -> nn.Sequential:
    """A decoder, written as for one device: its layers know what to do on a mesh with an axis ``tp``."""
    head = [nn.LayerNorm(width), dnn.ColumnParallelLinear(width, 256, bias=False)]
    return nn.Sequential(Embed(context, width), *(Block(width, heads) for _ in range(layers)), *head)


def batches(args: argparse.Namespace, done: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Bytes and the bytes that follow them, (batch, context) each; those of a step follow from its number."""
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    for step in range(done, args.steps):
        generator = torch.Generator().manual_seed(step)
        begins = torch.randint(len(text) - args.context, (args.batch, 1), generator=generator)
        ids = text[begins + torch.arange(args.context + 1)]
        yield ids[:, :-1], ids[:, 1:]


def train(args: argparse.Namespace, mesh: dtorch.DeviceMesh) -> list[float]:
    """The loss of each step, those of earlier runs among them."""
    torch.manual_seed(0)
    model = language_model(args.layers, args.width, args.heads, args.context)
    meshes = mesh.unbind("pp")
    stage_of = dtorch.assign_layers_to_stages(len(model), len(meshes))
    stages = [nn.Sequential(*(m for m, s in zip(model, stage_of) if s == n)) for n in range(len(meshes))]
    for stage, stage_mesh in zip(stages, meshes, strict=True):
        dtorch.parallelize(stage, stage_mesh, plan={})
    loss_of = dnn.vocab_parallel_cross_entropy
    pipeline = Pipeline(stages, meshes, num_micro_batches=args.micro_batches, loss=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=dtorch.tensor(args.lr), fused=True)
    if args.zero:
        dtorch.parallel.zero(model, optimizer, stage=args.zero)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warm_up))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "losses": None}
    checkpoint = args.run / "checkpoint"
    if checkpoint.exists():
        state = dtorch.checkpoint.load(checkpoint, state)
    losses = state["losses"] or []

    @dtorch.capture
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = pipeline.step(x, target=y)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    pending: deque[dtorch.TensorFuture] = deque()
    ahead = dtorch.prefetch(batches(args, len(losses)), mesh, SEQUENCE)
    bar = tqdm(ahead, initial=len(losses), total=args.steps)
    for x, y in bar:
        pending.append(step(x, y).item_async())
        schedule.step()
        if len(pending) > 2:  # the devices work on later steps while this one's loss is shown
            losses.append(pending.popleft().get())
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
    losses += [loss.get() for loss in pending]
    dtorch.checkpoint.save(checkpoint, state | {"losses": losses})
    return losses


def draw(losses: list[float], path: Path) -> None:
    """A picture of the losses."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: pip install matplotlib")
        return
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    figure.add_subplot(xlabel="step", ylabel="loss of a byte (nats)").plot(range(1, len(losses) + 1), losses)
    figure.savefig(path)
    print(f"plot: {path}")


def main() -> None:
    """Train, save, draw."""
    parser = argparse.ArgumentParser(description="Trains a small language model on any mesh.")
    numbers = {"tp": 2, "nodes": 1, "zero": 0, "steps": 100, "warm_up": 20, "batch": 8, "micro_batches": 1}
    numbers |= {"context": 128, "layers": 4, "width": 256, "heads": 4}
    for name, default in (dict.fromkeys(AXES, 1) | numbers).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--run", type=Path, default=Path("train_lm"), help="where checkpoint and plot are")
    args = parser.parse_args()
    shape = tuple(getattr(args, axis) for axis in AXES)
    dtorch.init(num_nodes=args.nodes, devices_per_node=-(-math.prod(shape) // args.nodes))
    mesh = dtorch.init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    losses = train(args, mesh)
    print(f"loss: {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}, on {mesh}")
    draw(losses, args.run / "loss.svg")
    dtorch.shutdown()


if __name__ == "__main__":
    main()
