"""Rules are verified, not believed: every placement of every sample equals plain torch or is refused, and every
signature that a table claims is legal."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from dtorch.rules.call import op_of
from dtorch.rules.new_like import LikeRule, StridedRule
from dtorch.rules.random import RandomLikeRule, RandomRule
from dtorch.rules.tables import find_rule, registered
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Replicate, Shard
from tests.numerics.more_samples import MORE
from tests.numerics.samples import ALL
from tests.numerics.samples_linalg import LINALG
from tests.numerics.samples_losses import LOSSES
from tests.numerics.samples_masks import MASKS
from tests.numerics.samples_nn import NN_SAMPLES
from tests.numerics.samples_scatter import SCATTER_AND_SPECIAL
from tests.numerics.samples_statistics import STATISTICS
from tests.support.rule_checks import Sample, check, check_all, choices, claimed, expected, tensors_of

EVERY = [*ALL, *MORE, *LINALG, *SCATTER_AND_SPECIAL, *NN_SAMPLES, *LOSSES, *STATISTICS, *MASKS]
#: Rules whose results no call of plain torch gives: their tests are in test_random.py.
TESTED_ELSEWHERE = (RandomRule, RandomLikeRule, LikeRule, StridedRule)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny: more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("sample", EVERY, ids=lambda sample: str(sample).replace(" ", "_"))
def test_placements_equal_torch_or_are_refused(sample: Sample) -> None:
    legal = check_all(sample, DeviceMesh("cpu", [0, 1, 2]), limit=60)
    assert legal, "not even whole inputs are legal"


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("sample", EVERY, ids=lambda sample: str(sample).replace(" ", "_"))
def test_every_claimed_signature_holds(sample: Sample, num_ranks: int) -> None:
    mesh = DeviceMesh("cpu", list(range(num_ranks)))
    want = expected(sample)
    for placements in claimed(sample, mesh):
        check(sample, mesh, [(placement,) for placement in placements], want)


@pytest.mark.parametrize("sample", EVERY, ids=lambda sample: str(sample).replace(" ", "_"))
def test_two_axes_equal_torch_or_are_refused(sample: Sample, rng: random.Random) -> None:
    """Axes that cut the same dim, partial over several axes, and cuts of coarse units among them."""
    mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]])
    want = expected(sample)
    tensors = tensors_of((sample.make(), sample.kwargs))
    axis_choices = claimed(sample, mesh) or list(itertools.product(*map(choices, tensors)))
    for _ in range(8):
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


def test_every_rule_has_a_sample() -> None:
    """What no sample reaches is believed, not verified."""
    reached = {id(find_rule(op_of(sample.func))) for sample in EVERY}
    by_name = {name for sample in EVERY for name in (op_of(sample.func).name, op_of(sample.func).base)}
    unknown, missing = [], []
    for name, rule in registered().items():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        found = getattr(getattr(torch.ops, namespace), packet, None)
        if found is None or (overload and not hasattr(found, overload)):
            unknown.append(name)
        in_place = {name + "_", name.replace(".", "_.", 1)}
        if not isinstance(rule, TESTED_ELSEWHERE) and not (
            {name, *in_place} & by_name and id(rule) in reached
        ):
            missing.append(name)
    assert not unknown, f"torch has no {unknown}"
    assert not missing, f"no sample reaches the rules of {missing}"
