"""Runs the peer: a function on two Gloo ranks, as a torchrun script would, and rank 0's answer."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_gloo_ranks(
    run: Callable[..., Any], *arguments: Any, num_ranks: int = 2, timeout_s: float = 300.0
) -> Any:
    """What ``run(rank, *arguments)`` returns on rank 0; one intra-op thread a rank.

    Raises:
        ProcessRaisedException, ProcessExitedException: a rank raised, or died; the others are ended.
        TimeoutError: the ranks have not ended within ``timeout_s``; they are killed.
    """
    deadline_s = time.monotonic() + timeout_s
    context = mp.get_context("spawn")
    receiver, answers = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        ranks = mp.spawn(
            _rank, (num_ranks, rendezvous, run, arguments, answers), nprocs=num_ranks, join=False
        )
        answer: list[Any] = []
        while not ranks.join(timeout=0.1):  # which raises when a rank has died
            if not answer and receiver.poll():
                answer.append(receiver.recv())
            if time.monotonic() > deadline_s:
                for process in ranks.processes:
                    process.kill()
                    process.join()
                raise TimeoutError(f"{num_ranks} Gloo ranks still ran {run.__name__} after {timeout_s:g} s")
    return answer[0] if answer else receiver.recv()


def _rank(
    rank: int, num_ranks: int, rendezvous: str, run: Callable[..., Any], arguments: Any, answers: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    try:
        answer = run(rank, *arguments)
        dist.barrier()
        if rank == 0:
            answers.send(answer)
    finally:
        dist.destroy_process_group()
