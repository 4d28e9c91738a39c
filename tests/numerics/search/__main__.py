"""``python -m tests.numerics.search [names]``: where the rules claim less than trying finds."""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict

import torch
from tqdm import tqdm

from tests.numerics.search.captured import captured_calls, entries
from tests.numerics.search.compare import compare
from tests.numerics.search.isolated import isolated

#: (op, has a rule, missing signatures, false claims)
Line = tuple[str, bool, list[str], list[str]]


def compare_entry(entry: str, num_samples: int) -> list[Line]:
    """The calls of one entry of the operator database."""
    lines = []
    for sample in captured_calls(entry, num_samples):
        verdict = compare(sample)
        lines.append(
            (str(sample.func), verdict.has_rule, list(map(str, verdict.missing)), list(verdict.false))
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="entries of the operator database; all when none is named")
    parser.add_argument("--samples", type=int, default=2, help="of each entry")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    missing: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    false: list[str] = []
    ruleless: set[str] = set()
    died: list[str] = []
    num_calls = 0
    for entry in tqdm(entries(options.names), unit="entry"):
        lines = isolated(compare_entry, entry, options.samples)
        if lines is None:
            died.append(entry)
            continue
        num_calls += len(lines)
        for op, has_rule, unclaimed, untrue in lines:
            ruleless.update([] if has_rule else [op])
            false += [f"{op} ({entry}): {line}" for line in untrue]
            for signature in unclaimed:
                missing[op][signature].append(entry)
    for op, signatures in sorted(missing.items()):
        print(f"{op}{'  (no rule)' if op in ruleless else ''}")
        for signature, where in signatures.items():
            print(f"    {signature:44s} e.g. {where[0]}")
    print(
        f"\n{num_calls} calls; {len(ruleless)} overloads without a rule; {len(missing)} claim less than holds"
    )
    print(f"entries whose kernels crash or hang on pieces: {', '.join(died) or 'none'}")
    print(f"claims that are false: {len(false)}")
    print("\n".join(f"    {line}" for line in false))
    raise SystemExit(1 if false else 0)


if __name__ == "__main__":
    main()
