"""A writer of checkpoints that is killed leaves the old checkpoint or the new one, whole."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dtorch

#: Of each format: what is left when all is well, index and files.
LEFT = {"dtorch": 2, "dcp": 3, "safetensors": 4}


def outcomes(module: str, *args: object, timeout_s: int = 50) -> list[dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, "-m", module, *map(str, args)],
        cwd=Path(dtorch.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_a_writer_that_is_killed_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    *deaths, last, rest = outcomes("tests.faults.dying_writer", tmp_path / "there")
    assert last["ended"]
    assert last["is_new"]
    assert len(deaths) >= 12, "a file and the index: created, written, closed, renamed; the old ones removed"
    assert all(death["killed"] for death in deaths), "each fault has fired"
    assert all(death["is_whole"] and death["is_old_or_new"] for death in deaths), deaths
    fates = [death["is_new"] for death in deaths]
    assert fates == sorted(fates), "old before the index is renamed, new behind it"
    assert {True, False} == set(fates)
    assert len(rest["left"]) == 2, "what the dead left is gone"


def check_deaths(folder: Path, num_deaths: int, seed: int, timeout_s: int) -> None:
    lines = outcomes(
        "tests.faults.killed_writer", folder, ",".join(LEFT), num_deaths, seed, timeout_s=timeout_s
    )
    for format, num_left in LEFT.items():
        *deaths, end = [line for line in lines if line["format"] == format]
        assert len(deaths) == num_deaths
        assert all(death["killed"] for death in deaths)
        assert all(death["number"] >= 0 for death in deaths), "never mixed, never unreadable"
        assert all(death["saved"] >= 0 for death in deaths), "never an older one"
        assert any(death["saved"] for death in deaths), "some of them had saved"
        assert end["saved"] == 1
        assert end["left"] == num_left, "what the dead left is gone"


def test_a_writer_that_is_killed_at_random_moments_leaves_a_whole_checkpoint(
    tmp_path: Path, rng: random.Random
) -> None:
    check_deaths(tmp_path, 10, rng.randrange(1000), 50)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_writer_that_is_killed_at_200_random_moments_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    check_deaths(tmp_path, 200, 7, 580)
