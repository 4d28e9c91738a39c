"""The command line of the measurement."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from tests.numerics.opinfo import worker
from tests.numerics.opinfo.driver import Result, child_command, run_entries
from tests.numerics.opinfo.entries import GRADIENT_DTYPES, Run, entries
from tests.numerics.opinfo.known import load_known
from tests.numerics.opinfo.report import describe, row_of, table, to_json
from tests.numerics.opinfo.suite import run_suite


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.numerics.opinfo", description="PyTorch's operator database on DTorch."
    )
    parser.add_argument("--all", action="store_true", help="every run of the suite, one after the other")
    parser.add_argument(
        "--ops", default="", help="names of entries, comma-separated; a name stands for its variants"
    )
    parser.add_argument("--mode", choices=("strict", "auto"), default="strict")
    parser.add_argument("--uneven", action="store_true", help="stock sizes, any dim of size > 1 sharded")
    parser.add_argument("--no-grad", action="store_true", help="values only")
    parser.add_argument("--mesh", default="2", help="sizes of the mesh's axes, as 2 or 2x2")
    parser.add_argument(
        "--dtype", default="float32", help="gradients are compared of float32, float64 and complex"
    )
    parser.add_argument("--max-checks", type=int, help="about so many, drawn evenly over all entries")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of combinations")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _run_of(options: argparse.Namespace, num_entries: int) -> Run:
    return Run(
        mode=options.mode,
        is_uneven=options.uneven,
        with_grad=not options.no_grad and options.dtype in GRADIENT_DTYPES,
        mesh_shape=tuple(map(int, options.mesh.split("x"))),
        dtype=options.dtype,
        checks_per_entry=math.ceil(options.max_checks / num_entries) if options.max_checks else None,
        seed=options.seed,
    )


def _selected(names: list[str], wanted: str) -> list[str]:
    if not wanted:
        return names
    found = [n for n in names if any(n == w or n.startswith(f"{w}.") for w in wanted.split(","))]
    if not found:
        sys.exit(f"no entry is named {wanted}")
    return found


def _measure(run: Run, names: Sequence[str], num_jobs: int) -> dict[str, Result]:
    with tqdm(total=len(names), desc=describe(run), unit="entry", dynamic_ncols=True) as bar:

        def done(result: Result) -> None:
            bar.set_postfix_str(result.entry, refresh=False)
            bar.update()

        return run_entries(child_command(run), names, num_jobs, done)


def main(arguments: list[str]) -> int:
    """Run what the arguments ask for; 1 when something fails that is not known to."""
    options = _parse(arguments)
    if options.child:
        fields = json.loads(options.child)
        worker.start(Run(**{**fields, "mesh_shape": tuple(fields["mesh_shape"])}))
        return 0
    if options.all:
        return run_suite(lambda run, names: _measure(run, names, options.jobs), options.out)
    names = _selected(list(entries(_run_of(options, 1))), options.ops)
    run = _run_of(options, len(names))
    results = _measure(run, names, options.jobs)
    rows = [row_of(results[name], run.mode) for name in names]
    print(table(rows, run))
    if options.out:
        options.out.write_text(json.dumps(to_json(rows, run), indent=1) + "\n")
    return int(any(row.failures and row.entry not in load_known() for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
