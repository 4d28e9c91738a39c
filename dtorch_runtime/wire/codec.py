"""Messages to bytes and back, strictly: an unknown tag, a wrong type or a missing field is refused."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from dtorch_runtime.errors import TransportError
from dtorch_runtime.wire.messages import FromChild, FromParent, Message, ToClient, ToController, ToNode

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_to_controller: msgspec.msgpack.Decoder[ToController] = msgspec.msgpack.Decoder(ToController)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
_from_parent: msgspec.msgpack.Decoder[FromParent] = msgspec.msgpack.Decoder(FromParent)
_from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)


class MalformedMessage(TransportError):
    """Bytes that are no message for this receiver. The receiver drops them and goes on."""


def encode(message: Message) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(message)


def decode_to_controller(frame: Any) -> ToController:
    """A header frame that the controller received.

    Raises:
        MalformedMessage: it is not one of the controller's messages.
    """
    return _decode(_to_controller, frame)


def decode_to_client(frame: Any) -> ToClient:
    """A header frame that a client received.

    Raises:
        MalformedMessage: it is not one of a client's messages.
    """
    return _decode(_to_client, frame)


def decode_to_node(frame: Any) -> ToNode:
    """A header frame that a node received.

    Raises:
        MalformedMessage: it is not one of a node's messages.
    """
    return _decode(_to_node, frame)


def decode_from_parent(frame: Any) -> FromParent:
    """A header frame that came from the node above in a relay, or from who says so.

    Raises:
        MalformedMessage: it is not one of those messages.
    """
    return _decode(_from_parent, frame)


def decode_from_child(frame: Any) -> FromChild:
    """A header frame that came from a node below in a relay.

    Raises:
        MalformedMessage: it is not one of those messages.
    """
    return _decode(_from_child, frame)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: Any) -> _T:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise MalformedMessage(f"not a message of protocol: {error}") from error
