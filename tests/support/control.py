"""A controller under test: its state with numbered peers, a manual clock, and what it sent to whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

from dtorch_runtime.controller.events import (
    Action,
    BeatsStopped,
    Event,
    PeerGone,
    Received,
    Send,
)
from dtorch_runtime.controller.handshake import ControllerConfig
from dtorch_runtime.controller.state import ControllerState
from dtorch_runtime.ir.stream import FREE, pack
from dtorch_runtime.wire.messages import (
    PROTOCOL_VERSION,
    ClientHello,
    DefineMesh,
    DefineTemplates,
    Done,
    Fetch,
    Message,
    NodeHello,
    NodeWelcome,
    Ops,
    Upload,
    ValueData,
    Welcome,
)
from dtorch_runtime.wire.records import FailureRecord, MeshRecord, Slot, TemplateRecord

KEY = b"k" * 32
T = TypeVar("T", bound=Message)


def node_hello(name: str = "node0", num_devices: int = 2, **changes: Any) -> NodeHello:
    fields: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "session_key": KEY,
        "name": name,
        "host": "host",
        "pid": 1,
        "device_type": "cpu",
        "num_devices": num_devices,
        "data_endpoint": f"ipc:///{name}",
    }
    return NodeHello(**(fields | changes))


def client_hello(**changes: Any) -> ClientHello:
    fields: dict[str, Any] = {"version": PROTOCOL_VERSION, "session_key": KEY, "host": "host", "pid": 2}
    return ClientHello(**(fields | changes))


def mesh(mesh_id: int, devices: Sequence[int]) -> MeshRecord:
    return MeshRecord(mesh_id, "cpu", [len(devices)], list(devices))


def template(
    template_id: int,
    num_inputs: int = 0,
    num_outputs: int = 1,
    mesh_ids: Sequence[int] = (1,),
    op: str = "aten::add.Tensor",
    **changes: Any,
) -> TemplateRecord:
    return TemplateRecord(
        template_id=template_id,
        op=op,
        args=[Slot(index) for index in range(num_inputs)],
        kwargs={},
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        num_scalars=0,
        mesh_ids=list(mesh_ids),
        **changes,
    )


def op(template_id: int, *value_ids: int) -> list[int]:
    """An op record: inputs, then outputs."""
    return [template_id, 0, *value_ids]


def free(*value_ids: int) -> list[int]:
    return [FREE, len(value_ids), *value_ids]


def frame(*records: list[int]) -> bytes:
    return pack([word for record in records for word in record])


def failure(kind: str = "op", failure_id: str = "f1", device: int = 0) -> FailureRecord:
    return FailureRecord(kind, failure_id, "aten::mm", 0, device, "node0", "RuntimeError", "no", "tb")


def value_data(session: int, request_id: int, device: int, offset: int = 0, total: int = 8) -> ValueData:
    return ValueData(
        session=session,
        request_id=request_id,
        device=device,
        dtype="int64",
        shape=[],
        offset_bytes=offset,
        total_bytes=total,
    )


def upload(seq: int, value_id: int, devices: Sequence[int], offset: int = 0, total: int = 8) -> Upload:
    return Upload(
        seq=seq,
        value_id=value_id,
        devices=list(devices),
        dtype="int64",
        shape=[],
        offset_bytes=offset,
        total_bytes=total,
    )


class ControllerRig:
    """Feeds a ``ControllerState`` and keeps what it did. Invariants are checked after each event."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.state = ControllerState(
            ControllerConfig(
                is_session_key=lambda key: key == KEY,
                heartbeat_endpoint="ipc:///beats",
                started_s=self.now_s,
                check=True,
            )
        )
        self.sent: dict[int, list[tuple[Message, tuple[Any, ...]]]] = defaultdict(list)
        self.actions: list[Action] = []
        self._num_peers = 0

    def handle(self, event: Event) -> list[Action]:
        actions = self.state.handle(event, self.now_s)
        self.actions += actions
        for action in actions:
            if isinstance(action, Send):
                for peer in action.peers:
                    self.sent[peer].append((action.message, tuple(action.frames)))
        self.state.validate()
        return actions

    def receive(self, peer: int, message: Message, *frames: Any) -> list[Action]:
        return self.handle(Received(peer=peer, message=message, frames=frames))  # type: ignore[arg-type]

    def lose(self, peer: int, reason: str = "gone") -> list[Action]:
        return self.handle(PeerGone(peer=peer, reason=reason))

    def silence(self, beat_name: str) -> list[Action]:
        return self.handle(BeatsStopped(beat_name=beat_name, reason="silent"))

    def new_peer(self) -> int:
        self._num_peers += 1
        return self._num_peers

    def add_node(self, name: str = "node0", num_devices: int = 2, **changes: Any) -> int:
        peer = self.new_peer()
        self.receive(peer, node_hello(name, num_devices, **changes))
        return peer

    def add_client(self, **changes: Any) -> int:
        peer = self.new_peer()
        self.receive(peer, client_hello(**changes))
        return peer

    def devices(self, node_peer: int) -> list[int]:
        return self.only(node_peer, NodeWelcome).devices

    def session(self, client_peer: int) -> int:
        return self.only(client_peer, Welcome).session

    def define(self, client: int, meshes: Sequence[MeshRecord], templates: Sequence[TemplateRecord]) -> None:
        for record in meshes:
            self.receive(client, DefineMesh(mesh=record))
        self.receive(client, DefineTemplates(templates=list(templates)))

    def ops(self, client: int, seq: int, *records: list[int]) -> list[Action]:
        return self.receive(client, Ops(seq=seq, graph_id=1), frame(*records))

    def fetch(self, client: int, request_id: int, value_id: int, device: int) -> list[Action]:
        return self.receive(client, Fetch(request_id=request_id, value_id=value_id, device=device))

    def done(self, node: int, session: int, seq: int) -> list[Action]:
        return self.receive(node, Done(session=session, seq=seq))

    def all(self, peer: int, kind: type[T]) -> list[T]:
        """What a peer was sent of this kind."""
        return [message for message, _ in self.sent[peer] if isinstance(message, kind)]

    def only(self, peer: int, kind: type[T]) -> T:
        """The one message of this kind that a peer was sent."""
        (message,) = self.all(peer, kind)
        return message

    def frames(self, peer: int, kind: type[Message]) -> list[bytes]:
        """The payloads of the messages of this kind."""
        return [bytes(frames[0]) for message, frames in self.sent[peer] if isinstance(message, kind)]

    def clear(self) -> None:
        """Forget what was sent."""
        self.sent.clear()
        self.actions.clear()


def program(rig: ControllerRig, nodes: int = 2) -> tuple[list[int], int, int]:
    """Nodes with two devices each, and a client with mesh 1 on all of them and mesh 2+i on node i.

    Template 1 makes a value on mesh 1, template 2+i on mesh 2+i. Returns (node peers, client peer, session).
    """
    peers = [rig.add_node(f"node{index}") for index in range(nodes)]
    client = rig.add_client()
    meshes = [mesh(1, range(2 * nodes))] + [mesh(2 + i, [2 * i, 2 * i + 1]) for i in range(nodes)]
    rig.define(client, meshes, [template(1 + i, mesh_ids=[1 + i]) for i in range(nodes + 1)])
    session = rig.session(client)
    rig.clear()
    return peers, client, session
