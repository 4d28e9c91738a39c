"""What the controller knows of one client: its graph, its devices, its credits, its fetches. Decisions only."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dtorch_runtime.controller.fanout import Fanout, Group
from dtorch_runtime.controller.membership import Node
from dtorch_runtime.controller.planning import plan_batch, route_of_template
from dtorch_runtime.ir.graph import GraphError, LogicalGraph, Route, RouteTable, unpack_checked
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.records import mesh_from_record
from dtorch_runtime.ir.verify import verify_ops
from dtorch_runtime.passes.rewrite import FIRST_OWN_ID, OwnTemplates, rewrite
from dtorch_runtime.wire.messages import Fetch, Ops, Upload, ValueData
from dtorch_runtime.wire.records import FailureRecord, MeshRecord, TemplateRecord


@dataclass(slots=True)
class PendingFetch:
    """A fetch that a node is to answer."""

    node: int
    device: int
    #: Bytes that have been sent on to the client so far.
    num_received: int = 0


@dataclass(frozen=True, slots=True)
class LostDevice:
    """Why a device is gone for this session."""

    node: str
    reason: str


class Session:
    """One client, from its hello to its end.

    A node that is lost is lost to the session for good: if it comes back, only sessions that begin later see it,
    because the values that this one had there are gone.
    """

    def __init__(
        self,
        number: int,
        peer: int,
        nodes: Iterable[Node],
        fanout: Fanout,
        *,
        check: bool,
        passes: Sequence[str] = (),
    ) -> None:
        self.number = number
        self.peer = peer
        self._fanout = fanout
        self._check = check
        #: Those that are run over captured calls, and the templates that they made.
        self._passes = passes
        self._own_templates = OwnTemplates()
        self._routes = RouteTable()
        self.graph = LogicalGraph(self._routes)
        #: mesh id -> record. A mesh is defined once.
        self.meshes: dict[int, MeshRecord] = {}
        #: Number -> peer of the live nodes that take part.
        self.nodes: dict[int, int] = {}
        #: The live nodes of each route that was used since a node last came or went.
        self._groups: dict[Route, Group] = {}
        #: device -> node number, for the nodes above only.
        self.node_of_device: dict[int, int] = {}
        #: Devices whose node was lost during the session. None of them is in the table above.
        self.lost_devices: dict[int, LostDevice] = {}
        #: (seq, nodes that got a part) of messages that are not credited, by rising seq, all above `credited`. What
        #: went through a relay waits for the relay's keys, negative numbers, in the place of nodes.
        self._in_flight: deque[tuple[int, tuple[int, ...]]] = deque()
        #: (seq, ops) of those that are batches of ops, and the sum.
        self._weights: deque[tuple[int, int]] = deque()
        self.num_ops_at_nodes = 0
        #: The live nodes and keys that are not done with the first of these. Empty only when there is none.
        self._waiting: set[int] = set()
        #: node number or key -> seq up to which it is done. Of the nodes above and of the present relay only.
        self._done: dict[int, int] = {}
        #: node number or key -> seq of the last message that it got directly, or that the relay was given.
        self._sent: dict[int, int] = {}
        self.last_seq = 0
        self._credited = 0
        self._credit_told = 0
        #: request id -> where it waits. Of live nodes only.
        self.fetches: dict[int, PendingFetch] = {}
        for node in nodes:
            self.add_node(node)

    # ---- nodes ----

    def add_node(self, node: Node) -> bool:
        """Let a node take part. False when the session lost one of its devices before."""
        if any(device in self.lost_devices for device in node.record.devices):
            return False
        self.nodes[node.number] = node.peer
        self._done[node.number] = self._sent[node.number] = 0
        self.node_of_device.update(dict.fromkeys(node.record.devices, node.number))
        self._reroute()
        return True

    def lose_node(self, node: Node, reason: str) -> list[tuple[int, int]]:
        """Take a node out. Returns the (request id, device) of the fetches that nobody will answer."""
        if node.number not in self.nodes:
            return []
        del self.nodes[node.number]
        del self._done[node.number], self._sent[node.number]
        for device in node.record.devices:
            del self.node_of_device[device]
            self.lost_devices[device] = LostDevice(node.name, reason)
        self._reroute()
        failed = [(request, f.device) for request, f in self.fetches.items() if f.node == node.number]
        for request, _ in failed:
            del self.fetches[request]
        self._waiting.discard(node.number)
        self._advance()
        return failed

    def _reroute(self) -> None:
        self._groups.clear()
        for record in self.graph.templates.values():
            route = route_of_template(record, self.meshes, self.node_of_device, self._routes)
            self.graph.set_route(record, route)

    # ---- definitions ----

    def define_mesh(self, record: MeshRecord) -> None:
        """Raises GraphError for a mesh that cannot be, or another one under a known id."""
        known = self.meshes.get(record.mesh_id)
        if known is not None and known != record:
            raise GraphError(f"mesh {record.mesh_id} is defined twice, as {known} and as {record}")
        _check_mesh(record)
        self.meshes[record.mesh_id] = record

    def define_templates(self, records: Iterable[TemplateRecord]) -> list[TemplateRecord]:
        """Add templates. Returns what the nodes are told: bodies as passes have left them, after what they name.

        Raises:
            GraphError: a template cannot be.
        """
        told: list[TemplateRecord] = []
        for record in records:
            if record.template_id >= FIRST_OWN_ID:
                raise GraphError(
                    f"template {record.template_id}: ids from {FIRST_OWN_ID} are the controller's own"
                )
            for defined in [record] if record.body is None else self._rewritten(record):
                route = route_of_template(defined, self.meshes, self.node_of_device, self._routes)
                self.graph.define_template(defined, route)
                told.append(defined)
        return told

    def _rewritten(self, record: TemplateRecord) -> list[TemplateRecord]:
        found = rewrite(
            record,
            self.graph.templates,
            {
                number: mesh_from_record(self.meshes[number])
                for number in record.mesh_ids
                if number in self.meshes
            },
            self._passes,
            self._own_templates,
            node_of=self.node_of_device,
            check=self._check,
        )
        return [*found.made, found.record]

    # ---- messages with a seq ----

    def add_ops(self, message: Ops, frame: Any) -> list[tuple[Group, Any]]:
        """Add a batch. Returns groups of nodes and the payload for each of them.

        Raises:
            GraphError: the batch cannot be, or comes out of order.
        """
        if message.num_ops < 0:
            raise GraphError(f"a batch of {message.num_ops} ops came")
        self._take_seq(message.seq)
        self._weights.append((message.seq, message.num_ops))
        self.num_ops_at_nodes += message.num_ops
        if self._check:
            verify_ops(unpack_checked(frame), self.graph.templates, self.graph.values)
        segments = self.graph.add_ops(message.seq, message.graph_id, frame)
        if len(segments) == 1:
            group = self._group(segments[0].route)
            self._track(message.seq, self._fanout.keys(group, may_begin=True))
            return [(group, frame)] if group.nodes else []
        plan = [(self._group_of(nodes), part) for nodes, part in plan_batch(segments, frame, self.nodes)]
        # No relay begins here: it could end the one that carries another of these groups.
        keys = [self._fanout.keys(group, may_begin=False) for group, _ in plan]
        self._track(message.seq, sum(keys, ()))
        return plan

    def _group(self, route: Route) -> Group:
        group = self._groups.get(route)
        if group is None:
            live = [node for node in route.nodes if node in self.nodes]
            group = self._groups[route] = self._group_of(live)
        return group

    def _group_of(self, nodes: Iterable[int]) -> Group:
        nodes = tuple(nodes)
        return Group(nodes, tuple(map(self.nodes.__getitem__, nodes)))

    def add_upload(self, message: Upload, num_bytes: int) -> list[tuple[Group, Upload]]:
        """Add a chunk of a value. Returns groups of nodes and the message for each; one for all, if a relay has it.

        Raises:
            GraphError: the chunk does not lie inside the value, or comes out of order.
        """
        self._take_seq(message.seq)
        offset, total = message.offset_bytes, message.total_bytes
        if min(message.shape, default=0) < 0:
            raise GraphError(f"an upload has shape {message.shape}; sizes are not negative")
        if offset < 0 or offset + num_bytes > total:
            raise GraphError(f"an upload of {num_bytes} bytes at {offset} lies outside its {total} bytes")
        devices_of_node: dict[int, list[int]] = {}
        for device in message.devices:
            node = self.node_of_device.get(device)
            if node is not None:
                devices_of_node.setdefault(node, []).append(device)
        self.graph.add_upload(message.seq, message.value_id, self._routes.to(set(devices_of_node)))
        everybody = self._group_of(sorted(devices_of_node))
        keys = self._fanout.keys(everybody, may_begin=False)
        self._track(message.seq, keys)
        if keys != everybody.nodes:  # each node takes its own devices out of the list
            return [(everybody, msgspec.structs.replace(message, session=self.number))]
        return [
            (self._group_of((node,)), msgspec.structs.replace(message, session=self.number, devices=devices))
            for node, devices in devices_of_node.items()
        ]

    def _take_seq(self, seq: int) -> None:
        if seq <= self.last_seq:
            raise GraphError(f"message {seq} came after message {self.last_seq}")
        self.last_seq = seq

    def _track(self, seq: int, nodes: tuple[int, ...]) -> None:
        self._sent.update(dict.fromkeys(nodes, seq))
        self._in_flight.append((seq, nodes))
        if len(self._in_flight) == 1:
            # Nobody can be done with what is only now being sent.
            self._waiting.update(nodes)
            self._advance()

    def done(self, node: int, seq: int) -> None:
        """A node, or with the key of a relay all nodes below it, is done up to ``seq``.

        Raises:
            GraphError: it was not given as much.
        """
        if seq > self._sent.get(node, 0):
            raise GraphError(f"message {seq} of session {self.number} was reported done, and never sent")
        if seq <= self._done.get(node, 0):
            return
        self._done[node] = seq
        if self._in_flight and seq >= self._in_flight[0][0]:
            self._waiting.discard(node)
            self._advance()

    def _advance(self) -> None:
        """Credit the first messages that no node is to be waited for."""
        in_flight = self._in_flight
        before = self._credited
        while in_flight and not self._waiting:
            self._credited, _ = in_flight.popleft()
            if in_flight:
                seq, nodes = in_flight[0]
                self._waiting.update(self._not_done(seq, nodes))
        if self._credited != before:
            self.graph.retire(self._credited)
            weights = self._weights
            while weights and weights[0][0] <= self._credited:
                self.num_ops_at_nodes -= weights.popleft()[1]

    def _not_done(self, seq: int, nodes: Iterable[int]) -> list[int]:
        """Those of these nodes that live, and keys, that are not done with a message."""
        live, done = self.nodes, self._done
        return [node for node in nodes if (node < 0 or node in live) and done.get(node, 0) < seq]

    def end_relay(self, keys: Sequence[int], nodes: Sequence[int]) -> None:
        """A relay is over: each of its ``nodes`` will say itself how far it is, where its ``keys`` were waited for."""
        last = self._sent.get(keys[0], 0)
        for key in keys:
            self._sent.pop(key, None)
            self._done.pop(key, None)
        if not last:
            return
        for node in nodes:
            if node in self.nodes:
                self._sent[node] = max(self._sent[node], last)
        replaced = set(keys)
        for index, (seq, waited) in enumerate(self._in_flight):
            if not replaced.isdisjoint(waited):
                others = tuple(node for node in waited if node > 0)
                self._in_flight[index] = (seq, tuple(sorted({*others, *nodes})))
        if self._in_flight:
            self._waiting = set(self._not_done(*self._in_flight[0]))
            self._advance()

    def take_credit(self) -> int | None:
        """The seq up to which everything is done, if the client was not told yet."""
        if self._credited == self._credit_told:
            return None
        self._credit_told = self._credited
        return self._credited

    def is_ready(self, value_id: int) -> bool:
        """Whether the message that produced a value is done on every node that holds a piece of it."""
        segment = self.graph.values.get(value_id)
        return segment is not None and all(
            self._done.get(node, 0) >= segment.seq for node in segment.route.nodes
        )

    # ---- fetches ----

    def add_fetch(self, message: Fetch) -> int | FailureRecord:
        """The node that will answer, or why nobody can.

        Raises:
            GraphError: a fetch with this request id is on its way.
        """
        if message.request_id in self.fetches:
            raise GraphError(f"fetch {message.request_id} was asked for twice")
        node = self.node_of_device.get(message.device)
        if node is None:
            return self.device_failure(message.device)
        if message.value_id not in self.graph.values:
            text = f"value {message.value_id} was fetched before it was made or after it was freed"
            return internal_failure(f"value:{self.number}:{message.value_id}", message.device, text)
        self.fetches[message.request_id] = PendingFetch(node, message.device)
        return node

    def take_chunk(self, node: int, message: ValueData, num_bytes: int) -> FailureRecord | bool:
        """Account for a chunk that a node sent. True: send it on. False: nobody waits for it (any more).

        A failure instead: the chunks do not make up the value, and the fetch is over.
        """
        fetch = self.fetches.get(message.request_id)
        if fetch is None or fetch.node != node or fetch.device != message.device:
            return False
        end = message.offset_bytes + num_bytes
        if message.offset_bytes < fetch.num_received and end <= fetch.num_received:
            return False  # it came twice
        if message.offset_bytes != fetch.num_received or end > message.total_bytes:
            del self.fetches[message.request_id]
            text = f"bytes {message.offset_bytes} to {end} of {message.total_bytes} came after {fetch.num_received}"
            return internal_failure(f"fetch:{self.number}:{message.request_id}", message.device, text)
        fetch.num_received = end
        if end == message.total_bytes:
            del self.fetches[message.request_id]
        return True

    def end_fetch(self, node: int, request_id: int) -> bool:
        """A node says that it has no value. False when nobody waits for it (any more)."""
        fetch = self.fetches.get(request_id)
        if fetch is None or fetch.node != node:
            return False
        del self.fetches[request_id]
        return True

    def device_failure(self, device: int) -> FailureRecord:
        """Why a device has no values: its node is lost, or there never was one."""
        lost = self.lost_devices.get(device)
        reason = f"no node of the cluster has device {device}" if lost is None else lost.reason
        return node_failure(device, "" if lost is None else lost.node, reason)

    def validate(self, live_nodes: Container[int]) -> None:
        """Check the invariants that the attributes state."""
        self.graph.validate()
        assert all(node in live_nodes for node in self.nodes)
        numbers = self.nodes.keys()
        assert set(self.node_of_device.values()) == numbers <= self._done.keys() & self._sent.keys()
        relay = self._fanout.relay
        assert {*self._done, *self._sent} <= {*numbers, *(() if relay is None else relay.keys)}
        for route, group in self._groups.items():
            assert group == self._group_of(node for node in route.nodes if node in self.nodes)
        assert not self.node_of_device.keys() & self.lost_devices.keys()
        assert all(fetch.node in self.nodes for fetch in self.fetches.values())
        assert all(done <= self._sent[node] for node, done in self._done.items())
        assert all(sent <= self.last_seq for sent in self._sent.values())
        seqs = [seq for seq, _ in self._in_flight]
        assert seqs == sorted(set(seqs))
        assert all(self._credited < seq <= self.last_seq for seq in seqs)
        assert self._credit_told <= self._credited <= self.last_seq
        seq, nodes = self._in_flight[0] if self._in_flight else (0, ())
        waiting = set(self._not_done(seq, nodes))
        assert self._waiting == waiting, "it waits for other nodes than those that are not done"
        assert waiting or not self._in_flight, "a message waits for nobody"
        assert {seq for seq, _ in self._weights} <= set(seqs)
        assert self.num_ops_at_nodes == sum(num_ops for _, num_ops in self._weights)
        assert all(segment.seq > self._credited for segment in self.graph.pending)


def node_failure(device: int, node: str, reason: str) -> FailureRecord:
    """No value, because the node that held it is gone. Equal for all devices of the node."""
    return FailureRecord(
        kind="node",
        failure_id=f"node:{node}:{'' if node else device}",
        op="",
        location_id=0,
        device=device,
        node=node,
        error_type="NodeLost",
        message=reason,
        traceback="",
    )


def internal_failure(failure_id: str, device: int, message: str) -> FailureRecord:
    """No value, because one side broke the protocol: a bug of ours."""
    return FailureRecord(
        kind="internal",
        failure_id=failure_id,
        op="",
        location_id=0,
        device=device,
        node="",
        error_type="InternalError",
        message=message,
        traceback="",
    )


def _check_mesh(record: MeshRecord) -> DeviceMesh:
    try:
        return mesh_from_record(record)
    except ValueError as error:
        raise GraphError(f"mesh {record.mesh_id} cannot be: {error}") from None
