"""Which way of running a captured call is chosen."""

from __future__ import annotations

import pytest
import torch

from dtorch_runtime.worker.costs import Way, Weight, choose, kernel_us

SMALL, LARGE = 1.0, 1000.0


@pytest.mark.parametrize(
    ("kernels_us", "num_moves", "way"),
    [
        ([SMALL] * 50, 10, Way.JOINT),  # threads would fight for the lock
        ([SMALL] * 50, 0, Way.JOINT),
        ([LARGE] * 50, 0, Way.APART),  # nothing but threads of their own makes these parallel
        ([LARGE] * 50 + [SMALL] * 500, 50, Way.APART),
        ([], 0, Way.JOINT),
    ],
)
def test_small_kernels_run_in_one_thread(kernels_us: list[float], num_moves: int, way: Way) -> None:
    assert choose([Weight(kernels_us, num_moves)] * 2, 2) is way


def test_many_devices_do_not_run_at_once_on_few_cores() -> None:
    weights = [Weight([LARGE] * 10, 1)] * 8
    assert choose(weights, 8) is Way.APART
    assert choose(weights, 1) is Way.JOINT


@pytest.mark.parametrize("op", ["aten::mm", "aten::linear", "aten::matmul", "aten::addmm"])
def test_products_are_weighed_by_their_depth(op: str) -> None:
    def weighed(depth: int) -> float:
        a, b = torch.empty(256, depth), torch.empty(depth, 256)
        inputs = [torch.empty(256), a, b] if op == "aten::addmm" else [a, b]
        return kernel_us(op, inputs, [torch.empty(256, 256)])

    assert weighed(2048) > 1.9 * weighed(1024)


def test_a_convolution_is_weighed_by_its_filter() -> None:
    x, out = torch.empty(1, 8, 64, 64), torch.empty(1, 16, 64, 64)
    small, large = (kernel_us("aten::convolution", [x, torch.empty(16, 8, k, k)], [out]) for k in (3, 9))
    assert large > 5 * small


def test_a_view_costs_nothing_and_a_write_what_it_writes() -> None:
    x = torch.empty(1000, 1000)
    assert kernel_us("aten::view", [x], [x.view(-1)]) == 0.0
    assert kernel_us("aten::neg", [x], [torch.empty(1000, 1000)]) > 100.0
    assert kernel_us("aten::add_.Tensor", [x, x], []) > 100.0
    assert kernel_us("aten::mul.out", [x, x], []) > 100.0
    assert kernel_us("aten::neg", [x], []) == 0.0
