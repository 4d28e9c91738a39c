"""Messages between node agents: boxes of tensors on their way from a device to another agent.

A message is one header frame (msgpack, tagged array) and, where its docstring says so, one payload frame. ``key`` is
the session key of the cluster: it stands in every message, so that a connection needs no handshake and may break and
come back.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from dtorch_runtime.wire.codec import MalformedMessage
from dtorch_runtime.wire.records import FailureRecord


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Which parcel: the ``number``-th that ``device`` gives the receiving agent in a step of a transfer."""

    session: int
    value_id: int
    step: int
    device: int
    number: int


class DataMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages between agents."""


class ParcelChunk(DataMessage, frozen=True, kw_only=True, tag="chunk"):
    """A part of a parcel. Payload: ``num_bytes`` of its elements in row-major order, from ``offset_bytes`` on.

    Chunks of one parcel come in order; it is whole when ``total_bytes`` are there.
    """

    key: bytes
    place: Place
    dtype: str
    shape: list[int]
    offset_bytes: int
    num_bytes: int
    total_bytes: int
    #: The sender, who is told when a large parcel has been read.
    node: str


class ParcelInSegment(DataMessage, frozen=True, kw_only=True, tag="segment"):
    """A parcel lies in a shared-memory segment of the sender, who is on the same machine."""

    key: bytes
    place: Place
    dtype: str
    shape: list[int]
    total_bytes: int
    #: Name under /dev/shm.
    segment: str
    #: The sender, who is told when the parcel has been read: by a message, or by the receipt in the segment.
    node: str
    has_receipt: bool


class ParcelRead(DataMessage, frozen=True, kw_only=True, tag="parcel_read"):
    """Nobody reads a large parcel any more: its segment may be used again, and its device may send more."""

    key: bytes
    place: Place
    #: The reader.
    node: str


class PoisonParcel(DataMessage, frozen=True, kw_only=True, tag="poison"):
    """There is no such parcel, and why."""

    key: bytes
    place: Place
    failure: FailureRecord


class BoxOffer(DataMessage, frozen=True, kw_only=True, tag="box"):
    """The sender has made a mailbox for the reader, who is on the same machine, and uses it once that is answered."""

    key: bytes
    #: The sender, and the name of the box under /dev/shm.
    node: str
    segment: str


class BoxTaken(DataMessage, frozen=True, kw_only=True, tag="box_taken"):
    """The mailbox that the receiver of this message has offered is read from now on."""

    key: bytes
    #: The reader, and the name of its bell under /dev/shm.
    node: str
    bell: str


ToAgent: TypeAlias = ParcelChunk | ParcelInSegment | ParcelRead | PoisonParcel | BoxOffer | BoxTaken

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)


def encode_data(message: DataMessage) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(message)


def decode_data(frame: Any) -> ToAgent:
    """A header frame that an agent received from another.

    Raises:
        MalformedMessage: it is not one of these messages.
    """
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise MalformedMessage(f"not a message between agents: {error}") from error
