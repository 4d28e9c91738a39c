"""Saves again and again into one folder, and is killed at random moments. Prints one JSON line for each death.

The moment is one of the clock: an alarm that nobody handles ends the process wherever it is.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import dtorch.checkpoint as checkpoint
from dtorch.checkpoint import plain
from tests.faults.dying_writer import state

#: Where the machine has much else to do, the first save may have been a slow one.
_LONGEST_S = 0.1


def numbered(number: int, format: str) -> dict[str, Any]:
    found = state(number)
    return (
        {name: torch.as_tensor(value) for name, value in found.items()} if format == "safetensors" else found
    )


def number_of(found: dict[str, Any]) -> int:
    """The number of a state, -1 for one that is mixed."""
    number = int(found["number"])
    is_whole = bool((found["a"] == number).all() and (found["b"] == number).all())
    return number if is_whole else -1


def kill_again_and_again(folder: Path, format: Any, num_deaths: int, rng: random.Random) -> None:
    checkpoint.save(folder, numbered(0, format), format=format)
    begun_s = time.perf_counter()
    checkpoint.save(folder, numbered(1, format), format=format)
    took_s = min(time.perf_counter() - begun_s, _LONGEST_S)
    last, num_saves = 1, 3.0
    for _ in range(num_deaths):
        moment_s = rng.uniform(0.0001, num_saves * took_s)
        child = os.fork()
        if child == 0:
            signal.setitimer(signal.ITIMER_REAL, moment_s)
            while True:
                last += 1
                checkpoint.save(folder, numbered(last, format), format=format)
        _, status = os.waitpid(child, 0)
        found = number_of(checkpoint.load(folder))
        death = {"killed": os.WIFSIGNALED(status), "saved": found - last, "number": found}
        print(json.dumps({"format": format} | death))
        # A machine that has become busy since the first save needs more time for one.
        num_saves = num_saves * 1.5 if found == last else 3.0
        last = found
    checkpoint.save(folder, numbered(last + 1, format), format=format)
    found = number_of(checkpoint.load(folder))
    print(json.dumps({"format": format, "left": len(list(folder.iterdir())), "saved": found - last}))


def main(folder: Path, formats: str, num_deaths: int, seed: int) -> None:
    torch.set_num_threads(1)  # a forked child has no others, and would wait for them
    plain._MAX_FILE_BYTES = 1000  # type: ignore[misc]  # several files and an index
    for format in formats.split(","):
        kill_again_and_again(folder / format, format, num_deaths, random.Random(seed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
