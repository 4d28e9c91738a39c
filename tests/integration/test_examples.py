"""The examples run as they stand, each in a new process, and say what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 80


def run(name: str, *arguments: str, timeout_s: float = 50) -> str:
    result = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_is_short_and_run_here() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert {file.name for file in files if len(file.read_text().splitlines()) >= MAX_LINES} == set()
    tested = set(re.findall(r'run\("([\w.]+)"', Path(__file__).read_text()))
    assert {file.name for file in files} == tested


def test_hello() -> None:
    output = run("hello.py")
    assert "x=tensor([[" in output
    assert "shape=(4, 3), device_mesh=DeviceMesh('cpu', [0, 1]), placements=[Shard(dim=0)]" in output
    assert "total.placements=(Partial('sum'),)" in output


def test_async_values() -> None:
    output = run("async_values.py")
    assert "300 of 300 values are right" in output
    assert re.search(r"longest pause .*: \d+\.\d ms", output)


@pytest.mark.model
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="default"),
        pytest.param(("--dp", "2", "--tp", "2", "--nodes", "2"), id="dp x tp", marks=pytest.mark.slow),
    ],
)
def test_language_model(arguments: tuple[str, ...]) -> None:
    output = run("language_model.py", *arguments, "--tokens", "12", timeout_s=200)
    assert "What is the capital of France?" in output
    assert "Paris" in output
    assert re.search(r"\d+\.\d tokens per second", output)
    assert re.search(r"model\.layers\.\[0-29\]\.self_attn\.q_proj\.weight .* MB", output)
    assert "The same tokens as plain PyTorch." in output


@pytest.mark.model
@pytest.mark.timeout(240)
def test_two_models() -> None:
    output = run("two_models.py", timeout_s=200)
    assert "Rome" in output
    assert "Tokyo" in output
    assert re.search(r"at the same time for \d+\.\d s", output)
