"""A whole control plane in one thread: the real controller state, real node states over null executors, and clients.

Nothing here has a clock or a socket. Connections are queues; a seeded generator picks which of all possible steps comes
next: a message arrives, a piece of work ends, a client does something, somebody dies. So every order of events that the
network allows can happen, and a seed repeats it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from dtorch_runtime.controller.events import AnswerSelf, BeatsStopped, Event, PeerGone, Received, Send
from dtorch_runtime.controller.handshake import ControllerConfig
from dtorch_runtime.controller.state import ControllerState
from dtorch_runtime.node import events as node_events
from dtorch_runtime.node.agent import perform
from dtorch_runtime.node.executor import ExecutorEvent
from dtorch_runtime.node.state import NodeConfig, NodeState
from dtorch_runtime.testing.null_executor import NullExecutor
from dtorch_runtime.wire.codec import (
    decode_from_child,
    decode_from_parent,
    decode_to_client,
    decode_to_controller,
    decode_to_node,
    encode,
)
from dtorch_runtime.wire.messages import (
    Answer,
    Done,
    FetchFailed,
    Message,
    OpFailed,
    RelayDone,
    Relayed,
    Subgraph,
    Upload,
    ValueData,
)
from dtorch_runtime.wire.records import CountsReply
from tests.support.control import KEY

#: The op that raises on every worker.
RAISING_OP = "test::raise"
_CHUNK_BYTES = 16

Packet = tuple[Message, tuple[Any, ...]]


class SimPeer:
    """One end of a connection to the controller. ``uplink`` and ``downlink`` are what is on the way."""

    def __init__(self, sim: Simulator, number: int) -> None:
        self.sim = sim
        self.number = number
        self.uplink: deque[Packet] = deque()
        self.downlink: deque[Packet] = deque()
        self.is_alive = True

    def send(self, message: Message, frames: Iterable[Any] = ()) -> None:
        if self.is_alive:
            self.uplink.append((message, tuple(frames)))

    def arrived(self, message: Any, frames: tuple[Any, ...]) -> None:
        """A message of the controller."""
        raise NotImplementedError

    def decode(self, frame: bytes) -> Any:
        raise NotImplementedError

    def die(self) -> None:
        """Without a word. Some of what it sent last is lost with it."""
        self.is_alive = False
        for _ in range(self.sim.rng.randrange(len(self.uplink) + 1)):
            self.uplink.pop()
        self.downlink.clear()


class SimLink:
    """A connection of a relay. What is on the way is lost when one of its ends dies, or when it breaks."""

    def __init__(self, number: int, relay: int, parent: SimNode, child: SimNode) -> None:
        self.number = number
        self.relay = relay
        self.parent = parent
        self.child = child
        self.down: deque[Packet] = deque()
        self.up: deque[Packet] = deque()
        self.is_open = True

    def close(self) -> None:
        self.is_open = False
        self.down.clear()
        self.up.clear()

    def deliver_down(self) -> None:
        message, frames = self.down.popleft()
        decoded = decode_from_parent(encode(message))
        peer = b"link-%d" % self.number
        self.child.handle(node_events.ReceivedFromParent(peer=peer, message=decoded, frames=frames))

    def deliver_up(self) -> None:
        message, _ = self.up.popleft()
        decoded = decode_from_child(encode(message))
        self.parent.handle(node_events.ReceivedFromChild(name=self.child.name, message=decoded))

    def break_off(self) -> None:
        """It breaks, and one of the ends notices some time later."""
        self.close()
        end = self.parent.sim.rng.choice((self.parent, self.child))
        end.notices.append(node_events.RelayLinkFailed(relay=self.relay, reason="the link broke"))


class SimNode(SimPeer):
    """A node agent."""

    def __init__(self, sim: Simulator, number: int, name: str, num_devices: int) -> None:
        super().__init__(sim, number)
        self.name = name
        #: Connections to nodes below, and what this node has still to notice of them.
        self.links: list[SimLink] = []
        self.notices: deque[node_events.RelayLinkFailed] = deque()
        #: (session, seq) in the order in which the executor was given them.
        self.taken: list[tuple[int, int]] = []
        self.reports: deque[ExecutorEvent] = deque()
        self.executor = NullExecutor(
            report=self.reports.append, node_name=name, is_gated=True, raising_ops=[RAISING_OP]
        )
        self.state = NodeState(
            NodeConfig(
                name=name,
                host="host",
                pid=number,
                device_type="cpu",
                num_devices=num_devices,
                data_endpoint=f"ipc:///{name}",
                session_key=KEY,
                chunk_bytes=_CHUNK_BYTES,
                relay_endpoint=name,
                check=True,
            )
        )
        self.handle(node_events.Connected())

    def arrived(self, message: Any, frames: tuple[Any, ...]) -> None:
        self.handle(node_events.Received(message=message, frames=frames))

    def decode(self, frame: bytes) -> Any:
        return decode_to_node(frame)

    @property
    def can_notice(self) -> bool:
        """A node below knows of a connection only once it has its seat; then it misses the beats."""
        return bool(self.notices) and self.notices[0].relay <= self.state._doorway.last_relay

    def take_reports(self) -> None:
        """Some of what the executor reported reaches the state."""
        count = self.sim.rng.randrange(len(self.reports)) + 1
        self.handle(node_events.Reported(events=[self.reports.popleft() for _ in range(count)]))

    def handle(self, event: node_events.Event) -> None:
        for action in self.state.handle(event):
            if isinstance(action, node_events.Send):
                self.send(action.message, action.frames)
            elif isinstance(action, node_events.SendDown):
                for link in self.links:
                    if link.is_open:
                        link.down.append((action.message, tuple(action.frames)))
            elif isinstance(action, node_events.SendUp):
                self._send_up(action)
            elif isinstance(action, node_events.LinkRelay):
                self._link(action)
            elif isinstance(action, node_events.Leave):
                assert not self.is_alive, f"{self.name} left: {action.reason}"
            else:
                if isinstance(action, node_events.RunOps):
                    self.taken.append((action.session, action.seq))
                elif isinstance(action, node_events.TakeUpload):
                    self.taken.append((action.message.session, action.message.seq))
                perform(self.executor, action)

    def _send_up(self, action: node_events.SendUp) -> None:
        link = self.sim.links[int(action.peer.removeprefix(b"link-"))]
        if link.is_open:
            link.up.append((action.message, ()))
        else:
            self.notices.append(
                node_events.RelayLinkFailed(relay=link.relay, reason="its connection is gone")
            )

    def _link(self, action: node_events.LinkRelay) -> None:
        for link in self.links:
            link.close()
        self.links = []
        for member in action.children:
            child = next((node for node in self.sim.nodes if node.name == member.endpoint), None)
            if child is None:
                self.notices.append(node_events.RelayLinkFailed(relay=action.relay, reason="nobody is there"))
                continue
            link = SimLink(len(self.sim.links), action.relay, self, child)
            self.sim.links.append(link)
            self.links.append(link)

    def die(self) -> None:
        super().die()
        for link in self.sim.links:
            if self in (link.parent, link.child):
                link.close()


class SimClient(SimPeer):
    """A client: a subclass decides what it does and what it makes of what arrives."""

    @property
    def can_act(self) -> bool:
        """Whether there is something that it would do now."""
        raise NotImplementedError

    def act(self) -> None:
        """Do the next thing."""
        raise NotImplementedError

    def decode(self, frame: bytes) -> Any:
        return decode_to_client(frame)


ClientT = TypeVar("ClientT", bound=SimClient)


class Simulator:
    """See the module. The states check their invariants after every event."""

    def __init__(
        self, rng: random.Random, *, relay_min_nodes: int = 1000, relay_fanout: int = 8, window: int = 10_000
    ) -> None:
        self.rng = rng
        self.now_s = 0.0
        self.controller = ControllerState(
            ControllerConfig(
                is_session_key=lambda key: key == KEY,
                heartbeat_endpoint="",
                started_s=0.0,
                check=True,
                relay_min_nodes=relay_min_nodes,
                relay_fanout=relay_fanout,
                shared_window_ops=window,
            )
        )
        #: Every connection of a relay that there was.
        self.links: list[SimLink] = []
        #: The last relayed message that the controller sent: its relay and its number.
        self._last_relayed = (0, 0)
        #: (session, seq) in the order in which the controller sent them to any node.
        self.order: list[tuple[int, int]] = []
        self.peers: dict[int, SimPeer] = {}
        #: Deaths that the controller has still to notice.
        self._notices: list[Event] = []
        #: How likely a message that may come twice does so.
        self.duplicate_probability = 0.0
        #: Messages to the controller that get lost, which no connection does: for tests of the checks themselves.
        self.loses: Callable[[Message], bool] = lambda message: False
        #: Told of every message that reaches the controller.
        self.watch: Callable[[Message], None] = lambda message: None
        self.num_steps = 0

    # ---- who is there ----

    def add_node(self, name: str, num_devices: int = 2) -> SimNode:
        node = SimNode(self, len(self.peers) + 1, name, num_devices)
        self.peers[node.number] = node
        return node

    def add_client(self, make: Callable[[Simulator, int], ClientT]) -> ClientT:
        client = make(self, len(self.peers) + 1)
        self.peers[client.number] = client
        return client

    @property
    def nodes(self) -> list[SimNode]:
        """The live nodes."""
        return [peer for peer in self.peers.values() if isinstance(peer, SimNode) and peer.is_alive]

    def kill(self, peer: SimPeer, beat_name: str) -> None:
        """End a peer without a word; the controller notices some time later, by either sign."""
        peer.die()
        signs: list[Event] = [
            PeerGone(peer=peer.number, reason="its connection is gone"),
            BeatsStopped(beat_name=beat_name, reason="no heartbeat"),
        ]
        self._notices.append(self.rng.choice(signs))

    # ---- steps ----

    def tell_controller(self, event: Event) -> None:
        """One event for the controller; what it sends is put on the way."""
        self.now_s += 0.001
        for action in self.controller.handle(event, self.now_s):
            if isinstance(action, Send):
                self._note_order(action)
                for number in action.peers:
                    peer = self.peers[number]
                    if peer.is_alive:
                        peer.downlink.append((action.message, tuple(action.frames)))
            elif isinstance(action, AnswerSelf):
                answer = Answer(session=action.session, request_id=action.request_id, reply=CountsReply({}))
                self.peers[action.peer].downlink.append((answer, ()))

    def _note_order(self, action: Send) -> None:
        message = action.message
        if isinstance(message, Relayed):
            if (message.relay, message.number) <= self._last_relayed or not action.frames:
                return  # again, at the end of a relay
            self._last_relayed = (message.relay, message.number)
            message = decode_to_node(action.frames[0])
        if isinstance(message, Subgraph | Upload) and (message.session, message.seq) not in self.order[-1:]:
            self.order.append((message.session, message.seq))

    def run(self, max_steps: int = 100_000, *, until_quiet: bool = True) -> None:
        """Take random steps until none is possible, or ``max_steps`` of them."""
        for _ in range(max_steps):
            steps = self._possible_steps()
            if not steps:
                self.check_order()
                return
            self.rng.choice(steps)()
            self.num_steps += 1
        assert not until_quiet, f"not quiet after {max_steps} steps"

    def deliver_all(self) -> None:
        """Let every message arrive, while no work ends and nobody does anything new."""
        while True:
            waiting = [peer for peer in self.peers.values() if peer.uplink or peer.downlink]
            links = [link for link in self.links if link.down or link.up]
            if not waiting and not links:
                return
            for link in links:
                if link.down:
                    link.deliver_down()
                if link.up:
                    link.deliver_up()
            for peer in waiting:
                if peer.uplink:
                    self._deliver_up(peer)
                if peer.downlink:
                    self._deliver_down(peer)

    def _possible_steps(self) -> list[Callable[[], None]]:
        steps: list[Callable[[], None]] = [partial(self._notice, notice) for notice in self._notices]
        for peer in self.peers.values():
            if peer.uplink:
                steps.append(partial(self._deliver_up, peer))
            if peer.downlink:
                steps.append(partial(self._deliver_down, peer))
            if isinstance(peer, SimNode) and peer.is_alive and peer.executor.num_held:
                steps.append(partial(peer.executor.release, 1))
            if isinstance(peer, SimNode) and peer.is_alive and peer.reports:
                steps.append(peer.take_reports)
            if isinstance(peer, SimNode) and peer.is_alive and peer.can_notice:
                steps.append(partial(self._notice_link, peer))
            if isinstance(peer, SimClient) and peer.is_alive and peer.can_act:
                steps.append(peer.act)
        for link in self.links:
            if link.down:
                steps.append(link.deliver_down)
            if link.up:
                steps.append(link.deliver_up)
        return steps

    def check_order(self) -> None:
        """Every node was given its work in the one order in which the controller got it, each piece once."""
        place = {work: index for index, work in enumerate(self.order)}
        for node in self.peers.values():
            if isinstance(node, SimNode):
                places = [place[work] for work in node.taken]
                assert places == sorted(set(places)), f"{node.name} was given {node.taken}"

    def _notice_link(self, node: SimNode) -> None:
        node.handle(node.notices.popleft())

    def _notice(self, notice: Event) -> None:
        self._notices.remove(notice)
        self.tell_controller(notice)

    def _deliver_up(self, peer: SimPeer) -> None:
        message, frames = peer.uplink.popleft()
        if self.loses(message):
            return
        may_repeat = isinstance(message, Done | RelayDone | ValueData | FetchFailed | OpFailed | Answer)
        if may_repeat and self.rng.random() < self.duplicate_probability:
            peer.uplink.appendleft((message, frames))
        self.watch(message)
        decoded = decode_to_controller(encode(message))
        self.tell_controller(Received(peer=peer.number, message=decoded, frames=frames))

    def _deliver_down(self, peer: SimPeer) -> None:
        message, frames = peer.downlink.popleft()
        peer.arrived(peer.decode(encode(message)), frames)
