"""What a device's other workers carry out while the compute worker goes on with ops: the communication worker large
redistributions, the copy worker large values that come from the client or go to it.

Until it is needed, the result is ``Pending``: no tensor, so that a kernel that gets one raises by itself, and
only then does the compute worker wait (as with ``Poison``). Ops that are not stopped by that, because they write or
because they are many in one, look for it beforehand. What a transfer still reads is not written to before it has read.

Nothing can lock up. Take the first op of the stream, in the order that all devices have in common, that is not done on
some device. All before it are done everywhere, so each device that takes part has come to it, on whichever of its
workers it runs: a worker waits only for earlier ops (of this device, or for room among what it gave itself earlier).
So this op ends, and then the next. Which of its workers a device chooses does not matter to the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic_ns
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

import torch

from dtorch_runtime.errors import ClusterTimeout
from dtorch_runtime.tape import FETCH, UPLOAD, Tape
from dtorch_runtime.worker.arguments import Runner
from dtorch_runtime.worker.blobs import Blob, Blobs, Pending, Poison, UnderWay, storage_of
from dtorch_runtime.worker.failures import SessionEnded
from dtorch_runtime.worker.races import DataRace
from dtorch_runtime.worker.streams.base import Stream
from dtorch_runtime.worker.thread import Job, LazyWorker, Ticket, Worker
from dtorch_runtime.worker.watch import StreamWatch

#: What the workers beside the compute worker are called, in traces too.
COMMUNICATION: Final = "communication"
COPY: Final = "copy"
#: Takes the device's piece of what is read, and gives the one that is made.
Move: TypeAlias = Callable[[Blob | None], Blob | None]
#: Makes the poison of an error.
Fail: TypeAlias = Callable[[Exception], Poison]
#: Bytes of transfers under way, inputs and results, with which a device starts no further one.
MAX_BYTES = 256 * 1024 * 1024
#: A wait gives up when no worker has ended a transfer in so many times the deadline of a collective:
#: a transfer waits several times, and its own deadlines say more about what is missing.
_PATIENCE = 10


class Side:
    """A worker beside the compute worker, as one session uses it.

    Args:
        watch: told what its jobs read and make, while races are looked for.
    """

    def __init__(self, kind: str, worker: LazyWorker, watch: StreamWatch | None = None) -> None:
        self.kind = kind
        self.worker = worker
        self.watch = watch
        #: Notes each job, while somebody profiles.
        self.tape: Tape | None = None
        self._num_submitted = 0
        self._num_finished = 0

    @property
    def is_idle(self) -> bool:
        """Whether all jobs of this session have ended."""
        return self._num_submitted == self._num_finished

    def submit(self, job: Job) -> None:
        """As of a worker."""
        self._num_submitted += 1

        def counted() -> None:
            try:
                job()
            finally:
                self._num_finished += 1

        self.worker.submit(counted)


class Transfers:
    """Those of one session on one device. Used by the compute worker's thread only.

    Args:
        compute: the worker that runs the session's ops.
        communication: carries redistributions out, in the order in which they are started.
        copying: carries copies from and to the host out, in their order.
        timeout_s: the deadline of one wait in a collective.
        copy_bytes: from how many bytes on a copy is worth the way to another thread.
    """

    def __init__(
        self, compute: Worker, communication: Side, copying: Side, timeout_s: float, copy_bytes: int = 0
    ) -> None:
        self._compute = compute
        self._communication = communication
        self._copying = copying
        self._sides = (communication, copying)
        self._timeout_s = timeout_s
        self.copy_bytes = copy_bytes
        #: Started and maybe not ended, the oldest first.
        self.under_way: deque[UnderWay] = deque()
        #: Values that are pending. Those that are freed are dropped with their results, here too.
        self.unresolved: WeakValueDictionary[int, Pending] = WeakValueDictionary()
        self._num_bytes = 0
        self.num_started = 0

    def start(self, pending: Pending, template_id: int, move: Move, fail: Fail) -> None:
        """Begin a redistribution as soon as what it reads exists, behind those that were started before.

        Args:
            move: takes the device's piece and gives its new one, or None; for the communication worker.
            fail: makes the poison of an error.
        """
        self.num_started += 1
        self._make(self._communication, pending, template_id, move, fail)

    def copy_in(self, pending: Pending, make: Callable[[], torch.Tensor], fail: Fail) -> None:
        """Begin to bring a value to the device.

        Args:
            make: gives it; for the copy worker.
            fail: makes the poison of an error.
        """
        self._make(self._copying, pending, UPLOAD, lambda nothing: make(), fail)

    def copy_out(self, transfer: UnderWay, take: Callable[[Blob | Exception | None], None]) -> None:
        """Have a value taken to the host behind what makes it, before anything is written to it.

        Args:
            take: gets the value, or what is there in its place; for the copy worker. Must not raise.
        """
        side = self._copying

        def job(value: Blob | Exception | None) -> bool:
            if side.watch is not None:
                try:
                    side.watch.ran("fetch", 0, (value,))
                except DataRace as race:
                    value = race
            take(value)
            return isinstance(value, Exception)

        self._begin(side, transfer, (FETCH, 0), job)

    def _make(self, side: Side, pending: Pending, what: int, make: Move, fail: Fail) -> None:
        def job(value: Blob | Exception | None) -> bool:
            try:
                if isinstance(value, Exception):
                    raise value
                if side.watch is not None:
                    side.watch.begins(*pending.made_by)
                pending.result = make(value)
                if side.watch is not None:
                    side.watch.ran(*pending.made_by, (value,), (pending.result,))
            except SessionEnded as error:
                pending.result = error
            except Exception as error:  # noqa: BLE001  it becomes the poison of all that depends on it
                pending.result = fail(error)
            return isinstance(pending.result, Poison | SessionEnded)

        self._begin(side, pending.transfer, (what, pending.made_by[1]), job)

    def _begin(
        self,
        side: Side,
        transfer: UnderWay,
        span: tuple[int, int],
        job: Callable[[Blob | Exception | None], bool],
    ) -> None:
        """Have a side do something with what a transfer reads.

        Args:
            span: what it is, and its location, in the lane of the side.
            job: gives whether it failed; must not raise.
        """
        self._forget_ended()
        while self.under_way and self._num_bytes + transfer.num_bytes > MAX_BYTES:
            self._await(self.under_way[0])
            self._forget_ended()
        self.under_way.append(transfer)
        self._num_bytes += transfer.num_bytes
        ready, tape = self._compute.stream.record(), side.tape

        def run() -> None:
            stream, start_ns = side.worker.stream, monotonic_ns()
            value: Blob | Exception | None
            try:
                stream.wait_for(ready)
                value = self._read(transfer.reads, stream)
            except Exception as error:  # noqa: BLE001  the job is told: somebody waits for its end
                value = error
            failed = job(value)
            transfer.point = stream.record()
            transfer.reads = None
            if tape is not None:
                tape.add(*span, start_ns, int(failed))
            transfer.done.set()

        side.submit(run)

    def _read(self, reads: Blob | Pending | None, stream: Stream) -> Blob | Exception | None:
        """What a transfer reads, on the worker that carries it out; or why there is nothing."""
        value: Blob | Exception | None
        if isinstance(reads, Pending):
            # Made by an earlier job of this worker or, rarely, of the other.
            self._await(reads.transfer)
            assert reads.transfer.point is not None
            stream.wait_for(reads.transfer.point)
            value = reads.result
        else:
            value = reads
        if isinstance(value, torch.Tensor):
            stream.use(value)
        return value

    def resolve(self, blobs: Blobs, value_ids: Iterable[int]) -> bool:
        """Put the values themselves in the place of those that are pending; whether there were any.

        Raises:
            SessionEnded: the session ended meanwhile.
            ClusterTimeout: a transfer does not end.
        """
        found = False
        for value_id in value_ids:
            blob = blobs.get(value_id)
            if type(blob) is Pending:
                value = self.wait(blob)
                self.unresolved.pop(value_id, None)
                blobs[value_id] = value
                found = True
        return found

    def wait(self, pending: Pending) -> Blob:
        """The result of a transfer, for the compute worker.

        Raises: as ``resolve``.
        """
        self._await(pending.transfer)
        result, point = pending.result, pending.transfer.point
        if isinstance(result, SessionEnded):
            raise result
        assert result is not None
        assert point is not None
        stream = self._compute.stream
        stream.wait_for(point)
        if isinstance(result, torch.Tensor):
            stream.use(result)
        return result

    def before_write(self, blobs: Iterable[object]) -> None:
        """Wait until no transfer reads memory that is written to next.

        Raises: as ``resolve``.
        """
        self._forget_ended()
        written = {storage_of(blob) for blob in blobs if isinstance(blob, torch.Tensor)}
        for transfer in [*self.under_way]:
            reads = transfer.reads
            if isinstance(reads, Pending):
                self._await(reads.transfer)
                value = reads.result
            else:
                value = reads
            if isinstance(value, torch.Tensor) and storage_of(value) in written:
                self._await(transfer)
        self._forget_ended()

    def ordered(self, runner: Runner, blobs: Blobs, num_inputs: int, written: Sequence[int]) -> Runner:
        """A runner that waits for what makes its inputs, and for what still reads what it writes to.

        Args:
            written: which of its inputs.
        """
        unresolved, under_way, stop = self.unresolved, self.under_way, 2 + num_inputs

        def run(words: list[int], i: int) -> int:
            if unresolved:
                self.resolve(blobs, words[i + 2 : i + stop])
            if under_way and written:
                self.before_write(blobs.get(words[i + 2 + index]) for index in written)
            return runner(words, i)

        return run

    def settle(self) -> None:
        """Wait until no transfer is under way.

        Raises: as ``resolve``.
        """
        for transfer in [*self.under_way]:
            self._await(transfer)
        self._forget_ended()

    def start_trace(self, max_spans: int) -> None:
        """Note each transfer from now on."""
        for side in self._sides:
            side.tape = Tape(max_spans)

    def stop_trace(self) -> list[tuple[str, Tape]]:
        """What was noted, by the kind of the worker, of those that had something to do; waits for them.

        Raises: as ``resolve``.
        """
        self.settle()
        found = [(side.kind, side.tape) for side in self._sides if side.tape is not None]
        for side in self._sides:
            side.tape = None
        return [(kind, tape) for kind, tape in found if not tape.is_empty]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and no value pending. For the compute worker, or while it has no job."""
        return all(side.is_idle for side in self._sides) and not self.unresolved

    def call_behind(self, job: Job) -> None:
        """Call something behind all transfers that were started: at once when they have ended."""
        busy = [side for side in self._sides if not side.is_idle]
        if not busy:
            job()
            return
        ticket = Ticket(len(busy), job)
        for side in busy:
            side.submit(ticket.done)

    def _await(self, transfer: UnderWay) -> None:
        while not transfer.done.is_done():
            before = self._num_ended()
            try:
                transfer.done.wait(_PATIENCE * self._timeout_s, f"a worker to end {transfer.what}")
            except ClusterTimeout:
                if before == self._num_ended():
                    raise

    def _num_ended(self) -> int:
        return sum(side.worker.num_finished for side in self._sides)

    def _forget_ended(self) -> None:
        while self.under_way and self.under_way[0].done.is_done():
            transfer = self.under_way.popleft()
            self._num_bytes -= transfer.num_bytes
            assert transfer.point is not None
            self._compute.stream.wait_for(transfer.point)
