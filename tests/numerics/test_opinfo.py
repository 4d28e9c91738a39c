"""One check of each entry of PyTorch's operator database, in one of the modes; ``make test-ops`` runs all of them."""

from __future__ import annotations

import datetime
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import dtorch
from dtorch.issue import make_symbol
from dtorch.spec import intern_spec
from dtorch_runtime.ir.layout import Layout
from tests.numerics.opinfo.check import Checker, Outcome, reference_of
from tests.numerics.opinfo.driver import Check, Result, run_entries
from tests.numerics.opinfo.entries import Run, Sample, choices, combinations, entries, samples
from tests.numerics.opinfo.known import MAX_KNOWN, load_known
from tests.numerics.opinfo.op_stream import OpStream
from tests.numerics.opinfo.report import failure
from tests.numerics.opinfo.suite import SUITE, run_suite
from tests.numerics.opinfo.worker import glance, scope_of

MODES = ("strict", "auto")
#: Entries are dealt out to so many tests. Every second test has even sizes; in each, every second entry is strict.
NUM_PARTS = 16


@pytest.fixture(autouse=True)
def one_quiet_thread() -> Iterator[None]:
    """Tensors are tiny: more threads only wait for one another. Plain torch warns of some of its own calls."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_entries(part: int, cluster: dtorch.Cluster) -> None:
    run = Run(is_uneven=part % 2 == 1)
    op_stream, mesh = OpStream(cluster.session), dtorch.DeviceMesh("cpu", [0, 1])
    checkers = [Checker(op_stream, mesh, scope_of(Run(mode=mode))) for mode in MODES]
    failures = []
    for index, name in enumerate(list(entries(run))[part::NUM_PARTS]):
        mode, checker = MODES[index % 2], checkers[index % 2]
        found = glance(entries(run)[name], name, run, checker)
        if found is not None and name not in load_known():
            placements, outcome = found
            category = failure(Check(0, placements, True, outcome), mode)
            assert not outcome.ends_session, f"{name} [{placements}] {mode}: {outcome.message}"
            if category is not None:
                words = f"{category}: {outcome.message}{outcome.grad_message}"
                failures.append(f"{name} [{placements}] {mode}: {words}")
    assert not failures, "\n".join(failures)


def test_known_failures_are_few_and_explained() -> None:
    known = load_known()
    assert len(known) <= MAX_KNOWN
    for item in known.values():
        assert item.entry in entries(Run())
        assert len(item.reason.split()) >= 5
        assert type(item.closes) is datetime.date


def test_combinations_begin_with_all_replicated_and_are_drawn_by_seed() -> None:
    run = Run()
    sample = samples(entries(run)["addmm"], run)[0]
    drawn = combinations(sample, run)
    assert all(not isinstance(p, dtorch.Shard) for placements in drawn[0] for p in placements)
    assert len(set(drawn)) == len(drawn) == min(32, math.prod(len(choices(t, run)) for t in sample.tensors))
    assert drawn == combinations(sample, run)


def test_even_runs_shard_what_the_mesh_divides_only() -> None:
    tensor = torch.zeros(4, 6, 5, 1)
    grid, pair = Run(mesh_shape=(2, 2)), Run()
    sharded = {p.dim for (p,) in choices(tensor, pair) if isinstance(p, dtorch.Shard)}
    assert sharded == {0, 1}
    nested = [p for p in choices(tensor, grid) if p == (dtorch.Shard(1), dtorch.Shard(1))]
    assert not nested
    assert (dtorch.Shard(0), dtorch.Shard(0)) in choices(tensor, grid)
    assert len(choices(tensor, Run(is_uneven=True))) == 4
    assert choices(torch.zeros(4, dtype=torch.bool), pair) == [(dtorch.Replicate(),)]


# ---- the measurement itself ----


class Entry:
    """What ``Checker`` needs of an entry."""

    name = "made_up"

    def __init__(self, op: Callable[[torch.Tensor], Any]) -> None:
        self.op = op


def outcome_of(
    cluster: dtorch.Cluster, op: Callable[[torch.Tensor], Any], placement: dtorch.Placement
) -> Outcome:
    tensor = torch.arange(8.0).view(2, 4).requires_grad_()
    sample = Sample([tensor, 2], pytree.tree_flatten(([0, 1], {}))[1])
    entry = Entry(lambda x, number: op(x))
    checker = Checker(OpStream(cluster.session), dtorch.DeviceMesh("cpu", [0, 1]), scope_of(Run()))
    pair = reference_of(entry, sample, with_grad=True)
    assert pair is not None
    return checker.check(entry, *pair, [(placement,)])


def only_distributed(change: Callable[[Any], Any]) -> Callable[[torch.Tensor], Any]:
    return lambda x: change(x) if isinstance(x, dtorch.Tensor) else x * x


def second_half_of_each_device(x: Any) -> Any:
    """A tensor said to be replicated, of which the two devices hold different rows."""
    rows = x.redistribute(placements=[dtorch.Shard(0)])
    spec = intern_spec((1, 4), x.dtype, Layout(x.device_mesh, (dtorch.Replicate(),)))
    return make_symbol(dtorch.Tensor, spec, rows._handle)


@pytest.mark.parametrize(
    ("op", "category", "grad_category"),
    [
        (lambda x: x * x, "equal", "equal"),
        (only_distributed(lambda x: x * x + 1), "value", None),
        (only_distributed(lambda x: x * x + 4e-5), "value", None),
        (only_distributed(lambda x: x * x + 2e-5), "rounding", "equal"),
        (only_distributed(lambda x: x * x.detach() + 2e-5), "rounding", "value"),
        (lambda x: [x * x + 2e-5, x + 1] if isinstance(x, dtorch.Tensor) else [x * x, x], "value", None),
        (only_distributed(lambda x: (x * x)[:1]), "shape", None),
        (only_distributed(lambda x: (x * x).double()), "dtype", None),
        (only_distributed(lambda x: x.detach() * x.detach()), "requires_grad", None),
        (only_distributed(lambda x: [x * x, x]), "structure", None),
        (only_distributed(lambda x: x * x.detach()), "equal", "value"),
        (only_distributed(lambda x: 1 / 0), "ZeroDivisionError", None),
    ],
)
def test_a_difference_is_found(
    cluster: dtorch.Cluster, op: Callable[..., Any], category: str, grad_category: str | None
) -> None:
    for placement in (dtorch.Replicate(), dtorch.Shard(1)):
        outcome = outcome_of(cluster, op, placement)
        assert (outcome.category, outcome.grad_category) == (category, grad_category), outcome


def test_every_replica_is_compared(cluster: dtorch.Cluster) -> None:
    def half(x: Any) -> Any:
        return second_half_of_each_device(x) if isinstance(x, dtorch.Tensor) else x.detach()[:1]

    assert outcome_of(cluster, half, dtorch.Replicate()).category == "value"


def test_a_refusal_is_legal_in_strict_mode_unless_all_is_replicated(cluster: dtorch.Cluster) -> None:
    def refuse(x: Any) -> Any:
        raise dtorch.PlacementError("no signature")

    sharded, whole = (
        Check(0, "", True, outcome_of(cluster, only_distributed(refuse), placement))
        for placement in (dtorch.Shard(0), dtorch.Replicate())
    )
    assert failure(sharded, "strict") is None
    assert failure(sharded, "auto") == "PlacementError"
    assert failure(whole, "strict") == "PlacementError on replicated"


def test_communication_is_seen_and_local_slices_are_not(cluster: dtorch.Cluster) -> None:
    def gathered(x: Any) -> Any:
        return (
            x * x
            if not isinstance(x, dtorch.Tensor)
            else (x * x).redistribute(placements=[dtorch.Replicate()])
        )

    assert outcome_of(cluster, gathered, dtorch.Shard(0)).has_communicated
    assert not outcome_of(cluster, gathered, dtorch.Replicate()).has_communicated
    cut = only_distributed(lambda x: (x * x).redistribute(placements=[dtorch.Shard(0)]))
    assert not outcome_of(cluster, cut, dtorch.Replicate()).has_communicated


CHILD = """
import json, os, signal, sys
print("[]", flush=True)
for line in sys.stdin:
    name = line.strip()
    print(json.dumps([name, 0, "R", False, "equal", "", None, "", False]), flush=True)
    if name == "crashes":
        os.abort()
    if name == "hangs":
        signal.pause()
    print(json.dumps([name]), flush=True)
"""


def test_a_child_that_crashes_or_hangs_is_recorded_and_the_run_goes_on() -> None:
    names = ["first", "crashes", "second", "hangs", "third"]
    done: list[str] = []
    results = run_entries(
        [sys.executable, "-S", "-c", CHILD], names, 2, lambda result: done.append(result.entry), silence_s=1.0
    )
    assert sorted(done) == sorted(names)
    found = {name: [check.outcome.category for check in result.checks] for name, result in results.items()}
    assert found == {
        "first": ["equal"],
        "crashes": ["equal", "crash"],
        "second": ["equal"],
        "hangs": ["equal", "hang"],
        "third": ["equal"],
    }


@pytest.mark.parametrize(
    ("failing", "status", "words"),
    [
        (lambda known: known, 0, "auto, float32, 2x2"),
        (lambda known: known | {"add"}, 1, "1 entries fail that known.toml does not list: add"),
        (lambda known: known - {"to_sparse"}, 1, "no longer failing, to be taken from known.toml: to_sparse"),
    ],
)
def test_the_suite_fails_on_what_is_not_listed_and_on_what_is_healed(
    failing: Callable[[set[str]], set[str]],
    status: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    failed = failing(set(load_known()))

    def measure(run: Run, names: Sequence[str]) -> dict[str, Result]:
        categories = {name: "value" if name in failed else "equal" for name in names} | {"mul": "rounding"}
        return {name: Result(name, [Check(0, "R", False, Outcome(categories[name]))]) for name in names}

    out = tmp_path / "ops.json"
    assert run_suite(measure, out) == status
    assert words in capsys.readouterr().out
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == len(SUITE)
    assert all(found["rounding"] == {"mul": 1} for found in runs)
