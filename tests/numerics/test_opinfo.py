"""One check of each entry of PyTorch's operator database, in each mode; ``make test-ops`` runs all of them."""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Iterator

import pytest
import torch

import dtorch
from tests.numerics.opinfo.check import Checker
from tests.numerics.opinfo.driver import Check
from tests.numerics.opinfo.entries import Run, choices, combinations, entries, samples
from tests.numerics.opinfo.known import MAX_KNOWN, load_known
from tests.numerics.opinfo.op_stream import OpStream
from tests.numerics.opinfo.report import failure
from tests.numerics.opinfo.worker import glance, scope_of

MODES = ("strict", "auto")
#: Entries are dealt out to so many tests. Every second one has even sizes.
NUM_PARTS = 8


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
    for name in list(entries(run))[part::NUM_PARTS]:
        found = glance(entries(run)[name], name, run, checkers)
        if found is not None and name not in load_known():
            placements, outcomes = found
            for mode, outcome in zip(MODES, outcomes):
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
