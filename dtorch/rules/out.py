"""``out=`` for rules whose pieces another kernel computes: it makes new tensors, which are copied into the targets."""

from __future__ import annotations

import dataclasses
from functools import cache

import torch

from dtorch.op_plan import OpPlan
from dtorch.rules.call import Call, Op, op_of
from dtorch.rules.whole import pack_outputs, packing
from dtorch.shapes import Metas
from dtorch_runtime.errors import InternalError
from dtorch_runtime.wire.records import ListArg, Slot


def is_out(op: Op) -> bool:
    """Whether an op returns tensors that it was given to write to, and is no in-place one."""
    return bool(op.returns) and None not in op.returned_parameter and not op.is_inplace


def functional_call(call: Call) -> Call | None:
    """The call that makes new tensors where ``call`` writes to its ``out=``; None where torch has none.

    Raises:
        InternalError: the targets are not the last tensors, so that others would change their numbers.
    """
    op = functional_of(call.op)
    if op is None:
        return None
    targets = _targets(call)
    if targets != tuple(range(len(call.inputs) - len(targets), len(call.inputs))):
        raise InternalError(f"{call.op}: the tensors written to are inputs {targets}, not the last ones")
    kwargs = {name: value for name, value in call.kwargs.items() if name not in call.op.writes}
    return Call(op, call.args[: len(op.parameters)], kwargs)


@cache
def functional_of(op: Op) -> Op | None:
    """The overload with the same parameters but for those that it returns; None when there is none."""
    if not is_out(op) or set(op.writes) != set(op.returned_parameter):
        return None
    namespace, _, name = op.base.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    wanted = [(a.name, str(a.type)) for a in op.func._schema.arguments if a.name not in op.writes]
    for overload in packet.overloads():
        func = getattr(packet, overload)
        if [(a.name, str(a.type)) for a in func._schema.arguments] == wanted:
            return op_of(func)
    return None


def into_targets(call: Call, functional: OpPlan) -> OpPlan:
    """The plan of ``call`` that runs the plan of its functional call, and copies the results into the targets."""
    targets = _targets(call)
    none: Metas = (None,) * len(call.op.returns)
    return dataclasses.replace(
        functional,
        op="dtorch::copied_to",
        args=(ListArg([Slot(index) for index in targets]), functional.op, ListArg(list(functional.args))),
        layouts=(*functional.layouts, *(call.inputs[index].layout for index in targets)),
        outputs=pack_outputs(call, none, [()] * len(none)),
        returns=packing(call.op),
        mutates=call.written,
    )


def _targets(call: Call) -> tuple[int, ...]:
    """The numbers of the tensors that are returned."""
    found = [call.operands[name] for name in call.op.returned_parameter if name is not None]
    return tuple(index for index in found if isinstance(index, int))
