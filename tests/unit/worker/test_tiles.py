"""Ops on lists as one: the same bits as op by op, whatever lies in the same memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dtorch_runtime.wire.records import Arg, RegionStep, Slot, TilesArg
from dtorch_runtime.worker import tiles as module
from dtorch_runtime.worker.arguments import BoundRegion
from dtorch_runtime.worker.tiles import tiles

Tensors = list[torch.Tensor]
TILE_BYTES = 64 * 1024
#: Elements of float32 that fill a tile, of one list.
FULL = TILE_BYTES // 4


def step(name: str, args: list[Arg], *inputs: int, **kwargs: Arg) -> RegionStep:
    return RegionStep(f"aten::_foreach_{name}", args, kwargs, list(inputs))


#: Like AdamW: lists 0 to 3 are parameters, gradients and state, 4 are numbers of each position; 5 is one for all.
ADAM = [
    step("mul_.Tensor", [Slot(0), Slot(1)], 0, 5),
    step("lerp_.Scalar", [Slot(0), Slot(1), 0.1], 2, 1),
    step("addcmul_.Scalar", [Slot(0), Slot(1), Slot(1), 0.01], 3, 1),
    step("sqrt", [Slot(0)], 3),
    step("div_.List", [Slot(0), Slot(1)], 9, 4),
    step("addcdiv_.Scalar", [Slot(0), Slot(1), Slot(2), -0.1], 0, 2, 9),
]
SQRT = 9


def adam(lists: list[Tensors], factor: torch.Tensor) -> Tensors:
    """Op by op; gives the square roots."""
    parameters, gradients, averages, squares, numbers = lists
    torch._foreach_mul_(parameters, factor)
    torch._foreach_lerp_(averages, gradients, 0.1)
    torch._foreach_addcmul_(squares, gradients, gradients, 0.01)
    roots = list(torch._foreach_sqrt(squares))
    torch._foreach_div_(roots, numbers)
    torch._foreach_addcdiv_(parameters, averages, roots, -0.1)
    return roots


def filled(make: Callable[[], Tensors]) -> list[Tensors]:
    """Four lists of random tensors of these shapes and strides, and one of numbers."""
    lists = [make() for _ in range(4)]
    generator = torch.Generator().manual_seed(0)
    for tensors in lists:
        for tensor in tensors:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return [*lists, [torch.tensor(2.0 + index) for index in range(len(lists[0]))]]


def of_sizes(*sizes: int) -> Callable[[], Tensors]:
    return lambda: [torch.empty(size) for size in sizes]


def views_of_one() -> Tensors:
    flat = torch.empty(3, FULL // 2)
    return [flat[0], flat[1], flat[2]]


def the_same_twice() -> Tensors:
    tensor = torch.empty(FULL // 2)
    return [tensor, torch.empty(FULL // 2), tensor]


def halves_that_overlap() -> Tensors:
    flat = torch.empty(FULL)
    return [flat[: FULL // 2 + 5], flat[FULL // 2 - 5 :]]


def turned() -> Tensors:
    return [torch.empty(60, 100).t(), torch.empty(90, 50).t()]


CASES = {
    "small": of_sizes(3, 0, 5),
    "grouped": of_sizes(*[FULL // 7 + 1] * 9),
    "in pieces": of_sizes(2 * FULL + 3),
    "of all sizes": of_sizes(1, FULL, 7, FULL + 1, 2, 100, 3 * FULL - 1, 0),
    "views of one": views_of_one,
    "the same twice": the_same_twice,
    "halves that overlap": halves_that_overlap,
    "turned": turned,
}


def run(
    lists: list[Tensors], factor: torch.Tensor, outputs: list[int], steps: list[RegionStep] = ADAM
) -> Tensors:
    arg = TilesArg(len(lists[0]), len(lists), steps, outputs)
    bound = BoundRegion(arg, {}, 0, torch.device("cpu"))
    return tiles(bound, *(tensor for tensors in lists for tensor in tensors), factor)


@pytest.fixture(autouse=True, params=[1, 2], ids="{} threads".format)
def num_threads(request, monkeypatch):
    monkeypatch.setattr(module, "TILE_BYTES", TILE_BYTES)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("outputs", [[], [SQRT]], ids=["writes", "makes"])
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_op_by_op(name, outputs):
    found, expected = filled(CASES[name]), filled(CASES[name])
    factor = torch.tensor(0.9)
    roots = adam(expected, factor)
    made = run(found, factor, outputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(made, roots if outputs else [], rtol=0, atol=0)


def test_one_for_all_that_is_written_to_at_a_position():
    [values, others, *_] = filled(of_sizes(FULL, FULL, FULL))
    expected = [tensor * others[0][7] for tensor in values]
    steps = [step("mul_.Tensor", [Slot(0), Slot(1)], 0, 2), step("neg_", [Slot(0)], 1)]
    run([values, others], others[0][7], [], steps)
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


def test_norms_are_of_whole_tensors():
    [values, *_] = filled(of_sizes(5 * FULL))
    steps = [step("mul_.Scalar", [Slot(0), 2.0], 0), step("norm.Scalar", [Slot(0)], 0)]
    [found] = run([values], torch.tensor(0.0), [3], steps)
    torch.testing.assert_close(found, values[0].norm(), rtol=0, atol=0)


def parts_of(name: str, outputs: list[int]) -> list[tuple[int, int]]:
    """How many positions each part has, and how many elements the first of its tensors."""
    lists = filled(CASES[name])
    arg = TilesArg(len(lists[0]), len(lists), ADAM, outputs)
    found = module.Tiles(BoundRegion(arg, {}, 0, torch.device("cpu")))
    return [(len(part[0]), part[0][0].numel()) for part in found._parts(lists, [torch.tensor(0.9)])]


def test_what_is_done_at_a_time(num_threads):
    del num_threads
    torch.set_num_threads(1)
    one = FULL // 7 + 1
    assert parts_of("small", []) == [(3, 3)]
    assert parts_of("grouped", []) == [(1, one)] * 9
    pieces = parts_of("in pieces", [])
    assert len(pieces) == 9
    assert {size for _, size in pieces[:-1]} == {FULL // 4}
    assert parts_of("in pieces", [SQRT]) == [(1, 2 * FULL + 3)]
    assert parts_of("views of one", []) == [(1, FULL // 4)] * 6
    assert len(parts_of("the same twice", [])) == 1
    assert len(parts_of("halves that overlap", [])) == 1
    assert parts_of("turned", []) == [(1, 6_000), (1, 4_500)]
