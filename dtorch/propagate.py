"""One ATen call on specs -> the plan of what workers run and what the user gets. Pure; cached by dispatch."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.arguments import check_arguments
from dtorch.dynamic import needs_whole, plan_dynamic
from dtorch.meshes import check_index
from dtorch.op_plan import OpPlan, SameValue
from dtorch.overlap import refuse_shared_elements
from dtorch.rules import factory, random
from dtorch.rules.call import Call, Op, op_of
from dtorch.rules.explain import no_rule
from dtorch.rules.tables import find_rule
from dtorch.rules.whole import plan_whole
from dtorch.shapes import ShapeNeedsData
from dtorch_runtime.errors import InternalError, UnsupportedError
from dtorch_runtime.ir.layout import Layout

#: A new symbol for the same value: no worker has anything to do.
_SAME_VALUE = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh"})


def propagate(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    default_layout: Layout | None = None,
) -> OpPlan:
    """Plan one call.

    The result depends on the arguments and, where a factory or a promotion is given no dtype, on
    ``torch.get_default_dtype()``: a cache must have it in its key.

    Args:
        func: the overload.
        args, kwargs: as torch passed them, each dtorch tensor replaced by its ``Spec`` (inside lists too).
        default_layout: the layout of what a factory without tensor inputs makes.

    Raises:
        PlacementError: no placement signature of the op fits the inputs.
        MeshError: the inputs live on different meshes.
        UnsupportedError: the op, or this use of it, is not supported.
        RuntimeError, IndexError, TypeError, ValueError: torch refuses these shapes, dtypes or arguments.
    """
    op = op_of(func)
    check_index(kwargs.get("device"))
    call = Call(op, args, kwargs)
    if not call.inputs:
        if default_layout is None:
            raise InternalError(f"{op} has no tensor inputs, and no default layout was given")
        if op.is_random:
            return random.plan_random_factory(call, default_layout)
        return factory.plan_factory(call, default_layout)
    _refuse_metadata_changes(op)
    check_arguments(call)
    if op.writes:
        refuse_shared_elements(call)
    if op.base in _SAME_VALUE:
        spec = call.inputs[0]
        return OpPlan(op=None, layouts=(spec.layout,), outputs=(SameValue(0, spec),))
    rule = find_rule(op)
    try:
        if rule is not None and (rule.always or not call.is_replicated):
            return rule.plan(call)
        if call.is_replicated:
            return plan_whole(call)
    except ShapeNeedsData:
        if call.is_replicated:
            return plan_dynamic(call)
        raise needs_whole(call) from None
    raise needs_whole(call) if op.is_dynamic else no_rule(call)


def _refuse_metadata_changes(op: Op) -> None:
    if op.is_inplace_view:
        name = op.base.removeprefix("aten::")
        raise UnsupportedError(
            f"{op.name} would change the shape of a tensor in place; write x = x.{name.rstrip('_')}(...)"
        )
