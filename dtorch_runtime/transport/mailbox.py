"""Mailboxes: messages from one agent straight to the threads of another on the same machine, through shared memory.

A box is a segment with slots of one size, filled and emptied in turn: two semaphores count the full and the free ones
(the bounded buffer of Dijkstra 1965, "Cooperating sequential processes"). Each side knows by itself where it is, so
nothing else is shared, and a side that is killed between two steps leaves nothing half done that the other could see.
A box has one sender and one reader. A full one takes nothing: its sender has a socket too.

Whoever waits for messages waits for the *bell* of its agent, a semaphore that all senders of that agent ring.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable
from typing import TypeAlias

from dtorch_runtime.errors import TransportError
from dtorch_runtime.transport.segments import Segment
from dtorch_runtime.transport.semaphores import SEMAPHORE_BYTES, SharedSemaphore

#: Takes a header and a payload, which are the sender's to write to again once this has returned.
OnMail: TypeAlias = Callable[[memoryview, memoryview], None]

_SLOT_BYTES = 64 * 1024
_NUM_SLOTS = 15
#: The first slot's place has the semaphores.
BOX_BYTES = _SLOT_BYTES * (_NUM_SLOTS + 1)
#: At the start of a slot: bytes of the payload, and of the header behind it. The payload begins at a cache line.
_LENGTHS = struct.Struct("<II")
_PAYLOAD_AT = 64
_ROOM_BYTES = _SLOT_BYTES - _PAYLOAD_AT
_FULL_AT, _FREE_AT = 0, SEMAPHORE_BYTES
BELL_BYTES = SEMAPHORE_BYTES


def set_up_box(segment: Segment) -> None:
    """Make an empty box of a segment of ``BOX_BYTES``, before its reader is told of it."""
    SharedSemaphore(segment.memory, _FULL_AT).set_up(0)
    SharedSemaphore(segment.memory, _FREE_AT).set_up(_NUM_SLOTS)


class Outbox:
    """The sender's side. Used by one thread at a time.

    Args:
        bell: of the reader's agent.
    """

    def __init__(self, segment: Segment, bell: SharedSemaphore) -> None:
        self._memory = _checked(segment)
        self._full = SharedSemaphore(self._memory, _FULL_AT)
        self._free = SharedSemaphore(self._memory, _FREE_AT)
        self._bell = bell
        self._next = 0

    def put(self, header: bytes, payload: memoryview | None) -> bool:
        """Leave a message; False when it is too long, or when there is no room."""
        num_payload = 0 if payload is None else payload.nbytes
        if num_payload + len(header) > _ROOM_BYTES or not self._free.try_wait():
            return False
        start = _slot(self._next)
        memory = self._memory
        _LENGTHS.pack_into(memory, start, num_payload, len(header))
        first = start + _PAYLOAD_AT
        if payload is not None:
            memory[first : first + num_payload] = payload
        memory[first + num_payload : first + num_payload + len(header)] = header
        self._next += 1
        self._full.post()
        self._bell.post()
        return True


class Inbox:
    """The reader's side. Used by one thread at a time."""

    def __init__(self, segment: Segment) -> None:
        self._memory = _checked(segment)
        self._view = memoryview(self._memory)
        self._full = SharedSemaphore(self._memory, _FULL_AT)
        self._free = SharedSemaphore(self._memory, _FREE_AT)
        self._next = 0

    def take(self, on_mail: OnMail) -> bool:
        """Give the next message to ``on_mail``; False when there is none.

        Raises:
            TransportError: its lengths cannot be.
        """
        if not self._full.try_wait():
            return False
        start = _slot(self._next)
        self._next += 1
        try:
            num_payload, num_header = _LENGTHS.unpack_from(self._memory, start)
            if num_payload + num_header > _ROOM_BYTES:
                raise TransportError(
                    f"a slot of {_ROOM_BYTES} bytes cannot hold {num_payload} + {num_header}"
                )
            middle = start + _PAYLOAD_AT + num_payload
            on_mail(self._view[middle : middle + num_header], self._view[start + _PAYLOAD_AT : middle])
        finally:
            self._free.post()
        return True


class Mailroom:
    """All boxes that one agent reads, and its bell. Safe to use from any thread; one at a time waits.

    Args:
        segment: for the bell.
        on_mail: takes each message, on whatever thread collects it.
        on_error: is told of what it raised: no message may end the thread that waits for others.
    """

    def __init__(self, segment: Segment, on_mail: OnMail, on_error: Callable[[Exception], None]) -> None:
        self.bell_name = segment.name
        self._bell = SharedSemaphore(segment.memory, 0)
        self._bell.set_up(0)
        self._on_mail = on_mail
        self._on_error = on_error
        self._lock = threading.Lock()
        #: By the name of the agent that fills it.
        self._boxes: dict[str, Inbox] = {}
        #: Messages that came through boxes.
        self.num_collected = 0

    def add(self, node: str, segment: Segment) -> None:
        """Read another agent's box from now on.

        Raises:
            TransportError: the segment is no box, or the agent has one already.
        """
        with self._lock:
            if node in self._boxes:
                raise TransportError(f"node {node!r} has a mailbox here already")
            self._boxes[node] = Inbox(segment)

    def remove(self, node: str) -> None:
        """An agent is gone, and what is in its box with it."""
        with self._lock:
            if self._boxes.pop(node, None) is not None:
                self.ring()  # for one that it may have owed, and that `collect` took from another message

    def collect(self, num_rung: int = 0) -> None:
        """Take all messages that are there.

        Args:
            num_rung: rings that the caller has waited for, and that need not be taken back.
        """
        with self._lock:
            for box in self._boxes.values():
                while self._take(box):
                    self.num_collected += 1
                    if num_rung:
                        num_rung -= 1
                    else:
                        # Else the rings of messages that nobody waited for would add up. It may be the ring of
                        # another message: then this one's own is about to come.
                        self._bell.try_wait()

    def _take(self, box: Inbox) -> bool:
        try:
            return box.take(self._on_mail)
        except Exception as error:  # noqa: BLE001  the messages behind it are as good as before
            self._on_error(error)
            return True

    def wait(self, deadline_s: float) -> bool:
        """Block until the bell rings; False when the time has passed."""
        return self._bell.wait(deadline_s)

    def ring(self) -> None:
        """Wake the one who waits."""
        self._bell.post()


def map_bell(segment: Segment) -> SharedSemaphore:
    """Another agent's bell, to ring it."""
    if segment.num_bytes < BELL_BYTES:
        raise TransportError(f"segment {segment.name} of {segment.num_bytes} bytes has no room for a bell")
    return SharedSemaphore(segment.memory, 0)


def _checked(segment: Segment) -> mmap.mmap:
    if segment.num_bytes < BOX_BYTES:
        raise TransportError(
            f"segment {segment.name} has {segment.num_bytes} bytes, a mailbox has {BOX_BYTES}"
        )
    return segment.memory


def _slot(number: int) -> int:
    return _SLOT_BYTES * (1 + number % _NUM_SLOTS)
