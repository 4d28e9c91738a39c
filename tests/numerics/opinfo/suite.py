"""Everything that is measured, in one go: what ``make test-ops`` runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import environment
from tests.numerics.opinfo.driver import Result
from tests.numerics.opinfo.entries import GRADIENT_DTYPES, Run, entries
from tests.numerics.opinfo.known import load_known
from tests.numerics.opinfo.report import EntryRow, describe, row_of, summary, table

_DTYPES = ("bool", "int64", "bfloat16", "complex64")
#: For 5,000 checks on the grid, entries with fewer combinations counted.
_GRID_CHECKS = 10
_DTYPE_CHECKS = 6

SUITE = (
    Run(),
    Run(is_uneven=True),
    Run(mode="auto"),
    Run(mode="auto", is_uneven=True),
    Run(mesh_shape=(2, 2), checks_per_entry=_GRID_CHECKS),
    Run(mode="auto", mesh_shape=(2, 2), checks_per_entry=_GRID_CHECKS),
    *(
        Run(mode=mode, dtype=dtype, with_grad=dtype in GRADIENT_DTYPES, checks_per_entry=_DTYPE_CHECKS)
        for dtype in _DTYPES
        for mode in ("strict", "auto")
    ),
)


def run_suite(measure: Callable[[Run, Sequence[str]], dict[str, Result]], out: Path | None) -> int:
    """Run everything and print a table; 1 when an entry fails that is not known to, or a known one does not."""
    known, began = load_known(), environment()
    found: list[tuple[Run, list[EntryRow]]] = []
    for run in SUITE:
        results = measure(run, list(entries(run)))
        rows = [row_of(result, run.mode) for result in results.values()]
        print(table(rows, run), flush=True)
        found.append((run, rows))
        if out is not None:  # after each: a run of everything is long
            runs = [_figures(*pair) for pair in found]
            out.write_text(json.dumps(began | {"runs": runs}, indent=1) + "\n")
    print(_overview(found))
    failing = {row.entry for _, rows in found for row in rows if row.failures}
    unknown, healed = sorted(failing - known.keys()), sorted(known.keys() - failing)
    if unknown:
        print(f"{len(unknown)} entries fail that known.toml does not list: {', '.join(unknown)}")
    if healed:
        print(f"no longer failing, to be taken from known.toml: {', '.join(healed)}")
    return int(bool(unknown or healed))


def _figures(run: Run, rows: Sequence[EntryRow]) -> dict[str, Any]:
    """Of one run, for a file that people compare with an earlier one."""
    return {
        "run": describe(run),
        "figures": summary(rows),
        "failing": {row.entry: row.first_failure for row in rows if row.failures},
        "rounding": {row.entry: row.num_rounding for row in rows if row.num_rounding},
        "no sharded check without communication": [
            row.entry for row in rows if row.num_sharded and not row.num_sharded_silent
        ],
    }


_COLUMNS = {
    "testable": "entries testable",
    "strict": "entries strict",
    "+ grad": "entries strict and gradients too",
    "checks": "checks",
    "passed": "checks without failure",
    "rounding": "checks with rounding",
    "sharded": "entries with an equal sharded check",
    "silent": "... without communication",
}


def _overview(found: Sequence[tuple[Run, list[EntryRow]]]) -> str:
    lines = ["", f"{'':34}" + "".join(f"{name:>10}" for name in _COLUMNS)]
    for run, rows in found:
        figures: dict[str, Any] = summary(rows)
        lines.append(f"{describe(run):34}" + "".join(f"{figures[key]:>10}" for key in _COLUMNS.values()))
    return "\n".join(lines)
