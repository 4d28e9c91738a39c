"""Pass "compile": neighbouring elementwise ops become one op, a region, which workers compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dtorch_runtime.ir.body import BodyOp
from dtorch_runtime.passes.body import Body
from dtorch_runtime.passes.reuse import IN_PLACE, OUT, full_name
from dtorch_runtime.wire.records import (
    Arg,
    ListArg,
    RegionArg,
    RegionStep,
    ScalarSlot,
    Slot,
    TemplateRecord,
    TransferArg,
)

REGION: Final = "dtorch::region"
_OTHERS: Final = """
eq.Scalar eq.Tensor ge.Scalar ge.Tensor gt.Scalar gt.Tensor le.Scalar le.Tensor lt.Scalar lt.Tensor ne.Scalar ne.Tensor
logical_and.default logical_or.default pow.Tensor_Tensor where.self
"""
#: Ops that compute each element of one new tensor of elements of their inputs.
ELEMENTWISE: Final = frozenset((*IN_PLACE, *OUT, *(f"aten::{name}" for name in _OTHERS.split())))


def form_regions(body: Body) -> Body:
    """The body with each run of two or more elementwise ops as one op."""
    ops: list[BodyOp] = []
    run: list[tuple[int, BodyOp]] = []
    last_uses = body.last_uses()

    def close() -> None:
        if len(run) > 1:
            stop = run[-1][0]
            ops.append(_region([op for _, op in run], _seen(run, stop, last_uses, body.num_outer)))
        else:
            ops.extend(op for _, op in run)
        run.clear()

    for index, op in enumerate(body.ops):
        if _is_elementwise(op) and (not run or op.template.mesh_ids == run[0][1].template.mesh_ids):
            run.append((index, op))
            continue
        close()
        if _is_elementwise(op):
            run.append((index, op))
        else:
            ops.append(op)
    close()
    return body.with_ops(ops)


def num_compiled(before: Body, after: Body) -> int:
    """How many ops of a body are in regions of the other."""
    del before
    regions = (arg for op in after.ops for arg in op.template.args if isinstance(arg, RegionArg))
    return sum(len(arg.steps) for arg in regions)


def _is_elementwise(op: BodyOp) -> bool:
    template = op.template
    return (
        full_name(template.op) in ELEMENTWISE
        and len(op.outputs) == 1
        and op.outputs[0] > 0
        and template.views == [-1]
        and not template.mutates
        and not op.scalars
        and all(map(_is_plain, (*template.args, *template.kwargs.values())))
    )


def _is_plain(arg: Arg) -> bool:
    if isinstance(arg, ListArg):
        return all(map(_is_plain, arg.items))
    return not isinstance(arg, ScalarSlot | TransferArg | RegionArg)


def _seen(
    run: Sequence[tuple[int, BodyOp]], stop: int, last_uses: dict[int, int], num_outer: int
) -> list[int]:
    """What is read behind the region or outside of the call."""
    made = [op.outputs[0] for _, op in run]
    return [value for value in made if value <= num_outer or last_uses.get(value, -1) > stop]


def _region(ops: Sequence[BodyOp], seen: Sequence[int]) -> BodyOp:
    made = {op.outputs[0] for op in ops}
    inputs = list(dict.fromkeys(value for op in ops for value in op.inputs if value not in made))
    number = {value: place for place, value in enumerate((*inputs, *(op.outputs[0] for op in ops)))}
    steps = [
        RegionStep(
            op.template.op, list(op.template.args), dict(op.template.kwargs), [number[v] for v in op.inputs]
        )
        for op in ops
    ]
    arg = RegionArg(steps, [number[value] for value in seen])
    template = TemplateRecord(
        0,
        REGION,
        [arg, *map(Slot, range(len(inputs)))],
        {},
        len(inputs),
        len(seen),
        0,
        ops[0].template.mesh_ids,
        views=[-1] * len(seen),
    )
    return BodyOp(template, ops[0].location_id, tuple(inputs), tuple(seen), ())
