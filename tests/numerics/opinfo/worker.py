"""A child process that checks entries: it has a cluster of its own, and may crash without harm to the run.

It reads the names of entries from its standard input, a line each, and writes a line of JSON when it is ready,
for each check, and after each entry.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import torch

import dtorch
from dtorch_runtime.errors import DTorchError
from dtorch_runtime.ir.placement import Placements, Replicate, Shard
from dtorch_runtime.settings import Settings
from tests.numerics.opinfo.check import Checker, Outcome, Reference, describe_error, is_random, reference_of
from tests.numerics.opinfo.entries import Run, Sample, combinations, drawn, entries, one_of, samples
from tests.numerics.opinfo.op_stream import OpStream

#: Longest wait in a check, in seconds; a check that needs longer hangs.
WAIT_TIMEOUT_S = 30.0
_COLLECTIVE_TIMEOUT_S = 15.0


def scope_of(run: Run) -> Callable[[], AbstractContextManager[Any]]:
    """What calls run in."""
    return dtorch.auto_redistribute if run.mode == "auto" else nullcontext


def check_entry(
    entry: Any, name: str, run: Run, checker: Checker
) -> Iterator[tuple[int, str, bool, Outcome]]:
    """Every check of an entry: the sample's number, its placements, whether one is a shard, and what became of it."""
    found = usable_samples(entry, run)
    entry_is_random = any(is_random(entry, sample, reference) for _, sample, reference in found)
    references: dict[int, Reference | Outcome] = {}
    for index, placements in _chosen(name, [sample for _, sample, _ in found], run):
        number, sample, reference = found[index]
        if entry_is_random:
            if index not in references:
                references[index] = _alone(checker, entry, sample, reference)
            own = references[index]
            outcome = own if isinstance(own, Outcome) else checker.check(entry, sample, own, placements)
        else:
            outcome = checker.check(entry, sample, reference, placements)
        is_sharded = any(isinstance(p, Shard) for each in placements for p in each)
        yield number, describe(placements), is_sharded, outcome


def glance(entry: Any, name: str, run: Run, checker: Checker) -> tuple[str, Outcome] | None:
    """One check of an entry, drawn for it: its placements, and what became of it. None where no sample serves."""
    for given, placements in one_of(entry, run, name):
        pair = reference_of(entry, given, run.with_grad)
        if pair is not None:
            sample, reference = pair
            if is_random(entry, sample, reference):
                own = _alone(checker, entry, sample, reference)
                if isinstance(own, Outcome):
                    return describe(placements), own
                reference = own
            return describe(placements), checker.check(entry, sample, reference, placements)
    return None


def usable_samples(entry: Any, run: Run) -> list[tuple[int, Sample, Reference]]:
    """The samples that count, with their numbers and what plain torch makes of them."""
    usable = []
    for number, sample in enumerate(samples(entry, run)):
        if sample.is_usable:
            pair = reference_of(entry, sample, run.with_grad)
            if pair is not None:
                usable.append((number, *pair))
    return usable


def _alone(checker: Checker, entry: Any, sample: Sample, reference: Reference) -> Reference | Outcome:
    try:
        return checker.alone(entry, sample, reference)
    except Exception as error:  # noqa: BLE001  every error is an outcome
        category, message = describe_error(error, is_whole=True)
        return Outcome(category, f"on one device: {message}")


def _chosen(name: str, found: list[Sample], run: Run) -> list[tuple[int, tuple[Placements, ...]]]:
    if run.checks_per_entry is not None:
        return drawn(found, run, name)
    return [(index, each) for index, sample in enumerate(found) for each in combinations(sample, run)]


def describe(placements: tuple[Placements, ...]) -> str:
    """``R,S0``: one word for each tensor, one letter for each axis."""
    return ",".join(
        "".join("R" if isinstance(p, Replicate) else f"S{p.dim}" for p in each) for each in placements
    )


class _Cluster:
    """A session on a cluster of its own, renewed when it was lost."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stack = ExitStack()

    def checker(self) -> Checker:
        run = self._run
        settings = Settings(
            num_threads=1, wait_timeout_s=WAIT_TIMEOUT_S, collective_timeout_s=_COLLECTIVE_TIMEOUT_S
        )
        count = math.prod(run.mesh_shape)
        connected = self._stack.enter_context(
            dtorch.connect(num_nodes=1, devices_per_node=count, settings=settings)
        )
        mesh = dtorch.DeviceMesh("cpu", torch.arange(count).view(run.mesh_shape).tolist())
        return Checker(OpStream(connected.session), mesh, scope_of(run))

    def close(self) -> None:
        # A failure that no check has fetched, or the loss that ends this session.
        with suppress(DTorchError):
            self._stack.close()


def main(run: Run, write: Callable[[str], None]) -> None:
    """Check the entries named on standard input until it ends."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = entries(run)
    cluster = _Cluster(run)
    checker = cluster.checker()
    write(json.dumps([]))  # ready
    try:
        for line in sys.stdin:
            name = line.strip()
            try:
                for number, placements, is_sharded, outcome in check_entry(known[name], name, run, checker):
                    write(json.dumps([name, number, placements, is_sharded, *_fields(outcome)]))
                    if outcome.ends_session:
                        cluster.close()
                        checker = cluster.checker()
                        break
                write(json.dumps([name]))
            except Exception as error:  # noqa: BLE001  a fault of the measurement must show in the table
                write(json.dumps([name, -1, "", False, "harness", repr(error)[:300], None, "", False]))
                write(json.dumps([name]))
    finally:
        cluster.close()


def _fields(outcome: Outcome) -> list[Any]:
    return [
        outcome.category,
        outcome.message,
        outcome.grad_category,
        outcome.grad_message,
        outcome.has_communicated,
    ]


def start(run: Run) -> None:
    """The child's beginning: what ops print goes to the standard error, so that the output has nothing but JSON."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    main(run, lambda line: print(line, file=output))
