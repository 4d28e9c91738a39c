"""All of them, one after the other: ``python -m benchmarks``."""

from __future__ import annotations

import subprocess
import sys

COMMANDS = (
    ["benchmarks.startup"],
    ["benchmarks.scale"],
    ["benchmarks.overhead"],
    ["benchmarks.captured"],
    ["benchmarks.miss"],
    ["benchmarks.fetch"],
    ["benchmarks.collectives"],
    ["benchmarks.collectives", "--nodes", "2"],
    ["benchmarks.overlap"],
    ["benchmarks.decode"],
    ["benchmarks.training"],
    ["benchmarks.search"],
    ["benchmarks.load_memory"],
    ["benchmarks.failure"],
)


def main() -> int:
    """Run each in its own process; the exit status is the number that failed."""
    return sum(
        bool(subprocess.run([sys.executable, "-m", *command], check=False).returncode) for command in COMMANDS
    )


if __name__ == "__main__":
    sys.exit(main())
