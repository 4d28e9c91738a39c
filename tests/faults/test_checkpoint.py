"""A writer of checkpoints that is killed leaves the old checkpoint or the new one, whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import dtorch


def test_a_writer_that_is_killed_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.dying_writer", str(tmp_path / "there")],
        cwd=Path(dtorch.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    *deaths, last, rest = map(json.loads, run.stdout.splitlines())
    assert last["ended"]
    assert last["is_new"]
    assert len(deaths) >= 12, "a file and the index: created, written, closed, renamed; the old ones removed"
    assert all(death["killed"] for death in deaths), "each fault has fired"
    assert all(death["is_whole"] and death["is_old_or_new"] for death in deaths), deaths
    fates = [death["is_new"] for death in deaths]
    assert fates == sorted(fates), "old before the index is renamed, new behind it"
    assert {True, False} == set(fates)
    assert len(rest["left"]) == 2, "what the dead left is gone"
