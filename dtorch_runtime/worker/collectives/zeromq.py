"""``ZmqNetwork``: the data plane, sockets straight from agent to agent.

Each agent binds one ROUTER, read by one thread, and connects one DEALER to each other agent, which worker threads
send on under a lock. Parcels leave in frames of at most ``chunk_bytes`` and are received into the memory of the
tensor that they make up. Between agents of one machine large parcels go through shared memory (see ``shm``), and
messages that are short, which those then are too, from worker thread to worker thread through mailboxes: no thread of
the network is woken on the way.
"""

from __future__ import annotations

import hmac
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import zmq

from dtorch_runtime.errors import ClusterTimeout
from dtorch_runtime.transport.base import LARGE_FRAME_BYTES, LinkLimits
from dtorch_runtime.transport.mailbox import BELL_BYTES, BOX_BYTES, Mailroom, map_bell, set_up_box
from dtorch_runtime.transport.security import CurveKeys
from dtorch_runtime.transport.segments import Receipt, SegmentPool, SegmentReader, unlink_segments_of
from dtorch_runtime.transport.semaphores import HAS_SEMAPHORES
from dtorch_runtime.transport.sockets import (
    UnsentLedger,
    bound_address,
    close_socket,
    new_client,
    open_server,
)
from dtorch_runtime.wire.codec import MalformedMessage
from dtorch_runtime.wire.data import (
    BoxOffer,
    BoxTaken,
    ParcelChunk,
    ParcelInSegment,
    ParcelRead,
    Place,
    PoisonParcel,
    ToAgent,
    decode_data,
    encode_data,
)
from dtorch_runtime.wire.records import NodeRecord
from dtorch_runtime.worker.blobs import Blob, ChunkedTensor, Poison, memory_of, name_of
from dtorch_runtime.worker.collectives.base import ParcelKey
from dtorch_runtime.worker.collectives.peer import Peer
from dtorch_runtime.worker.collectives.run_ahead import MIN_BYTES, RunAhead
from dtorch_runtime.worker.collectives.shm import read_from_segment, write_to_segment

_log = logging.getLogger(__name__)

#: Bytes of large frames that may wait in the sockets to all peers before a sender waits.
_MAX_UNSENT_BYTES = 256 << 20
_MESSAGES_PER_TURN = 64


class ZmqNetwork:
    """``Network`` over ZeroMQ, and over shared memory between agents of one machine.

    Args:
        node: this agent's name, and ``host`` its machine's, as its ``NodeRecord`` has them.
        endpoint: where to bind.
        deposit: takes what has come; called on the network's thread.
        keys: CURVE keys, for an endpoint that strangers can reach. All agents have the same.
        session_key: stands in every message; others are dropped.
        chunk_bytes: most bytes in one frame.
        timeout_s: longest wait for room in the sockets.
        pool: segments to send through; None does without shared memory.
        run_ahead: bounds what may be sent and not read yet.

    Raises:
        SecurityError: strangers can reach the endpoint and there are no keys.
        TransportError: it cannot be bound.
    """

    def __init__(
        self,
        node: str,
        host: str,
        endpoint: str,
        deposit: Callable[[ParcelKey, Blob], None],
        *,
        keys: CurveKeys | None = None,
        session_key: bytes = b"",
        chunk_bytes: int,
        timeout_s: float,
        pool: SegmentPool | None,
        run_ahead: RunAhead,
    ) -> None:
        self._node = node
        self._host = host
        self._deposit = deposit
        self._keys = None if keys is None else keys.among_clients()
        self._session_key = session_key
        self._chunk_bytes = chunk_bytes
        self._timeout_s = timeout_s
        self._pool = pool
        self._run_ahead = run_ahead
        #: Large parcels that were sent and not read: what to call when they are.
        self._unread: dict[tuple[str, Place], Callable[[], None]] = {}
        #: Those of them whose segment has a receipt, in the order in which they were sent.
        self._receipts: dict[tuple[str, Place], Receipt] = {}
        # Reentrant, and for both: a segment is lent again once its parcel is out of these.
        self._unread_lock = threading.RLock()
        run_ahead.look = partial(self._look_at_receipts, is_blocked=True)
        self._reader = SegmentReader()
        #: Agents whose boxes are read and that could not be told yet.
        self._unanswered: set[str] = set()
        self._offer_lock = threading.Lock()
        self._limits = LinkLimits(max_frame_bytes=max(64 << 20, 2 * chunk_bytes))
        self._ledger = UnsentLedger()
        self._peers: dict[str, Peer] = {}
        self._partial: dict[tuple[bytes, Place], ChunkedTensor] = {}
        #: Messages that were dropped because they were malformed or without the key.
        self.num_malformed = 0
        self._socket = open_server(endpoint, self._keys, self._limits)
        self._endpoint = bound_address(self._socket)
        self.mail = self._new_mailroom()  # only now: an address that is refused leaves no bell behind
        # A SimpleQueue and an eventfd, because both may be used while the interpreter drops a tensor.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_lock = threading.RLock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name=f"dtorch-{node}-data", daemon=True)
        self._thread.start()

    def _new_mailroom(self) -> Mailroom | None:
        if self._pool is None or not HAS_SEMAPHORES:
            return None
        segment = self._pool.lend(BELL_BYTES)
        return None if segment is None else Mailroom(segment, self._receive_mail, self._count_malformed)

    @property
    def endpoint(self) -> str:
        return self._endpoint

    # ---- from the agent's loop ----

    def connect(self, record: NodeRecord) -> None:
        socket = new_client(record.data_endpoint, self._keys, self._limits)
        socket.connect(record.data_endpoint)
        shares_memory = self._pool is not None and record.host == self._host
        self._peers[record.name] = Peer(record, socket, shares_memory=shares_memory)
        self._command(partial(self._answer_offer, record.name))

    def disconnect(self, node: str) -> None:
        peer = self._peers.pop(node, None)
        if peer is None:
            return
        peer.close()
        if self._pool is not None and peer.box_segment is not None:
            self._pool.remove(peer.box_segment)
        self._command(partial(self._forget, peer.record))

    def sent_bytes(self) -> dict[str, int]:
        return {name: peer.num_sent_bytes for name, peer in self._peers.items()}

    def close(self, timeout_s: float) -> None:
        if self._wake < 0:
            return
        self._is_closing = True
        self._command(lambda: None)
        self._thread.join(timeout_s)
        is_stopped = not self._thread.is_alive()
        for peer in self._peers.values():
            peer.close(flush_s=min(timeout_s, 1.0))
        if self._pool is not None:
            self._pool.close()
        if not is_stopped:
            raise ClusterTimeout(f"the data plane of node {self._node!r} to stop", timeout_s)
        close_socket(self._socket)
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1

    # ---- from worker threads ----

    def send(self, node: str, key: ParcelKey, value: Blob) -> None:
        peer = self._peers.get(node)
        if peer is None:
            return  # it is lost, and so is every device that would wait for this
        if peer.shares_memory and peer.box_segment is None and self.mail is not None:
            self._offer_box(peer)
        place = Place(*key)
        if isinstance(value, Poison):
            poison = PoisonParcel(key=self._session_key, place=place, failure=value.failure)
            peer.send(encode_data(poison), None, self._ledger, is_parcel=True)
            return
        num_bytes = value.numel() * value.dtype.itemsize
        if num_bytes >= MIN_BYTES:
            self._look_at_receipts()
            self._unread[node, place] = self._run_ahead.lend(key.device, num_bytes)
            if (
                self._peers.get(node) is not peer
            ):  # lost meanwhile: `_forget` may have come too early to see it
                self._was_read(node, place)
                return
            if peer.shares_memory and self._send_segment(peer, place, value, num_bytes):
                return
        self._send_chunks(peer, place, value, num_bytes)

    def _offer_box(self, peer: Peer) -> None:
        """Make a mailbox for a peer, once; without room for one there is always the socket."""
        assert self._pool is not None
        with self._offer_lock:
            if peer.box_segment is not None:
                return
            segment = self._pool.lend(BOX_BYTES)
            if segment is None:
                return
            set_up_box(segment)
            peer.box_segment = segment
        offer = BoxOffer(key=self._session_key, node=self._node, segment=segment.name)
        peer.send(encode_data(offer), None, self._ledger)

    def _send_segment(self, peer: Peer, place: Place, value: torch.Tensor, num_bytes: int) -> bool:
        assert self._pool is not None
        segment = self._pool.lend(num_bytes)
        if segment is None:
            return False
        key = (peer.record.name, place)
        self._unread[key] = partial(_both, partial(self._pool.give_back, segment), self._unread[key])
        if HAS_SEMAPHORES:
            self._receipts[key] = segment.receipt
        write_to_segment(segment, value)
        message = ParcelInSegment(
            key=self._session_key,
            place=place,
            dtype=name_of(value.dtype),
            shape=list(value.shape),
            total_bytes=num_bytes,
            segment=segment.name,
            node=self._node,
            has_receipt=HAS_SEMAPHORES,
        )
        peer.send(encode_data(message), None, self._ledger, num_bytes, is_parcel=True)
        return True

    def _send_chunks(self, peer: Peer, place: Place, value: torch.Tensor, num_bytes: int) -> None:
        # Large frames are read by ZeroMQ after this returns, so they are memory that nobody else has.
        plain = value.cpu().resolve_conj().resolve_neg().contiguous()
        is_shared = num_bytes >= LARGE_FRAME_BYTES and plain.data_ptr() == value.data_ptr()
        memory = memory_of(plain.clone() if is_shared else plain)
        for offset in range(0, max(num_bytes, 1), self._chunk_bytes):
            payload = memory[offset : offset + self._chunk_bytes]
            message = ParcelChunk(
                key=self._session_key,
                place=place,
                dtype=name_of(value.dtype),
                shape=list(value.shape),
                offset_bytes=offset,
                num_bytes=payload.nbytes,
                total_bytes=num_bytes,
                node=self._node,
            )
            if self._ledger.num_bytes > _MAX_UNSENT_BYTES:
                what = f"node {peer.record.name!r} to read what was sent to it"
                self._ledger.wait_below(_MAX_UNSENT_BYTES, self._timeout_s, what)
            is_whole = payload.nbytes == num_bytes
            peer.send(encode_data(message), payload, self._ledger, is_parcel=is_whole)

    # ---- on the network's thread ----

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        with torch.inference_mode():
            while not self._is_closing:
                for ready, _ in poller.poll():
                    if ready == self._wake:
                        os.eventfd_read(self._wake)
                        self._run_commands()
                    else:
                        self._receive_some()

    def _run_commands(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _receive_some(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            try:
                sender = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._receive(sender)
            except Exception as error:  # noqa: BLE001  no message may end the thread that receives the others
                self._count_malformed(error)
            while self._socket.getsockopt(zmq.RCVMORE):
                self._socket.recv(copy=False)

    def _count_malformed(self, error: Exception) -> None:
        self.num_malformed += 1
        # Each time that the number doubles: a stranger must not fill the log.
        if self.num_malformed & (self.num_malformed - 1) == 0:
            _log.warning(
                "node %s dropped %d messages on its data plane, the last one because: %s: %s",
                self._node,
                self.num_malformed,
                type(error).__name__,
                error,
            )

    def _receive(self, sender: bytes) -> None:
        if not self._socket.getsockopt(zmq.RCVMORE):
            raise MalformedMessage("a message without frames")
        message = self._decode(self._socket.recv(copy=False).buffer)
        match message:
            case ParcelChunk():
                self._receive_chunk(sender, message)
            case ParcelInSegment():
                self._receive_segment(message)
            case PoisonParcel(place=place, failure=failure):
                self._deposit(_key_of(place), Poison(failure))
            case ParcelRead(place=place, node=node):
                self._was_read(node, place)
            case BoxOffer(node=node, segment=segment):
                self._take_box(node, segment)
            case BoxTaken(node=node, bell=bell):
                self._use_box(node, bell)

    def _decode(self, header: Any) -> ToAgent:
        message = decode_data(header)
        if not hmac.compare_digest(message.key, self._session_key):
            raise MalformedMessage("the session key is not that of this cluster")
        return message

    def _receive_mail(self, header: memoryview, payload: memoryview) -> None:
        """A message from a mailbox; on whatever thread collects it."""
        message = self._decode(header)
        match message:
            case ParcelChunk():
                if not payload.nbytes == message.num_bytes == message.total_bytes:
                    raise MalformedMessage(
                        f"a parcel of {message.total_bytes} bytes came with {payload.nbytes}"
                    )
                parcel = ChunkedTensor(message.dtype, message.shape, message.total_bytes)
                parcel.room(message.offset_bytes, message.num_bytes)[:] = payload
                self._take_in(parcel.tensor, message)
            case ParcelInSegment():
                self._receive_segment(message)
            case PoisonParcel(place=place, failure=failure):
                self._deposit(_key_of(place), Poison(failure))
            case _:
                raise MalformedMessage(f"{type(message).__name__} does not come through a mailbox")

    def _take_box(self, node: str, name: str) -> None:
        if self.mail is not None:
            self.mail.add(node, self._reader.map(name))
            self._unanswered.add(node)
            self._answer_offer(node)

    def _answer_offer(self, node: str) -> None:
        if self.mail is not None and node in self._unanswered and node in self._peers:
            self._unanswered.remove(node)
            answer = BoxTaken(key=self._session_key, node=self._node, bell=self.mail.bell_name)
            self._send_to(node, encode_data(answer))

    def _use_box(self, node: str, bell: str) -> None:
        peer = self._peers.get(node)
        if peer is None:
            return  # it was lost meanwhile
        if not peer.open_box(map_bell(self._reader.map(bell))):
            raise MalformedMessage(f"node {node!r} has no mailbox to take, or has taken it")
        assert self._pool is not None
        assert peer.box_segment is not None
        self._pool.hide(peer.box_segment)

    def _receive_chunk(self, sender: bytes, message: ParcelChunk) -> None:
        key = (sender, message.place)
        parcel = self._partial.pop(key, None)
        if parcel is None:
            parcel = ChunkedTensor(message.dtype, message.shape, message.total_bytes)
        room = parcel.room(message.offset_bytes, message.num_bytes)
        if not self._socket.getsockopt(zmq.RCVMORE):
            raise MalformedMessage("a chunk without its payload")
        if self._receive_into(room) != room.nbytes:
            raise MalformedMessage(f"a chunk that is not of the {room.nbytes} bytes that it announced")
        if parcel.is_full:
            self._take_in(parcel.tensor, message)
        else:
            self._partial[key] = parcel

    def _take_in(self, parcel: torch.Tensor, message: ParcelChunk) -> None:
        if message.total_bytes >= MIN_BYTES:
            self._answer_when_read(parcel, message)
        self._deposit(_key_of(message.place), parcel)

    def _receive_into(self, room: memoryview) -> int:
        if room.nbytes >= LARGE_FRAME_BYTES:
            return int(self._socket.recv_into(room))
        frame = self._socket.recv()
        if len(frame) == room.nbytes:
            room[:] = frame
        return len(frame)

    def _receive_segment(self, message: ParcelInSegment) -> None:
        parcel = read_from_segment(self._reader, message)
        has_receipt = message.has_receipt and HAS_SEMAPHORES
        receipt = self._reader.map(message.segment).receipt if has_receipt else None
        self._answer_when_read(parcel, message, receipt)
        self._deposit(_key_of(message.place), parcel)

    def _answer_when_read(
        self, parcel: torch.Tensor, message: ParcelChunk | ParcelInSegment, receipt: Receipt | None = None
    ) -> None:
        """Tell the sender when the tensor is dropped, on whatever thread that happens. Nobody keeps a view of it."""
        answer = ParcelRead(key=self._session_key, place=message.place, node=self._node)
        send = partial(self._send_to, message.node, encode_data(answer))
        weakref.finalize(parcel, self._answer, receipt, send).atexit = False

    def _answer(self, receipt: Receipt | None, send: Callable[[], None]) -> None:
        if receipt is None or receipt.sign():
            self._command(send)

    def _look_at_receipts(self, *, is_blocked: bool = False) -> None:
        """Take note of what was read. A message of it costs the wake-ups of several threads.

        Args:
            is_blocked: the calling thread waits for it, so that messages are wanted.
        """
        with self._unread_lock:
            for key, receipt in list(self._receipts.items()):
                if is_blocked:
                    receipt.want_message()
                if receipt.is_signed():
                    self._was_read(*key)
                elif not is_blocked:
                    return  # what was sent later is mostly read later

    def _was_read(self, node: str, place: Place) -> None:
        """Not news when a message and a receipt have said so."""
        with self._unread_lock:
            self._receipts.pop((node, place), None)
            release = self._unread.pop((node, place), None)
            if release is not None:
                release()

    def _send_to(self, node: str, header: bytes) -> None:
        peer = self._peers.get(node)
        if peer is not None:
            peer.send(header, None, self._ledger)

    def _forget(self, record: NodeRecord) -> None:
        """A peer is gone: what it had begun to send, what it had borrowed, and what it leaves behind."""
        self._unanswered.discard(record.name)
        if self.mail is not None:
            self.mail.remove(record.name)
        for key in [key for key in self._partial if key[1].device in record.devices]:
            del self._partial[key]
        for node, place in [key for key in list(self._unread) if key[0] == record.name]:
            self._was_read(node, place)
        if record.host == self._host and record.pid != os.getpid():
            self._reader.forget(record.pid)
            unlink_segments_of(record.pid)


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _key_of(place: Place) -> ParcelKey:
    return ParcelKey(place.session, place.value_id, place.step, place.device, place.number)
