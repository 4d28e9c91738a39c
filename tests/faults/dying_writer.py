"""Overwrites a checkpoint again and again, and is killed at each step on the disk, one step further each time.

Prints what was there behind each death, one JSON line each, and at the end which files are left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch

import dtorch.checkpoint as checkpoint
from dtorch.checkpoint.files import Disk
from dtorch.checkpoint.saving import write_checkpoint


class DyingDisk(Disk):
    """Kills its process in the middle of the step with a given number; writes get halfway."""

    def __init__(self, dies_at: int) -> None:
        self.steps_left = dies_at

    def _step(self) -> bool:
        self.steps_left -= 1
        return self.steps_left < 0

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def create(self, path: Path) -> BinaryIO:
        if self._step():
            self._die()
        return super().create(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        if self._step():
            super().write(file, data[: len(data) // 2])
            self._die()
        super().write(file, data)

    def close(self, file: BinaryIO) -> None:
        if self._step():
            self._die()
        super().close(file)

    def replace(self, source: Path, target: Path) -> None:
        if self._step():
            self._die()
        super().replace(source, target)

    def remove(self, path: Path) -> None:
        if self._step():
            self._die()
        super().remove(path)

    def settle(self, folder: Path) -> None:
        if self._step():
            self._die()
        super().settle(folder)


def state(number: int) -> dict[str, Any]:
    return {"number": number, "a": torch.full((300_000,), float(number)), "b": torch.full((2,), number)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # a forked child has no others, and would wait for them
    checkpoint.save(folder, state(0))
    saved, dies_at, has_ended = 0, 0, False
    while not has_ended:
        child = os.fork()
        if child == 0:
            write_checkpoint(folder, state(dies_at + 1), DyingDisk(dies_at))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        has_ended = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
        found = checkpoint.load(folder)
        is_whole = bool((found["a"] == found["number"]).all() and (found["b"] == found["number"]).all())
        is_old_or_new = found["number"] in (saved, dies_at + 1)
        line = {
            "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
            "ended": has_ended,
        }
        line |= {"is_whole": is_whole, "is_old_or_new": is_old_or_new, "is_new": found["number"] != saved}
        print(json.dumps(line))
        saved, dies_at = found["number"], dies_at + 1
    checkpoint.save(folder, state(-1))
    print(json.dumps({"left": sorted(path.name for path in folder.iterdir())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
