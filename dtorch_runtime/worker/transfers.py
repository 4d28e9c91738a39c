"""Transfers that a device's communication worker carries out while the compute worker goes on with other ops.

Until it is needed, a transfer's result is ``Pending``: no tensor, so that a kernel that gets one raises by itself, and
only then does the compute worker wait (as with ``Poison``). Ops that are not stopped by that, because they write or
because they are many in one, look for it beforehand. What a transfer still reads is not written to before it has read.

Nothing can lock up. Take the first op of the stream, in the order that all devices have in common, that is not done on
some device. All before it are done everywhere, so each device that takes part has come to it, on whichever of its two
workers it runs: a worker waits only for earlier ops (of this device, or for room among what it gave itself earlier).
So this op ends, and then the next. Which of its workers a device chooses does not matter to the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic_ns
from weakref import WeakValueDictionary

import torch

from dtorch_runtime.errors import ClusterTimeout
from dtorch_runtime.tape import Tape
from dtorch_runtime.worker.arguments import Runner
from dtorch_runtime.worker.blobs import Blob, Blobs, Pending, Poison, UnderWay, storage_of
from dtorch_runtime.worker.failures import SessionEnded
from dtorch_runtime.worker.thread import Job, LazyWorker, Worker
from dtorch_runtime.worker.watch import StreamWatch

#: Bytes of transfers under way, inputs and results, with which a device starts no further one.
MAX_BYTES = 256 * 1024 * 1024
#: A wait gives up when the communication worker has ended no transfer in so many times the deadline of a collective:
#: a transfer waits several times, and its own deadlines say more about what is missing.
_PATIENCE = 10


class Transfers:
    """Those of one session on one device. Used by the compute worker's thread only.

    Args:
        compute: the worker that runs the session's ops.
        communication: the one that carries transfers out, in the order in which they are started.
        timeout_s: the deadline of one wait in a collective.
        watch: told what transfers read and make, while races are looked for.
    """

    def __init__(
        self,
        compute: Worker,
        communication: LazyWorker,
        timeout_s: float,
        watch: StreamWatch | None = None,
    ) -> None:
        self._compute = compute
        self._communication = communication
        self._timeout_s = timeout_s
        self._watch = watch
        #: Started and maybe not ended, the oldest first.
        self.under_way: deque[UnderWay] = deque()
        #: Values that are pending. Those that are freed are dropped with their results, here too.
        self.unresolved: WeakValueDictionary[int, Pending] = WeakValueDictionary()
        self._num_bytes = 0
        self.num_started = 0
        #: Notes each transfer, while somebody profiles.
        self.tape: Tape | None = None
        #: Jobs of this session: given to the communication worker, and ended by it.
        self._num_submitted = 0
        self._num_finished = 0

    def start(
        self,
        pending: Pending,
        template_id: int,
        move: Callable[[Blob | None], Blob | None],
        fail: Callable[[Exception], Poison],
    ) -> None:
        """Begin a transfer as soon as what it reads exists, behind those that were started before.

        Args:
            move: takes the device's piece and gives its new one, or None; for the communication worker.
            fail: makes the poison of an error.
        """
        transfer = pending.transfer
        self._forget_ended()
        while self.under_way and self._num_bytes + transfer.num_bytes > MAX_BYTES:
            self._await(self.under_way[0])
            self._forget_ended()
        self.under_way.append(transfer)
        self._num_bytes += transfer.num_bytes
        self.num_started += 1
        ready, tape, watch = self._compute.stream.record(), self.tape, self._watch

        def job() -> None:
            stream, start_ns = self._communication.stream, monotonic_ns()
            try:
                stream.wait_for(ready)
                # What is pending was made by an earlier job of this worker.
                value = transfer.reads.result if isinstance(transfer.reads, Pending) else transfer.reads
                if isinstance(value, SessionEnded):
                    raise value
                if isinstance(value, torch.Tensor):
                    stream.use(value)
                pending.result = move(value)
                if watch is not None:
                    watch.ran(*pending.made_by, (value,), (pending.result,))
            except SessionEnded as error:
                pending.result = error
            except Exception as error:  # noqa: BLE001  it becomes the poison of all that depends on it
                pending.result = fail(error)
            transfer.point = stream.record()
            transfer.reads = None
            if tape is not None:
                failed = isinstance(pending.result, Poison | SessionEnded)
                tape.add(template_id, pending.made_by[1], start_ns, int(failed))
            transfer.done.set()

        self._submit(job)

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
        if self.under_way:
            self._await(self.under_way[-1])
            self._forget_ended()

    def stop_trace(self) -> Tape | None:
        """What was noted of transfers, if there were any; waits for those under way.

        Raises: as ``resolve``.
        """
        self.settle()
        tape, self.tape = self.tape, None
        return None if tape is None or tape.is_empty else tape

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and no value pending. For the compute worker, or while it has no job."""
        return self._num_submitted == self._num_finished and not self.unresolved

    def call_behind(self, job: Job) -> None:
        """Call something behind all transfers that were started: at once when they have ended."""
        if self._num_submitted == self._num_finished:
            job()
        else:
            self._submit(job)

    def _submit(self, job: Job) -> None:
        self._num_submitted += 1

        def counted() -> None:
            try:
                job()
            finally:
                self._num_finished += 1

        self._communication.submit(counted)

    def _await(self, transfer: UnderWay) -> None:
        while not transfer.done.is_done():
            before = self._communication.num_finished
            try:
                transfer.done.wait(
                    _PATIENCE * self._timeout_s, f"the communication worker to end {transfer.what}"
                )
            except ClusterTimeout:
                if before == self._communication.num_finished:
                    raise

    def _forget_ended(self) -> None:
        while self.under_way and self.under_way[0].done.is_done():
            transfer = self.under_way.popleft()
            self._num_bytes -= transfer.num_bytes
            assert transfer.point is not None
            self._compute.stream.wait_for(transfer.point)
