"""``python -m tests.numerics.search [names]``: where the rules claim less than trying finds."""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict

import torch
from tqdm import tqdm

from tests.numerics.search.captured import captured_calls
from tests.numerics.search.compare import Verdict, compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="entries of the operator database; all when none is named")
    parser.add_argument("--samples", type=int, default=2, help="of each entry")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    missing: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    false: list[str] = []
    ruleless: dict[str, str] = {}
    num_calls = 0
    with tqdm(unit="call") as bar:
        for entry, sample in captured_calls(options.names, options.samples):
            verdict: Verdict = compare(sample)
            bar.set_postfix_str(str(sample.func), refresh=False)
            bar.update()
            num_calls += 1
            if not verdict.has_rule:
                ruleless.setdefault(str(sample.func), entry)
            false += [f"{sample.func} ({entry}): {line}" for line in verdict.false]
            for found in verdict.missing:
                missing[str(sample.func)][str(found)].append(entry)
    for op, signatures in sorted(missing.items()):
        label = "  (no rule)" if op in ruleless else ""
        print(f"{op}{label}")
        for signature, entries in signatures.items():
            print(f"    {signature:44s} e.g. {entries[0]}")
    print(
        f"\n{num_calls} calls; {len(ruleless)} overloads without a rule; {len(missing)} claim less than holds"
    )
    print(f"claims that are false: {len(false)}")
    print("\n".join(f"    {line}" for line in false))
    raise SystemExit(1 if false else 0)


if __name__ == "__main__":
    main()
