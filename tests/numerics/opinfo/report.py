"""Figures of a run, for people and for files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tests.numerics.opinfo.check import EQUAL, REFUSED, ROUNDING
from tests.numerics.opinfo.driver import Check, Result
from tests.numerics.opinfo.entries import Run


def failure(check: Check, mode: str) -> str | None:
    """The category of what is wrong with a check, or None. A refusal is legal in strict mode."""
    legal = (EQUAL, ROUNDING, REFUSED) if mode == "strict" else (EQUAL, ROUNDING)
    outcome = check.outcome
    if outcome.category not in legal:
        return outcome.category
    if outcome.grad_category is not None and outcome.grad_category not in legal:
        return f"grad {outcome.grad_category}"
    return None


@dataclass(frozen=True)
class EntryRow:
    """One entry: numbers of checks, and its first failure."""

    entry: str
    num_checks: int
    num_grad_checks: int
    #: Number of checks by what became of them; those of gradients begin with "grad".
    categories: Mapping[str, int]
    failures: Mapping[str, int]
    first_failure: str
    #: Checks that did not fail, with values or gradients that differ by rounding; and the first such difference.
    num_rounding: int
    first_rounding: str
    num_sharded: int
    #: Sharded checks whose call gave the right values, and of these the ones where no device sent anything.
    num_sharded_equal: int
    num_sharded_silent: int

    @property
    def is_testable(self) -> bool:
        return self.num_checks > 0

    @property
    def values_fail(self) -> bool:
        return any(not category.startswith("grad ") for category in self.failures)


def row_of(result: Result, mode: str) -> EntryRow:
    """The figures of one entry."""
    categories: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    first = first_rounding = ""
    num_rounding = 0
    for check in result.checks:
        outcome = check.outcome
        categories[outcome.category] += 1
        if outcome.grad_category is not None:
            categories[f"grad {outcome.grad_category}"] += 1
        category = failure(check, mode)
        if category is not None:
            failures[category] += 1
            message = outcome.grad_message if category.startswith("grad ") else outcome.message
            first = first or f"{category}: {message} {_where(check)}"
        elif ROUNDING in (outcome.category, outcome.grad_category):
            num_rounding += 1
            message = outcome.message or f"gradient: {outcome.grad_message}"
            first_rounding = first_rounding or f"{message} {_where(check)}"
    sharded = [check.outcome for check in result.checks if check.is_sharded]
    equal = [outcome for outcome in sharded if outcome.category in (EQUAL, ROUNDING)]
    return EntryRow(
        entry=result.entry,
        num_checks=len(result.checks),
        num_grad_checks=sum(check.outcome.grad_category is not None for check in result.checks),
        categories=dict(categories),
        failures=dict(failures),
        first_failure=first,
        num_rounding=num_rounding,
        first_rounding=first_rounding,
        num_sharded=len(sharded),
        num_sharded_equal=len(equal),
        num_sharded_silent=sum(not outcome.has_communicated for outcome in equal),
    )


def _where(check: Check) -> str:
    return f"[sample {check.sample}, {check.placements}]"


def summary(rows: Iterable[EntryRow]) -> dict[str, Any]:
    """The figures of a run."""
    tested = [row for row in rows if row.is_testable]
    failures: Counter[str] = Counter()
    categories: Counter[str] = Counter()
    for row in tested:
        failures.update(row.failures)
        categories.update(row.categories)
    num_checks = sum(row.num_checks for row in tested)
    return {
        "entries testable": len(tested),
        "entries strict": sum(not row.values_fail for row in tested),
        "entries strict and gradients too": sum(not row.failures for row in tested),
        "checks": num_checks,
        "checks without failure": num_checks - sum(failures.values()),
        "checks equal": categories[EQUAL],
        "checks with rounding": sum(row.num_rounding for row in tested),
        "entries with rounding": sum(row.num_rounding > 0 for row in tested),
        "gradients compared": sum(row.num_grad_checks for row in tested),
        "gradients equal": categories[f"grad {EQUAL}"],
        "entries with a sharded check": sum(row.num_sharded > 0 for row in tested),
        "entries with an equal sharded check": sum(row.num_sharded_equal > 0 for row in tested),
        "... without communication": sum(row.num_sharded_silent > 0 for row in tested),
        "refused": categories[REFUSED],
        "gradients refused": categories[f"grad {REFUSED}"],
        "failures": dict(failures.most_common()),
    }


def table(rows: Iterable[EntryRow], run: Run) -> str:
    """What the command line prints: the entries that fail, those with rounding, then the figures."""
    rows = list(rows)
    lines = [
        f"{row.entry:44} {_counts(row.failures)}  {row.first_failure[:220]}" for row in rows if row.failures
    ]
    lines += [
        f"{row.entry:44} rounding={row.num_rounding}  {row.first_rounding[:220]}"
        for row in rows
        if row.num_rounding
    ]
    lines.append(f"\n{describe(run)}")
    lines += [f"  {name:40} {value}" for name, value in summary(rows).items() if name != "failures"]
    lines += [f"  failed: {name:32} {number}" for name, number in summary(rows)["failures"].items()]
    return "\n".join(lines)


def describe(run: Run) -> str:
    """The run in a few words."""
    words = [run.mode, run.dtype, "x".join(map(str, run.mesh_shape))]
    return ", ".join([*words, "uneven"] if run.is_uneven else words)


def to_json(rows: Iterable[EntryRow], run: Run) -> dict[str, Any]:
    """The same for a file."""
    rows = list(rows)
    return {"run": asdict(run), "summary": summary(rows), "entries": [asdict(row) for row in rows]}


def _counts(failures: Mapping[str, int]) -> str:
    return " ".join(f"{name}={number}" for name, number in failures.items())
