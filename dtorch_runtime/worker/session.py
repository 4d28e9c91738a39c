"""A session as the workers see it: what was defined for it, and its values on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import Protocol

import torch

from dtorch_runtime.errors import ClusterTimeout
from dtorch_runtime.ir.body import BodyOp, expand, parse_body
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.tape import BATCH, Tape
from dtorch_runtime.wire.records import (
    DeviceMemoryRecord,
    FailureRecord,
    LaneRecord,
    ShortageRecord,
    TemplateRecord,
)
from dtorch_runtime.worker import (
    dynamic_kernels as _dynamic_kernels,  # noqa: F401  registers its kernels
    shard_kernels as _shard_kernels,  # noqa: F401  registers its kernels
)
from dtorch_runtime.worker.arguments import (
    Runner,
    Runners,
    compile_runner,
    first_runner,
    free_runner,
    raising_runner,
    skip_runner,
)
from dtorch_runtime.worker.blobs import (
    Blob,
    Blobs,
    Pending,
    Poison,
    poison_in,
    poison_with_aliases,
)
from dtorch_runtime.worker.bodies import BodyDevice, CompiledBody
from dtorch_runtime.worker.copies import UPLOADED, new_fetch, new_upload, size_of
from dtorch_runtime.worker.failures import (
    InternalFailure,
    OpSite,
    SessionEnded,
    asked_bytes_of,
    failure_of,
)
from dtorch_runtime.worker.joint import JointBodies, JointMember, weigh
from dtorch_runtime.worker.kernels import EXCHANGE_ROWS, REDISTRIBUTE, find_kernel
from dtorch_runtime.worker.ledger import (
    UNKNOWN,
    CountedBlobs,
    DeviceTotal,
    Ledger,
    Origin,
    freed_unused,
    groups_of,
    memory_record,
    origins_of,
)
from dtorch_runtime.worker.moves import Moves
from dtorch_runtime.worker.overlap import is_overlap, run_on_copies
from dtorch_runtime.worker.redistribute import Redistributor
from dtorch_runtime.worker.thread import Job
from dtorch_runtime.worker.timed import Timer
from dtorch_runtime.worker.transfers import Transfers
from dtorch_runtime.worker.watch import StreamWatch, watched_runner

#: Values that are told of with a failure for want of memory.
_NUM_TOLD = 5


class ReportFailure(Protocol):
    """Takes a failure of an op; tells the controller unless the same was told before."""

    def __call__(self, session: int, failure: FailureRecord) -> None: ...


class Session:
    """What a client defined. Written by the agent's loop, read by workers. They meet for ``meeting_timeout_s``."""

    def __init__(self, number: int, meeting_timeout_s: float = 600.0) -> None:
        self.number = number
        self.templates: dict[int, TemplateRecord] = {}
        self.meshes: dict[int, DeviceMesh] = {}
        self.is_ended = False
        #: Those of this agent that take part.
        self.devices: dict[int, DeviceSession] = {}
        self.joint = JointBodies(meeting_timeout_s)
        #: Whether the peak of what values hold is measured; devices that join later do so too.
        self.is_measured = False


class DeviceSession:
    """The values of one session on one device, and how its ops run. Used by the device's worker thread only.

    Args:
        device: the cluster-wide id.
        torch_device: where its tensors are.
        node: the name of the agent, for failures.
        total: what all sessions hold on the device, and how much they may.
        transfers: carries out large redistributions beside ops; without it all are done at once.
        watch: told what ops read and write, while races are looked for.
    """

    def __init__(
        self,
        session: Session,
        device: int,
        torch_device: torch.device,
        node: str,
        redistributor: Redistributor,
        report_failure: ReportFailure,
        total: DeviceTotal | None = None,
        transfers: Transfers | None = None,
        watch: StreamWatch | None = None,
    ) -> None:
        self.session = session
        self._watch = watch
        self.blobs: Blobs = {}
        self._device = device
        self._torch_device = torch_device
        self._node = node
        self._redistributor = redistributor
        self._report_failure = report_failure
        self._seq = 0
        self._transfers = transfers
        self._moves = Moves(
            session.number,
            device,
            session.templates,
            session.meshes,
            redistributor,
            transfers,
            self._poison_of,
            lambda: self._seq,
        )
        #: Runners of ops, and those that are used: the same, or timed ones while somebody profiles.
        self._plain = Runners(self._make_runner)
        self._runners = self._plain
        self._tape: Tape | None = None
        #: Templates with a body that have run, by id.
        self._bodies: dict[int, CompiledBody | JointMember] = {}
        self._total = total or DeviceTotal()
        #: Counts what the values hold, while there is a limit or somebody wants to know the peak.
        self._ledger: Ledger | None = None
        if self._total.limit_bytes or session.is_measured:
            self._count(Ledger(self._total, self._reclaim))

    def end(self) -> None:
        """Make the batch that runs now stop at its next op. Called from the agent's loop."""
        self.session.is_ended = True
        self.session.joint.end()
        self._runners.clear()
        self._plain.clear()

    def run(self, seq: int, words: list[int]) -> None:
        """Run a batch of op records. Errors become failures of their ops; the rest of the batch goes on."""
        self._seq = seq
        if self._tape is None:
            self._run(words, 0)
            return
        start_ns = monotonic_ns()
        self._run(words, 0)
        self._tape.add(BATCH, seq, start_ns)

    def start_trace(self, max_spans: int) -> None:
        """Note what each op takes, from the next batch on."""
        tape = self._tape = Tape(max_spans)
        timer = Timer(
            tape,
            self.session.templates,
            self._plain,
            self._run,
            self._drop_inner,
            self.blobs,
            self._transfers,
        )
        self._runners = Runners(timer.runner)
        if self._transfers is not None:
            self._transfers.start_trace(max_spans)

    def stop_trace(self) -> list[LaneRecord] | None:
        """Note no more; what was noted, of ops and, if there were any, of transfers beside them."""
        tape, self._tape = self._tape, None
        self._runners = self._plain
        if tape is None:
            return None
        lanes = [tape.lane("worker", self._device, self.session.templates)]
        if self._transfers is not None:
            for kind, beside in self._transfers.stop_trace():
                lanes.append(beside.lane(kind, self._device, self.session.templates))
        return lanes

    def _run(self, words: list[int], i: int) -> None:
        runners = self._runners
        stop = len(words)
        while i < stop:
            try:
                while i < stop:
                    i = runners[words[i]](words, i)
            except SessionEnded:
                return
            except Exception as error:  # noqa: BLE001  whatever a kernel raises is the failure of its op
                i = self._after_error(words, i, error)

    def fail(self, op: str, error: Exception, *record: int) -> FailureRecord:
        """A failure of something that is no op: an upload or a fetch."""
        site = OpSite(self.session.number, self._seq, op, 0, record)
        return failure_of(error, site, self._device, self._node, self._shortage(error, record[:1]))

    def place(self, value_id: int, make: Callable[[], torch.Tensor], num_bytes: int) -> None:
        """A value that was uploaded: ``make`` brings it to the device, on the copy worker if it is large."""
        try:
            if self._ledger is not None:
                self._ledger.origin, self._ledger.words = UPLOADED, ()
            if self._transfers is not None and num_bytes >= self._transfers.copy_bytes > 0:
                pending = new_upload(value_id, num_bytes)
                self.blobs[value_id] = self._transfers.unresolved[value_id] = pending
                self._transfers.copy_in(pending, make, partial(self._refused, value_id))
                return
            self.blobs[value_id] = tensor = make()
            if self._watch is not None:
                self._watch.ran(*UPLOADED, (), (tensor,))
        except Exception as error:  # noqa: BLE001  whoever uses the value gets it
            self.refuse_upload(value_id, error)

    def refuse_upload(self, value_id: int, error: Exception) -> None:
        """There is no such value, and why."""
        self.blobs[value_id] = self._refused(value_id, error)

    def _refused(self, value_id: int, error: Exception) -> Poison:
        failure = self.fail("upload", error, value_id)
        self._report_failure(self.session.number, failure)
        return Poison(failure)

    # ---- memory ----

    def memory(self, num_largest: int, peak: str) -> DeviceMemoryRecord:
        """What the values hold now; ``peak`` is "keep", "reset" (to this, measured from now on) or "stop"."""
        if peak == "reset":
            if self._ledger is None:
                self._count(Ledger(self._total, self._reclaim))
            else:
                self._ledger.reset_peak()
        elif peak == "stop" and self._ledger is not None and not self._total.limit_bytes:
            self._count(None)
        return self._memory(num_largest, lambda value_id: UNKNOWN)

    def clear(self) -> None:
        """Drop every value."""
        self.blobs.clear()
        if self._transfers is not None:
            self._transfers.unresolved.clear()

    def read(self, value_id: int, take: Callable[[Blob | Exception | None], None]) -> None:
        """Have ``take`` called with a value: on the copy worker with a large one, else now.

        Raises:
            SessionEnded: the session ended while the value was waited for.
            ClusterTimeout: the transfer that makes it does not end.
        """
        blob = self.blobs.get(value_id)
        num_bytes = size_of(blob)
        if self._transfers is not None and num_bytes >= self._transfers.copy_bytes > 0:
            self._transfers.copy_out(new_fetch(blob, value_id, num_bytes), take)
            return
        self._wait_for((value_id,))
        value = self.blobs.get(value_id)
        assert not isinstance(value, Pending)
        if self._watch is not None:
            self._watch.ran("fetch", 0, (value,))
        take(value)

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is under way or its result awaited."""
        return self._transfers is None or self._transfers.is_idle

    def call_behind(self, job: Job) -> None:
        """Call something when all that was run so far is done, transfers too."""
        if self._transfers is None:
            job()
        else:
            self._transfers.call_behind(job)

    def _count(self, ledger: Ledger | None) -> None:
        """Count what the values hold from now on, or no more. Not while a batch runs: runners know their blobs."""
        before, self._ledger = self._ledger, ledger
        self.blobs = dict(self.blobs) if ledger is None else CountedBlobs(ledger, self.blobs)
        if before is not None:
            before.clear()
        self._runners.clear()
        self._plain.clear()
        self._bodies.clear()
        self.session.joint.forget()

    def _reclaim(self) -> None:
        """Free what the program has dropped, but the running batch frees later, and no op needs before."""
        assert self._ledger is not None
        for value_id in freed_unused(self._ledger.words[self._ledger.start :], self.session.templates):
            self.blobs.pop(value_id, None)

    def _memory(self, num_largest: int, origin_of: Callable[[int], Origin]) -> DeviceMemoryRecord:
        ledger, limit_bytes = self._ledger, self._total.limit_bytes
        if ledger is None:
            return memory_record(self._device, groups_of(self.blobs, origin_of), -1, limit_bytes, num_largest)
        return memory_record(self._device, ledger.groups(), ledger.peak_bytes, limit_bytes, num_largest)

    def _shortage(
        self, error: Exception, made: Sequence[int], words: Sequence[int] = ()
    ) -> ShortageRecord | None:
        """What the values hold, when the error is want of memory. ``made`` are ids of what the op was to make,
        ``words`` records that have run before it, which name what they made."""
        asked_bytes = asked_bytes_of(error)
        if asked_bytes is None:
            return None
        origins = origins_of(words, self.session.templates)
        held = self._memory(_NUM_TOLD, lambda value_id: origins.get(value_id, UNKNOWN))
        other_bytes = self._ledger.other_bytes if self._ledger is not None else 0
        return ShortageRecord(asked_bytes, other_bytes, next(filter(None, made), 0), held)

    def _after_error(self, words: list[int], i: int, error: Exception) -> int:
        """Poison what the failed op was to make; returns where the next record starts."""
        record = self.session.templates.get(words[i])
        if record is None or i + record.width > len(words):
            site = OpSite(self.session.number, self._seq, "op stream", 0, words[i : i + 2])
            self._report_failure(self.session.number, failure_of(error, site, self._device, self._node))
            return len(words)
        stop = i + record.width
        body = self._bodies.get(record.template_id)
        if body is not None:
            self._finish_body(record, body, words, i, error)
            return stop
        inputs = words[i + 2 : i + 2 + record.num_inputs]
        try:
            # An input was pending, and is not any more. A redistribution looks at its own input, and starts once.
            if record.op != REDISTRIBUTE and self._wait_for(inputs):
                return i
        except SessionEnded:
            return len(words)
        except ClusterTimeout as late:
            error = late
        poison = poison_in(self.blobs, inputs)
        if is_overlap(record, error) and run_on_copies(self._plain, self.blobs, record, words[i:stop]):
            return stop
        if poison is None:
            missing = [value_id for value_id in inputs if value_id not in self.blobs]
            if missing:
                error = InternalFailure(
                    f"{record.op} reads values {missing}, which device {self._device} does not hold"
                )
            poison = self._new_poison(record, words, i, error)
        first = i + 2 + record.num_inputs
        for value_id in words[first : first + record.num_outputs]:
            if value_id:
                self.blobs[value_id] = poison
        if record.mutates:
            poison_with_aliases(self.blobs, [inputs[index] for index in record.mutates], poison)
        return stop

    def _wait_for(self, value_ids: Sequence[int]) -> bool:
        return self._transfers is not None and self._transfers.resolve(self.blobs, value_ids)

    def _new_poison(self, record: TemplateRecord, words: list[int], i: int, error: Exception) -> Poison:
        return self._poison_of(record, words[i : i + record.width], error, self._seq, words[:i])

    def _poison_of(
        self, record: TemplateRecord, words: list[int], error: Exception, seq: int, before: Sequence[int] = ()
    ) -> Poison:
        """Poison for what the op of a record was to make; ``before`` are records that have run before it."""
        site = OpSite(self.session.number, seq, record.op, words[1], words)
        first = 2 + record.num_inputs
        made = words[first : first + record.num_outputs]
        shortage = self._shortage(error, made, before)
        failure = failure_of(error, site, self._device, self._node, shortage)
        self._report_failure(self.session.number, failure)
        return Poison(failure)

    def _make_runner(self, template_id: int) -> Runner:
        if self.session.is_ended:
            raise SessionEnded
        if template_id == FREE:
            return free_runner(self.blobs)
        record = self.session.templates.get(template_id)
        if record is None:
            raise InternalFailure(f"the op stream names template {template_id}, which was not defined")
        try:
            undefined = [mesh_id for mesh_id in record.mesh_ids if mesh_id not in self.session.meshes]
            if undefined:
                raise InternalFailure(f"{record.op} names meshes {undefined}, which were not defined")
            meshes = [self.session.meshes[mesh_id] for mesh_id in record.mesh_ids]
            if all(mesh.coordinate(self._device) is None for mesh in meshes):
                return skip_runner(record.width)
            if record.body is not None:
                return self._ordered(record, self._body_runner(record))
            if record.op == REDISTRIBUTE:
                return self._counted_runner(record, self._moves.runner(record, self.blobs))
            if record.op == EXCHANGE_ROWS:
                return self._counted_runner(record, self._moves.exchange_runner(record, self.blobs))
            runner = compile_runner(
                find_kernel(record.op),
                record,
                self.blobs,
                self.session.meshes,
                self._device,
                self._torch_device,
            )
            runner = self._ordered(record, self._counted_runner(record, runner))
            return first_runner(record, self.blobs, runner, partial(self._keep_runner, template_id))
        except Exception as error:  # noqa: BLE001  each op of the template fails with it
            return raising_runner(error)

    def _keep_runner(self, template_id: int, runner: Runner) -> None:
        if not self.session.is_ended:
            self._plain[template_id] = runner

    def _ordered(self, record: TemplateRecord, runner: Runner) -> Runner:
        """Makes what cannot run twice wait for transfers beforehand."""
        written = record.mutates
        if record.body is not None:  # it may write to an input through a view
            steps = self._bodies[record.template_id].steps
            writes = any(isinstance(step, BodyOp) and step.template.mutates for step in steps)
            written = list(range(record.num_inputs)) if writes else []
        if self._transfers is None or not (written or record.body):
            return runner
        return self._transfers.ordered(runner, self.blobs, record.num_inputs, written)

    def _counted_runner(self, record: TemplateRecord, runner: Runner) -> Runner:
        """Tells those who want to know: the ledger which op runs, the race detector what it used."""
        if self._watch is not None and record.body is None:
            runner = watched_runner(self._watch, record, self.blobs, runner)
        ledger = self._ledger
        if ledger is None:
            return runner
        blobs, op, written = self.blobs, record.op, [2 + index for index in record.mutates]

        def run(words: list[int], i: int) -> int:
            ledger.origin, ledger.words, ledger.start = (op, words[i + 1]), words, i
            stop = runner(words, i)
            for place in written:
                ledger.remeasure(blobs.get(words[i + place]))
            return stop

        return run

    @property
    def body_device(self) -> BodyDevice:
        """This device as captured calls see it."""
        return BodyDevice(self._device, self._torch_device, self.blobs, self._ledger, self._watch)

    def _body_runner(self, record: TemplateRecord) -> Runner:
        session, planner = self.session, self._redistributor.planner
        steps = parse_body(record, session.templates)
        devices, moves = [self.body_device], self._moves
        body = CompiledBody(record, steps, session.meshes, devices, moves=moves, transfers=self._transfers)
        single = partial(weigh, record, steps, self.blobs, self._moves.at_once(self._run))
        part = session.joint.join(
            record, body, self._device, session.devices, session.meshes, planner, single
        )
        found = self._bodies[record.template_id] = body if part is None else part
        return found.run if self._ledger is None else self._counted_runner(record, found.run)

    def _finish_body(
        self,
        record: TemplateRecord,
        body: CompiledBody | JointMember,
        words: list[int],
        i: int,
        error: Exception,
    ) -> None:
        """Go on with a captured call after one of its ops raised, op by op: peers wait for the rest of them."""
        expanded, starts, ids = expand(record, body.steps, words, i)
        found = body.interrupted(error)
        start = 0
        if found is not None:
            stopped = found[0]
            for value, blob in stopped.values.items():
                if value > record.num_inputs and ids[value]:
                    self.blobs[ids[value]] = blob
                    if type(blob) is Pending and self._transfers is not None:
                        self._transfers.unresolved[ids[value]] = blob
            start = starts[stopped.step] if stopped.step < len(starts) else len(expanded)
            if stopped.raised is not None:
                start = self._after_error(expanded, start, stopped.raised)
                stopped.raised.__traceback__ = None  # it holds what the call has dropped since
        error.__traceback__ = None
        self._run(expanded, start)
        self._drop_inner(record, ids)

    def _drop_inner(self, record: TemplateRecord, ids: list[int]) -> None:
        for value_id in ids[1 + record.num_inputs + record.num_outputs :]:
            self.blobs.pop(value_id, None)
