"""Plans for kernels that refuse pieces without elements, for devices that hold such pieces."""

from __future__ import annotations

import dataclasses

from dtorch.op_plan import NewOutput, OpPlan
from dtorch.rules import explain
from dtorch.rules.call import ArgumentEncoder, Call, local_shape
from dtorch.rules.equation import Matched
from dtorch.rules.whole import replicated
from dtorch.spec import Spec, intern_spec
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Partial, ReduceOp, Replicate
from dtorch_runtime.wire.records import ListArg, Slot


def unless_empty(call: Call, matched: Matched, plan: OpPlan) -> OpPlan:
    """The same plan, where a device without elements gives what changes nothing: 0 to a sum, -inf to a maximum.

    Raises:
        PlacementError: a result is whole on a device that holds no element to compute it from.
    """
    specs = [output.spec for output in plan.outputs if isinstance(output, NewOutput)]
    for axis, letter in enumerate(matched.letters):
        if letter is not None and any(_is_whole(spec, axis) for spec in specs):
            raise explain.refused(call, "some device would hold no element, and the op needs one", [])
    encode = ArgumentEncoder().encode
    return dataclasses.replace(
        plan,
        op="dtorch::unless_empty",
        args=(
            plan.op,
            ListArg(list(plan.args)),
            ListArg([local_shape(spec.shape, spec.layout) for spec in specs]),
            ListArg([encode(spec.dtype) for spec in specs]),
            ListArg([_kept_kind(spec.layout) for spec in specs]),
            _num_without_elements(call, plan),
        ),
    )


def with_empty_whole(call: Call) -> tuple[Call, tuple[tuple[int, Layout], ...]]:
    """A call whose tensors without elements are whole: every device has all of them, however they are placed.

    Returns the call and what to convert first, which moves no bytes: nothing where a tensor could be seen to move,
    because it is written to or viewed.
    """
    if call.op.writes or call.op.is_view:
        return call, ()
    inputs, conversions = list(call.inputs), []
    for index, spec in enumerate(call.inputs):
        if 0 in spec.shape and not spec.layout.is_replicated:
            layout = replicated(spec.layout.mesh)
            inputs[index] = intern_spec(spec.shape, spec.dtype, layout)
            conversions.append((index, layout))
    return call.with_inputs(inputs), tuple(conversions)


def _num_without_elements(call: Call, plan: OpPlan) -> int:
    """How many tensors of a plan have no element on any device: those say nothing about pieces."""
    slots = [arg.index for arg in (*plan.args, *plan.kwargs.values()) if isinstance(arg, Slot)]
    return sum(0 in call.inputs[index].shape for index in slots)


def _is_whole(spec: Spec, axis: int) -> bool:
    return 0 not in spec.shape and isinstance(spec.layout.placements[axis], Replicate)


def _kept_kind(layout: Layout) -> ReduceOp:
    """The kind of the terms of a result; of one that is not partial the pieces are empty, and any kind will do."""
    return next((p.op for p in layout.placements if isinstance(p, Partial)), "sum")
