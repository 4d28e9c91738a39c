"""Has a figure become worse? ``make bench-check`` runs the cheap benchmarks again and compares.

Each is run several times, and held against the newest file of its name in ``benchmarks/results``. Times are compared as
ratios to the peer of the same run (plain torch, or a yardstick where nobody else does the same), so that a slower
machine is no regression; counts and ratios are compared as they are. A figure has regressed when even the best of the
new runs is worse than the old one by more than the new runs differ among each other, and by more than a floor.

Run: ``python -m benchmarks.check [NAME ...] [--runs N]``. The exit status is the number of benchmarks with regressions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import KEPT_RESULTS, YARDSTICK

#: Result name -> how it is made. Those that take seconds; the rest is for `make bench`.
CHEAP = {
    name: [sys.executable, "-m", f"benchmarks.{name}"]
    for name in ("scale", "overhead", "captured", "fetch", "startup")
}
RUNS = 3
#: What a figure may lose although all new runs agree: the old one was a single run, with a noise of its own.
FLOOR = 0.15
#: In this order: the first that a row has, old and new. Others are this project's own figures.
OUTSIDE_PEERS = ("plain torch", "import torch", YARDSTICK, "DTensor")
TIMES = frozenset({"us", "us/op", "ms", "s"})
#: Less is better, and the machine plays no part.
COUNTS = frozenset({"messages", "bytes", "x"})
_DEADLINE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one figure. ``change`` is 0.1 for 10 % worse; ``allowed`` what it may be."""

    figure: str
    change: float = 0.0
    allowed: float = 0.0
    note: str = ""
    is_worse: bool = False

    def __str__(self) -> str:
        if self.note:
            return f"{'WORSE' if self.is_worse else '-':>6}  {self.figure}: {self.note}"
        word = "WORSE" if self.is_worse else "ok"
        return f"{word:>6}  {self.figure}: {self.change:+.0%}, allowed {self.allowed:+.0%}"


def newest(name: str, folder: Path = KEPT_RESULTS) -> Path | None:
    """The newest result file of this name; their names begin with the day."""
    found = sorted(folder.glob(f"[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]-{name}.json"))
    return found[-1] if found else None


def compare(old: Sequence[dict[str, Any]], runs: Sequence[Sequence[dict[str, Any]]]) -> list[Verdict]:
    """The old rows against those of each new run. A figure that is no longer measured is a regression."""
    by_figure = [{row["figure"]: row for row in run} for run in runs]
    verdicts = []
    for row in old:
        figure = row["figure"]
        new = [rows[figure] for rows in by_figure if figure in rows]
        if len(new) < len(by_figure):
            note = "is no longer measured; if that is meant, keep a new result file"
            verdicts.append(Verdict(figure=figure, note=note, is_worse=True))
        else:
            verdicts.append(_compare_row(row, new))
    return verdicts


def _compare_row(old: dict[str, Any], new: Sequence[dict[str, Any]]) -> Verdict:
    figure, unit = old["figure"], old["unit"]
    if any(row["unit"] != unit for row in new) or unit not in TIMES | COUNTS:
        return Verdict(figure=figure, note=f"not compared: unit {unit!r}")
    peer = next((name for name in OUTSIDE_PEERS if all(name in row["peers"] for row in (old, *new))), None)
    if unit in TIMES and peer is None:
        return Verdict(figure=figure, note="not compared: no peer that old and new runs share")
    before = _relative(old, peer)
    after = [_relative(row, peer) for row in new]
    noise = (max(after) - min(after)) / statistics.median(after) if any(after) else 0.0
    allowed = max(FLOOR, noise)
    if before == 0:
        worse = min(after) > 0
        return Verdict(figure=figure, note=f"was 0, is {min(after):g}", is_worse=worse)
    change = min(after) / before - 1
    return Verdict(figure=figure, change=change, allowed=allowed, is_worse=change > allowed)


def _relative(row: dict[str, Any], peer: str | None) -> float:
    value = float(row["dtorch"])
    return value / float(row["peers"][peer]) if peer and row["unit"] in TIMES else value


def run_once(name: str) -> list[dict[str, Any]]:
    """The rows of one new run, whose file is not kept.

    Raises:
        subprocess.SubprocessError: the benchmark failed or did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"BENCHMARK_RESULTS": folder}
        subprocess.run(
            CHEAP[name], env=environment, stdout=subprocess.DEVNULL, check=True, timeout=_DEADLINE_S
        )
        path = newest(name, Path(folder))
        if path is None:
            raise subprocess.SubprocessError(f"benchmarks.{name} wrote no result file")
        return _rows(path)


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def check(name: str, num_runs: int) -> bool:
    """Run a benchmark, print what became of each of its figures, and say whether none is worse."""
    kept = newest(name)
    if kept is None:
        print(f"{name}: no result file to compare with; make one with `python -m benchmarks.{name}`")
        return False
    print(f"{name}: {num_runs} runs against {kept.name}", flush=True)
    try:
        runs = [run_once(name) for _ in range(num_runs)]
    except subprocess.SubprocessError as error:
        print(f" WORSE  {error}")
        return False
    verdicts = compare(_rows(kept), runs)
    for verdict in verdicts:
        print(verdict)
    return not any(verdict.is_worse for verdict in verdicts)


def main() -> int:
    """Check what was named, or everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHEAP)}; all by default")
    parser.add_argument(
        "--runs", type=int, default=RUNS, help="new runs of each, from which the noise is taken"
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in CHEAP]
    if unknown:
        parser.error(f"{', '.join(unknown)}: the cheap benchmarks are {', '.join(CHEAP)}")
    if arguments.runs < 2:
        parser.error(f"--runs {arguments.runs}: one run alone has no noise; take 2 or more")
    return sum(not check(name, arguments.runs) for name in arguments.names or CHEAP)


if __name__ == "__main__":
    sys.exit(main())
