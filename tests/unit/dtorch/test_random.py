"""Seeds of random ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dtorch import random


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    state = random.get_state()
    yield
    random.set_state(*state)


def test_a_seed_gives_a_sequence() -> None:
    def draw(seed: int) -> list[int]:
        random.set_seed(seed)
        return [random.next_seed() for _ in range(1000)]

    first = draw(1)
    assert first == draw(1)
    assert len(set(first)) == 1000
    assert set(first).isdisjoint(draw(2))
    assert all(0 <= seed < 2**63 for seed in first)


def test_torch_seeds_it_too() -> None:
    torch.manual_seed(7)
    first = random.next_seed()
    assert random.manual_seed(7).initial_seed() == 7
    assert random.next_seed() == first


def test_its_state_can_be_kept_and_restored_as_torch_does() -> None:
    random.set_seed(2**64 - 1)
    random.next_seed()
    state = torch.get_device_module("dtorch").get_rng_state()
    with torch.random.fork_rng(devices=[0], device_type="dtorch"):
        expected = random.next_seed()
    assert random.next_seed() == expected
    torch.get_device_module("dtorch").set_rng_state(state)
    assert random.next_seed() == expected
