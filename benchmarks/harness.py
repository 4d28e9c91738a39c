"""Medians, a table, and a dated result file with machine, versions, commit and command."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

#: Where results are kept; and where this run writes them, which is elsewhere when they are only to be compared.
KEPT_RESULTS = Path(__file__).parent / "results"
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", KEPT_RESULTS))
#: The peer of a figure that nobody else has: a fixed piece of Python, so that two machines can be compared.
YARDSTICK = "yardstick"


@dataclass
class Row:
    """One figure. ``peers`` are the same thing done otherwise, in the same unit and run."""

    figure: str
    unit: str
    dtorch: float
    peers: dict[str, float] = field(default_factory=dict)
    goal: str = ""
    met: bool | None = None


def median_of(run: Callable[[], float], repeats: int, warm: int = 1) -> float:
    """The median of what ``run`` returns, after ``warm`` runs that do not count."""
    for _ in range(warm):
        run()
    return statistics.median(run() for _ in range(repeats))


def timed(run: Callable[[], Any], count: int = 1) -> float:
    """Seconds for one of ``count`` things that ``run`` does."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / count


def yardstick_us(repeats: int = 101) -> float:
    """Microseconds of the processor for 1,000 turns of a loop that does what ours do: calls, dicts, small objects."""
    table: dict[int, tuple[int, int]] = {}

    def put(key: int) -> int:
        table[key % 64] = (key, key + 1)
        return table.get(key, (key, key))[0]

    def run() -> float:
        start = time.thread_time()
        for key in range(1000):
            put(key)
        return time.thread_time() - start

    return median_of(run, repeats, warm=10) * 1e6


def report(name: str, rows: list[Row]) -> None:
    """Print the table and write ``results/<date>-<name>.json``. A time that has no peer gets the yardstick for one."""
    stick_s = yardstick_us() / 1e6
    for row in rows:
        per_second = {"us": 1e6, "us/op": 1e6, "ms": 1e3, "s": 1.0}.get(row.unit)
        if not row.peers and per_second is not None:
            row.peers[YARDSTICK] = stick_s * per_second
    peers = list(dict.fromkeys(peer for row in rows for peer in row.peers))
    table = Table(title=f"{name} (medians; every column of a row from the same run)")
    for column in ("figure", "unit", "dtorch", *peers, "goal", "met"):
        table.add_column(column, justify="left" if column in {"figure", "goal"} else "right")
    for row in rows:
        met = "" if row.met is None else ("yes" if row.met else "NO")
        values = [f"{row.peers[peer]:.4g}" if peer in row.peers else "-" for peer in peers]
        table.add_row(row.figure, row.unit, f"{row.dtorch:.4g}", *values, row.goal, met)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-{name}.json"
    path.write_text(json.dumps(environment() | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    print(f"written: {os.path.relpath(path)}")


def environment() -> dict[str, Any]:
    """What a result depends on beside the code: when, how, where and with which versions it came about."""
    packages = ("torch", "pyzmq", "msgspec", "transformers")
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "command": " ".join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+changes" if _git("status", "--porcelain") else ""),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "load_before": os.getloadavg()[0],
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except ImportError:
        return "not installed"


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, cwd=KEPT_RESULTS.parent, check=False
    )
    return result.stdout.strip() or ("unknown" if arguments[0] == "rev-parse" else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
