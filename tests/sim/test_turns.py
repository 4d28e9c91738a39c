"""Sessions that share a cluster: each keeps its order, and none waits for the end of a flood of another."""

from __future__ import annotations

import random

import pytest

from tests.sim.program import ProgramClient
from tests.sim.simulator import Simulator
from tests.sim.test_simulation import end_sessions

_SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))]


def make(seed: int, window: int) -> tuple[Simulator, ProgramClient, ProgramClient]:
    """Two nodes, and a client with a mesh of all devices that will flood them, and one that asks for little."""
    sim = Simulator(random.Random(seed), window=window)
    for index in range(2):
        sim.add_node(f"node{index}")
    sim.run()
    flood, small = (sim.add_client(lambda s, number: ProgramClient(s, number, 0)) for _ in range(2))
    sim.run()
    for client in (flood, small):
        client.is_wide = True
        client._add_mesh()
    sim.run()
    return sim, flood, small


def batches_before(sim: Simulator, flood: ProgramClient, small: ProgramClient) -> int:
    """How many batches of the flood a node is given before the first of the other."""
    (node, *_) = sim.nodes
    taken = [session for session, _ in node.taken]
    return taken.index(small.session)


@pytest.mark.parametrize("seed", _SEEDS)
def test_a_flood_holds_up_another_session_by_its_window_only(seed: int) -> None:
    sim, flood, small = make(seed, window=20)
    for _ in range(60):
        flood._issue_batch()
    sim.deliver_all()
    small._issue_batch()
    sim.deliver_all()
    # At most 20 ops, one at least in each batch.
    assert batches_before(sim, flood, small) <= 20
    assert sim.controller.turns.num_waiting(flood.session) >= 40
    sim.run()
    assert sim.controller.turns.is_empty
    for client in (flood, small):
        client.check()
    end_sessions(sim, [flood, small])


def test_a_session_that_is_alone_is_not_held_up() -> None:
    sim, flood, small = make(0, window=20)
    small.say_goodbye()
    sim.deliver_all()
    for _ in range(60):
        flood._issue_batch()
    sim.deliver_all()
    assert sim.controller.turns.is_empty
    assert all(len(node.taken) == 60 for node in sim.nodes)


@pytest.mark.parametrize("seed", _SEEDS)
def test_what_waits_goes_on_when_the_other_session_ends(seed: int) -> None:
    sim, flood, small = make(seed, window=3)
    for _ in range(20):
        flood._issue_batch()
    sim.deliver_all()
    assert sim.controller.turns.num_waiting(flood.session)
    sim.kill(small, small.beat_name)
    sim.run()
    assert sim.controller.turns.is_empty
    flood.check()
    end_sessions(sim, [flood])


@pytest.mark.parametrize("seed", _SEEDS)
def test_everything_of_a_session_keeps_its_order_behind_what_waits(seed: int) -> None:
    sim, flood, small = make(seed, window=2)
    for client in (flood, small):
        client.num_actions = 40
        client.max_outstanding = 1000
    sim.run()
    for client in (flood, small):
        client.check()
    end_sessions(sim, [flood, small])


@pytest.mark.parametrize("seed", _SEEDS)
def test_nodes_and_sessions_that_die_leave_nobody_waiting_for_a_turn(seed: int) -> None:
    sim, flood, small = make(seed, window=3)
    for client in (flood, small):
        client.num_actions = 60
        client.max_outstanding = 1000
    sim.run(200, until_quiet=False)
    victim = sim.rng.choice(sim.nodes)
    sim.kill(victim, f"node:{victim.name}")
    sim.run(50, until_quiet=False)
    if seed % 2:
        sim.kill(small, small.beat_name)
    sim.run()
    assert sim.controller.turns.is_empty
    for client in (flood, small):
        if client.is_alive:
            client.check()
    end_sessions(sim, [flood, small])
