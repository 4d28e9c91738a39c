"""Random programs whose messages are passed on from node to node, while nodes and links are lost in between."""

from __future__ import annotations

import random

import pytest

from dtorch_runtime.wire.messages import Done, Message, RelayDone
from tests.sim.program import ProgramClient
from tests.sim.simulator import Simulator
from tests.sim.test_simulation import end_sessions

_SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))]


def relays(sim: Simulator) -> int:
    """How many there were."""
    return sim.controller._fanout._num_relays


def make(
    seed: int, num_nodes: int, num_clients: int, num_actions: int, fanout: int
) -> tuple[Simulator, list[ProgramClient]]:
    """Nodes that have joined, and clients whose first mesh is all of them."""
    # With so small a window, messages of the sessions wait for each other in the controller too.
    sim = Simulator(
        random.Random(seed), relay_min_nodes=2, relay_fanout=fanout, window=6 if seed % 3 else 10_000
    )
    for index in range(num_nodes):
        sim.add_node(f"node{index}", sim.rng.randrange(1, 4))
    sim.run()
    return sim, [add_client(sim, num_actions) for _ in range(num_clients)]


def add_client(sim: Simulator, num_actions: int) -> ProgramClient:
    client = sim.add_client(lambda s, number: ProgramClient(s, number, num_actions))
    client.is_wide = True
    return client


@pytest.mark.parametrize("fanout", [1, 2])
@pytest.mark.parametrize("seed", _SEEDS)
def test_programs_end_and_leave_nothing(seed: int, fanout: int) -> None:
    sim, clients = make(seed, 5, 2, 40, fanout)
    sim.run()
    assert relays(sim), "no relay ever began"
    for client in clients:
        client.check()
        assert not client.lost_nodes
    end_sessions(sim, clients)


@pytest.mark.parametrize("seed", _SEEDS)
def test_reports_that_come_twice_change_nothing(seed: int) -> None:
    sim, clients = make(seed, 4, 2, 40, fanout=1)
    sim.duplicate_probability = 0.3
    sim.run()
    assert relays(sim)
    for client in clients:
        client.check()
    end_sessions(sim, clients)


@pytest.mark.parametrize("seed", _SEEDS)
def test_members_that_are_lost_anywhere_leave_nobody_waiting(seed: int) -> None:
    sim, clients = make(seed, 6, 2, 80, fanout=1 + seed % 2)
    dead = set()
    for _ in range(3):
        sim.run(sim.rng.randrange(50, 300), until_quiet=False)
        victim = sim.rng.choice(sim.nodes)
        if victim.state.is_joined:
            sim.kill(victim, f"node:{victim.name}")
            dead.add(victim.name)
    sim.run()
    assert relays(sim)
    for client in clients:
        client.check()
        assert client.lost_nodes <= dead
    end_sessions(sim, clients)


@pytest.mark.parametrize("seed", _SEEDS)
def test_links_that_break_cost_a_relay_and_no_message(seed: int) -> None:
    sim, clients = make(seed, 6, 2, 60, fanout=1 + seed % 2)
    num_broken = 0
    for _ in range(20):
        sim.run(30, until_quiet=False)
        links = [link for link in sim.links if link.is_open]
        if links and num_broken < 2:
            sim.rng.choice(links).break_off()
            num_broken += 1
    sim.run()
    assert num_broken
    for client in clients:
        client.check()
        assert not client.lost_nodes
    end_sessions(sim, clients)


@pytest.mark.parametrize("seed", _SEEDS)
def test_nodes_and_sessions_come_and_go_while_relays_last(seed: int) -> None:
    sim, clients = make(seed, 4, 2, 40, fanout=2)
    for index in range(4, 7):
        sim.run(sim.rng.randrange(30, 200), until_quiet=False)
        sim.add_node(f"node{index}")
        clients.append(add_client(sim, 30))
        if clients[0].session and clients[0].is_alive:
            sim.kill(clients[0], clients[0].beat_name)
    sim.run()
    assert relays(sim)
    for client in clients:
        if client.is_alive:
            client.check()
    end_sessions(sim, clients)


@pytest.mark.parametrize("seed", range(2))
def test_reports_are_added_up_on_the_way(seed: int) -> None:
    sim, (client,) = make(seed, 7, 1, 0, fanout=2)
    sim.run()
    reports: list[Message] = []
    sim.watch = lambda message: reports.append(message) if isinstance(message, Done | RelayDone) else None
    client._add_mesh()
    for _ in range(10):
        client._issue_batch()
    sim.run()
    client.check()
    assert relays(sim) == 1
    tops = [report for report in reports if isinstance(report, RelayDone)]
    assert tops
    assert not [report for report in reports if isinstance(report, Done)]
    assert len(tops) <= 2 * 10, "two nodes are at the top, and only they report"
