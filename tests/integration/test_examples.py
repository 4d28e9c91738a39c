"""The examples run as they stand, each in a new process, and say what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 160


def run(name: str, *arguments: str, timeout_s: float = 50) -> str:
    return output_of([sys.executable, EXAMPLES / name, *arguments], timeout_s)


def output_of(command: Sequence[str | Path], timeout_s: float) -> str:
    # One thread each for plain torch and the devices: tests share the cores, and threads that wait for each other spin.
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=EXAMPLES.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_is_short_and_run_here() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    # A whole Llama is longer than a program that shows one thing.
    assert {f.name for f in files if len(f.read_text().splitlines()) >= MAX_LINES} == {"llama.py"}
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


def losses_of(folder: Path, *arguments: str) -> tuple[float, float, int]:
    """The first loss and the last of a tiny language model, and how many there are."""
    size = ("--width", "32", "--layers", "1", "--context", "32", "--warm-up", "4", "--run", str(folder))
    output = run("train_lm.py", *size, *arguments, timeout_s=200)
    found = re.search(r"loss: (\d\.\d+) at step 1, (\d\.\d+) at step (\d+), on DeviceMesh", output)
    assert found, output
    assert f"plot: {folder / 'loss.svg'}" in output
    assert "loss of a byte" in (folder / "loss.svg").read_text()
    return float(found[1]), float(found[2]), int(found[3])


@pytest.mark.timeout(240)
def test_train_lm_goes_on_with_another_mesh(tmp_path: Path) -> None:
    first, last, number = losses_of(tmp_path, "--steps", "16", "--lr", "0.01")
    assert number == 16
    assert last < first - 0.5
    mesh = "--tp 1 --dp 2 --pp 2 --micro-batches 2 --zero 3"
    again, further, number = losses_of(tmp_path, "--steps", "24", "--lr", "0.01", *mesh.split())
    assert (again, number) == (first, 24)
    assert further < last


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train_lm_learns_the_same_on_every_mesh(tmp_path: Path) -> None:
    meshes = (
        "--tp 1",
        "--tp 2",
        "--tp 1 --dp 2 --zero 1",
        "--tp 2 --dp 2 --zero 2 --nodes 2",
        "--tp 1 --pp 4 --micro-batches 4",
        "--tp 2 --ulysses-cp 2",
        "--tp 1 --dp 2 --pp 2 --ring-cp 2 --micro-batches 3 --zero 3",
    )
    resumed = tmp_path / "resumed"
    found = []
    for number, mesh in enumerate(meshes, 1):
        first, last, _ = losses_of(tmp_path / str(number), "--steps", str(len(meshes)), *mesh.split())
        again, so_far, _ = losses_of(resumed, "--steps", str(number), *mesh.split())
        found.append((mesh, first, last, again, so_far))
    _, first, last, *_ = found[0]
    for mesh, *losses, again, _ in found:
        assert (*losses, again) == pytest.approx((first, last, first), abs=2e-3), mesh
    assert found[-1][-1] == pytest.approx(last, abs=2e-3), "a run that each mesh went on with"


@pytest.mark.timeout(120)
def test_moe() -> None:
    output = run("moe.py", "--steps", "11", "--ep", "2", timeout_s=100)
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == 2
    assert losses[-1] < losses[0] - 0.5
    used = [list(map(int, found.split(","))) for found in re.findall(r"%: \[(.*)\]", output)]
    assert all(len(row) == 8 and sum(row) == pytest.approx(100, abs=5) for row in used)


@pytest.mark.timeout(120)
def test_llama() -> None:
    arguments = "--dp 2 --pp 2 --micro-batches 2 --ties-head --steps 2 --tokens 2"
    output = run("llama.py", *arguments.split(), timeout_s=110)
    assert "The same tokens as plain PyTorch." in output
    assert "The same losses as on one device" in output


def test_the_guide_to_llama_shows_what_is_in_it() -> None:
    guide = (EXAMPLES.parent / "docs" / "llama.md").read_text()
    code = "".join((EXAMPLES / "llama.py").read_text().split())
    shown = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert len(shown) >= 5
    assert [snippet for snippet in shown if "".join(snippet.split()) not in code] == []


def check_language_model(output: str) -> None:
    assert "What is the capital of France?" in output
    assert "Paris" in output
    assert re.search(r"\d+\.\d tokens per second", output)
    assert re.search(r"model\.layers\.\[0-29\]\.self_attn\.q_proj\.weight .* MB", output)
    assert "The same tokens as plain PyTorch." in output


def check_two_models(output: str) -> None:
    assert "Rome" in output
    assert "Tokyo" in output
    assert re.search(r"at the same time for \d+\.\d s", output)


#: The examples with real weights, unchanged but for one thing: the second gets what the first has read from the file.
ONE_AFTER_THE_OTHER = """
import copy, functools, sys
sys.path.insert(0, "examples")
import language_model
read = functools.cache(language_model.load_model)
language_model.load_model = lambda: copy.deepcopy(read())
language_model.main()
sys.argv = ["two_models.py"]
import two_models
two_models.main()
"""


@pytest.mark.model
@pytest.mark.timeout(240)
def test_language_model_and_two_models() -> None:
    output = output_of([sys.executable, "-c", ONE_AFTER_THE_OTHER, "--tokens", "8"], timeout_s=200)
    check_language_model(output)
    check_two_models(output)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "arguments", [(), ("--dp", "2", "--tp", "2", "--nodes", "2")], ids=["default", "dp x tp"]
)
def test_language_model(arguments: tuple[str, ...]) -> None:
    check_language_model(run("language_model.py", *arguments, "--tokens", "12", timeout_s=200))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(240)
def test_two_models() -> None:
    check_two_models(run("two_models.py", timeout_s=200))


@pytest.mark.timeout(120)
def test_rl_loop_learns_on_two_meshes() -> None:
    size = ("--rollout-dp", "2", "--update-dp", "2", "--update-tp", "1", "--width", "32", "--steps", "24")
    output = run("rl_loop.py", *size, timeout_s=100)
    found = re.search(r"reward: (\d\.\d+) in the first 2 steps, (\d\.\d+) in the last", output)
    assert found, output
    assert float(found[1]) < 0.3, "a tenth of guesses is right"
    assert float(found[2]) > float(found[1]) + 0.2, "and then more"
    assert len(re.findall(r"^step +\d+ +reward", output, re.MULTILINE)) == 4
