"""A session as the workers see it: what was defined for it, and its values on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from dtorch_runtime.ir.body import expand, parse_body
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.records import layout_from_record
from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.wire.records import FailureRecord, TemplateRecord, TransferArg
from dtorch_runtime.worker import (
    dynamic_kernels as _dynamic_kernels,  # noqa: F401  registers its kernels
    shard_kernels as _shard_kernels,  # noqa: F401  registers its kernels
)
from dtorch_runtime.worker.arguments import Runner, compile_runner, free_runner, skip_runner
from dtorch_runtime.worker.blobs import Blobs, Poison, check_plain, dtype_of, poison_with_aliases
from dtorch_runtime.worker.bodies import CompiledBody, Mover
from dtorch_runtime.worker.failures import InternalFailure, OpSite, SessionEnded, failure_of
from dtorch_runtime.worker.kernels import REDISTRIBUTE, find_kernel
from dtorch_runtime.worker.redistribute import Redistributor, check_piece


class ReportFailure(Protocol):
    """Takes a failure of an op; tells the controller unless the same was told before."""

    def __call__(self, session: int, failure: FailureRecord) -> None: ...


class Session:
    """What a client defined. Written by the agent's loop, read by workers."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.templates: dict[int, TemplateRecord] = {}
        self.meshes: dict[int, DeviceMesh] = {}
        self.is_ended = False


class _Runners(dict[int, Runner]):
    """Runners by template id; a missing one is made when it is first used."""

    def __init__(self, make: Callable[[int], Runner]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, template_id: int) -> Runner:
        runner = self._make(template_id)
        self[template_id] = runner
        return runner


class DeviceSession:
    """The values of one session on one device, and how its ops run. Used by the device's worker thread only.

    Args:
        device: the cluster-wide id.
        torch_device: where its tensors are.
        node: the name of the agent, for failures.
    """

    def __init__(
        self,
        session: Session,
        device: int,
        torch_device: torch.device,
        node: str,
        redistributor: Redistributor,
        report_failure: ReportFailure,
    ) -> None:
        self.session = session
        self.blobs: Blobs = {}
        self._device = device
        self._torch_device = torch_device
        self._node = node
        self._redistributor = redistributor
        self._report_failure = report_failure
        self._seq = 0
        self._runners = _Runners(self._make_runner)
        #: Templates with a body that have run, by id.
        self._bodies: dict[int, CompiledBody] = {}

    def end(self) -> None:
        """Make the batch that runs now stop at its next op. Called from the agent's loop."""
        self.session.is_ended = True
        self._runners.clear()

    def run(self, seq: int, words: list[int]) -> None:
        """Run a batch of op records. Errors become failures of their ops; the rest of the batch goes on."""
        self._seq = seq
        self._run(words, 0)

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
        return failure_of(error, site, self._device, self._node)

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
        poison = self._poisoned_input(inputs)
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

    def _poisoned_input(self, value_ids: list[int]) -> Poison | None:
        for value_id in value_ids:
            blob = self.blobs.get(value_id)
            if isinstance(blob, Poison):
                return blob
        return None

    def _new_poison(self, record: TemplateRecord, words: list[int], i: int, error: Exception) -> Poison:
        words_of_op = words[i : i + record.width]
        site = OpSite(self.session.number, self._seq, record.op, words[i + 1], words_of_op)
        failure = failure_of(error, site, self._device, self._node)
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
                return self._body_runner(record)
            if record.op == REDISTRIBUTE:
                return self._transfer_runner(record)
            runner = compile_runner(
                find_kernel(record.op),
                record,
                self.blobs,
                self.session.meshes,
                self._device,
                self._torch_device,
            )
            return self._first_runner(template_id, record, runner)
        except Exception as error:  # noqa: BLE001  each op of the template fails with it
            return _raising_runner(error)

    def _first_runner(self, template_id: int, record: TemplateRecord, runner: Runner) -> Runner:
        """Looks what the first op of a template makes: all make tensors of the same kind."""
        first = 2 + record.num_inputs

        def run(words: list[int], i: int) -> int:
            stop = runner(words, i)
            for value_id in words[i + first : i + first + record.num_outputs]:
                check_plain(self.blobs.get(value_id))
            if not self.session.is_ended:
                self._runners[template_id] = runner
            return stop

        return run

    def _transfer_runner(self, record: TemplateRecord) -> Runner:
        move, is_source, is_target = self._mover(record)
        blobs, width = self.blobs, record.width

        def run(words: list[int], i: int) -> int:
            out = words[i + 3]
            if out:
                value = blobs.get(words[i + 2]) if is_source else None
                result = move(value, words[i + 2], out, words[i + 1])
                if is_target:
                    blobs[out] = result
            return i + width

        return run

    def _mover(self, record: TemplateRecord) -> tuple[Mover, bool, bool]:
        """How a redistribution moves this device's piece, and whether there is one before and one after it."""
        arg = next((arg for arg in record.args if isinstance(arg, TransferArg)), None)
        if arg is None or record.num_inputs != 1 or record.num_outputs != 1:
            raise InternalFailure(f"{REDISTRIBUTE} takes one input, a transfer, and one output")
        meshes = self.session.meshes
        source, target = layout_from_record(arg.source, meshes), layout_from_record(arg.target, meshes)
        transfer = self._redistributor.planner.plan(arg.shape, dtype_of(arg.dtype), source, target)
        device, number = self._device, self.session.number
        is_source = source.mesh.coordinate(device) is not None
        is_target = target.mesh.coordinate(device) is not None
        redistribute = self._redistributor.run

        def move(value: Any, value_id: int, out: int, location_id: int) -> Any:
            def fail(error: Exception) -> Poison:
                words = [record.template_id, location_id, value_id, out]
                return self._new_poison(record, words, 0, error)

            if is_source:
                try:
                    check_piece(value, value_id, transfer, device)
                except InternalFailure as error:
                    value = fail(error)
            result = redistribute(transfer, device, value, number, out, fail)
            assert result is not None or not is_target, f"{transfer} left device {device} without its piece"
            return result

        return move, is_source, is_target

    def _body_runner(self, record: TemplateRecord) -> Runner:
        body = self._bodies[record.template_id] = CompiledBody(
            record,
            parse_body(record, self.session.templates),
            self.blobs,
            self.session.meshes,
            self._device,
            self._torch_device,
            self._mover,
        )
        return body.run

    def _finish_body(
        self, record: TemplateRecord, body: CompiledBody, words: list[int], i: int, error: Exception
    ) -> None:
        """Go on with a captured call after one of its ops raised, op by op: peers wait for the rest of them."""
        expanded, starts, ids = expand(record, body.steps, words, i)
        stopped = body.interrupted(error)
        start = 0
        if stopped is not None:
            for value, blob in stopped.values.items():
                if value > record.num_inputs and ids[value]:
                    self.blobs[ids[value]] = blob
            start = self._after_error(expanded, starts[stopped.step], error)
        error.__traceback__ = None  # it holds what the call has dropped since
        self._run(expanded, start)
        for value_id in ids[1 + record.num_inputs + record.num_outputs :]:
            self.blobs.pop(value_id, None)


def _raising_runner(error: Exception) -> Runner:
    where = error.__traceback__

    def fail(words: list[int], i: int) -> int:
        raise error.with_traceback(where)

    return fail
