"""Random programs under ``dtorch.capture`` with passes: replays give the bits of eager calls.

Many more, with more subsets of the passes: ``python -m tests.numerics.programs.captured``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from dtorch_runtime.local import LocalCluster, start_local_cluster
from dtorch_runtime.settings import Settings
from tests.numerics.programs import captured
from tests.numerics.programs.captured import SUBSETS, check
from tests.numerics.programs.execute import Difference
from tests.numerics.programs.generate import MAX_DEVICES
from tests.support.leaks import LeakWatch

NUM_PROGRAMS = 4

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torch, for what the programs do


@pytest.fixture(scope="module")
def local(leak_watch: LeakWatch) -> Iterator[LocalCluster]:
    before = leak_watch.snapshot()
    cluster = start_local_cluster(2, MAX_DEVICES // 2, Settings(check=True))
    cluster.wait_ready()
    leak_watch.declare_baseline(before)
    yield cluster
    cluster.stop()


@pytest.mark.timeout(240)
def test_replays_do_what_eager_calls_do(local: LocalCluster) -> None:
    counts: Counter[str] = Counter()
    for number in range(NUM_PROGRAMS):
        rng = random.Random(number)
        counts += check(local, rng, (rng.choice(SUBSETS), "all"))
    assert counts["replayed"]
    assert counts["found"]
    assert counts["common"]
    assert counts["redistribute"]


@pytest.mark.timeout(120)
def test_a_wrong_value_is_found(local: LocalCluster) -> None:
    function = captured.Function(
        (2,), ("v0 = make(1, (4,), torch.float64, [Replicate()], False)",), ("v1 = v0 + 1",), ("v1",)
    )
    with captured.session(local, "all"):
        results, text = function.call(captured=True)
    assert "2 replays" in text
    with pytest.raises(Difference, match="another value: v1"):
        captured._compare(results[-1], {**results[-1], "v1": results[-1]["v0"]}, "a test")
