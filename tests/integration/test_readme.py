"""The README's programs run as they stand, each in a new process, as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (match["info"].strip(), match["code"]) for match in BLOCK.finditer((ROOT / "README.md").read_text())
]
PROGRAMS = [code for info, code in BLOCKS if not info.startswith("skip-test:")]


def test_only_a_block_with_a_reason_is_left_out() -> None:
    skipped = [info for info, _ in BLOCKS if info]
    assert all(re.fullmatch(r"skip-test: \w.+", info) for info in skipped), skipped
    assert len(PROGRAMS) >= 2


@pytest.mark.parametrize("code", PROGRAMS, ids=[f"block{index}" for index in range(len(PROGRAMS))])
def test_program_runs_and_prints(code: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(code)
    result = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=50, check=False, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert not result.stderr.strip()
