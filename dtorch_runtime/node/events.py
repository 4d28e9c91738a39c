"""What happens to a node agent, and what it does about it. Plain; ``state`` decides, ``agent`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from dtorch_runtime.node.executor import ExecutorEvent
from dtorch_runtime.wire.messages import (
    FromChild,
    FromParent,
    Message,
    RelayMember,
    ToNode,
    Upload,
)
from dtorch_runtime.wire.records import MeshRecord, NodeRecord, Question, TemplateRecord

# ---- events ----


class Connected(msgspec.Struct, frozen=True, kw_only=True):
    """There is a connection to the controller; it was told nothing yet."""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded message of the controller, with its payload frames."""

    message: ToNode
    frames: Sequence[Any] = ()


class ReceivedFromParent(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded message of another node, on the connection ``peer`` that it made to this one."""

    peer: bytes
    message: FromParent
    frames: Sequence[Any] = ()


class ReceivedFromChild(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded message of the node ``name`` below this one."""

    name: str
    message: FromChild


class RelayLinkFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the relay cannot be reached, or does not read, or sends what is no message."""

    relay: int
    reason: str


class Ticked(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat interval has passed, while the node has a seat in a relay."""


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor reported since the last time, in its order."""

    events: Sequence[ExecutorEvent]


class ConnectionLost(msgspec.Struct, frozen=True, kw_only=True):
    """The controller is silent, gone, or does not read."""

    reason: str


class ExecutorBroke(msgspec.Struct, frozen=True, kw_only=True):
    """The executor cannot be made, or raised: the node is of no use any more."""

    reason: str


class CloseAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The process is to end."""

    reason: str


Event: TypeAlias = (
    Connected
    | Received
    | ReceivedFromParent
    | ReceivedFromChild
    | RelayLinkFailed
    | Ticked
    | Reported
    | ConnectionLost
    | ExecutorBroke
    | CloseAsked
)

# ---- actions ----


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Send a message to the controller."""

    message: Message
    frames: Sequence[Any] = ()


class LinkRelay(msgspec.Struct, frozen=True, kw_only=True):
    """Close the connections to the nodes below, and connect to these; tick while ``relay`` is not 0."""

    relay: int
    children: tuple[RelayMember, ...]


class SendDown(msgspec.Struct, frozen=True, kw_only=True):
    """Send a message to every node below; before a connection is there it waits in line."""

    message: Message
    frames: Sequence[Any] = ()


class SendUp(msgspec.Struct, frozen=True, kw_only=True):
    """Send a message to the node above, which has made the connection ``peer``."""

    peer: bytes
    message: Message


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """It is over: close the executor and the connection. An agent whose controller is lost may join again."""

    reason: str
    is_controller_lost: bool = False
    is_refused: bool = False
    #: The node itself is of no use any more.
    is_broken: bool = False


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Send heartbeats from now on, and tell the executor which devices are its own."""

    devices: tuple[int, ...]
    nodes: tuple[NodeRecord, ...]
    heartbeat_endpoint: str


class PeerNodeJoined(msgspec.Struct, frozen=True, kw_only=True):
    """``Executor.node_joined``."""

    node: NodeRecord


class PeerNodeLost(msgspec.Struct, frozen=True, kw_only=True):
    """``Executor.node_lost``."""

    name: str
    devices: tuple[int, ...]
    reason: str


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    """``Executor.open_session``."""

    session: int


class EndSession(msgspec.Struct, frozen=True, kw_only=True):
    """``Executor.end_session``."""

    session: int


class AddMesh(msgspec.Struct, frozen=True, kw_only=True):
    """``Executor.define_mesh``."""

    session: int
    record: MeshRecord


class AddTemplates(msgspec.Struct, frozen=True, kw_only=True):
    """``Executor.define_templates``."""

    session: int
    records: tuple[TemplateRecord, ...]


class RunOps(msgspec.Struct, frozen=True, kw_only=True):
    """``Executor.run``, of the unpacked frame."""

    session: int
    seq: int
    frame: Any


class TakeUpload(msgspec.Struct, frozen=True, kw_only=True):
    """``Executor.upload``."""

    message: Upload
    frame: Any


class StartFetch(msgspec.Struct, frozen=True, kw_only=True):
    """``Executor.fetch``."""

    session: int
    request_id: int
    value_id: int
    device: int


class TakeQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """``Executor.ask``; what the shell knows by itself it answers itself."""

    session: int
    request_id: int
    question: Question


#: Actions that are calls of the executor. Those that come before it exists wait for it, in order.
ExecutorCall: TypeAlias = (
    Joined
    | PeerNodeJoined
    | PeerNodeLost
    | OpenSession
    | EndSession
    | AddMesh
    | AddTemplates
    | RunOps
    | TakeUpload
    | StartFetch
    | TakeQuestion
)
Action: TypeAlias = Send | SendDown | SendUp | LinkRelay | Leave | ExecutorCall
