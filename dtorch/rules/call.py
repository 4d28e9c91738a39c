"""One ATen call as the rules see it: the schema of the overload, and its arguments by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import torch

from dtorch.meshes import layout_record
from dtorch.spec import Spec
from dtorch_runtime.errors import MeshError, UnsupportedError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
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
    ScalarSlot,
    Slot,
)

#: Where a tensor parameter gets its tensors from: an input number, several for a list, None for no tensor.
Operand: TypeAlias = int | tuple[int | None, ...] | None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a schema. ``tensors`` is "one", "list" or "" when it takes no tensor."""

    name: str
    tensors: str
    writes: bool
    default: Any


_UNSAID_WRITES = {"aten::native_batch_norm": ("running_mean", "running_var")}
#: What kernels do not write to though the schema says so.
_ONLY_READS = {"aten::_fused_adagrad_": ("state_steps",)}
_KEEP_GAPS = ("aten::slice_scatter", "aten::select_scatter", "aten::diagonal_scatter")


class Op:
    """What is fixed for an overload, read once from its schema."""

    def __init__(self, func: torch._ops.OpOverload) -> None:
        schema = func._schema
        self.func = func
        #: ``aten::add.Tensor``, as templates name it.
        self.name: str = f"{schema.name}.{func._overloadname}"
        #: ``aten::add``: in-place and ``out=`` variants keep their own name here.
        self.base: str = schema.name
        self.parameters = tuple(
            Parameter(
                a.name,
                _tensor_kind(str(a.type)),
                bool(a.alias_info and a.alias_info.is_write)
                and a.name not in _ONLY_READS.get(schema.name, ()),
                a.default_value if a.has_default_value() else None,
            )
            for a in schema.arguments
        )
        self.position = {p.name: i for i, p in enumerate(self.parameters)}
        self.tensor_parameters = tuple(p for p in self.parameters if p.tensors)
        self.writes = tuple(p.name for p in self.parameters if p.writes)
        #: Parameters that the kernel writes to in training though the schema does not say so.
        self.unsaid_writes: tuple[str, ...] = _UNSAID_WRITES.get(self.base, ())
        self.returns = tuple(_tensor_kind(str(r.type)) for r in schema.returns)
        aliases: dict[str, str] = {}
        for a in schema.arguments:
            if a.alias_info and a.alias_info.is_write:
                aliases.update(dict.fromkeys(a.alias_info.before_set, a.name))
        #: For each return, the parameter that it is (in-place and ``out=``), or None.
        self.returned_parameter = tuple(
            next((aliases[s] for s in r.alias_info.before_set if s in aliases), None)
            if r.alias_info and r.alias_info.is_write
            else None
            for r in schema.returns
        )
        #: For each return, the parameter that it is a view of, or None.
        self.viewed_parameter = tuple(_viewed(schema, i) for i in range(len(schema.returns)))
        tags = func.tags
        self.is_random = torch.Tag.nondeterministic_seeded in tags
        self.is_inplace_view = torch.Tag.inplace_view in tags
        self.is_dynamic = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        self.has_generator = "generator" in self.position
        #: Whether the results are other looks at the memory of the first tensor.
        self.is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        #: Whether results have the strides of the input, gaps between rows included; those of other ops are dense.
        self.keeps_gaps = self.is_view or self.base in _KEEP_GAPS
        #: Whether it is one op on each position of lists, which it writes to and does not return.
        self.writes_lists = (
            not schema.returns and self.parameters[:1] != () and self.parameters[0].tensors == "list"
        )
        self.is_inplace = bool(self.writes) and self.writes[0] == self.parameters[0].name

    def __repr__(self) -> str:
        return self.name


def _viewed(schema: Any, position: int) -> str | None:
    """The parameter whose memory a return shares without being it: ``Tensor(a)``, or ``Tensor(a)[]``."""
    returned = schema.returns[position]
    if str(returned.type) == "List[Tensor]":  # torch keeps no alias of a list's items
        sources = [a for a in schema.arguments if a.alias_info and "*" in a.alias_info.after_set]
    elif returned.alias_info and not returned.alias_info.is_write:
        shared = returned.alias_info.before_set
        sources = [a for a in schema.arguments if a.alias_info and a.alias_info.before_set & shared]
    else:
        return None
    return sources[0].name if sources else None


def _tensor_kind(type_name: str) -> str:
    if type_name in ("Tensor", "Optional[Tensor]"):
        return "one"
    if type_name in ("List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]"):
        return "list"
    return ""


@cache
def op_of(func: torch._ops.OpOverload) -> Op:
    """The facts of an overload, read once."""
    return Op(func)


class Call:
    """An overload with its arguments. Tensors are specs, numbered in order of appearance.

    Raises:
        MeshError: the tensors live on different meshes.
    """

    def __init__(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.args = args
        self.kwargs = kwargs
        inputs: list[Spec] = []
        for value in (*args, *kwargs.values()):
            _collect(value, inputs)
        self.inputs: tuple[Spec, ...] = tuple(inputs)
        self.mesh: DeviceMesh | None = inputs[0].layout.mesh if inputs else None
        for spec in inputs:
            if spec.layout.mesh is not self.mesh and spec.layout.mesh != self.mesh:
                raise MeshError(_different_meshes(self))

    def get(self, name: str) -> Any:
        """The argument with this name of the schema, or its default."""
        position = self.op.position[name]
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, self.op.parameters[position].default)

    def has(self, name: str) -> bool:
        """Whether the overload has a parameter with this name."""
        return name in self.op.position

    def spec(self, name: str) -> Spec:
        """The tensor argument with this name."""
        value = self.get(name)
        assert isinstance(value, Spec), f"{self.op}: {name} is {value!r}"
        return value

    def with_inputs(self, inputs: Sequence[Spec]) -> Call:
        """The same call on other tensors."""
        remaining = iter(inputs)
        args = tuple(_replaced(value, remaining) for value in self.args)
        return Call(self.op, args, {name: _replaced(value, remaining) for name, value in self.kwargs.items()})

    @cached_property
    def operands(self) -> dict[str, Operand]:
        """For each tensor parameter, the numbers of its inputs."""
        numbers = iter(range(len(self.inputs)))
        found: dict[str, Operand] = {p.name: None for p in self.op.tensor_parameters}
        for position, value in enumerate(self.args):
            _number(self.op.parameters[position].name, value, numbers, found)
        for name, value in self.kwargs.items():
            _number(name, value, numbers, found)
        return found

    @cached_property
    def written(self) -> tuple[int, ...]:
        """The numbers of the inputs that the op writes to."""
        result: list[int] = []
        unsaid = self.op.unsaid_writes if self.op.unsaid_writes and self.get("training") else ()
        for name in (*self.op.writes, *unsaid):
            operand = self.operands[name]
            if isinstance(operand, int):
                result.append(operand)
            elif operand is not None:
                result.extend(i for i in operand if i is not None)
        return tuple(result)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole of every input."""
        return all(spec.layout.is_replicated for spec in self.inputs)


def _collect(value: Any, into: list[Spec]) -> None:
    if type(value) is Spec:
        into.append(value)
    elif type(value) in (list, tuple):
        for item in value:
            _collect(item, into)


def _replaced(value: Any, remaining: Iterator[Spec]) -> Any:
    if type(value) is Spec:
        return next(remaining)
    if type(value) in (list, tuple):
        return [_replaced(item, remaining) for item in value]
    return value


def _number(name: str, value: Any, numbers: Iterator[int], found: dict[str, Operand]) -> None:
    if type(value) is Spec:
        found[name] = next(numbers)
    elif type(value) in (list, tuple) and any(type(item) is Spec for item in value):
        found[name] = tuple(next(numbers) if type(item) is Spec else None for item in value)


def _different_meshes(call: Call) -> str:
    lines = "\n".join(f"  input {i}: {spec}, {spec.layout.mesh!r}" for i, spec in enumerate(call.inputs))
    return (
        f"{call.op} got tensors of different meshes:\n{lines}\n"
        f"all inputs of an op live on one mesh; move one, e.g. "
        f"y.redistribute(device_mesh=x.device_mesh, placements=x.placements)"
    )


class Seed:
    """Stands, among the arguments of a kernel, for the next seed of the op: an int of 63 bits."""


class ArgumentEncoder:
    """Turns the arguments of a call into those of a template, numbering tensors and seeds as it goes."""

    def __init__(self) -> None:
        self.num_tensors = 0
        self.num_seeds = 0

    def encode(self, value: Any) -> Arg:
        """One argument.

        Raises:
            UnsupportedError: a value that cannot cross a process.
        """
        kind = type(value)
        if kind is Spec:
            self.num_tensors += 1
            return Slot(self.num_tensors - 1)
        if kind in _PLAIN:
            return value  # type: ignore[no-any-return]  # one of the plain types of Arg
        if kind is list or kind is tuple or kind is torch.Size:
            return ListArg([self.encode(item) for item in value])
        if kind is Seed:
            self.num_seeds += 1
            return ScalarSlot(self.num_seeds - 1)
        return encode_constant(value)


_LOCAL_ARGS = (Slot, ScalarSlot, ListArg, DTypeArg, LocalShape, LocalStart, DeviceArg, MemoryFormatArg)
_PLAIN = frozenset((bool, int, float, str, type(None), *_LOCAL_ARGS))


def encode_constant(value: Any) -> Arg:
    """A constant that is not a plain number or string, as a template argument.

    Raises:
        UnsupportedError: a value that cannot cross a process.
    """
    if isinstance(value, torch.dtype):
        if str(value).startswith(("torch.q", "torch.bits")):
            raise UnsupportedError(
                f"DTorch holds plain tensors, got dtype={value}, a quantized one; write x.to(torch.int8), or quantize "
                f"on the CPU: x.cpu()"
            )
        return DTypeArg(str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return MemoryFormatArg(str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return DeviceArg()
    if isinstance(value, torch.layout):
        if value is not torch.strided:
            raise UnsupportedError(f"DTorch tensors are strided, got layout={value}; leave layout= out")
        return LayoutArg("strided")
    if isinstance(value, complex):
        return ComplexArg(value.real, value.imag)
    if isinstance(value, int | float | str):  # subclasses, e.g. IntEnum and numpy.float64
        return (
            int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else str(value)
        )
    raise UnsupportedError(
        f"an argument of type {type(value).__name__} ({value!r}) cannot be sent to workers; "
        f"an op takes tensors, numbers, strings, dtypes and lists of them"
    )


def local_shape(shape: tuple[int, ...], layout: Layout) -> Arg:
    """The argument that is ``shape`` on a worker: as it is, or the size of the worker's piece."""
    if layout.is_replicated or not any(map(_is_shard, layout.placements)):
        return ListArg(list(shape))
    return LocalShape(list(shape), layout_record(layout))


def _is_shard(placement: object) -> bool:
    return hasattr(placement, "dim")


def rounds_nothing(call: Call) -> bool:
    """Whether the first input is of a dtype in which an average is exact: rounded terms add up to another number."""
    dtype = call.inputs[0].dtype
    return dtype.is_floating_point or dtype.is_complex
