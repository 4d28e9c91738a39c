"""The connection of one agent's data plane to one other agent."""

from __future__ import annotations

import threading

import zmq

from dtorch_runtime.errors import TransportError
from dtorch_runtime.transport.base import LARGE_FRAME_BYTES
from dtorch_runtime.transport.mailbox import Outbox
from dtorch_runtime.transport.segments import Segment
from dtorch_runtime.transport.semaphores import SharedSemaphore
from dtorch_runtime.transport.sockets import Socket, UnsentLedger, close_socket
from dtorch_runtime.wire.records import NodeRecord


class Peer:
    """A socket, and a mailbox beside it where both agents are on one machine. Safe to use from any thread."""

    def __init__(self, record: NodeRecord, socket: Socket, *, shares_memory: bool) -> None:
        self.record = record
        self.shares_memory = shares_memory
        self._lock = threading.Lock()
        self._socket = socket
        self._is_closed = False
        #: The segment of the mailbox that it was offered, and the box once it is read.
        self.box_segment: Segment | None = None
        self._box: Outbox | None = None
        #: Of tensors, through the socket or through shared memory.
        self.num_sent_bytes = 0

    def open_box(self, bell: SharedSemaphore) -> bool:
        """What is short goes through the box from now on; False when it was offered none, or has answered before."""
        with self._lock:
            if self.box_segment is None or self._box is not None:
                return False
            if not self._is_closed:
                self._box = Outbox(self.box_segment, bell)
            return True

    def send(
        self,
        header: bytes,
        payload: memoryview | None,
        ledger: UnsentLedger,
        num_shared_bytes: int = 0,
        *,
        is_parcel: bool = False,
    ) -> None:
        """Queue one message without waiting; dropped when the peer is gone.

        Args:
            num_shared_bytes: what the message says to be in shared memory.
            is_parcel: it is a whole parcel, which may go through the mailbox.

        Raises:
            TransportError: the peer does not read and its queue is full.
        """
        with self._lock:
            if self._is_closed:
                return
            self.num_sent_bytes += num_shared_bytes if payload is None else payload.nbytes
            if is_parcel and self._box is not None and self._box.put(header, payload):
                return
            try:
                if payload is None:
                    self._socket.send(header, zmq.NOBLOCK)
                    return
                self._socket.send(header, zmq.NOBLOCK | zmq.SNDMORE)
                if payload.nbytes < LARGE_FRAME_BYTES:
                    self._socket.send(payload, zmq.NOBLOCK)
                else:
                    self._socket.send(ledger.lend(payload), zmq.NOBLOCK, copy=False)
            except zmq.ZMQError as error:
                raise TransportError(f"cannot send to node {self.record.name!r}: {error.strerror}") from error

    def close(self, flush_s: float = 0.0) -> None:
        with self._lock:
            self._is_closed = True
            self._box = None
            close_socket(self._socket, flush_s)
