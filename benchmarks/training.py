"""Tokens a second of a training step of ``examples/train_lm.py``, on two devices of one node.

Beside plain torch with two threads, and PyTorch DDP, FSDP2 (dp=2) and DTensor (tp=2) on two Gloo ranks.
Run: ``python -m benchmarks.training [--steps 6]``. 3.3 million parameters, 8 rows of 128 bytes, AdamW, float32. A
figure is the median of three runs of so many steps, of which only the last loss is waited for. The optimizer is the
fused one, as in the example; DTensor's is not, which refuses the parameters that are no DTensors there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dtorch
import dtorch.nn as dnn
from benchmarks.gloo import on_gloo_ranks
from benchmarks.harness import Row, report
from examples.train_lm import Block, language_model

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 256, 4, 128, 8
RUNS = 3
Step = Callable[[Any, Any], Any]


def make_model() -> nn.Sequential:
    """On the CPU; the same weights each time."""
    torch.manual_seed(0)
    return language_model(LAYERS, WIDTH, HEADS, CONTEXT)


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets, (batch, context) each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(256, (BATCH, CONTEXT + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def make_step(model: Any, fused: bool = True) -> Step:
    """Forward, backward and optimizer; gives the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)

    def step(x: Any, y: Any) -> Any:
        loss = dnn.vocab_parallel_cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def tokens_a_second(step: Step, x: Any, y: Any, num_steps: int) -> float:
    """Of the whole batch."""
    for _ in range(3):
        step(x, y).item()
    rates = []
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(num_steps):
            loss = step(x, y)
        loss.item()
        rates.append(num_steps * BATCH * CONTEXT / (time.perf_counter() - start))
    return statistics.median(rates)


def plain(num_steps: int) -> float:
    """Plain torch, two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return tokens_a_second(make_step(make_model()), *make_batch(), num_steps)
    finally:
        torch.set_num_threads(before)


def ours(sizes: tuple[int, int], num_steps: int) -> tuple[float, float]:
    """Eager and captured, on a mesh of (dp, tp)."""
    mesh = dtorch.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    [(x, y)] = dtorch.prefetch([make_batch()], mesh)
    rates = []
    for is_captured in (False, True):
        model = dtorch.parallelize(make_model(), mesh, plan={})
        step = make_step(model)
        rates.append(tokens_a_second(dtorch.capture(step) if is_captured else step, x, y, num_steps))
    return rates[0], rates[1]


def data_parallel(rank: int, kind: str, num_steps: int) -> float:
    """DDP or FSDP2: each rank has half of the rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model: Any = make_model()
    if kind == "DDP":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))  # else it takes the accelerator that dtorch is
        for part in model:
            if isinstance(part, Block):
                fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    x, y = (t.chunk(2)[rank] for t in make_batch())
    return tokens_a_second(make_step(model), x, y, num_steps)


def tensor_parallel(rank: int, num_steps: int) -> float:
    """DTensor, with the same layers cut by columns and by rows; logits are gathered."""
    from torch.distributed.tensor import Replicate, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = make_model()
    plan: dict[str, Any] = {
        "0.bytes": RowwiseParallel(input_layouts=Replicate()),
        str(len(model) - 1): ColwiseParallel(output_layouts=Replicate()),
    }
    for number, part in enumerate(model):
        if isinstance(part, Block):
            part.heads //= 2  # a rank sees its own
            plan |= {f"{number}.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
            plan |= {f"{number}.{name}": RowwiseParallel() for name in ("out", "down")}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    return tokens_a_second(make_step(model, fused=False), *make_batch(), num_steps)


def rows_of(name: str, found: tuple[float, float], plain_rate: float, peers: dict[str, float]) -> list[Row]:
    """One row beside plain torch, which must be nearly as fast, and one beside the others, which must be slower."""
    eager, captured = found
    best = max(captured, eager)
    return [
        Row(f"{name}, eager", "tokens/s", eager, {"plain torch": plain_rate, **peers}),
        Row(
            f"{name}, captured",
            "tokens/s",
            captured,
            {"plain torch": plain_rate, **peers},
            ">= 0.85 x plain torch, > the others",
            best >= 0.85 * plain_rate and best > max(peers.values()),
        ),
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Training throughput on one node.")
    parser.add_argument("--steps", type=int, default=6, help="of a run")
    num_steps = parser.parse_args().steps
    dtorch.init(devices_per_node=2)
    tp, dp = ours((1, 2), num_steps), ours((2, 1), num_steps)
    dtorch.shutdown()
    plain_rate = plain(num_steps)
    dp_peers = {kind: on_gloo_ranks(data_parallel, kind, num_steps) for kind in ("DDP", "FSDP2")}
    tp_peers = {"DTensor": on_gloo_ranks(tensor_parallel, num_steps)}
    report("training", rows_of("tp=2", tp, plain_rate, tp_peers) + rows_of("dp=2", dp, plain_rate, dp_peers))


if __name__ == "__main__":
    main()
