"""From a template to a *runner*: ``run(words, i)`` runs the record at ``words[i]`` and returns where the next starts.

A runner is Python code generated once for each pattern of arguments (which are inputs, which are constants, how
many outputs) and bound to one function, one set of constants and one device's blobs. What it adds to the kernel is
a few list and dict look-ups; there is no loop over arguments, and no ``try``: the worker's loop catches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from dtorch_runtime.ir.layout import device_box, local_shape
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.records import layout_from_record
from dtorch_runtime.wire.records import (
    Arg,
    ComplexArg,
    DeviceArg,
    DTypeArg,
    LayoutArg,
    ListArg,
    LocalShape,
    LocalStart,
    MemoryFormatArg,
    RegionArg,
    ScalarSlot,
    Slot,
    TemplateRecord,
    TransferArg,
)
from dtorch_runtime.worker.blobs import Blobs, check_plain, dtype_of
from dtorch_runtime.worker.failures import InternalFailure
from dtorch_runtime.worker.kernels import Kernel


@dataclass(slots=True, eq=False)
class BoundRegion:
    """A region as the constant of its op on one device; ``run`` is made when it runs first."""

    arg: RegionArg
    meshes: Mapping[int, DeviceMesh]
    device: int
    torch_device: torch.device
    run: Callable[..., Any] | None = None


Runner: TypeAlias = Callable[[list[int], int], int]


class Runners(dict[int, Runner]):
    """Runners by template id; a missing one is made when it is first used."""

    def __init__(self, make: Callable[[int], Runner]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, template_id: int) -> Runner:
        runner = self._make(template_id)
        self[template_id] = runner
        return runner


class Expressions:
    """Turns the arguments of a template into source text, and collects the constants that the text names.

    Args:
        inputs, scalars: the text of each input and each scalar of the template.
        constants: values named ``c0``, ``c1``, ... by the text; more are added.
    """

    def __init__(
        self,
        record: TemplateRecord,
        inputs: Sequence[str],
        scalars: Sequence[str],
        meshes: Mapping[int, DeviceMesh],
        device: int,
        torch_device: torch.device,
        constants: list[Any],
    ) -> None:
        self._record = record
        self._inputs = inputs
        self._scalars = scalars
        self._meshes = meshes
        self._device = device
        self._torch_device = torch_device
        self.constants = constants

    def arguments(self) -> str:
        """All arguments, as they stand in a call.

        Raises:
            InternalFailure: the template contradicts itself.
            KeyError: it names a mesh that was not defined.
        """
        texts = [self.of(arg) for arg in self._record.args]
        for name, arg in self._record.kwargs.items():
            if not name.isidentifier():
                raise InternalFailure(f"{self._record.op} has an argument named {name!r}")
            texts.append(f"{name}={self.of(arg)}")
        return ", ".join(texts)

    def of(self, arg: Arg) -> str:
        match arg:
            case Slot(index):
                return self._named(index, self._inputs, "input")
            case ScalarSlot(index):
                return self._named(index, self._scalars, "scalar")
            case ListArg(items) if any(_is_dynamic(item) for item in items):
                return f"[{', '.join(self.of(item) for item in items)}]"
            case _:
                return self._constant(self.constant(arg))

    def constant(self, arg: Arg) -> Any:
        """What an argument that no record changes is in torch's terms."""
        match arg:
            case ListArg(items):
                return [self.constant(item) for item in items]
            case DTypeArg(name):
                return dtype_of(name)
            case LayoutArg(name):
                return _named(name, torch.layout)
            case MemoryFormatArg(name):
                return _named(name, torch.memory_format)
            case DeviceArg():
                return self._torch_device
            case ComplexArg(real, imag):
                return complex(real, imag)
            case LocalShape(shape, layout):
                return list(local_shape(shape, layout_from_record(layout, self._meshes), self._device))
            case LocalStart(shape, layout, dim):
                return device_box(shape, layout_from_record(layout, self._meshes), self._device)[dim][0]
            case RegionArg():
                return BoundRegion(arg, self._meshes, self._device, self._torch_device)
            case TransferArg():
                raise InternalFailure(f"{self._record.op} takes no transfer; only dtorch::redistribute does")
            case _:
                return arg

    def _named(self, index: int, names: Sequence[str], what: str) -> str:
        if not 0 <= index < len(names):
            raise InternalFailure(f"{self._record.op} names {what} {index}, its records have {len(names)}")
        return names[index]

    def _constant(self, value: Any) -> str:
        self.constants.append(value)
        return f"c{len(self.constants) - 1}"


def _is_dynamic(arg: Arg) -> bool:
    if isinstance(arg, ListArg):
        return any(_is_dynamic(item) for item in arg.items)
    return isinstance(arg, Slot | ScalarSlot)


def _named(name: str, kind: type) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise InternalFailure(f"torch has no {kind.__name__} named {name!r}")
    return found


def compile_runner(
    kernel: Kernel,
    record: TemplateRecord,
    blobs: Blobs,
    meshes: Mapping[int, DeviceMesh],
    device: int,
    torch_device: torch.device,
) -> Runner:
    """The runner of a template on one device.

    Args:
        kernel: what computes.
        blobs: the values of the session on the device; read and written by the runner.
        meshes: the session's meshes by id.
        device: the cluster-wide id of the device.
        torch_device: where its tensors are.

    Raises:
        InternalFailure: the template contradicts itself.
        KeyError: it names a mesh that was not defined.
    """
    first = 2 + record.num_inputs + record.num_outputs
    expressions = Expressions(
        record,
        [f"blobs[words[i + {2 + index}]]" for index in range(record.num_inputs)],
        [f"words[i + {first + index}]" for index in range(record.num_scalars)],
        meshes,
        device,
        torch_device,
        [],
    )
    body = _body(f"fn({expressions.arguments()})", record, returns_one=kernel.returns_one)
    names = [f"c{index}" for index in range(len(expressions.constants))]
    factory = _factory(tuple(names), body)
    runner: Runner = factory(kernel.function, blobs, kernel.spread, *expressions.constants)
    return runner


def _body(call: str, record: TemplateRecord, *, returns_one: bool) -> tuple[str, ...]:
    first = 2 + record.num_inputs
    if record.num_outputs == 0:
        lines = [call]
    elif record.num_outputs == 1 and returns_one:
        lines = [f"result = {call}", f"out = words[i + {first}]", "if out:", "    blobs[out] = result"]
    else:
        lines = [f"results = spread({call}, {record.num_outputs})"]
        for index in range(record.num_outputs):
            lines += [f"out = words[i + {first + index}]", "if out:", f"    blobs[out] = results[{index}]"]
    return (*lines, f"return i + {record.width}")


@lru_cache(maxsize=4096)
def _factory(constants: tuple[str, ...], body: tuple[str, ...]) -> Callable[..., Runner]:
    parameters = ", ".join(("fn", "blobs", "spread", *constants))
    lines = "\n".join("        " + line for line in body)
    source = f"def make({parameters}):\n    def run(words, i):\n{lines}\n    return run\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, "<dtorch runner>", "exec"), namespace)
    factory: Callable[..., Runner] = namespace["make"]
    return factory


def first_runner(
    record: TemplateRecord, blobs: Blobs, runner: Runner, keep: Callable[[Runner], None]
) -> Runner:
    """Looks what the first op of a template makes, and then lets the runner be kept: all make tensors of one kind."""
    first = 2 + record.num_inputs

    def run(words: list[int], i: int) -> int:
        stop = runner(words, i)
        for value_id in words[i + first : i + first + record.num_outputs]:
            check_plain(blobs.get(value_id))
        keep(runner)
        return stop

    return run


def skip_runner(width: int) -> Runner:
    """The runner of a template in which the device takes no part."""

    def skip(words: list[int], i: int) -> int:
        return i + width

    return skip


def free_runner(blobs: Blobs) -> Runner:
    """The runner of FREE records."""
    pop = blobs.pop

    def free(words: list[int], i: int) -> int:
        stop = i + 2 + words[i + 1]
        for index in range(i + 2, stop):
            pop(words[index], None)
        return stop

    return free


def raising_runner(error: Exception) -> Runner:
    """The runner of a template that cannot be run."""
    where = error.__traceback__

    def fail(words: list[int], i: int) -> int:
        raise error.with_traceback(where)

    return fail
