"""Lazy conjugates and negatives are what they are in PyTorch: in value, memory, bits, gradients and errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

import dtorch
from dtorch import DeviceMesh, PlacementError, Replicate, Shard
from tests.integration.aliasing_programs import Send
from tests.integration.conjugate_programs import NOT_CONVERTED, PROGRAMS
from tests.integration.test_client_aliasing import compare, outcome, plain, sender


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program(mesh: DeviceMesh, program: Callable[[Send], Any]) -> None:
    """Whole, cut on either dim (unevenly, too), and converted; sharded, or refused by placement in strict mode."""
    expected = outcome(program, plain)
    with dtorch.Graph.default_graph().device_mesh_guard(mesh):
        for placement in (Replicate(), Shard(0), Shard(1, 4)):
            for scope in (nullcontext, dtorch.auto_redistribute):
                with scope():
                    actual = outcome(program, sender(mesh, placement))
                may_refuse = scope is nullcontext or program.__name__.startswith(NOT_CONVERTED)
                if placement != Replicate() and may_refuse and isinstance(actual, PlacementError):
                    continue
                where = f"{placement}, {scope.__name__}"
                if scope is nullcontext:
                    compare(actual, expected, where)
                else:
                    compare(without_offsets(actual), without_offsets(expected), where)


def without_offsets(facts: Any) -> Any:
    """A view of a converted copy counts from the start of the copy."""
    if isinstance(facts, list):
        return [without_offsets(item) for item in facts]
    if isinstance(facts, dict):
        return {name: fact for name, fact in facts.items() if name != "offset"}
    return facts
