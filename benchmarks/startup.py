"""From starting Python to the first value on the screen, beside ``python -c "import torch"``.

Run: ``python -m benchmarks.startup``.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Row, report

FIRST_VALUE = """
import dtorch
mesh = dtorch.DeviceMesh("cpu", [0, 1])
x = dtorch.rand((4, 3), device_mesh=mesh, placements=[dtorch.Shard(0)])
print(f"{x=}", flush=True)
"""
REPEATS = 5


def seconds_to_first_line(script: str) -> float:
    """Seconds from the start of a Python process to its first line of output."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(script)
        start = time.perf_counter()
        with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            elapsed_s = time.perf_counter() - start
            process.communicate(timeout=60)
        if process.returncode or not line:
            raise RuntimeError(f"the script failed with status {process.returncode}")
    return elapsed_s


def main() -> None:
    """Measure and report, the two scripts in turn."""
    first, torch_only = [], []
    for _ in range(REPEATS + 1):
        torch_only.append(seconds_to_first_line("import torch; print(1, flush=True)"))
        first.append(seconds_to_first_line(FIRST_VALUE))
    value_s, torch_s = statistics.median(first[1:]), statistics.median(torch_only[1:])
    met = value_s <= 3.0 and value_s <= 2.5 * torch_s
    report(
        "startup",
        [
            Row(
                "start to first value",
                "s",
                value_s,
                {"import torch": torch_s},
                "<= 3 and <= 2.5 x import torch",
                met,
            )
        ],
    )


if __name__ == "__main__":
    main()
