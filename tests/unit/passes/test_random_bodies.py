"""Random bodies after subsets of the passes: the same values, and the same writes to the inputs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from dtorch_runtime.passes.rewrite import PASSES
from tests.support.bodies import BodyRunner, random_body
from tests.support.executors import Rig

NUM_BODIES = 25
#: Chosen at random for each body, beside each pass alone and all of them.
NUM_SUBSETS = 6


@pytest.fixture(scope="module")
def runner() -> Iterator[BodyRunner]:
    with Rig([range(3)]) as rig:
        yield BodyRunner(rig)


@pytest.mark.parametrize("seed", range(NUM_BODIES))
def test_passes_change_no_value(runner: BodyRunner, seed: int) -> None:
    rng = random.Random(seed)
    body = random_body(rng, num_ops=5 + seed)
    expected = runner.run(body.writer, body.outputs)
    chosen = [[name for name in PASSES if rng.random() < 0.5] for _ in range(NUM_SUBSETS)]
    for passes in [list(PASSES), *([name] for name in PASSES), *chosen]:
        for found, wanted in zip(runner.run(body.writer, body.outputs, *passes), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=f"seed {seed}, passes {passes}")
