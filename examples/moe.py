"""A small language model with experts learns the characters of this repository's README, on any mesh.

Run: python examples/moe.py --ep 2 --dp 2 --nodes 2 --steps 100
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dtorch
import dtorch.nn as dnn

WIDTH, LENGTH, BATCH, EXPERTS = 32, 32, 16, 8


class Model(nn.Module):
    """Attention, then experts; as for one device, but for the line with ``dnn``."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.experts = dnn.MoE(WIDTH, 2 * WIDTH, EXPERTS, top_k=2, num_shared_experts=1)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, num_characters)

    def forward(self, ids: torch.Tensor) -> Any:
        """Characters [batch, length] to logits [batch, length, characters], and how experts were used."""
        x = self.embedding(ids) + self.places.weight
        q, k, v = self.qkv(self.norms[0](x)).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        y, routing = self.experts(self.norms[1](x), return_routing=True)
        return self.head(self.norms[2](x + y)), routing


def main() -> None:
    """Train, and say how well and with which experts."""
    parser = argparse.ArgumentParser()
    for axis, what in ("dp", "the batch"), ("ep", "the experts"), ("tp", "each expert"):
        parser.add_argument(f"--{axis}", type=int, default=1 + (axis == "ep"), help=f"parts of {what}")
    parser.add_argument("--nodes", type=int, default=1, help="node agents that hold the devices")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    dtorch.init(num_nodes=args.nodes, devices_per_node=-(-args.dp * args.ep * args.tp // args.nodes))
    mesh = dtorch.init_device_mesh("cpu", (args.dp, args.ep, args.tp), mesh_dim_names=("dp", "ep", "tp"))
    text = (Path(__file__).parents[1] / "README.md").read_text()
    characters = sorted(set(text))
    data = torch.tensor([characters.index(c) for c in text])
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = dtorch.parallelize(Model(len(characters)), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    on_batch = [dtorch.Shard(0), dtorch.Shard(0), dtorch.Replicate()]
    for step in range(args.steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        batch = dtorch.from_torch(rows, device_mesh=mesh, placements=on_batch)
        logits, routing = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + 0.01 * routing.balance_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            used = (100 * routing.tokens_per_expert / (2 * BATCH * LENGTH)).round().int().tolist()
            print(f"step {step:>4}  loss {loss.item():.4f}  tokens of each expert in %: {used}")


if __name__ == "__main__":
    main()
