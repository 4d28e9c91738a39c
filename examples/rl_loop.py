"""Reinforcement learning on two meshes of one cluster: a small language model learns to write numbers backwards.

One copy of the policy rolls out on the first mesh, another is updated on the second, and after each update its weights
move to the first by ``redistribute``. The reward is the share of right digits, the advantage is against the mean of a
group of answers to the same prompt (GRPO, arxiv.org/abs/2402.03300).

Run: python examples/rl_loop.py --rollout-dp 2 --update-tp 2 --steps 60
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import dtorch
import dtorch.nn as dnn


class Embed(nn.Module):
    """Digits and their positions to features."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.digits, self.positions = nn.Embedding(10, width), nn.Embedding(length, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Digits (batch, length) to (batch, length, width)."""
        return self.digits(x) + self.positions.weight[: x.shape[1]]


class Block(nn.Module):
    """Attention and a feed-forward network; on an axis ``tp`` heads and features are cut."""

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


def policy(args: argparse.Namespace, mesh: dtorch.DeviceMesh) -> nn.Module:
    """A decoder of digits; the same numbers on every mesh."""
    torch.manual_seed(args.seed)
    blocks = (Block(args.width, args.heads) for _ in range(args.layers))
    head = [nn.LayerNorm(args.width), nn.Linear(args.width, 10)]
    return dtorch.parallelize(
        nn.Sequential(Embed(2 * args.digits, args.width), *blocks, *head), mesh, plan={}
    )


def rewards(ids: torch.Tensor, num_digits: int) -> torch.Tensor:
    """The share of right digits in each row."""
    return (ids[:, num_digits:] == ids[:, :num_digits].flip(1)).float().mean(1)


def train(args: argparse.Namespace, rollout: dtorch.DeviceMesh, update: dtorch.DeviceMesh) -> list[float]:
    """The mean reward of each step."""
    actor, learner = policy(args, rollout), policy(args, update)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=args.lr, capturable=True)
    rows, whole = dtorch.Shard(0), dtorch.Replicate()

    @dtorch.capture
    def act(ids: torch.Tensor) -> torch.Tensor:
        for _ in range(args.digits):
            logits = actor(ids)[:, -1]
            noise = -torch.log(-torch.log(torch.rand_like(logits)))  # the largest is a sample of the softmax
            ids = torch.cat([ids, (logits + noise).argmax(-1, keepdim=True)], dim=1)
        return ids

    @dtorch.capture
    def learn(ids: torch.Tensor) -> torch.Tensor:
        reward = rewards(ids, args.digits)
        # A group may lie on several devices: the few numbers go to all.
        by_group = reward.redistribute(placements=[whole, whole]).view(-1, args.group)
        spread = by_group.std(1, keepdim=True) + 0.1
        advantage = ((by_group - by_group.mean(1, keepdim=True)) / spread).view(-1, 1)
        logits = learner(ids[:, :-1])[:, args.digits - 1 :]
        chosen = logits.log_softmax(-1).gather(-1, ids[:, args.digits :, None])[..., 0]
        optimizer.zero_grad()
        (-(advantage * chosen).mean()).backward()
        optimizer.step()
        return reward.mean().detach()

    curve = []
    for step in range(args.steps):
        numbers = torch.Generator().manual_seed(step)
        prompts = torch.randint(10, (args.prompts, args.digits), generator=numbers)
        prompts = prompts.repeat_interleave(args.group, 0)
        with torch.no_grad():
            ids = act(dtorch.from_torch(prompts, device_mesh=rollout, placements=[rows]))
        ids = ids.redistribute(device_mesh=update, placements=[rows, whole])
        curve.append(learn(ids).item_async())
        with torch.no_grad():  # the new weights go to the mesh that rolls out
            for old, new in zip(actor.parameters(), learner.parameters(), strict=True):
                old.copy_(new.redistribute(device_mesh=rollout, placements=old.placements))
        if (step + 1) % args.every == 0:
            recent = [reward.get() for reward in curve[-args.every :]]
            mean = sum(recent) / len(recent)
            print(f"step {step + 1:4}  reward {mean:.3f}  {'#' * round(40 * mean)}")
    return [reward.get() for reward in curve]


def main() -> None:
    """Learn, and say how far it came."""
    parser = argparse.ArgumentParser(description="Alternates rollout and update on two meshes.")
    meshes = {"rollout-dp": 2, "update-dp": 1, "update-tp": 2, "nodes": 1}
    sizes = {"layers": 1, "width": 64, "heads": 4, "digits": 2}
    steps = {"steps": 60, "every": 5, "prompts": 64, "group": 8, "seed": 0}
    for name, default in (meshes | sizes | steps).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    num_devices = args.rollout_dp + args.update_dp * args.update_tp
    dtorch.init(num_nodes=args.nodes, devices_per_node=-(-num_devices // args.nodes))
    ids = torch.arange(num_devices)
    rollout = dtorch.DeviceMesh("cpu", ids[: args.rollout_dp].tolist(), mesh_dim_names=("dp",))
    grid = ids[args.rollout_dp :].view(args.update_dp, args.update_tp).tolist()
    update = dtorch.DeviceMesh("cpu", grid, mesh_dim_names=("dp", "tp"))
    curve = train(args, rollout, update)
    few = max(1, len(curve) // 10)
    first, last = sum(curve[:few]) / few, sum(curve[-few:]) / few
    print(f"reward: {first:.3f} in the first {few} steps, {last:.3f} in the last; {rollout} and {update}")
    dtorch.shutdown()


if __name__ == "__main__":
    main()
