"""The command line: many random programs, and the shortest of those on which the sides differ."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import warnings
from collections import Counter

import torch
from tqdm import tqdm

import dtorch
from tests.numerics.programs.execute import Difference, Program, shrink
from tests.numerics.programs.generate import MAX_DEVICES, write_and_run


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.numerics.programs", description="Random programs on DTorch and on plain torch."
    )
    parser.add_argument("--count", type=int, default=20_000, help="programs, half of them in the auto scope")
    parser.add_argument("--mode", choices=("strict", "auto", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one program of this seed")
    parser.add_argument("--most", type=int, default=20, help="differences to shrink and print")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the programs; 1 when the sides differ on one."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("dtorch").setLevel(logging.CRITICAL)  # what both sides refuse is no news
    modes = ("strict", "auto") if options.mode == "both" else (options.mode,)
    numbers = range(options.count) if options.only is None else [options.only]
    kinds: Counter[str] = Counter()
    num_lines = 0
    with tqdm(numbers, unit="program", dynamic_ncols=True) as bar:
        dtorch.init(devices_per_node=MAX_DEVICES)
        for number in bar:
            mode = modes[number % len(modes)]
            program, difference = write_and_run(random.Random(f"{options.seed} {number}"), mode)
            num_lines += len(program.lines)
            if difference is not None:
                kinds[difference.kind] += 1
                if kinds.total() <= options.most:
                    bar.write(_report(number, program, difference))
            bar.set_postfix_str(f"{num_lines:,} lines, {kinds.total()} differences", refresh=False)
        dtorch.shutdown()
    print(
        f"{len(numbers):,} programs of {num_lines:,} lines, seed {options.seed}: {kinds.total()} differences"
    )
    for kind, count in kinds.most_common():
        print(f"  {count:6,}  {kind}")
    return int(bool(kinds))


def _report(number: int, program: Program, difference: Difference) -> str:
    shortest, found = shrink(program, difference.kind)
    return f"\n# program {number}: {str(found)!r}\n{shortest}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
