"""Two ends in one event loop, with nothing between them: a controller and the agent in its process.

A message is delivered inside ``send``, not a turn of the loop later as by ``memory``, which saves some 30 us each way
in the round trip of a fetch. So a receiver may be called while its own ``send`` is on the way, and must put up with it.
"""

from __future__ import annotations

import logging
from collections import deque

from dtorch_runtime.errors import TransportError
from dtorch_runtime.transport.base import Frames, Message, OnMessage, OnPeerMessage, checked_frames

_logger = logging.getLogger(__name__)

_PEER = b"direct"
_ADDRESS = "direct://controller"


class _Way:
    """One direction. Messages wait until somebody receives; then each is delivered at once, in order."""

    def __init__(self) -> None:
        self._queue: deque[Message] = deque()
        self._sink: OnMessage | None = None
        self._is_delivering = False
        self.is_closed = False

    def put(self, frames: Frames) -> None:
        if self.is_closed:
            raise TransportError(f"cannot send on {_ADDRESS}: the link is closed")
        self._queue.append(checked_frames(frames))
        self.deliver()

    def listen(self, sink: OnMessage) -> None:
        self._sink = sink
        self.deliver()

    def close(self) -> None:
        self.is_closed = True
        self._queue.clear()

    def deliver(self) -> None:
        sink = self._sink
        if sink is None or self._is_delivering:
            return
        self._is_delivering = True
        try:
            while self._queue:
                message = self._queue.popleft()
                try:
                    sink(message)
                except Exception:
                    # As for a callback of the loop: the sender is not to blame, and the next message is delivered.
                    _logger.exception("a receiver on %s raised", _ADDRESS)
        finally:
            self._is_delivering = False


class DirectServerLink:
    """Implements ``base.ServerLink`` for one peer; made by ``direct_links``."""

    def __init__(self, uplink: _Way, downlink: _Way) -> None:
        self._uplink = uplink
        self._downlink = downlink

    @property
    def endpoint(self) -> str:
        return _ADDRESS

    @property
    def unsent_bytes(self) -> int:
        """Nothing is ever on the way: the receiver has what was sent."""
        return 0

    def start(self, on_message: OnPeerMessage) -> None:
        self._uplink.listen(lambda message: on_message(_PEER, message))

    def send(self, peer: bytes, frames: Frames) -> bool:
        if peer != _PEER or self._downlink.is_closed:
            return False
        self._downlink.put(frames)
        return True

    async def drain(self, max_unsent_bytes: int, timeout_s: float) -> None:
        return

    def close(self, flush_s: float = 0.0) -> None:
        self._uplink.close()


class DirectClientLink:
    """Implements ``base.ClientLink``; made by ``direct_links``."""

    def __init__(self, uplink: _Way, downlink: _Way) -> None:
        self._uplink = uplink
        self._downlink = downlink

    @property
    def endpoint(self) -> str:
        return _ADDRESS

    @property
    def unsent_bytes(self) -> int:
        return 0

    def start(self, on_message: OnMessage) -> None:
        self._downlink.listen(on_message)

    def send(self, frames: Frames) -> None:
        self._uplink.put(frames)

    async def drain(self, max_unsent_bytes: int, timeout_s: float) -> None:
        return

    def close(self, flush_s: float = 0.0) -> None:
        self._downlink.close()


def direct_links() -> tuple[DirectServerLink, DirectClientLink]:
    """The two ends of a new connection."""
    uplink, downlink = _Way(), _Way()
    return DirectServerLink(uplink, downlink), DirectClientLink(uplink, downlink)
