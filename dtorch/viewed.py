"""Which results of an op share memory with its inputs, or could: what the passes of the controller must know."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch

from dtorch.op_plan import NewOutput, OpPlan
from dtorch.rules.call import op_of
from dtorch.spec import Spec, contiguous_stride
from dtorch_runtime.passes.reuse import can_reuse

#: Ops of torch that give the memory of an input on, though their schema does not say so.
_HIDDEN_VIEWS: Final = frozenset({"aten::_unsafe_view"})
#: Ops made of others that never do. The rest of their kind may: ``reshape``, ``einsum``.
_FRESH_COMPOSITES: Final = frozenset({"aten::linear", "aten::matmul", "aten::softmax", "aten::log_softmax"})


def views_of(plan: OpPlan) -> list[int] | None:
    """For each value that the op makes, the input whose memory it lies in, -1 for none; None when it is not known."""
    assert plan.op is not None
    if plan.is_dynamic:
        return None
    windows = [output.window for output in plan.outputs if isinstance(output, NewOutput)]
    if None in windows and not makes_new_memory(plan.op):
        return None
    return [-1 if window is None else window.index for window in windows]


def fits_of(plan: OpPlan, given: Sequence[Spec]) -> list[int]:
    """The inputs that are as the only result, row by row in memory, where an op could write it to one of them.

    Args:
        given: the specs of the inputs, before conversions.
    """
    assert plan.op is not None
    if not can_reuse(plan.op) or len(plan.outputs) != 1 or len(plan.layouts) != len(given):
        return []
    [output] = plan.outputs
    if not isinstance(output, NewOutput) or output.window is not None:
        return []
    made = output.spec
    if not made.is_resolved or made.stride != contiguous_stride(made.shape):
        return []
    converted = {index for index, _ in plan.conversions}
    return [
        index
        for index, (spec, layout) in enumerate(zip(given, plan.layouts, strict=True))
        if (spec.shape, spec.dtype, layout) == (made.shape, made.dtype, made.layout)
        and spec.is_resolved
        and (index in converted or spec.stride == made.stride)
    ]


@functools.cache
def makes_new_memory(op: str) -> bool:
    """Whether no result of an op on a worker shares memory with an input."""
    if op == "dtorch::redistribute":
        return True
    namespace, _, rest = op.partition("::")
    if namespace != "aten":
        return False
    name, _, overload = rest.partition(".")
    func = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
    if not isinstance(func, torch._ops.OpOverload):
        return False
    called = op_of(func)
    if called.base in _HIDDEN_VIEWS or called.viewed_parameter.count(None) != len(called.viewed_parameter):
        return False
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return called.base in _FRESH_COMPOSITES or not is_composite
