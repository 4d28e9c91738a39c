"""Kernels of experts, against the plainest way to say the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dtorch_runtime.worker import expert_kernels, route_kernels
from dtorch_runtime.worker.failures import InternalFailure

routes: Any = route_kernels
experts: Any = expert_kernels
NUM_EXPERTS, FEATURES = 4, 3


@pytest.fixture
def choices(rng: random.Random) -> torch.Tensor:
    """Of 6 tokens, two each; expert 2 is chosen by nobody, and some pairs are dropped."""
    return torch.tensor([[rng.choice([0, 1, 3, NUM_EXPERTS]) for _ in range(2)] for _ in range(6)])


def test_order_and_counts(choices: torch.Tensor) -> None:
    order = routes.expert_order(choices, NUM_EXPERTS).tolist()
    flat = choices.flatten().tolist()
    assert order == sorted((i for i, e in enumerate(flat) if e < NUM_EXPERTS), key=lambda i: (flat[i], i))
    counts = routes.expert_counts(choices, NUM_EXPERTS, 2)
    assert counts.tolist() == [[[flat.count(expert) for expert in range(NUM_EXPERTS)]]]


@pytest.mark.parametrize("is_expanded", [False, True])
def test_rows_are_taken_and_put_back(choices: torch.Tensor, is_expanded: bool) -> None:
    order = routes.expert_order(choices, NUM_EXPERTS)
    pairs = torch.randn(6, 1 if is_expanded else 2, FEATURES).expand(6, 2, FEATURES)
    rows = routes.rows_taken(pairs, order)
    assert torch.equal(rows, pairs.reshape(12, FEATURES)[order])
    back = routes.rows_put(rows, order, [6, 2])
    kept = choices < NUM_EXPERTS
    assert torch.equal(back[kept], pairs[kept])
    assert not back[~kept].any()


def test_products_with_the_matrix_of_each_expert(choices: torch.Tensor) -> None:
    numbers = choices.flatten().sort().values
    numbers = numbers[numbers < NUM_EXPERTS]
    here = (numbers >= 1) & (numbers < 4)  # experts 1, 2 and 3
    numbers = numbers[here]
    counts = torch.bincount(numbers, minlength=NUM_EXPERTS).reshape(1, NUM_EXPERTS)
    left, rows = torch.randn(len(numbers), 5), torch.randn(len(numbers), FEATURES)
    weights = torch.randn(3, 5, FEATURES)
    made = experts.routed_linear(rows, counts, weights, 1)
    torch.testing.assert_close(made, torch.einsum("ri,roi->ro", rows, weights[numbers - 1]))
    outer = experts.routed_linear_backward(left, rows, counts, 1, [3, 5, FEATURES])
    expected = torch.zeros(3, 5, FEATURES).index_add_(0, numbers - 1, left[:, :, None] * rows[:, None, :])
    torch.testing.assert_close(outer, expected)
    shuffled = torch.randperm(
        len(numbers)
    )  # as rows that are not sorted, and have the numbers of their experts
    unsorted = experts.expert_linear(rows[shuffled], weights, numbers[shuffled], 1)
    torch.testing.assert_close(unsorted, made[shuffled])
    with pytest.raises(InternalFailure, match="rows by their counts, not"):
        experts.routed_linear(torch.randn(len(numbers) + 1, FEATURES), counts, weights, 1)
