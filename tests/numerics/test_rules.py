"""Rules are verified, not believed: every placement of every sample equals plain torch or is refused, and every
signature that a table claims is legal."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Replicate, Shard
from tests.numerics.samples import ALL
from tests.support.rule_checks import Sample, check, check_all, choices, claimed, expected, tensors_of


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny: more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("sample", ALL, ids=lambda sample: str(sample).replace(" ", "_"))
def test_placements_equal_torch_or_are_refused(sample: Sample, num_ranks: int) -> None:
    legal = check_all(sample, DeviceMesh("cpu", list(range(num_ranks))), limit=60)
    assert legal, "not even whole inputs are legal"


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("sample", ALL, ids=lambda sample: str(sample).replace(" ", "_"))
def test_every_claimed_signature_holds(sample: Sample, num_ranks: int) -> None:
    mesh = DeviceMesh("cpu", list(range(num_ranks)))
    want = expected(sample)
    for placements in claimed(sample, mesh):
        check(sample, mesh, [(placement,) for placement in placements], want)


@pytest.mark.parametrize("sample", ALL, ids=lambda sample: str(sample).replace(" ", "_"))
def test_two_axes_equal_torch_or_are_refused(sample: Sample, rng: random.Random) -> None:
    """Axes that cut the same dim, partial over several axes, and cuts of coarse units among them."""
    mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]])
    want = expected(sample)
    tensors = tensors_of((sample.make(), sample.kwargs))
    axis_choices = claimed(sample, mesh) or list(itertools.product(*map(choices, tensors)))
    for _ in range(12):
        pair = [rng.choice(axis_choices) for _ in range(mesh.ndim)]
        placements = [tuple(coarser(p[i], t, rng) for p in pair) for i, t in enumerate(tensors)]
        try:
            check(sample, mesh, placements, want)
        except PlacementError:
            continue
    check(sample, mesh, [(Replicate(), Replicate())] * len(tensors), want)


def coarser(placement: Placement, tensor: torch.Tensor, rng: random.Random) -> Placement:
    """Sometimes the same cut with a coarser unit."""
    if isinstance(placement, Shard) and rng.random() < 0.3:
        return Shard(placement.dim, unit=rng.choice([2, 3]))
    return placement
