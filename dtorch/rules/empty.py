"""Kernels that refuse tensors without elements, on devices that hold none: more ranks than rows, say."""

from __future__ import annotations

from typing import Any

from dtorch.op_plan import OpPlan
from dtorch.rules.call import Call
from dtorch.rules.dsl import Localize
from dtorch.rules.equation import Matched, has_empty_piece
from dtorch.rules.reduce import other_op
from dtorch.rules.unless_empty import unless_empty
from dtorch.shapes import Metas


def or_zeros(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    """The op itself where every device holds elements (None), else with zeros where one holds none."""
    if not some_device_is_empty(call, matched):
        return None
    return with_zeros(call, matched, metas, call.op.name, all_arguments(call))


def localized_or_zeros(localize: Localize) -> Any:
    """As ``or_zeros``, for a rule with the same ``localize``."""

    def plan(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
        if not some_device_is_empty(call, matched):
            return None
        args = all_arguments(call, localize(call, matched, metas))
        return with_zeros(call, matched, metas, call.op.name, args)

    return plan


def on_pieces(call: Call, matched: Matched, metas: Metas, op: str, args: list[Any]) -> OpPlan:
    """Another op on the pieces, with zeros on devices that hold none."""
    if some_device_is_empty(call, matched):
        return with_zeros(call, matched, metas, op, args)
    return other_op(call, matched, metas, op, args)


def all_arguments(call: Call, replace: dict[str, Any] | None = None) -> list[Any]:
    """Every argument in the order of the schema, some of them replaced by name."""
    replace = replace or {}
    names = [p.name for p in call.op.parameters]
    return [replace[name] if name in replace else call.get(name) for name in names]


def with_zeros(call: Call, matched: Matched, metas: Metas, op: str, args: list[Any]) -> OpPlan:
    """Another op on the pieces, and zeros on devices that hold none.

    Zeros are right where results are empty there too, or terms of a sum; a whole result must be computed.

    Raises:
        PlacementError: a result is whole on a device that holds no element to compute it from.
    """
    return unless_empty(call, matched, other_op(call, matched, metas, op, args))


def some_device_is_empty(call: Call, matched: Matched) -> bool:
    """Whether some device holds no element of an input that has some."""
    return any(
        has_empty_piece(spec.shape, layout) for spec, layout in zip(call.inputs, matched.inputs, strict=True)
    )
