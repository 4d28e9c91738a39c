"""Random programs on the whole control plane, in random orders, with and without deaths."""

from __future__ import annotations

import random

import pytest

from dtorch_runtime.wire.messages import Answer, Done, FetchFailed, Message, ValueData
from tests.sim.program import ProgramClient
from tests.sim.simulator import SimNode, Simulator

_SEEDS = range(15)


def make(
    seed: int, num_nodes: int, num_clients: int, num_actions: int
) -> tuple[Simulator, list[ProgramClient]]:
    sim = Simulator(random.Random(seed))
    for index in range(num_nodes):
        sim.add_node(f"node{index}", sim.rng.randrange(1, 4))
    clients = [
        sim.add_client(lambda s, number: ProgramClient(s, number, num_actions)) for _ in range(num_clients)
    ]
    return sim, clients


def end_sessions(sim: Simulator, clients: list[ProgramClient]) -> None:
    """Everybody leaves, some without a word; then nothing may be left anywhere."""
    for client in clients:
        if client.is_alive and sim.rng.random() < 0.5:
            client.say_goodbye()
        elif client.is_alive:
            sim.kill(client, client.beat_name)
    sim.run()
    assert not sim.controller.sessions
    for node in sim.nodes:
        assert node.state.sessions == []
        assert node.state.num_outstanding == 0
        assert node.executor.num_values == node.executor.num_held == 0


@pytest.mark.parametrize("seed", _SEEDS)
def test_programs_end_and_leave_nothing(seed: int) -> None:
    sim, clients = make(seed, num_nodes=3, num_clients=2, num_actions=40)
    sim.run()
    for client in clients:
        client.check()
        assert not client.lost_nodes
        session = sim.controller.sessions[client.session]
        assert session.graph.values.keys() == client.values.keys()
        assert all(session.is_ready(value_id) for value_id in client.values)
        assert not session.graph.pending
    end_sessions(sim, clients)


@pytest.mark.parametrize("seed", _SEEDS)
def test_messages_that_come_twice_change_nothing(seed: int) -> None:
    sim, clients = make(seed, num_nodes=2, num_clients=2, num_actions=30)
    sim.duplicate_probability = 0.3
    sim.run()
    for client in clients:
        client.check()
    end_sessions(sim, clients)


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("seed", _SEEDS)
def test_nodes_far_behind_report_seldom_and_everything_is_credited(seed: int, dies: bool) -> None:
    sim, (client,) = make(seed, num_nodes=2, num_clients=1, num_actions=0)
    sim.run()
    client.num_actions, client.max_outstanding = 150, 1000
    while client.can_act:
        client.act()
    sim.deliver_all()
    reports: list[Message] = []
    sim.watch = lambda message: reports.append(message) if isinstance(message, Done) else None
    if dies:
        sim.kill(sim.nodes[1], "node:node1")
    sim.run()
    client.check()
    assert len(reports) < client.seq / 4
    end_sessions(sim, [client])


@pytest.mark.parametrize("seed", _SEEDS)
def test_nodes_that_die_leave_nobody_waiting(seed: int) -> None:
    sim, clients = make(seed, num_nodes=4, num_clients=2, num_actions=60)
    dead: list[SimNode] = []
    for _ in range(3):
        sim.run(sim.rng.randrange(20, 200), until_quiet=False)
        victim = sim.rng.choice(sim.nodes)
        if not victim.state.is_joined:
            continue
        sim.kill(victim, f"node:{victim.name}")
        dead.append(victim)
    sim.run()
    for client in clients:
        client.check()
        assert client.lost_nodes <= {node.name for node in dead}
    assert {node.name for node in sim.controller.membership} == {node.name for node in sim.nodes}
    end_sessions(sim, clients)


@pytest.mark.parametrize("seed", _SEEDS)
def test_node_that_comes_back_under_its_name(seed: int) -> None:
    sim, clients = make(seed, num_nodes=2, num_clients=2, num_actions=40)
    sim.run(150, until_quiet=False)
    victim = sim.nodes[1]
    if not victim.state.is_joined:
        sim.run()
    sim.kill(victim, f"node:{victim.name}")
    sim.run()
    old_ids = next(ids for ids in (client.nodes.get(victim.name) for client in clients) if ids)
    again = sim.add_node(victim.name, len(old_ids))
    late = sim.add_client(lambda s, number: ProgramClient(s, number, 40))
    for client in clients:
        client.num_actions += 20
    sim.run()
    assert again.state.is_joined
    assert {node.name: node.record.devices for node in sim.controller.membership}[victim.name] == old_ids
    for client in [*clients, late]:
        client.check()
    assert not late.lost_nodes
    end_sessions(sim, [*clients, late])


@pytest.mark.parametrize("seed", _SEEDS)
def test_clients_that_die_disturb_no_other(seed: int) -> None:
    sim, clients = make(seed, num_nodes=3, num_clients=3, num_actions=40)
    sim.run(sim.rng.randrange(50, 300), until_quiet=False)
    victim = clients[0]
    if victim.session:
        sim.kill(victim, victim.beat_name)
    sim.run()
    for client in clients[1:]:
        client.check()
    assert set(sim.controller.sessions) == {client.session for client in clients if client.is_alive}
    for node in sim.nodes:
        assert set(node.state.sessions) == set(sim.controller.sessions)
    end_sessions(sim, clients)


def test_same_seed_same_run() -> None:
    def trace(seed: int) -> tuple[int, list[int]]:
        sim, clients = make(seed, num_nodes=3, num_clients=2, num_actions=30)
        sim.run()
        return sim.num_steps, [client.seq for client in clients]

    assert trace(3) == trace(3)
    assert trace(3) != trace(4)


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Done, "never credited"),
        (ValueData, r"fetch \d+ was never answered"),
        (FetchFailed, r"fetch \d+ was never answered"),
        (Answer, "a question was never answered"),
    ],
)
def test_checks_notice_a_message_that_got_lost(kind: type[Message], complaint: str) -> None:
    sim, (client,) = make(0, num_nodes=1, num_clients=1, num_actions=200)
    sim.loses = lambda message: isinstance(message, kind)
    sim.run()
    with pytest.raises(AssertionError, match=complaint):
        client.check()
