"""Plans of ``redistribute`` against brute force: no sequence of layouts between source and target is cheaper."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest

from dtorch_runtime.ir import transfer
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from dtorch_runtime.ir.transfer import cost_bytes, plan_redistribute
from tests.support.layouts import take_apart

MESHES = [
    DeviceMesh("cpu", ids)
    for ids in ([0, 1], [0, 1, 2], [0, 1, 2, 3], [[0, 1], [2, 3]], [[0, 1, 2], [3, 4, 5]])
]
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def layouts(mesh: DeviceMesh, choices: tuple[Placement, ...]) -> list[Layout]:
    return [Layout(mesh, placements) for placements in itertools.product(choices, repeat=mesh.ndim)]


def costs_of_sequences(shape: tuple[int, ...], every: list[Layout]) -> np.ndarray:
    """The cheapest sequence of plans of few steps, from each layout to each (Floyd and Warshall 1962)."""
    cost = np.array(
        [[cost_bytes(plan_redistribute(shape, a, b, itemsize_bytes=0), 1) for b in every] for a in every]
    )
    for middle in range(len(every)):
        cost = np.minimum(cost, cost[:, middle, None] + cost[None, middle, :])
    return cost


def check(shape: tuple[int, ...], every: list[Layout], allowed: float) -> None:
    best = costs_of_sequences(shape, every)
    for (i, source), (j, target) in itertools.product(enumerate(every), repeat=2):
        planned = cost_bytes(plan_redistribute(shape, source, target, itemsize_bytes=1), 1)
        assert planned <= best[i, j] * allowed, (
            f"{source} -> {target} on {source.mesh}: {planned} > {best[i, j]}"
        )


@pytest.mark.parametrize("step_cost", [0, 60])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.shape))
def test_no_sequence_is_cheaper(mesh, step_cost, monkeypatch):
    monkeypatch.setattr(transfer, "STEP_COST_BYTES", step_cost)
    check((12, 12), layouts(mesh, (R, S0, S1, P) if mesh.size() < 6 else (R, S0, P)), allowed=1.0)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.shape))
def test_of_uneven_pieces_hardly_any_sequence_is_cheaper(mesh, monkeypatch):
    """Another way to cut may round better, by a row here and there."""
    monkeypatch.setattr(transfer, "STEP_COST_BYTES", 100)
    check((70, 51), layouts(mesh, (R, S0, S1, P) if mesh.size() < 6 else (S0, S1, P)), allowed=1.1)


@pytest.mark.parametrize("ops", [("sum", "max"), ("avg", "sum"), ("max", "prod")], ids="-".join)
def test_no_sequence_is_cheaper_with_terms_of_two_ops(ops, monkeypatch):
    monkeypatch.setattr(transfer, "STEP_COST_BYTES", 50)
    check((12, 12), layouts(MESHES[3], (S0, *map(Partial, ops))), allowed=1.0)


def test_every_device_receives_what_it_lacks_and_nothing_else(rng):
    """Of numbered elements, without partial terms: no plan of any kind can move less."""
    shape = (7, 5)
    numbers = np.arange(35).reshape(shape)
    grid = layouts(DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]]), (R, S0, S1, Shard(0, unit=2)))
    line = layouts(DeviceMesh("cpu", [5, 1, 8]), (R, S0, Shard(1, unit=2)))
    for source, target in itertools.product(grid + line, repeat=2):
        held, wanted = (
            {device: set(piece.ravel()) for device, piece in take_apart(numbers, layout, rng).items()}
            for layout in (source, target)
        )
        received: dict[int, int] = defaultdict(int)
        for step in plan_redistribute(shape, source, target, itemsize_bytes=1):
            for (_, destination), num_bytes in step.bytes_by_link(1).items():
                received[destination] += num_bytes
        lacking = {device: len(elements - held.get(device, set())) for device, elements in wanted.items()}
        assert received == {device: number for device, number in lacking.items() if number}


def test_what_one_has_and_many_want_is_scattered_and_gathered(monkeypatch):
    """One device does not send the whole to each of the others."""
    monkeypatch.setattr(transfer, "STEP_COST_BYTES", 100)
    source, target = Layout(DeviceMesh("cpu", [9]), (R,)), Layout(DeviceMesh("cpu", range(8)), (R,))
    first, second = plan_redistribute((800,), source, target, itemsize_bytes=1)
    assert set(first.bytes_by_link(1).values()) == {100}
    assert set(second.bytes_by_link(1).values()) == {100}
    assert len(second.bytes_by_link(1)) == 8 * 7


def test_copies_are_given_by_all_that_have_them():
    source = Layout(DeviceMesh("cpu", [[0, 1], [2, 3]]), (R, S0))
    target = Layout(source.mesh, (R, R))
    (step,) = plan_redistribute((4,), source, target, itemsize_bytes=1)
    assert sorted(giver for giver, _ in step.bytes_by_link(1)) == [0, 1, 2, 3]
