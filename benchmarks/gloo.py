"""Runs the peer: a function on two Gloo ranks, as a torchrun script would, and rank 0's answer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_gloo_ranks(
    run: Callable[..., Any], *arguments: Any, num_ranks: int = 2, timeout_s: float = 300.0
) -> Any:
    """What ``run(rank, *arguments)`` returns on rank 0; one intra-op thread a rank."""
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        ranks = mp.spawn(
            _rank, (num_ranks, rendezvous, run, arguments, answers), nprocs=num_ranks, join=False
        )
        answer = answers.get()
        while not ranks.join(timeout=timeout_s):
            pass
    return answer


def _rank(
    rank: int, num_ranks: int, rendezvous: str, run: Callable[..., Any], arguments: Any, answers: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    try:
        answer = run(rank, *arguments)
        dist.barrier()
        if rank == 0:
            answers.put(answer)
    finally:
        dist.destroy_process_group()
