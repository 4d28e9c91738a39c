"""A recorded call made ready to be issued again: where its inputs come from, and what the user gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dtorch.graph import Graph, Handle, ViewHandle, next_write
from dtorch.issue import make_symbol
from dtorch.location import describe
from dtorch.meshes import mesh_of, node_of_devices
from dtorch.replay.templates import Op, free_inputs, make_template
from dtorch.replay.watch import PLAIN
from dtorch.spec import Spec
from dtorch.tensors import Tensor
from dtorch_runtime.errors import SessionClosed
from dtorch_runtime.passes.dead import without_dead
from dtorch_runtime.passes.rewrite import OwnTemplates, rewrite
from dtorch_runtime.wire.records import TemplateRecord


class NotReplayable(Exception):
    """A recorded call cannot be issued again; says what it does."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a replay finds a tensor: at a place among the arguments, or one that the function reached.

    Attributes:
        is_gradient: whether it is the gradient of that.
    """

    spec: Spec
    leaf: int | None = None
    tensor: Any = None
    is_gradient: bool = False

    def find(self, leaves: Sequence[Any]) -> Any:
        """The tensor, as it is now."""
        tensor = self.tensor if self.leaf is None else leaves[self.leaf]
        return tensor.grad if self.is_gradient else tensor

    def is_current(self, leaves: Sequence[Any]) -> bool:
        """Whether it is a tensor of the kind that it was."""
        tensor = self.find(leaves)
        return tensor is not None and tensor._spec is self.spec


@dataclass(frozen=True, slots=True)
class Output:
    """A value that a call makes.

    Attributes:
        root: the tensor whose memory it is a view of: an input, or from ``num_inputs`` on an output before it.
        offset_bytes: where it begins in that.
    """

    origin: Any
    location: int
    root: int | None = None
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """Ops as one template; template 0 when there are none."""

    graph: Graph
    template: int
    record: TemplateRecord
    draws: tuple[Callable[[], int], ...]
    outputs: tuple[Output, ...]
    num_ops: int

    def issue(self, inputs: Sequence[Any]) -> list[Handle]:
        """Issue it on these tensors; returns their handles and those of what it makes."""
        graph, record = self.graph, self.record
        handles = [tensor._handle for tensor in inputs]
        foreign = {id(handle.graph): handle.graph for handle in handles if handle.graph is not graph}
        for other in foreign.values():
            if other.session is not graph.session:
                raise SessionClosed(
                    "a captured function got tensors of another session than those it closes over"
                )
            other.flush()
        if record.mutates:
            for index in record.mutates:
                handles[index].root.last_write = next_write()
            torch._C._increment_version([inputs[index] for index in record.mutates])
        if graph.recording is not None:
            graph.recording.draws += self.draws
        assert record.body is not None
        scalars = [graph.session.new_inner_ids(record.body.num_inner), *(draw() for draw in self.draws)]
        ids = [handle.value_id for handle in handles]
        made = (
            graph.append(self.template, 0, ids, record.num_outputs, scalars, self.num_ops)
            if self.template
            else []
        )
        if foreign:
            graph.flush()  # before the other graphs can free what was just used
        for value_id, output in zip(made, self.outputs, strict=True):
            if output.root is None:
                handles.append(Handle(graph, value_id, output.origin, output.location))
                continue
            near = handles[output.root]
            start = near.offset_bytes + output.offset_bytes
            handles.append(ViewHandle(graph, value_id, output.origin, output.location, near.root, start))
        return handles

    def passes(self) -> str:
        """How many ops each pass of the controller removes or changes. Passes are pure: they find the same here."""
        record, session = self.record, self.graph.session
        passes = session.settings.pass_names
        if record.body is None or not passes:
            return "no passes"
        meshes = {number: mesh_of(number) for number in record.mesh_ids}
        node_of = node_of_devices(session.nodes())
        return str(rewrite(record, session.templates, meshes, passes, OwnTemplates(), node_of=node_of))


@dataclass(frozen=True, slots=True)
class Symbol:
    """A result: a new symbol for the value at ``index`` among the inputs and outputs of a call."""

    index: int
    spec: Spec


@dataclass(frozen=True, slots=True)
class Same:
    """A result: the very tensor that was the input at ``index``."""

    index: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A result that is no tensor."""

    value: Any


Result: TypeAlias = Symbol | Same | Constant


def make_result(result: Result, inputs: Sequence[Any], handles: Sequence[Handle]) -> Any:
    """What the user gets."""
    match result:
        case Symbol(index, spec):
            return make_symbol(Tensor, spec, handles[index])
        case Same(index):
            return inputs[index]
        case Constant(value):
            return value


@dataclass(frozen=True, slots=True)
class Made:
    """A call of recorded ops.

    Attributes:
        inputs: the tensors that it was recorded with.
        position: the index of each value among the inputs and outputs.
        ops: what it is made of.
    """

    call: Call
    inputs: list[Any]
    position: Mapping[int, int]
    ops: Sequence[Op]

    def result(self, value: Any) -> Result:
        """How a replay gives again what was returned when the ops were recorded."""
        if isinstance(value, PLAIN):
            return Constant(value)
        for index, tensor in enumerate(self.inputs):
            if tensor is value:
                return Same(index)
        return Symbol(self.position[value._handle.value_id], value._spec)

    def is_view_of_input(self, tensor: Any) -> bool:
        """Whether a result shares memory with an input."""
        handle = tensor._handle
        index = self.position[handle.value_id]
        return index < len(self.inputs) or any(handle.root is known._handle.root for known in self.inputs)


def check_types(results: Iterable[Any]) -> None:
    """Whether everything that was returned can be given again.

    Raises:
        NotReplayable: something is neither a tensor nor a number, a string, or another constant.
    """
    for value in results:
        if isinstance(value, PLAIN) or type(value) is Tensor:
            continue
        if isinstance(value, Tensor):
            raise NotReplayable(
                "returns a view that auto_redistribute() keeps in step with its base. Return x.clone()"
            )
        raise NotReplayable(
            f"returns a {type(value).__qualname__}. Return tensors, numbers and containers of them"
        )


def make_call(
    graph: Graph,
    ops: Sequence[Op],
    wanted: Iterable[Any],
    known: Mapping[int, Any],
    was_written: Callable[[Any], bool],
) -> Made:
    """One call for recorded ops.

    Args:
        wanted: tensors that must be among its inputs or outputs.
        known: tensors that a replay can find, by their value.
        was_written: whether the ops wrote to the memory of a tensor that they did not make.

    Raises:
        NotReplayable: a value is needed that no replay could find.
    """
    made = {value for op in ops for value in op.outputs}
    outputs: dict[int, Handle] = {}
    extra: dict[int, None] = {}
    for tensor in wanted:
        for handle in (tensor._handle.root, tensor._handle):
            if handle.value_id in made:
                outputs[handle.value_id] = handle
            elif handle is tensor._handle:
                extra[handle.value_id] = None
    # Seeds are drawn as the function would, also those that make no difference.
    ops = without_dead(ops, outputs, must_stay=lambda op: bool(op.draws))
    ids = list(dict.fromkeys((*free_inputs(ops), *extra)))
    inputs = [_find(value_id, known, ops) for value_id in ids]
    position = {value_id: index for index, value_id in enumerate((*ids, *outputs))}
    roots = {id(tensor._handle.root): index for index, tensor in reversed(list(enumerate(inputs)))}
    described = [_describe(handle, position, roots, inputs) for handle in outputs.values()]
    written = [value_id for value_id, tensor in zip(ids, inputs, strict=True) if was_written(tensor)]
    record, draws = make_template(ops, ids, list(outputs), written)
    template = graph.session.define_template(record) if ops else 0
    call = Call(graph, template, record, tuple(draws), tuple(described), len(ops))
    return Made(call, inputs, position, ops)


def _find(value_id: int, known: Mapping[int, Any], ops: Sequence[Op]) -> Any:
    found = known.get(value_id)
    if found is None:
        reader = next((op for op in ops if value_id in op.inputs), None)
        where = f", in {reader.template.op} at {describe(reader.location_id)}" if reader else ""
        raise NotReplayable(
            f"uses a tensor that it reaches in a way that cannot be watched{where}. Pass it as an argument"
        )
    return found


def _describe(
    handle: Handle, position: Mapping[int, int], roots: Mapping[int, int], inputs: Sequence[Any]
) -> Output:
    if handle.root is handle:
        return Output(handle.origin, handle.location)
    root = position.get(handle.root.value_id, roots.get(id(handle.root)))
    if root is None:
        raise NotReplayable(
            "returns a view of a tensor that it does not use otherwise. Return a copy: x.clone()"
        )
    start = inputs[root]._handle.offset_bytes if root < len(inputs) else 0
    return Output(handle.origin, handle.location, root, handle.offset_bytes - start)
