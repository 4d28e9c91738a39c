"""Regions: op by op first, compiled when that is ready, as they are when it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from dtorch_runtime.wire.records import FailureRecord, RegionArg, RegionStep, Slot
from dtorch_runtime.worker import regions
from dtorch_runtime.worker.arguments import BoundRegion
from dtorch_runtime.worker.blobs import Poison
from dtorch_runtime.worker.regions import MIN_ELEMENTS, Background, Compiler, Function, region

STEPS = [
    RegionStep("aten::mul.Tensor", [Slot(0), 2], {}, [0]),
    RegionStep("aten::add.Tensor", [Slot(0), Slot(1)], {"alpha": 3}, [2, 1]),
    RegionStep("aten::sigmoid.default", [Slot(0)], {}, [1]),
]
OUTPUTS = [3, 4]
WAIT_S = 10.0


def bound() -> BoundRegion:
    return BoundRegion(RegionArg(STEPS, OUTPUTS), {}, 0, torch.device("cpu"))


def computed(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [torch.add(x * 2, y, alpha=3), torch.sigmoid(y)]


def two(size: int = MIN_ELEMENTS) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, size), torch.linspace(0, 2, size)]


class Gated:
    """Compiles when it is let; counts the calls of what it has made."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.num_compiled = 0
        self.num_calls = 0

    def compile(self, function: Function, inputs: Sequence[torch.Tensor]) -> Function:
        assert self.gate.wait(WAIT_S)
        self.num_compiled += 1

        def run(*given: torch.Tensor) -> Sequence[torch.Tensor]:
            self.num_calls += 1
            return function(*given)

        return run


class Refuses:
    def compile(self, function: Function, inputs: Sequence[torch.Tensor]) -> Function:
        raise RuntimeError("no C++ compiler\nand more")


@pytest.fixture
def background(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Background]:
    found = Background(request.param)
    monkeypatch.setattr(regions, "background", found)
    yield found
    assert found.wait(WAIT_S)


GATED = Gated()


@pytest.mark.parametrize("background", [GATED], indirect=True)
def test_it_runs_op_by_op_until_it_is_compiled(background: Background) -> None:
    one, other, x = bound(), bound(), two()
    torch.testing.assert_close(list(region(one, *x)), computed(*x))
    region(other, *x)  # as on a second device
    assert GATED.num_calls == 0
    GATED.gate.set()
    assert background.wait(WAIT_S)
    for made in (one, other):
        torch.testing.assert_close(list(region(made, *x)), computed(*x))
    assert (GATED.num_compiled, GATED.num_calls) == (1, 2)
    region(one, *[value[::2] for value in two(2 * MIN_ELEMENTS)])  # of other strides: compiled anew
    assert background.wait(WAIT_S)
    assert GATED.num_compiled == 2


@pytest.mark.parametrize("background", [Refuses()], indirect=True)
def test_what_cannot_be_compiled_runs_as_it_is(
    background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for size in (MIN_ELEMENTS, 2 * MIN_ELEMENTS):
            x = two(size)
            made = bound()
            region(made, *x)
            assert background.wait(WAIT_S)
            torch.testing.assert_close(list(region(made, *x)), computed(*x))
    [record] = caplog.records
    assert "are not compiled on this node" in record.message
    assert "no C++ compiler. Compiling needs" in record.message


@pytest.mark.parametrize("background", [Refuses()], indirect=True)
def test_what_is_small_is_not_compiled(background: Background, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        region(bound(), *two(8))
        assert background.wait(WAIT_S)
    assert not caplog.records


@pytest.mark.parametrize("background", [regions.EagerCompiler()], indirect=True)
def test_only_what_depends_on_a_poison_is_one(background: Background) -> None:
    poison = Poison(FailureRecord("op", "1", "aten::mm", 0, 0, "n", "", "", ""))
    _, y = two()
    first, second = region(bound(), poison, y)
    assert first is poison
    torch.testing.assert_close(second, torch.sigmoid(y))


@pytest.mark.parametrize(
    "compiler",
    [
        regions.EagerCompiler(),
        pytest.param(
            regions.InductorCompiler(),
            marks=[
                pytest.mark.slow,
                pytest.mark.timeout(400),
                pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch warns of itself
            ],
        ),
    ],
    ids=lambda compiler: type(compiler).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compilers_give_what_eager_gives(compiler: Compiler, dtype: torch.dtype) -> None:
    x = [value.to(dtype) for value in two()]
    compiled = compiler.compile(computed, [torch.empty_like(value) for value in x])
    with torch.inference_mode():
        for given in (x, [value.neg() for value in x]):
            found, expected = list(compiled(*given)), computed(*given)
            torch.testing.assert_close(found, expected)
            assert [value.stride() for value in found] == [value.stride() for value in expected]
