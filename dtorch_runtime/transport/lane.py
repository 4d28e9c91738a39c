"""One direction of one in-memory connection: a queue that tests may hold, and script faults on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from dtorch_runtime.errors import ClusterTimeout, TransportError
from dtorch_runtime.transport.base import LARGE_FRAME_BYTES, LinkLimits, Message, OnMessage


class Lane:
    """One direction of one connection. Used from its event loop only.

    Messages are numbered from 0 in the order in which they are sent, dropped ones included.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, limits: LinkLimits) -> None:
        self._loop = loop
        self._name = name
        #: The queue's bound is the sender's, the size of a portion the receiver's.
        self.max_queued_messages = limits.max_queued_messages
        self.max_messages_per_turn = limits.max_messages_per_turn
        self._queue: deque[Message] = deque()
        self._sink: OnMessage | None = None
        self._is_held = False
        self._is_scheduled = False
        self._num_sent = 0
        #: Keyed by the number of the message: what to do with it, and by how many messages to delay it.
        self._faults: dict[int, tuple[str, int]] = {}
        #: Delayed messages, each with the number of the message that it goes behind.
        self._delayed: list[tuple[int, Message]] = []
        self._delivered = asyncio.Event()
        self.unsent_bytes = 0
        #: Called when ``unsent_bytes`` has fallen.
        self.on_fall: Callable[[], None] = lambda: None

    @property
    def num_queued(self) -> int:
        """Messages sent and not delivered, delayed ones left out."""
        return len(self._queue)

    def hold(self) -> None:
        """Deliver nothing until ``release``."""
        self._is_held = True

    def release(self) -> None:
        """Deliver what was held back, in order, and go on."""
        self._is_held = False
        self._schedule()

    def step(self) -> None:
        """Deliver one message of a held lane, now.

        Raises:
            TransportError: there is none, or nobody receives.
        """
        if not self._queue or self._sink is None:
            raise TransportError(f"{self._name}: there is no message to deliver, or nobody receives")
        self._deliver()

    def drop(self, number: int) -> None:
        """Lose message ``number``."""
        self._script(number, "drop", 0)

    def duplicate(self, number: int) -> None:
        """Deliver message ``number`` twice."""
        self._script(number, "duplicate", 0)

    def delay(self, number: int, *, behind: int) -> None:
        """Deliver message ``number`` after message ``behind``, which is sent later."""
        if behind <= number:
            raise TransportError(
                f"{self._name}: message {number} cannot be delayed behind {behind}, an earlier one"
            )
        self._script(number, "delay", behind)

    def unfired_faults(self) -> list[str]:
        """Scripted faults whose message was never sent, and delays that never ended."""
        waiting = [f"{kind} message {number}" for number, (kind, _) in sorted(self._faults.items())]
        delayed = [f"deliver a message behind message {behind}" for behind, _ in self._delayed]
        return [f"{self._name}: {what}" for what in waiting + delayed]

    def put(self, message: Message) -> None:
        """Send a message: what ``checked_frames`` returned.

        Raises:
            TransportError: too many messages wait.
        """
        if len(self._queue) >= self.max_queued_messages:
            raise TransportError(
                f"cannot send on {self._name}: its queue is full, because the other side does not read"
            )
        number = self._num_sent
        self._num_sent += 1
        kind, behind = self._faults.pop(number, ("", 0))
        if kind == "delay":
            self._delayed.append((behind, message))
        elif kind != "drop":
            self._enqueue(message)
            if kind == "duplicate":
                self._enqueue(message)
        for entry in [entry for entry in self._delayed if entry[0] <= number]:
            self._delayed.remove(entry)
            self._enqueue(entry[1])

    def deliver_to(self, sink: OnMessage | None) -> None:
        """Set who receives. With None, messages wait."""
        self._sink = sink
        self._schedule()

    def clear(self) -> None:
        """Forget every message on its way. Delayed ones stay, so that ``unfired_faults`` tells of them."""
        self._queue.clear()
        self._count_out(self.unsent_bytes)

    async def drain(self, max_unsent_bytes: int, timeout_s: float) -> None:
        """As ``ServerLink.drain``, for this lane."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.unsent_bytes > max_unsent_bytes:
                    self._delivered.clear()
                    await self._delivered.wait()
        except TimeoutError:
            hint = f"{self.unsent_bytes} bytes are still unsent"
            raise ClusterTimeout(f"{self._name} to be read", timeout_s, hint) from None

    def _script(self, number: int, kind: str, behind: int) -> None:
        if number < self._num_sent or number in self._faults:
            raise TransportError(f"{self._name}: message {number} was sent already, or has a fault already")
        self._faults[number] = (kind, behind)

    def _enqueue(self, message: Message) -> None:
        self._queue.append(message)
        self.unsent_bytes += large_bytes(message)
        self._schedule()

    def _schedule(self) -> None:
        is_ready = self._queue and not self._is_held and self._sink is not None
        if is_ready and not self._is_scheduled and not self._loop.is_closed():
            self._is_scheduled = True
            self._loop.call_soon(self._deliver_portion)

    def _deliver_portion(self) -> None:
        self._is_scheduled = False
        try:
            for _ in range(self.max_messages_per_turn):
                if self._is_held:
                    return
                self._deliver()
        finally:
            self._schedule()

    def _deliver(self) -> None:
        if self._queue and self._sink is not None:
            message = self._queue.popleft()
            self._count_out(large_bytes(message))
            # A duplicated message is delivered twice, and receivers may take the list apart.
            self._sink(list(message))

    def _count_out(self, num_bytes: int) -> None:
        if num_bytes:
            self.unsent_bytes -= num_bytes
            self._delivered.set()
            self.on_fall()


def large_bytes(message: Message) -> int:
    return sum(len(frame) for frame in message if len(frame) >= LARGE_FRAME_BYTES)
