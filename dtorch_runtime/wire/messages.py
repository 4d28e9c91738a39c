"""Every control message, grouped by receiver.

A message is a header frame (msgpack, tagged array) and, where its docstring says so, payload frames.
Ops travel as one payload frame of packed native-endian int64 (see ``dtorch_runtime.ir.stream``); tensors as
payload frames of raw bytes in row-major order, at most ``Settings.chunk_bytes`` each.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dtorch_runtime.wire.records import (
    FailureRecord,
    MeshRecord,
    NodeRecord,
    Question,
    Reply,
    TemplateRecord,
)

#: Raised by one whenever a message changes. Both sides must have the same.
PROTOCOL_VERSION = 3


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


def tag_of(message: Message) -> str:
    """What a message is called."""
    return str(type(message).__struct_config__.tag)


# ---- to the controller, from a client ----


class ClientHello(Message, frozen=True, kw_only=True, tag="client_hello"):
    """First message of a client. ``passes`` are those that it wants over its captured calls."""

    version: int
    session_key: bytes
    host: str
    pid: int
    passes: list[str] = []


class DefineMesh(Message, frozen=True, kw_only=True, tag="define_mesh"):
    """Also sent on to every node, with the session filled in."""

    session: int = 0
    mesh: MeshRecord


class DefineTemplates(Message, frozen=True, kw_only=True, tag="define_templates"):
    """Templates, before the first op that uses them. Also sent on to nodes, with the session filled in."""

    session: int = 0
    templates: list[TemplateRecord]


class Ops(Message, frozen=True, kw_only=True, tag="ops"):
    """A batch of op records, in program order. Payload: one frame of int64.

    ``num_ops`` is how much work that is: a captured call counts as many as it stands for.
    """

    seq: int
    graph_id: int
    num_ops: int = 0


class Upload(Message, frozen=True, kw_only=True, tag="upload"):
    """A chunk of a value's local piece, for each of ``devices``. Payload: one frame.

    Also sent on to nodes, with the session filled in. The value exists when ``offset_bytes`` plus the
    payload reaches ``total_bytes``; chunks of one value come in order.
    """

    session: int = 0
    seq: int
    value_id: int
    devices: list[int]
    dtype: str
    shape: list[int]
    offset_bytes: int
    total_bytes: int


class Fetch(Message, frozen=True, kw_only=True, tag="fetch"):
    """Asks one device for its local piece of a value. Also sent on to the node, with the session filled in."""

    session: int = 0
    request_id: int
    value_id: int
    device: int


class Ask(Message, frozen=True, kw_only=True, tag="ask"):
    """Asks the controller and every node of the session. Also sent on to nodes, with the session filled in."""

    session: int = 0
    request_id: int
    question: Question


class ClientBye(Message, frozen=True, kw_only=True, tag="client_bye"):
    """The client leaves; everything of the session is freed."""


class StatusRequest(Message, frozen=True, kw_only=True, tag="status_request"):
    """Asks for a ``Status``; needs the session key, opens no session."""

    version: int
    session_key: bytes


class StopCluster(Message, frozen=True, kw_only=True, tag="stop_cluster"):
    """Asks the controller and all nodes to end."""

    version: int
    session_key: bytes


# ---- to the controller, from a node ----


class NodeHello(Message, frozen=True, kw_only=True, tag="node_hello"):
    """First message of a node agent. ``num_devices`` become cluster-wide ids in the order of joining."""

    version: int
    session_key: bytes
    name: str
    host: str
    pid: int
    device_type: str
    num_devices: int
    data_endpoint: str
    #: Where other agents reach it to pass the controller's messages on; empty for a node that takes no part in that.
    relay_endpoint: str = ""


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """Every worker of the node finished all messages of the session up to ``seq`` that reached the node."""

    session: int
    seq: int


class ValueData(Message, frozen=True, kw_only=True, tag="value_data"):
    """A chunk of the local piece that a fetch asked for. Payload: one frame. Also sent on to the client."""

    session: int
    request_id: int
    device: int
    dtype: str
    shape: list[int]
    offset_bytes: int
    total_bytes: int


class FetchFailed(Message, frozen=True, kw_only=True, tag="fetch_failed"):
    """The fetch has no value. Also sent on to the client."""

    session: int
    request_id: int
    device: int
    failure: FailureRecord


class OpFailed(Message, frozen=True, kw_only=True, tag="op_failed"):
    """An op raised on a worker; once for the op that raised, not for those that depend on it.

    Also sent on to the client. Comes before the ``Done`` of the message that held the op.
    """

    session: int
    failure: FailureRecord


class Answer(Message, frozen=True, kw_only=True, tag="answer"):
    """Answers an ``Ask``. Also sent on to the client, with the node's name filled in; the controller has none."""

    session: int
    request_id: int
    node: str = ""
    reply: Reply


class RelayDone(Message, frozen=True, kw_only=True, tag="relay_done"):
    """The sender, and all nodes below it in the relay, finished every relayed message of the session up to ``seq``.

    Also sent from a node to the one above it.
    """

    relay: int
    session: int
    seq: int


class RelayBroken(Message, frozen=True, kw_only=True, tag="relay_broken"):
    """Messages of the relay do not reach the sender, or those below it."""

    relay: int
    reason: str


class NodeBye(Message, frozen=True, kw_only=True, tag="node_bye"):
    """The node leaves on purpose."""

    reason: str


# ---- to a client ----


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Answer to ``ClientHello``."""

    session: int
    nodes: list[NodeRecord]
    heartbeat_endpoint: str


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The handshake, or a message that the protocol does not allow, was refused. The peer must end."""

    reason: str


class Credit(Message, frozen=True, kw_only=True, tag="credit"):
    """All nodes are done with the session's messages up to ``seq``."""

    seq: int


class Asked(Message, frozen=True, kw_only=True, tag="asked"):
    """Who will answer an ``Ask``, beside the controller. A ``NodeDown`` says that one of them will not after all."""

    request_id: int
    nodes: list[str]


class NodeJoined(Message, frozen=True, kw_only=True, tag="node_joined"):
    """A node joined after ``Welcome``. Also sent to nodes."""

    node: NodeRecord


class NodeDown(Message, frozen=True, kw_only=True, tag="node_down"):
    """A node is lost or left. Also sent to nodes."""

    name: str
    devices: list[int]
    reason: str


class ClusterClosing(Message, frozen=True, kw_only=True, tag="cluster_closing"):
    """The controller ends. Also sent to nodes."""

    reason: str


class Status(Message, frozen=True, kw_only=True, tag="status"):
    """Answer to ``StatusRequest``."""

    nodes: list[NodeRecord]
    sessions: list[int]
    num_ops: int
    uptime_s: float


# ---- to a node ----


class NodeWelcome(Message, frozen=True, kw_only=True, tag="node_welcome"):
    """Answer to ``NodeHello``. ``devices`` are the node's cluster-wide ids; ``nodes`` the others."""

    devices: list[int]
    nodes: list[NodeRecord]
    heartbeat_endpoint: str


class SessionOpened(Message, frozen=True, kw_only=True, tag="session_opened"):
    """A client has come. The following messages may name its session."""

    session: int


class SessionEnded(Message, frozen=True, kw_only=True, tag="session_ended"):
    """The client has gone: drop its work and free its values."""

    session: int


class Subgraph(Message, frozen=True, kw_only=True, tag="subgraph"):
    """Op records of the node's devices, in program order. Payload: one frame of int64."""

    session: int
    seq: int


class RelayMember(msgspec.Struct, frozen=True, array_like=True):
    """A node to pass messages on to."""

    name: str
    endpoint: str


class RelayBegin(Message, frozen=True, kw_only=True, tag="relay_begin"):
    """The node is member ``position`` of a relay, and passes its messages on to ``children``.

    A node with a parent gets them from there, the others from the controller.
    """

    relay: int
    position: int
    has_parent: bool
    children: list[RelayMember]


class RelayMark(Message, frozen=True, kw_only=True, tag="relay_mark"):
    """What the controller sends directly from here on comes after the relayed message ``number``."""

    relay: int
    number: int


class RelayEnd(Message, frozen=True, kw_only=True, tag="relay_end"):
    """The relay is over. Whatever of it the node may lack, up to ``number``, was sent before this."""

    relay: int
    number: int


class Relayed(Message, frozen=True, kw_only=True, tag="relayed"):
    """A message for all members, numbered from 1 without gaps. Payload: its header frame, then its own payload.

    Without payload it only takes its number. Also sent from a node to those below it.
    """

    relay: int
    number: int
    #: Position -> messages that the controller sent directly to that member since the relay began and that come
    #: before this one. Only of members that were sent any since the number before.
    after: dict[int, int]


# ---- to a node, from the node above it in a relay ----


class RelayHello(Message, frozen=True, kw_only=True, tag="relay_hello"):
    """First message on a connection between nodes."""

    session_key: bytes
    relay: int


class RelayBeat(Message, frozen=True, kw_only=True, tag="relay_beat"):
    """A sign of life, with the number of the last message that was passed on."""

    relay: int
    number: int


ToController: TypeAlias = (
    ClientHello
    | DefineMesh
    | DefineTemplates
    | Ops
    | Upload
    | Fetch
    | Ask
    | ClientBye
    | StatusRequest
    | StopCluster
    | NodeHello
    | Done
    | ValueData
    | FetchFailed
    | OpFailed
    | Answer
    | RelayDone
    | RelayBroken
    | NodeBye
)
ToClient: TypeAlias = (
    Welcome
    | Refused
    | Credit
    | NodeJoined
    | NodeDown
    | ClusterClosing
    | Status
    | ValueData
    | FetchFailed
    | OpFailed
    | Asked
    | Answer
)
ToNode: TypeAlias = (
    NodeWelcome
    | Refused
    | SessionOpened
    | SessionEnded
    | DefineMesh
    | DefineTemplates
    | Subgraph
    | Upload
    | Fetch
    | Ask
    | NodeJoined
    | NodeDown
    | ClusterClosing
    | RelayBegin
    | RelayMark
    | RelayEnd
    | Relayed
)
#: From the node above in a relay, and from those below.
FromParent: TypeAlias = RelayHello | RelayBeat | Relayed
FromChild: TypeAlias = RelayDone
