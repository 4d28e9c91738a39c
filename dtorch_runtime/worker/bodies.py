"""From a template with a body to a runner: a captured call as one Python function, generated for a device.

Values inside are local variables, kernels and constants are closed over, and a value is dropped where its last use
was: nothing is looked up. There is no ``try``. When a line raises, the caller finds in the traceback which step it was
and what the variables held (``Interrupted``), and goes on from there op by op, as if nothing had been captured.

A large redistribution is two lines: one starts it (``transfers``), one waits for it in front of the first step that
reads what it makes. In between its variable holds ``Pending``, as the value would op by op.

One function may also run the call for several devices of an agent, each step for all of them in turn (``joint``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol, TypeAlias

import torch

from dtorch_runtime.ir.body import BodyFree, BodyOp, Step
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.wire.records import TemplateRecord
from dtorch_runtime.worker.arguments import Expressions, Runner
from dtorch_runtime.worker.blobs import Blobs
from dtorch_runtime.worker.kernels import EXCHANGE_ROWS, REDISTRIBUTE, find_kernel
from dtorch_runtime.worker.ledger import Ledger
from dtorch_runtime.worker.transfers import Transfers
from dtorch_runtime.worker.watch import StreamWatch

#: Moves a device's piece: ``(value, its id, id of the result, location) -> new piece``.
Mover: TypeAlias = Callable[[Any, int, int, int], Any]
#: Moves the pieces of all devices of a body at once, in their order; None where a device has none.
JointMover: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
#: The mover of a redistribution, and the indices of the devices that have a piece before it and after it.
FindJointMover: TypeAlias = Callable[[TemplateRecord], tuple[JointMover, Sequence[int], Sequence[int]]]

_FILE = "<dtorch captured>"


@dataclass(frozen=True, slots=True)
class Move:
    """How one device takes part in a redistribution.

    Attributes:
        now: does it at once.
        is_source: whether the device has a piece before it.
        is_target: whether it has one after it.
        start: gives ``Pending`` and does it beside what follows; None when it is too small for that.
    """

    now: Mover
    is_source: bool
    is_target: bool
    start: Mover | None = None


#: Takes part in an exchange of rows: ``(rows and counts, their ids, id of the result, location) -> new rows``.
ExchangeRows: TypeAlias = Callable[[Sequence[Any], Sequence[int], int, int], Any]


class FindMoves(Protocol):
    """How one device takes part in what several do together."""

    def move(self, record: TemplateRecord) -> Move:
        """In a redistribution."""

    def exchange(self, record: TemplateRecord) -> ExchangeRows:
        """In an exchange of rows."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Where a call stopped on a device: the step it had come to, and the values that its variables held by then.

    Attributes:
        raised: what that step raised; None when another device's did, and this one has yet to begin the step.
    """

    step: int
    values: Mapping[int, Any]
    raised: Exception | None


@dataclass(frozen=True, slots=True)
class BodyDevice:
    """A device that a body runs on.

    Attributes:
        device: the cluster-wide id.
        torch_device: where its tensors are.
        blobs: the values of the session on the device; read and written by the runner.
        ledger: counts what values hold, if that is wanted.
        watch: told what ops read and write, while races are looked for.
    """

    device: int
    torch_device: torch.device
    blobs: Blobs
    ledger: Ledger | None = None
    watch: StreamWatch | None = None


class CompiledBody:
    """The runner of a template with a body on one device, or on several that take turns in one thread.

    Args:
        steps: of the body.
        meshes: the session's, by id.
        moves: how one device takes part in redistributions and exchanges.
        transfers: carries out what is started; needed where something is.
        find_joint_mover: how those of all devices are; needed when there are several.

    Raises:
        InternalFailure: a template contradicts itself.
    """

    def __init__(
        self,
        record: TemplateRecord,
        steps: Sequence[Step],
        meshes: Mapping[int, DeviceMesh],
        devices: Sequence[BodyDevice],
        *,
        moves: FindMoves | None = None,
        transfers: Transfers | None = None,
        find_joint_mover: FindJointMover | None = None,
    ) -> None:
        writer = _Writer(record, meshes, devices, moves, transfers, find_joint_mover)
        for index, step in enumerate(steps):
            writer.add(step, next_op(steps, index + 1))
        source = writer.finish()
        namespace: dict[str, Any] = {}
        exec(compile(source, _FILE, "exec"), namespace)
        self.steps = steps
        self.run: Runner = namespace["make"](*(device.blobs for device in devices), *writer.constants)
        self._code: CodeType = self.run.__code__
        self._num_devices = len(devices)
        self._place_of_line = writer.place_of_line

    def interrupted(self, error: Exception) -> list[Interrupted] | None:
        """Where this body raised an error, for each device; None when it was before its first step."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is self._code:
                place = self._place_of_line.get(trace.tb_lineno)
                return None if place is None else self._stopped(*place, trace.tb_frame.f_locals, error)
            trace = trace.tb_next
        return None

    def _stopped(
        self, step: int, turn: int | None, variables: Mapping[str, Any], error: Exception
    ) -> list[Interrupted]:
        values: list[dict[int, Any]] = [{} for _ in range(self._num_devices)]
        for name, value in variables.items():
            if name[0] == "v" and value is not None:
                number, _, device = name[1:].partition("d")
                values[int(device)][int(number)] = value
        stopped = []
        for index, held in enumerate(values):
            is_done = turn is not None and index < turn
            stopped.append(Interrupted(step + is_done, held, error if index == turn else None))
        return stopped


def next_op(steps: Sequence[Step], index: int) -> BodyOp | None:
    """The first op from a step on."""
    return next((step for step in steps[index:] if isinstance(step, BodyOp)), None)


class _Writer:
    """Writes the function, a line or more for each step and device. Value ``n`` of device ``k`` is ``v<n>d<k>``."""

    def __init__(
        self,
        record: TemplateRecord,
        meshes: Mapping[int, DeviceMesh],
        devices: Sequence[BodyDevice],
        moves: FindMoves | None,
        transfers: Transfers | None,
        find_joint_mover: FindJointMover | None,
    ) -> None:
        self._record = record
        self._meshes = meshes
        self._find_joint_mover = find_joint_mover
        self._devices = [
            _DeviceWriter(self, record, meshes, device, index, moves, transfers)
            for index, device in enumerate(devices)
        ]
        self.constants: list[Any] = []
        self._names: dict[int, str] = {}
        self.lines: list[str] = []
        #: By line: the step, and the index of the device whose turn it is; None when it is everybody's.
        self.place_of_line: dict[int, tuple[int, int | None]] = {}
        self._num_steps = 0

    def add(self, step: Step, following: BodyOp | None) -> None:
        """Write a step.

        Args:
            following: the op behind it.
        """
        if (
            isinstance(step, BodyOp)
            and step.template.op == REDISTRIBUTE
            and self._find_joint_mover is not None
        ):
            self._move(step, self._find_joint_mover)
        else:
            for index, device in enumerate(self._devices):
                first = len(self.lines)
                device.add(step, following)
                self._note(first, index)
        self._num_steps += 1

    def _note(self, first: int, turn: int | None) -> None:
        for line in range(first, len(self.lines)):
            self.place_of_line[line + 3] = self._num_steps, turn  # after the two lines of `def`

    def _move(self, step: BodyOp, find: FindJointMover) -> None:
        move, sources, targets = find(step.template)
        first = len(self.lines)
        pieces = [
            device.value(step.inputs[0]) if index in sources else "None"
            for index, device in enumerate(self._devices)
        ]
        names = [
            device.made(step.outputs[0]) if index in targets else "_"
            for index, device in enumerate(self._devices)
        ]
        self.lines.append(f"{', '.join(names)}, = {self.constant(move)}(({', '.join(pieces)},))")
        self._note(first, None)
        for index, device in enumerate(self._devices):
            first = len(self.lines)
            device.tell(step, index in sources, index in targets)
            self._note(first, index)

    def finish(self) -> str:
        for device in self._devices:
            device.finish()
        self.lines.append(f"return i + {self._record.width}")
        blobs = [f"b{index}" for index in range(len(self._devices))]
        names = ", ".join((*blobs, *(f"c{index}" for index in range(len(self.constants)))))
        body = "\n".join(f"        {line}" for line in self.lines)
        return f"def make({names}):\n    def run(words, i):\n{body}\n    return run\n"

    def constant(self, value: Any) -> str:
        """Kernels are often the same, other constants rarely."""
        name = self._names.get(id(value)) if callable(value) else None
        if name is None:
            self.constants.append(value)
            name = self._names[id(value)] = f"c{len(self.constants) - 1}"
        return name


class _DeviceWriter:
    """Writes the lines of one device."""

    def __init__(
        self,
        writer: _Writer,
        record: TemplateRecord,
        meshes: Mapping[int, DeviceMesh],
        device: BodyDevice,
        index: int,
        moves: FindMoves | None,
        transfers: Transfers | None,
    ) -> None:
        self._writer = writer
        self._record = record
        self._meshes = meshes
        self._device = device.device
        self._torch_device = device.torch_device
        self._index = index
        self._moves = moves
        self._transfers = transfers
        self._ledger = device.ledger
        self._watch = device.watch
        self._first_scalar = 2 + record.num_inputs + record.num_outputs
        self._num_outer = record.num_inputs + record.num_outputs
        #: Values that this device has by now; inputs are looked up where they are first used.
        self._held: set[int] = set()
        self._freed: set[int] = set()
        #: Values that no step has waited for yet, and the steps that make them.
        self._pending: dict[int, BodyOp] = {}
        self._has_started = False

    def add(self, step: Step, following: BodyOp | None) -> None:
        """Write the lines of a step."""
        if isinstance(step, BodyFree):
            for value in step.values:
                if value in self._held:
                    self._pending.pop(value, None)
                    self._release(value)
                    self._line(f"{self._name(value)} = None")
                    self._freed.add(value)
        elif step.template.op == REDISTRIBUTE:
            self._move(step, following)
        elif any(self._takes_part(mesh_id) for mesh_id in step.template.mesh_ids):
            if step.template.op == EXCHANGE_ROWS:
                self._exchange(step)
            else:
                self._call(step)

    def finish(self) -> None:
        """Hand the outputs over."""
        for value in range(self._record.num_inputs + 1, self._num_outer + 1):
            if value in self._held:
                self._line(f"{self._blob(value)} = {self._name(value)}")
                if value in self._pending:
                    assert self._transfers is not None
                    unresolved = self._writer.constant(self._transfers.unresolved)
                    self._line(f"{unresolved}[{self._id(value)}] = {self._name(value)}")
        for value in sorted(self._held - self._freed):
            if value > self._num_outer:
                self._release(value)

    def value(self, value: int) -> str:
        """The variable of a value that is read; it is waited for, if it is under way."""
        made_by = self._pending.pop(value, None)
        if made_by is not None:
            assert self._transfers is not None
            wait = f"{self._writer.constant(self._transfers.wait)}({self._name(value)})"
            self._line(f"{self._name(value)} = {self._counted(value, wait, made_by)}")
        if value <= self._record.num_inputs and value not in self._held:
            self._line(f"{self._name(value)} = {self._blob(value)}")
            self._held.add(value)
        return self._name(value)

    def made(self, value: int) -> str:
        """The variable of a value that is made."""
        self._held.add(value)
        return self._name(value)

    def _line(self, text: str) -> None:
        self._writer.lines.append(text)

    def _name(self, value: int) -> str:
        return f"v{value}d{self._index}"

    def _blob(self, value: int) -> str:
        return f"b{self._index}[words[i + {1 + value}]]"

    def _takes_part(self, mesh_id: int) -> bool:
        return self._meshes[mesh_id].coordinate(self._device) is not None

    def _call(self, step: BodyOp) -> None:
        template = step.template
        kernel = find_kernel(template.op)
        expressions = Expressions(
            template,
            [self.value(value) for value in step.inputs],
            [f"words[i + {self._first_scalar + index}]" for index in step.scalars],
            self._meshes,
            self._device,
            self._torch_device,
            self._writer.constants,
        )
        if self._has_started and template.mutates:
            assert self._transfers is not None
            written = "".join(f"{self._name(step.inputs[index])}, " for index in template.mutates)
            self._line(f"{self._writer.constant(self._transfers.before_write)}(({written}))")
        call = f"{self._writer.constant(kernel.function)}({expressions.arguments()})"
        wanted = [value for value in step.outputs if value]
        if not wanted:
            self._line(call)
        elif len(step.outputs) == 1 and kernel.returns_one:
            self._line(f"{self._name(wanted[0])} = {self._counted(wanted[0], call, step)}")
        else:
            targets = ", ".join(self._name(value) if value else "_" for value in step.outputs)
            spread = self._writer.constant(kernel.spread)
            results = self._counted_all(step, f"{spread}({call}, {len(step.outputs)})")
            self._line(f"{targets}, = {results}")
        self._held.update(wanted)
        if self._ledger is not None:
            remeasure = self._writer.constant(self._ledger.remeasure)
            for index in template.mutates:
                self._line(f"{remeasure}({self._name(step.inputs[index])})")
        self.tell(step)

    def _move(self, step: BodyOp, following: BodyOp | None) -> None:
        assert self._moves is not None
        move = self._moves.move(step.template)
        if not (move.is_source or move.is_target):
            return
        (read,), (made,) = step.inputs, step.outputs
        # Beside what? The next op would wait at once, or there is none.
        is_beside = move.start is not None and following is not None and made not in following.inputs
        value = "None"
        if move.is_source:  # what is under way may be moved on, behind what makes it
            value = self._name(read) if is_beside and read in self._pending else self.value(read)
        if self._watch is not None and not is_beside:
            begins = self._writer.constant(self._watch.begins)
            self._line(f"{begins}({REDISTRIBUTE!r}, {step.location_id})")
        function = self._writer.constant(move.start if is_beside else move.now)
        call = f"{function}({value}, {self._id(read)}, {self._id(made)}, {step.location_id})"
        if move.is_target:
            call = f"{self.made(made)} = {self._counted(made, call, step)}"
        self._line(call)
        if is_beside:
            self._has_started = True
            if move.is_target:
                self._pending[made] = step
        else:
            self.tell(step, move.is_source, move.is_target)

    def _exchange(self, step: BodyOp) -> None:
        assert self._moves is not None
        exchange = self._writer.constant(self._moves.exchange(step.template))
        values = ", ".join(self.value(value) for value in step.inputs)
        ids = ", ".join(self._id(value) for value in step.inputs)
        [made] = step.outputs
        if self._watch is not None:
            begins = self._writer.constant(self._watch.begins)
            self._line(f"{begins}({EXCHANGE_ROWS!r}, {step.location_id})")
        call = f"{exchange}(({values}), ({ids}), {self._id(made)}, {step.location_id})"
        self._line(f"{self.made(made)} = {self._counted(made, call, step)}")
        self.tell(step)

    def tell(self, step: BodyOp, reads: bool = True, makes: bool = True) -> None:
        """Tell the race detector, when there is one, what a step has used."""
        if self._watch is None:
            return
        inputs = "".join(f"{self._name(value)}, " for value in step.inputs if reads)
        outputs = "".join(f"{self._name(value)}, " for value in step.outputs if value and makes)
        mutates = f"({''.join(f'{index}, ' for index in step.template.mutates)})"
        ran = self._writer.constant(self._watch.ran)
        op = repr(step.template.op)
        self._line(f"{ran}({op}, {step.location_id}, ({inputs}), ({outputs}), {mutates})")

    def _counted(self, value: int, call: str, step: BodyOp) -> str:
        """A call whose result the ledger counts, before the result has a name: what is too large gets none."""
        if self._ledger is None:
            return call
        hold = self._writer.constant(self._ledger.hold_inner)
        return f"{hold}({self._id(value)}, {call}, {self._origin(step)})"

    def _counted_all(self, step: BodyOp, call: str) -> str:
        if self._ledger is None:
            return call
        hold = self._writer.constant(self._ledger.hold_results)
        ids = ", ".join(self._id(value) if value else "0" for value in step.outputs)
        return f"{hold}(({ids},), {call}, {self._origin(step)})"

    def _release(self, value: int) -> None:
        if self._ledger is not None:
            self._line(f"{self._writer.constant(self._ledger.release)}({self._id(value)})")

    def _origin(self, step: BodyOp) -> str:
        return self._writer.constant((step.template.op, step.location_id))

    def _id(self, value: int) -> str:
        if value <= self._num_outer:
            return f"words[i + {1 + value}]"
        return f"words[i + {self._first_scalar}] + {value - self._num_outer - 1}"
