"""Random bodies after every subset of the passes: the same values, and the same writes to the inputs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from dtorch_runtime.passes.rewrite import PASSES
from tests.support.bodies import BodyRunner, random_body
from tests.support.executors import Rig

NUM_BODIES = 25
_SUBSETS = [names for size in range(1, len(PASSES) + 1) for names in itertools.combinations(PASSES, size)]


@pytest.fixture(scope="module")
def runner() -> Iterator[BodyRunner]:
    with Rig([range(3)]) as rig:
        yield BodyRunner(rig)


@pytest.mark.parametrize("seed", range(NUM_BODIES))
def test_passes_change_no_value(runner: BodyRunner, seed: int) -> None:
    body = random_body(random.Random(seed), num_ops=5 + seed)
    expected = runner.run(body.writer, body.outputs)
    for passes in _SUBSETS:
        for found, wanted in zip(runner.run(body.writer, body.outputs, *passes), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=f"seed {seed}, passes {passes}")
