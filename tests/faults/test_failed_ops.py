"""An op that fails on a worker: who hears of it, where, and what goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dtorch
from tests.support.leaks import LeakWatch

R, S0 = dtorch.Replicate(), dtorch.Shard(0)


@pytest.fixture(scope="module")
def mesh(leak_watch: LeakWatch) -> Iterator[dtorch.DeviceMesh]:
    before = leak_watch.snapshot()
    dtorch.init(num_nodes=2, devices_per_node=1)
    leak_watch.declare_baseline(before)
    yield dtorch.DeviceMesh("cpu", [0, 1])
    dtorch.shutdown()


def failing_on_one_rank(mesh: dtorch.DeviceMesh) -> dtorch.Tensor:
    """Integer division by a zero that only the second device holds."""
    ones = dtorch.ones((4,), dtype=torch.int64, device_mesh=mesh, placements=[S0])
    divisor = dtorch.tensor([1, 1, 1, 0], device_mesh=mesh, placements=[S0])
    return torch.remainder(ones, divisor)


def test_the_fetch_of_what_depends_on_it_raises_with_both_places(mesh: dtorch.DeviceMesh) -> None:
    bad = failing_on_one_rank(mesh)
    line = "return torch.remainder(ones, divisor)"
    with pytest.raises(dtorch.RemoteOpError) as caught:
        (bad + 1).to_torch()
    assert Path(__file__).name in caught.value.location
    assert line in caught.value.location
    assert caught.value.failure.op == "aten::remainder.Tensor"
    assert caught.value.failure.device == 1
    assert "ZeroDivisionError" in str(caught.value)
    assert "Traceback" in caught.value.failure.traceback


def test_collectives_are_poisoned_on_every_rank_and_nobody_waits(mesh: dtorch.DeviceMesh) -> None:
    bad = failing_on_one_rank(mesh)
    whole = bad.redistribute(placements=[R])
    total = bad.sum()
    for value in (whole, total, whole + total):
        with pytest.raises(dtorch.RemoteOpError, match="remainder"):
            value.to_torch(timeout_s=20)


def test_independent_values_stay_fetchable(mesh: dtorch.DeviceMesh) -> None:
    bad = failing_on_one_rank(mesh)
    good = dtorch.ones((4,), device_mesh=mesh, placements=[S0]) * 3
    assert good.sum().item() == 12
    with pytest.raises(dtorch.RemoteOpError):
        bad.to_torch()


def test_an_error_that_nobody_fetched_is_raised_by_sync_once(mesh: dtorch.DeviceMesh) -> None:
    bad = failing_on_one_rank(mesh)
    with pytest.raises(dtorch.RemoteOpError, match="remainder"):
        bad.graph.sync(timeout_s=20)
    bad.graph.sync(timeout_s=20)


def test_an_error_that_nobody_fetched_is_printed_at_exit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, dtorch\n"
        "x = dtorch.ones((2,), dtype=torch.int64)\n"
        "y = torch.remainder(x, dtorch.zeros((2,), dtype=torch.int64))\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=40, check=False)
    assert "RemoteOpError" in result.stderr
    assert "script.py:3" in result.stderr
