"""From a template with a body to a runner: a captured call as one Python function, generated for a device.

Values inside are local variables, kernels and constants are closed over, and a value is dropped where its last use
was: nothing is looked up. There is no ``try``. When a line raises, the caller finds in the traceback which step it was
and what the variables held (``Interrupted``), and goes on from there op by op, as if nothing had been captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeAlias

import torch

from dtorch_runtime.ir.body import BodyFree, BodyOp, Step
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.wire.records import TemplateRecord
from dtorch_runtime.worker.arguments import Expressions, Runner
from dtorch_runtime.worker.blobs import Blobs
from dtorch_runtime.worker.kernels import REDISTRIBUTE, find_kernel
from dtorch_runtime.worker.ledger import Ledger

#: Moves a device's piece: ``(value, its id, id of the result, location) -> new piece``.
Mover: TypeAlias = Callable[[Any, int, int, int], Any]
#: The mover of a redistribution, and whether the device has a piece before it and after it.
FindMover: TypeAlias = Callable[[TemplateRecord], tuple[Mover, bool, bool]]

_FILE = "<dtorch captured>"


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Where a call stopped: the step that raised, and the values that the variables held by then."""

    step: int
    values: Mapping[int, Any]


class CompiledBody:
    """The runner of a template with a body on one device."""

    def __init__(
        self,
        record: TemplateRecord,
        steps: Sequence[Step],
        blobs: Blobs,
        meshes: Mapping[int, DeviceMesh],
        device: int,
        torch_device: torch.device,
        find_mover: FindMover,
        ledger: Ledger | None = None,
    ) -> None:
        """Generate it.

        Args:
            steps: of the body.
            blobs: the values of the session on the device; read and written by the runner.
            find_mover: how redistributions are done.
            ledger: counts what values hold, if that is wanted.

        Raises:
            InternalFailure: a template contradicts itself.
        """
        writer = _Writer(record, meshes, device, torch_device, find_mover, ledger)
        for step in steps:
            writer.add(step)
        source = writer.finish()
        namespace: dict[str, Any] = {}
        exec(compile(source, _FILE, "exec"), namespace)
        self.steps = steps
        self.run: Runner = namespace["make"](blobs, *writer.constants)
        self._code: CodeType = self.run.__code__
        self._step_of_line = writer.step_of_line

    def interrupted(self, error: BaseException) -> Interrupted | None:
        """Where this body raised an error; None when it was before its first step."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is self._code:
                step = self._step_of_line.get(trace.tb_lineno)
                if step is None:
                    return None
                local = trace.tb_frame.f_locals
                values = {
                    int(name[1:]): value
                    for name, value in local.items()
                    if name[0] == "v" and value is not None
                }
                return Interrupted(step, values)
            trace = trace.tb_next
        return None


class _Writer:
    """Writes the function, a line or more for each step."""

    def __init__(
        self,
        record: TemplateRecord,
        meshes: Mapping[int, DeviceMesh],
        device: int,
        torch_device: torch.device,
        find_mover: FindMover,
        ledger: Ledger | None,
    ) -> None:
        self._record = record
        self._meshes = meshes
        self._device = device
        self._torch_device = torch_device
        self._find_mover = find_mover
        self._ledger = ledger
        self.constants: list[Any] = []
        self._names: dict[int, str] = {}
        self._lines: list[str] = []
        self.step_of_line: dict[int, int] = {}
        self._num_steps = 0
        self._first_scalar = 2 + record.num_inputs + record.num_outputs
        self._num_outer = record.num_inputs + record.num_outputs
        #: Values that this device has by now; inputs are looked up where they are first used.
        self._held: set[int] = set()
        self._freed: set[int] = set()

    def add(self, step: Step) -> None:
        first = len(self._lines)
        if isinstance(step, BodyFree):
            for value in step.values:
                if value in self._held:
                    self._release(value)
                    self._lines.append(f"v{value} = None")
                    self._freed.add(value)
        elif step.template.op == REDISTRIBUTE:
            self._move(step)
        elif any(self._takes_part(mesh_id) for mesh_id in step.template.mesh_ids):
            self._call(step)
        for line in range(first, len(self._lines)):
            self.step_of_line[line + 3] = self._num_steps  # after the two lines of `def`
        self._num_steps += 1

    def finish(self) -> str:
        for value in range(self._record.num_inputs + 1, self._num_outer + 1):
            if value in self._held:
                self._lines.append(f"blobs[words[i + {1 + value}]] = v{value}")
        for value in sorted(self._held - self._freed):
            if value > self._num_outer:
                self._release(value)
        self._lines.append(f"return i + {self._record.width}")
        names = ", ".join(("blobs", *(f"c{index}" for index in range(len(self.constants)))))
        body = "\n".join(f"        {line}" for line in self._lines)
        return f"def make({names}):\n    def run(words, i):\n{body}\n    return run\n"

    def _takes_part(self, mesh_id: int) -> bool:
        return self._meshes[mesh_id].coordinate(self._device) is not None

    def _call(self, step: BodyOp) -> None:
        template = step.template
        kernel = find_kernel(template.op)
        expressions = Expressions(
            template,
            [self._value(value) for value in step.inputs],
            [f"words[i + {self._first_scalar + index}]" for index in step.scalars],
            self._meshes,
            self._device,
            self._torch_device,
            self.constants,
        )
        call = f"{self._constant(kernel.function)}({expressions.arguments()})"
        wanted = [value for value in step.outputs if value]
        if not wanted:
            self._lines.append(call)
        elif len(step.outputs) == 1 and kernel.returns_one:
            self._lines.append(f"v{wanted[0]} = {self._counted(wanted[0], call, step)}")
        else:
            targets = ", ".join(f"v{value}" if value else "_" for value in step.outputs)
            spread = self._constant(kernel.spread)
            results = self._counted_all(step, f"{spread}({call}, {len(step.outputs)})")
            self._lines.append(f"{targets}, = {results}")
        self._held.update(wanted)
        if self._ledger is not None:
            remeasure = self._constant(self._ledger.remeasure)
            for index in template.mutates:
                self._lines.append(f"{remeasure}(v{step.inputs[index]})")

    def _move(self, step: BodyOp) -> None:
        move, is_source, is_target = self._find_mover(step.template)
        if not (is_source or is_target):
            return
        value = self._value(step.inputs[0]) if is_source else "None"
        source, target = self._id(step.inputs[0]), self._id(step.outputs[0])
        call = f"{self._constant(move)}({value}, {source}, {target}, {step.location_id})"
        if is_target:
            call = f"v{step.outputs[0]} = {self._counted(step.outputs[0], call, step)}"
            self._held.add(step.outputs[0])
        self._lines.append(call)

    def _counted(self, value: int, call: str, step: BodyOp) -> str:
        """A call whose result the ledger counts, before the result has a name: what is too large gets none."""
        if self._ledger is None:
            return call
        hold = self._constant(self._ledger.hold_inner)
        return f"{hold}({self._id(value)}, {call}, {self._origin(step)})"

    def _counted_all(self, step: BodyOp, call: str) -> str:
        if self._ledger is None:
            return call
        hold = self._constant(self._ledger.hold_results)
        ids = ", ".join(self._id(value) if value else "0" for value in step.outputs)
        return f"{hold}(({ids},), {call}, {self._origin(step)})"

    def _release(self, value: int) -> None:
        if self._ledger is not None:
            self._lines.append(f"{self._constant(self._ledger.release)}({self._id(value)})")

    def _origin(self, step: BodyOp) -> str:
        return self._constant((step.template.op, step.location_id))

    def _value(self, value: int) -> str:
        if value <= self._record.num_inputs and value not in self._held:
            self._lines.append(f"v{value} = blobs[words[i + {1 + value}]]")
            self._held.add(value)
        return f"v{value}"

    def _id(self, value: int) -> str:
        if value <= self._num_outer:
            return f"words[i + {1 + value}]"
        return f"words[i + {self._first_scalar}] + {value - self._num_outer - 1}"

    def _constant(self, value: Any) -> str:
        """Kernels are often the same, other constants rarely."""
        name = self._names.get(id(value)) if callable(value) else None
        if name is None:
            self.constants.append(value)
            name = self._names[id(value)] = f"c{len(self.constants) - 1}"
        return name
