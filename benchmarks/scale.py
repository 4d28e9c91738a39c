"""What the controller's work costs with 1, 8, 64 and 512 simulated nodes of 8 devices each.

Run: ``python -m benchmarks.scale``; ``--profile 512`` shows where the time of a step goes instead. It is the real state
machine in the real shell, over a link that ends in memory: no sockets, no workers, no torch. A *step* is one captured
call of 1,000 ops on all devices; it costs what the controller does from the client's message until it has told the
client that all nodes are done. From 17 nodes on it goes through a relay of nodes with eight below each; what a node in
the middle does for a step is a row of its own. The last rows are what one message costs on a real socket, which comes
on top. Times are those of the processor in the controller's thread, so that other processes disturb them little.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import math
import pstats
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.harness import YARDSTICK, Row, report, yardstick_us
from dtorch_runtime.controller.server import ControllerServer
from dtorch_runtime.ir.stream import FREE, pack
from dtorch_runtime.node import events
from dtorch_runtime.node.executor import Completed
from dtorch_runtime.node.state import NodeConfig, NodeState
from dtorch_runtime.settings import Settings
from dtorch_runtime.transport.base import Frames as SentFrames, Message as Frames, OnPeerMessage
from dtorch_runtime.transport.zeromq import ZmqClientLink, ZmqServerLink
from dtorch_runtime.wire.codec import decode_to_client, decode_to_node, encode
from dtorch_runtime.wire.messages import (
    PROTOCOL_VERSION,
    ClientHello,
    Credit,
    DefineMesh,
    DefineTemplates,
    Done,
    Message,
    NodeHello,
    NodeWelcome,
    Ops,
    RelayBegin,
    RelayDone,
    Relayed,
    RelayHello,
    RelayMember,
    SessionOpened,
    Subgraph,
    Welcome,
)
from dtorch_runtime.wire.records import BodyRecord, MeshRecord, Slot, TemplateRecord

NUM_NODES = (1, 8, 64, 512)
DEVICES_PER_NODE = 8
BATCH_OPS = 256
STEP_OPS = 1_000
#: Steps under way at once, when nobody waits for one.
AHEAD = 32
REPEATS = 31
GOAL_US = 2_000
_KEY = b"k" * 32
_CLIENT = b"client"
_ADD, _STEP = 1, 2
_DEADLINE_S = 60.0


class CountingLink:
    """A ``ServerLink`` without peers: what is sent is counted, and kept for the client alone."""

    endpoint = "memory://scale"
    unsent_bytes = 0

    def __init__(self) -> None:
        self.num_messages = 0
        self.num_bytes = 0
        self.to_client: list[Frames] = []
        #: The nodes that were sent work, which has a payload, since this was emptied, and the last of it.
        self.reached: list[bytes] = []
        self.to_node: Frames = []
        self.receive: OnPeerMessage = lambda peer, frames: None

    def start(self, on_message: OnPeerMessage) -> None:
        self.receive = on_message

    def send(self, peer: bytes, frames: SentFrames) -> bool:
        self.num_messages += 1
        self.num_bytes += sum(map(len, frames))
        if peer == _CLIENT:
            self.to_client.append(list(frames))
        elif len(frames) > 1:
            self.reached.append(peer)
            self.to_node = frames  # type: ignore[assignment]  # a list
        return True

    async def drain(self, max_unsent_bytes: int, timeout_s: float) -> None:
        pass

    def close(self, flush_s: float = 0.0) -> None:
        pass


class Cluster:
    """A controller, its simulated nodes and one client. Each method returns the seconds that the controller took."""

    def __init__(self, num_nodes: int) -> None:
        self.link = CountingLink()
        self.server = ControllerServer([self.link], session_key=_KEY, settings=Settings())
        self.server.start()
        self.nodes = [b"node%d" % index for index in range(num_nodes)]
        for peer in self.nodes:
            self._take(peer, [encode(_node_hello(peer))])
        hello = ClientHello(version=PROTOCOL_VERSION, session_key=_KEY, host="host", pid=1)
        self._take(_CLIENT, [encode(hello)])
        welcome = decode_to_client(self.link.to_client[0][0])
        assert isinstance(welcome, Welcome)
        self.session = welcome.session
        self.seq = 0
        self._num_values = 0
        self._num_templates = _STEP
        devices = list(range(num_nodes * DEVICES_PER_NODE))
        self.define(DefineMesh(mesh=MeshRecord(1, "cpu", [len(devices)], devices)))
        self.define(DefineTemplates(templates=[_add(_ADD), _step(_STEP)]))
        # As a node far away would answer: in no order that the controller knows.
        self._order = random.Random(0).sample(self.nodes, num_nodes)

    def _take(self, peer: bytes, frames: Frames) -> float:
        start = time.thread_time()
        self.link.receive(peer, frames)
        return time.thread_time() - start

    def define(self, message: Message) -> float:
        """A definition that all nodes get."""
        return self._take(_CLIENT, [encode(message)])

    def define_step(self) -> float:
        """One more template with a body of 1,000 ops."""
        self._num_templates += 1
        return self.define(DefineTemplates(templates=[_step(self._num_templates)]))

    def replay(self) -> float:
        """One record of the captured step, and one that frees the result of the step before."""
        self._num_values += 1
        value = self._num_values + 2
        return self._issue([_STEP, 0, 1, 2, value, 1 + STEP_OPS * value, *self._freed(value - 1)])

    def eager(self) -> float:
        """A batch of ops, each of which frees the value of the one before."""
        words: list[int] = []
        for _ in range(BATCH_OPS):
            self._num_values += 1
            value = self._num_values + 2
            words += [_ADD, 0, 1, 2, value, *self._freed(value - 1)]
        return self._issue(words)

    def _freed(self, value: int) -> list[int]:
        return [FREE, 1, value] if value > 2 else []

    def _issue(self, words: list[int]) -> float:
        self.seq += 1
        self.link.reached.clear()
        return self._take(_CLIENT, [encode(Ops(seq=self.seq, graph_id=1)), pack(words)])

    def done(self, seq: int) -> float:
        """Every node says that it is done up to ``seq``, those below others to them; the client must be told, once."""
        reached = set(self.link.reached)
        frames: Frames = [encode(_done(decode_to_node(self.link.to_node[0]), self.session, seq))]
        self.link.to_client.clear()
        receive = self.link.receive
        order = [peer for peer in self._order if peer in reached]
        start = time.thread_time()
        for peer in order:
            receive(peer, frames)
        elapsed_s = time.thread_time() - start
        (credit,) = self.link.to_client
        if decode_to_client(credit[0]) != Credit(seq=seq):
            raise RuntimeError("the controller did not give the credit of the step")
        return elapsed_s


def _node_hello(peer: bytes) -> NodeHello:
    name = peer.decode()
    return NodeHello(
        version=PROTOCOL_VERSION,
        session_key=_KEY,
        name=name,
        host="host",
        pid=1,
        device_type="cpu",
        num_devices=DEVICES_PER_NODE,
        data_endpoint=f"tcp://{name}:5555",
        relay_endpoint=f"tcp://{name}:5556",
    )


def _done(told: object, session: int, seq: int) -> Done | RelayDone:
    """What a node says when it, and all below it, are done with what it was told."""
    if isinstance(told, Relayed):
        return RelayDone(relay=told.relay, session=session, seq=seq)
    return Done(session=session, seq=seq)


def _template(template_id: int, op: str, body: BodyRecord | None, num_scalars: int) -> TemplateRecord:
    return TemplateRecord(
        template_id=template_id,
        op=op,
        args=[] if body else [Slot(0), Slot(1)],
        kwargs={},
        num_inputs=2,
        num_outputs=1,
        num_scalars=num_scalars,
        mesh_ids=[1],
        body=body,
    )


def _add(template_id: int) -> TemplateRecord:
    return _template(template_id, "aten::add.Tensor", None, 0)


def _step(template_id: int) -> TemplateRecord:
    """A chain of additions: value 3 is the result, those from 4 on are inner ones, freed when they were used."""
    words: list[int] = []
    source = 1
    for value in [*range(4, STEP_OPS + 3), 3]:
        words += [_ADD, 0, source, 2, value]
        if source > 3:
            words += [FREE, 1, source]
        source = value
    return _template(template_id, "dtorch::captured", BodyRecord(words, STEP_OPS - 1), 1)


def _real_node() -> NodeState:
    """A node that has joined, with one session."""
    node = NodeState(
        NodeConfig(
            name="node",
            host="host",
            pid=1,
            device_type="cpu",
            num_devices=DEVICES_PER_NODE,
            data_endpoint="tcp://node:5555",
            session_key=_KEY,
            chunk_bytes=1 << 20,
        )
    )
    node.handle(events.Received(message=NodeWelcome(devices=[0], nodes=[], heartbeat_endpoint="")))
    node.handle(events.Received(message=SessionOpened(session=1)))
    return node


def inner_node_us(repeats: int) -> float:
    """What a real node with one above it and eight below does for a step that is waited for, without sockets."""
    node, peer = _real_node(), b"parent"
    below = [RelayMember(f"child{index}", "tcp://child:1") for index in range(Settings().relay_fanout)]
    begin = RelayBegin(relay=1, position=8, has_parent=True, children=below)
    node.handle(events.Received(message=begin))
    hello = RelayHello(session_key=_KEY, relay=1)
    node.handle(events.ReceivedFromParent(peer=peer, message=hello))
    seq = 0

    def step() -> float:
        nonlocal seq
        seq += 1
        header = encode(Subgraph(session=1, seq=seq))
        relayed = Relayed(relay=1, number=seq, after={})
        come = events.ReceivedFromParent(peer=peer, message=relayed, frames=(header, b""))
        told = [
            events.ReceivedFromChild(name=child.name, message=RelayDone(relay=1, session=1, seq=seq))
            for child in below
        ]
        start = time.thread_time()
        node.handle(come)
        node.handle(events.Reported(events=[Completed(session=1, seq=seq)]))
        actions = [action for event in told for action in node.handle(event)]
        elapsed_s = time.thread_time() - start
        if [type(action) for action in actions] != [events.SendUp]:
            raise RuntimeError("the node did not report the step once")
        return elapsed_s

    return median_us(step, repeats)


def seqs_told(num_messages: int) -> list[int]:
    """Of which messages a real node reports that it is done, when it has as many and completes them one by one."""
    node = _real_node()
    for seq in range(1, num_messages + 1):
        node.handle(events.Received(message=Subgraph(session=1, seq=seq), frames=(b"",)))
    completed = [Completed(session=1, seq=seq) for seq in range(1, num_messages + 1)]
    actions = [action for one in completed for action in node.handle(events.Reported(events=[one]))]
    return [
        send.message.seq for send in actions if isinstance(send, events.Send) and type(send.message) is Done
    ]


def median_us(run: Callable[[], float], repeats: int) -> float:
    """The median of what ``run`` returns in seconds, after two runs that do not count."""
    run(), run()
    gc.collect()
    return statistics.median(run() for _ in range(repeats)) * 1e6


class Costs(NamedTuple):
    """What one number of nodes costs: microseconds of the controller, and what it sends and reads for a step."""

    waited: float
    ahead: float
    eager: float
    define: float
    yardstick: float
    num_sent: float
    num_read: float
    num_read_ahead: float
    num_bytes: float


def measure(num_nodes: int, repeats: int = REPEATS) -> Costs:
    """The costs with ``num_nodes`` nodes."""
    cluster = Cluster(num_nodes)
    told = seqs_told(AHEAD)

    def waited() -> float:
        return cluster.replay() + cluster.done(cluster.seq)

    def ahead() -> float:
        before = cluster.seq
        issued_s = sum(cluster.replay() for _ in range(AHEAD))
        return (issued_s + sum(cluster.done(before + seq) for seq in told)) / AHEAD

    def batch() -> float:
        elapsed_s = cluster.eager()
        cluster.done(cluster.seq)
        return elapsed_s / BATCH_OPS

    cost_us = {run.__name__: median_us(run, repeats) for run in (waited, ahead, batch)}
    define_us = median_us(cluster.define_step, min(repeats, 7))
    link = cluster.link
    link.num_messages = link.num_bytes = 0
    waited()
    return Costs(
        waited=cost_us["waited"],
        ahead=cost_us["ahead"],
        eager=cost_us["batch"],
        define=define_us,
        yardstick=yardstick_us(),
        num_sent=link.num_messages,
        num_read=1 + len(link.reached),
        num_read_ahead=1 + len(link.reached) * len(told) / AHEAD,
        num_bytes=link.num_bytes,
    )


async def socket_costs_us(address: str, num_messages: int = 5_000) -> tuple[float, float]:
    """Microseconds to send and to read one message of a step, on a socket with one peer that reads at once."""
    server = ZmqServerLink(address)
    try:
        client = await ZmqClientLink.connect(server.endpoint, timeout_s=_DEADLINE_S)
        try:
            return await _exchange(server, client, num_messages)
        finally:
            client.close()
    finally:
        server.close()


async def _exchange(server: ZmqServerLink, client: ZmqClientLink, num_messages: int) -> tuple[float, float]:
    """The client asks, and is answered with as many messages, as a step does; then it sends as many."""
    frames = [b"x" * 16, b"x" * 72]
    num_arrived = {"server": 0, "client": 0}
    sent_s = 0.0
    arrived = asyncio.Event()

    def at_server(peer: bytes, message: Frames) -> None:
        nonlocal sent_s
        num_arrived["server"] += 1
        arrived.set()
        if num_arrived["server"] == 1:
            start = time.thread_time()
            for _ in range(num_messages):
                server.send(peer, frames)
            sent_s = time.thread_time() - start

    def at_client(message: Frames) -> None:
        num_arrived["client"] += 1
        arrived.set()

    async def reach(side: str, count: int) -> None:
        while num_arrived[side] < count:
            arrived.clear()
            await arrived.wait()

    async with asyncio.timeout(_DEADLINE_S):
        server.start(at_server)
        client.start(at_client)
        client.send(frames)
        await reach("client", num_messages)
        for _ in range(num_messages):
            client.send(frames)
        start = time.thread_time()
        await reach("server", 1 + num_messages)
        received_s = time.thread_time() - start
    return sent_s / num_messages * 1e6, received_s / num_messages * 1e6


def rows_of(costs: dict[int, Costs], sockets_us: tuple[float, float], inner_us: float) -> list[Row]:
    """The table. Growth is held against that of the logarithm of the number of nodes."""
    rows = []
    for num_nodes, cost in costs.items():
        where = f"{num_nodes} node" + "s" * (num_nodes > 1)
        is_last = num_nodes == NUM_NODES[-1]
        peers = {YARDSTICK: cost.yardstick}
        step = Row(f"step, waited for, {where}", "us", cost.waited, peers)
        if is_last:
            step.goal, step.met = f"<= {GOAL_US}", cost.waited <= GOAL_US
        rows += [
            step,
            Row(f"step, {AHEAD} under way, {where}", "us", cost.ahead, peers),
            Row(f"eager op, {where}", "us", cost.eager, peers),
            Row(f"defining the step, {where}", "us", cost.define, peers),
            Row(f"messages sent a step, {where}", "messages", cost.num_sent),
            Row(f"messages read a step, waited for, {where}", "messages", cost.num_read),
            Row(f"messages read a step, {AHEAD} under way, {where}", "messages", cost.num_read_ahead),
            Row(f"bytes sent a step, {where}", "bytes", cost.num_bytes),
        ]
    few, many = NUM_NODES[-2:]
    growth, allowed = costs[many].waited / costs[few].waited, math.log(many) / math.log(few)
    rows.append(
        Row(f"step, {many} nodes over {few}", "x", growth, {}, f"<= {allowed:g} (log)", growth <= allowed)
    )
    peers = {YARDSTICK: costs[many].yardstick}
    rows += [
        Row("step, waited for, in a node with 8 below it", "us", inner_us, peers),
        Row("socket: sending a message to a node", "us", sockets_us[0], peers),
        Row("socket: reading a message of a node", "us", sockets_us[1], peers),
    ]
    return rows


async def _profile(num_nodes: int) -> None:
    cluster = Cluster(num_nodes)
    profile = cProfile.Profile()
    for step in range(60):
        if step == 10:
            profile.enable()
        cluster.replay()
        cluster.done(cluster.seq)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(20)


async def _measure_all(address: str) -> tuple[dict[int, Costs], tuple[float, float]]:
    return {num_nodes: measure(num_nodes) for num_nodes in NUM_NODES}, await socket_costs_us(address)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--profile", type=int, metavar="NODES", help="profile steps with so many nodes instead"
    )
    arguments = parser.parse_args()
    if arguments.profile:
        asyncio.run(_profile(arguments.profile))
        return
    with tempfile.TemporaryDirectory() as folder:
        costs, sockets_us = asyncio.run(_measure_all(f"ipc://{folder}/scale.sock"))
    if "torch" in sys.modules:
        raise RuntimeError("the controller imported torch")
    report("scale", rows_of(costs, sockets_us, inner_node_us(REPEATS)))


if __name__ == "__main__":
    main()
