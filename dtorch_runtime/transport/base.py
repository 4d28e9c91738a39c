"""What every transport promises; ``zeromq`` and ``memory`` keep it, and one conformance suite checks both.

A *message* is a sequence of *frames*, each a bytes-like buffer, and arrives whole or not at all. Messages of one
direction of one connection arrive in the order in which they were sent. The transport never looks inside.

Frames of ``LARGE_FRAME_BYTES`` and more are passed on without copying them: give away memory that nobody changes any
more. ``unsent_bytes`` counts what is on its way, and ``drain`` waits for it to fall. Smaller frames may be reused as
soon as ``send`` returns. Received frames are read-only, and large ones are not aligned to 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dtorch_runtime.errors import TransportError

LARGE_FRAME_BYTES = 64 * 1024
"""From this size on a frame is sent and received without copying it. ZeroMQ's own threshold."""

Buffer = bytes | memoryview
Frames = Sequence[Buffer]
Message = list[Buffer]

OnPeerMessage = Callable[[bytes, Message], None]
OnMessage = Callable[[Message], None]


@dataclass(frozen=True, kw_only=True)
class LinkLimits:
    """Bounds on what one connection may hold; beyond them senders are told, and memory does not grow."""

    max_queued_messages: int = 100_000
    """Messages that wait for a slow peer before ``send`` raises."""
    max_unread_messages: int = 256
    """Messages that wait for this process before the peer is held back."""
    max_frame_bytes: int = 1 << 30
    """A peer that announces a larger frame is disconnected."""
    max_unsent_bytes: int = 64 << 20
    """Large frames in flight before ``ThreadLink.send`` blocks."""
    max_messages_per_turn: int = 64
    """Messages read before other callbacks of the event loop get their turn."""


class ServerLink(Protocol):
    """The end that others connect to. Lives in one asyncio loop; every method is called from that loop."""

    @property
    def endpoint(self) -> str:
        """The address that is really bound, with the port that was chosen."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """Bytes of large frames on their way, over all peers."""
        ...

    def start(self, on_message: OnPeerMessage) -> None:
        """Begin to receive: ``on_message(peer, frames)`` is called in the loop for each message.

        A peer is known from its first message on. It gets a new name when it connects again.
        """
        ...

    def send(self, peer: bytes, frames: Frames) -> bool:
        """Queue a message without waiting. False when the peer is unknown or has gone.

        Raises:
            TransportError: the peer does not read and its queue is full, the message has no frames, or the
                link is closed.
        """
        ...

    async def drain(self, max_unsent_bytes: int, timeout_s: float) -> None:
        """Wait until at most ``max_unsent_bytes`` of large frames are in flight.

        Raises:
            ClusterTimeout: peers did not read in time.
        """
        ...

    def close(self, flush_s: float = 0.0) -> None:
        """Close; what is queued is still sent for at most ``flush_s``, in the background. May be called twice.

        Sent is not read: a peer that is more than its ``max_unread_messages`` behind loses the rest with the
        connection. Where the last message matters, wait for an answer to it before closing.
        """
        ...


class ClientLink(Protocol):
    """The end that connects, inside an asyncio loop. Every method is called from that loop."""

    @property
    def endpoint(self) -> str: ...

    @property
    def unsent_bytes(self) -> int: ...

    def start(self, on_message: OnMessage) -> None:
        """Begin to receive: ``on_message(frames)`` is called in the loop for each message."""
        ...

    def send(self, frames: Frames) -> None:
        """Queue a message without waiting.

        Raises:
            TransportError: the server does not read and the queue is full, the message has no frames, or the
                link is closed.
        """
        ...

    async def drain(self, max_unsent_bytes: int, timeout_s: float) -> None:
        """As ``ServerLink.drain``."""
        ...

    def close(self, flush_s: float = 0.0) -> None:
        """As ``ServerLink.close``."""
        ...


class ThreadLink(Protocol):
    """The end that connects, without asyncio. ``send`` and ``wake`` are for any thread, ``receive`` for one."""

    @property
    def endpoint(self) -> str: ...

    @property
    def unsent_bytes(self) -> int: ...

    def send(self, frames: Frames, timeout_s: float = 60.0) -> None:
        """Send from the calling thread. Blocks only while too many bytes of large frames are in flight.

        Raises:
            ClusterTimeout: the server did not take large frames within ``timeout_s``.
            TransportError: the queue is full, the message has no frames, or the link is closed.
        """
        ...

    def receive(self, timeout_s: float) -> list[Message]:
        """Wait for messages and return all that are there. Empty after ``timeout_s`` or a ``wake``.

        Raises:
            TransportError: the link is closed, also when that happens during the wait.
        """
        ...

    def wake(self) -> None:
        """Make the running ``receive`` return, or else the next one."""
        ...

    def close(self, flush_s: float = 0.0) -> None:
        """As ``ServerLink.close``, from any thread."""
        ...


def checked_frames(frames: Frames) -> Message:
    """The frames of a message about to be sent, as a list.

    Raises:
        TransportError: there is none, or one is not a contiguous buffer. Nothing has been sent.
    """
    if not frames:
        raise TransportError(
            "a message of no frames was to be sent; a message has at least one, which may be empty"
        )
    checked: Message = []
    for frame in frames:
        if type(frame) is not bytes:
            view = _view_of_bytes(frame)
            # A small frame may be overwritten as soon as send() returns, whatever the implementation does with it.
            frame = view if view.nbytes >= LARGE_FRAME_BYTES else view.tobytes()
        checked.append(frame)
    return checked


def _view_of_bytes(frame: object) -> memoryview:
    try:
        # mypy has no name for "any object with the buffer protocol" before Python 3.12.
        return memoryview(frame).cast("B")  # type: ignore[arg-type]
    except TypeError as error:
        raise TransportError(
            f"a frame of type {type(frame).__name__} was to be sent; a frame is a contiguous bytes-like buffer, "
            f"for example `memoryview(array)`"
        ) from error
