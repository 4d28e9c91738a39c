"""What happens to the controller, and what it does about it. Plain; ``state`` decides, ``server`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from dtorch_runtime.wire.messages import Message, ToController
from dtorch_runtime.wire.records import Question

# ---- events ----


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded message of a peer, with its payload frames."""

    peer: int
    message: ToController
    frames: Sequence[Any] = ()


class ReceivedGarbage(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a peer that are no message."""

    peer: int
    reason: str


class PeerGone(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's connection is gone, or it does not read what it is sent."""

    peer: int
    reason: str


class BeatsStopped(msgspec.Struct, frozen=True, kw_only=True):
    """No sign of life from the peer that beats under this name."""

    beat_name: str
    reason: str


class StopAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The process is to end."""

    reason: str


Event: TypeAlias = Received | ReceivedGarbage | PeerGone | BeatsStopped | StopAsked

# ---- actions ----


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Send a message to each of these peers."""

    peers: tuple[int, ...]
    message: Message
    frames: Sequence[Any] = ()


class ForgetPeer(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing more is sent to this peer, and what it sends is of no interest."""

    peer: int


class WatchBeats(msgspec.Struct, frozen=True, kw_only=True):
    """Expect heartbeats of a peer, under this name."""

    peer: int
    beat_name: str


class ForgetBeats(msgspec.Struct, frozen=True, kw_only=True):
    """Expect them no more."""

    beat_name: str


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """End the process, once what was sent has left."""

    reason: str


class AnswerSelf(msgspec.Struct, frozen=True, kw_only=True):
    """Answer a client's question for the controller's own process."""

    peer: int
    session: int
    request_id: int
    question: Question


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the operator of the cluster wants to read."""

    text: str


Action: TypeAlias = Send | ForgetPeer | WatchBeats | ForgetBeats | Stop | AnswerSelf | Log
