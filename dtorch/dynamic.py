"""Calls whose result has a shape that only the data tells: planned here, awaited by ``issue``.

Such an op is issued at once, like any other. It makes one more value, the description of its results; the client
waits for that and for nothing else, and makes symbols of the shapes that it names. Every device of the mesh computes
the whole from whole inputs, so all agree.
"""

from __future__ import annotations

import torch

from dtorch.op_plan import LaterOutput, OpPlan
from dtorch.rules import explain
from dtorch.rules.call import ArgumentEncoder, Call
from dtorch.rules.whole import encode_arguments, packing, replicated
from dtorch.spec import Spec, intern_spec
from dtorch_runtime.errors import PlacementError, UnsupportedError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.wire.records import ListArg
from dtorch_runtime.worker.dynamic_kernels import DESCRIPTION_BYTES


def plan_dynamic(call: Call) -> OpPlan:
    """The op on whole inputs, with a description of its results.

    Raises:
        UnsupportedError: it returns a list, or writes to what may have another size.
    """
    assert call.mesh is not None
    returns = packing(call.op)
    if returns == "list" or call.op.writes:
        what = (
            "how many tensors it returns"
            if returns == "list"
            else "whether the result fits what it writes to"
        )
        raise UnsupportedError(
            f"{call.op}: only the data tells {what}; write it without out=, with ops whose result has a known "
            f"shape, or fetch the tensors with .cpu() and compute there"
        )
    encoder = ArgumentEncoder()
    args, kwargs = encode_arguments(call, encoder, {})
    layout = replicated(call.mesh)
    return OpPlan(
        op="dtorch::described",
        args=(call.op.name, ListArg(list(args))),
        kwargs=kwargs,
        layouts=tuple(spec.layout for spec in call.inputs),
        outputs=(LaterOutput(layout),) * len(call.op.returns),
        returns=returns,
    )


def description_spec(layout: Layout) -> Spec:
    """What the description of results with this layout is."""
    return intern_spec((DESCRIPTION_BYTES,), torch.uint8, replicated(layout.mesh))


def needs_whole(call: Call) -> PlacementError:
    """The error for sharded or partial inputs of such an op."""
    names = explain.input_names(call)
    return explain.refused(
        call,
        "only the data tells the shape of its result, so every device has to see all of it",
        [f"{', '.join(f'{name}: R' for name in names)} -> R"],
        f"{explain.replicate_fix(call)}; or call it inside `with dtorch.auto_redistribute():`",
    )
