"""Agents that pass the controller's messages on to each other, over every transport."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dtorch_runtime.controller.server import ControllerServer
from dtorch_runtime.errors import TransportError
from dtorch_runtime.node.agent import NodeAgent
from dtorch_runtime.node.events import Leave
from dtorch_runtime.node.executor import Executor, ReportEvent
from dtorch_runtime.node.relay_links import RelayLinks
from dtorch_runtime.node.state import NodeConfig
from dtorch_runtime.settings import Settings
from dtorch_runtime.testing.null_executor import NullExecutor
from dtorch_runtime.testing.wait import wait_until_async
from dtorch_runtime.transport.base import ClientLink, ServerLink
from dtorch_runtime.transport.memory import MemoryHub
from dtorch_runtime.transport.security import CurveKeys, load_keys, write_keys
from dtorch_runtime.transport.zeromq import ZmqClientLink, ZmqServerLink
from dtorch_runtime.wire.codec import encode
from dtorch_runtime.wire.messages import (
    Credit,
    DefineMesh,
    DefineTemplates,
    Fetch,
    NodeDown,
    Ops,
    RelayBeat,
    Relayed,
    RelayHello,
    Subgraph,
    ValueData,
    Welcome,
)
from tests.support.control import KEY, client_hello, frame, mesh, op, template, upload
from tests.support.wire_client import LoopClient

_TIMEOUT_S = 10.0
_SETTINGS = Settings(check=True, relay_min_nodes=2, relay_fanout=2, heartbeat_interval_s=0.05)


class Wires:
    """Servers and connections to them, of one kind."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind = kind
        self._folder = folder
        self._hub = MemoryHub()
        self._keys: CurveKeys | None = None
        self._server_keys: CurveKeys | None = None
        if kind == "zeromq-tcp-curve":
            write_keys(folder)
            self._keys, self._server_keys = load_keys(folder, "client"), load_keys(folder, "server")

    def serve(self, name: str, *, is_controller: bool = False) -> ServerLink:
        if self._kind == "memory":
            return self._hub.serve(f"memory://{name}")
        address = "tcp://127.0.0.1:*" if self._keys else f"ipc://{self._folder}/{name}"
        among_agents = None if self._keys is None else self._keys.among_clients()
        return ZmqServerLink(address, keys=self._server_keys if is_controller else among_agents)

    async def connect(self, address: str, *, to_controller: bool = False) -> ClientLink:
        if self._kind == "memory":
            return await self._hub.connect(address, timeout_s=_TIMEOUT_S)
        among_agents = None if self._keys is None else self._keys.among_clients()
        keys = self._keys if to_controller else among_agents
        return await ZmqClientLink.connect(address, keys=keys, timeout_s=_TIMEOUT_S)


class Cluster:
    """A controller, agents with null executors, and one client with a mesh of all devices."""

    def __init__(self, wires: Wires, num_nodes: int) -> None:
        self.wires = wires
        link = wires.serve("controller", is_controller=True)
        self.address = link.endpoint
        self.server = ControllerServer([link], session_key=KEY, settings=_SETTINGS)
        self.num_nodes = num_nodes
        self.agents: list[NodeAgent] = []
        self.tasks: list[asyncio.Task[Leave]] = []
        self.client: LoopClient
        self.seq = 0
        self.num_requests = 0

    async def start(self, connect: Callable[[str], Any] | None = None) -> None:
        self.server.start()
        for index in range(self.num_nodes):
            links = RelayLinks(
                self.wires.serve(f"relay{index}"),
                connect or self.wires.connect,
                _SETTINGS.heartbeat_interval_s,
            )
            config = NodeConfig(
                name=f"node{index}",
                host="host",
                pid=index,
                device_type="cpu",
                num_devices=1,
                data_endpoint="",
                relay_endpoint=links.endpoint,
                session_key=KEY,
                chunk_bytes=64,
                check=True,
            )
            link = await self.wires.connect(self.address, to_controller=True)
            agent = NodeAgent(
                config, link, self._executor, settings=_SETTINGS, has_heartbeats=False, relay_links=links
            )
            self.agents.append(agent)
            self.tasks.append(asyncio.create_task(agent.run()))
            assert await agent.wait_joined()
        self.client = LoopClient(await self.wires.connect(self.address, to_controller=True))
        self.client.send(client_hello())
        await self.client.wait_for(Welcome)
        self.client.send(DefineMesh(mesh=mesh(1, range(self.num_nodes))))
        self.client.send(DefineTemplates(templates=[template(1)]))

    @staticmethod
    def _executor(report: ReportEvent) -> Executor:
        return NullExecutor(report=report)

    @property
    def has_relay(self) -> bool:
        return self.server.state._fanout.relay is not None

    def run(self, value_id: int) -> None:
        self.seq += 1
        self.client.send(Ops(seq=self.seq, graph_id=1), frame(op(1, value_id)))

    async def fetch(self, value_id: int, device: int) -> bytes:
        self.num_requests += 1
        self.client.send(Fetch(request_id=self.num_requests, value_id=value_id, device=device))
        message, frames = await self.client.wait_for(ValueData)
        assert message.request_id == self.num_requests
        return bytes(frames[0])

    async def credited(self) -> None:
        while (await self.client.wait_for(Credit))[0].seq < self.seq:
            pass

    async def close(self) -> None:
        self.client.close()
        self.server.stop("the test ends")
        for task in self.tasks:
            await asyncio.wait_for(task, _TIMEOUT_S)
        await self.server.close(0.1)


@pytest.fixture(params=["memory", "zeromq-ipc", "zeromq-tcp-curve"])
async def cluster(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Cluster]:
    made = Cluster(Wires(request.param, folder), 7)
    await made.start()
    yield made
    await made.close()


def number(value_id: int) -> bytes:
    return array("q", [value_id]).tobytes()


async def test_work_reaches_every_node_and_its_credit_comes_back(cluster: Cluster) -> None:
    for step in range(1, 41):
        cluster.run(step)
        # A value of a leaf, which is asked for directly, behind what came through two others.
        assert await cluster.fetch(step, step % 7) == number(step)
    assert cluster.has_relay
    await cluster.credited()
    chunk = b"12345678"
    for value_id in range(101, 106):
        cluster.seq += 1
        cluster.client.send(upload(cluster.seq, value_id, range(7)), chunk)
        assert await cluster.fetch(value_id, 6) == chunk
    await cluster.credited()
    for agent in cluster.agents[2:]:
        work = agent.state._sessions[1]
        assert work.done == cluster.seq
        assert not work.direct.done, "what was relayed is reported to the node above"


async def test_steps_that_nobody_waits_for_arrive_in_order(cluster: Cluster) -> None:
    for step in range(1, 201):
        cluster.run(step)
    assert await cluster.fetch(200, 6) == number(200)
    await cluster.credited()
    for agent in cluster.agents:
        assert agent.state.num_outstanding == 0


async def test_strangers_at_a_node_change_nothing(cluster: Cluster) -> None:
    cluster.run(1)
    await cluster.credited()
    agent = cluster.agents[6]
    stranger = await cluster.wires.connect(agent._config.relay_endpoint)
    relay = cluster.server.state._fanout.relay
    assert relay is not None
    guessed = RelayHello(session_key=b"guess" * 6, relay=relay.number)
    forged = Relayed(relay=relay.number, number=2, after={})
    for message in (guessed, forged, RelayBeat(relay=relay.number, number=99)):
        stranger.send([encode(message), encode(Subgraph(session=1, seq=9)), frame(op(1, 9))])
    for junk in (b"", b"junk", encode(client_hello())):
        stranger.send([junk])
    for step in range(2, 21):
        cluster.run(step)
        assert await cluster.fetch(step, 6) == number(step)
    await cluster.credited()
    assert cluster.server.state._fanout.relay is relay
    assert agent.state._sessions[1].done == cluster.seq
    stranger.close()


@pytest.mark.parametrize("position", [0, 2, 6])
async def test_a_member_that_leaves_ends_the_relay_and_no_message_is_lost(
    cluster: Cluster, position: int
) -> None:
    for step in range(1, 11):
        cluster.run(step)
    cluster.agents[position].stop("maintenance")
    for step in range(11, 31):
        cluster.run(step)
    down, _ = await cluster.client.wait_for(NodeDown)
    assert down.name == f"node{position}"
    await cluster.credited()
    for device in set(range(7)) - {position}:
        assert await cluster.fetch(30, device) == number(30)
    cluster.run(31)
    await cluster.credited()
    relay = cluster.server.state._fanout.relay
    assert relay is not None
    assert len(relay.group.peers) == 6


async def test_nodes_that_cannot_reach_each_other_are_sent_everything_directly(folder: Path) -> None:
    async def connect(address: str) -> ClientLink:
        raise TransportError(f"no way to {address}")

    cluster = Cluster(Wires("zeromq-ipc", folder), 4)
    await cluster.start(connect)
    for step in range(1, 11):
        cluster.run(step)
    await cluster.credited()
    for device in range(4):
        assert await cluster.fetch(10, device) == number(10)
    await wait_until_async(lambda: not cluster.has_relay, "the relay to be given up")
    cluster.run(11)
    await cluster.credited()
    assert not cluster.has_relay, "it was begun again, with the same nodes"
    await cluster.close()
