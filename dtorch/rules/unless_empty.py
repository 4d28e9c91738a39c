"""Plans for kernels that refuse pieces without elements, for devices that hold such pieces."""

from __future__ import annotations

import dataclasses

from dtorch.op_plan import NewOutput, OpPlan
from dtorch.rules import explain
from dtorch.rules.call import ArgumentEncoder, Call, local_shape
from dtorch.rules.equation import Matched
from dtorch.spec import Spec
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


def _num_without_elements(call: Call, plan: OpPlan) -> int:
    """How many tensors of a plan have no element on any device: those say nothing about pieces."""
    slots = [arg.index for arg in (*plan.args, *plan.kwargs.values()) if isinstance(arg, Slot)]
    return sum(0 in call.inputs[index].shape for index in slots)


def _is_whole(spec: Spec, axis: int) -> bool:
    return 0 not in spec.shape and isinstance(spec.layout.placements[axis], Replicate)


def _kept_kind(layout: Layout) -> ReduceOp:
    """The kind of the terms of a result; of one that is not partial the pieces are empty, and any kind will do."""
    return next((p.op for p in layout.placements if isinstance(p, Partial)), "sum")
