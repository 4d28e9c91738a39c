"""Plans that are the same for every op: each device computes the whole, and how results are packed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch

from dtorch import shapes
from dtorch.op_plan import NewOutput, NoOutput, OpPlan, Output, SameTensor, Window
from dtorch.rules import lazy
from dtorch.rules.call import ArgumentEncoder, Call, Op, encode_constant
from dtorch.shapes import Metas, TensorMeta
from dtorch.spec import intern_spec
from dtorch_runtime.errors import UnsupportedError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Replicate
from dtorch_runtime.wire.records import Arg


@lru_cache(maxsize=4096)
def replicated(mesh: DeviceMesh) -> Layout:
    """Replicate on every axis."""
    return Layout(mesh, (Replicate(),) * mesh.ndim)


def plan_whole(call: Call) -> OpPlan:
    """Each device runs the op as it is on whole inputs, and holds whole results.

    Raises:
        UnsupportedError: the op draws random numbers that would differ between devices.
    """
    assert call.mesh is not None
    layout = replicated(call.mesh)
    if call.op.writes:
        shapes.check_written(call)
        metas: Metas = (None,) * len(call.op.returns) if _returns_written(call.op) else shapes.infer(call)
    else:
        metas = shapes.infer(call)
    return plan_same_op(call, metas, [layout] * len(metas))


def _returns_written(op: Op) -> bool:
    return all(parameter is not None for parameter in op.returned_parameter)


def plan_same_op(
    call: Call,
    metas: Metas,
    layouts: Sequence[Layout | Sequence[Layout]],
    *,
    conversions: Sequence[tuple[int, Layout]] = (),
    replace: dict[str, Any] | None = None,
    op: str | None = None,
) -> OpPlan:
    """The op itself on local pieces, its arguments as given but for those in ``replace`` (by name).

    ``layouts`` has one entry for each return, a sequence for a list of tensors.
    """
    encoder = ArgumentEncoder()
    args, kwargs = encode_arguments(call, encoder, replace or {})
    if op is None and draws(call):
        raise undrawable(call)
    return OpPlan(
        op=op or call.op.name,
        args=args,
        kwargs=kwargs,
        layouts=input_layouts(call, conversions),
        conversions=tuple(conversions),
        outputs=pack_outputs(call, metas, layouts),
        returns=packing(call.op),
        mutates=call.written,
        num_seeds=encoder.num_seeds,
    )


def encode_arguments(
    call: Call, encoder: ArgumentEncoder, replace: dict[str, Any]
) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
    """The arguments of a call as template arguments; ``replace`` gives other values by parameter name."""
    parameters = call.op.parameters
    if replace:
        args = tuple(
            encoder.encode(replace.get(p.name, value))
            for p, value in zip(parameters, call.args, strict=False)
        )
        names = {p.name for p in parameters[: len(call.args)]}
        merged = {**call.kwargs, **{name: value for name, value in replace.items() if name not in names}}
    else:
        args = tuple(encoder.encode(value) for value in call.args)
        merged = call.kwargs
    if merged.get("layout") is not None:
        encode_constant(merged["layout"])  # refuses sparse ones
    kwargs = {
        name: encoder.encode(value)
        for name, value in merged.items()
        if name not in ("generator", "pin_memory", "layout")
    }
    return args, kwargs


def draws(call: Call) -> bool:
    """Whether a call needs random numbers: attention does only with a dropout."""
    return call.op.is_random and not (call.has("dropout_p") and call.get("dropout_p") == 0)


def undrawable(call: Call) -> UnsupportedError:
    """A call that needs random numbers in a way that is not known here."""
    return UnsupportedError(
        f"{call.op} draws random numbers in a way of its own, so devices would disagree; "
        f"draw them first (torch.rand, torch.bernoulli, torch.multinomial) and compute with them"
    )


def input_layouts(call: Call, conversions: Sequence[tuple[int, Layout]] = ()) -> tuple[Layout, ...]:
    """The layouts of the inputs as the kernel sees them."""
    layouts = [spec.layout for spec in call.inputs]
    for index, layout in conversions:
        layouts[index] = layout
    return tuple(layouts)


def packing(op: Op) -> Literal["one", "tuple", "list", "none"]:
    """How the results of an op are packed.

    Raises:
        UnsupportedError: a result is not a tensor.
    """
    returns = op.returns
    if not returns:
        return "none"
    if returns == ("list",):
        return "list"
    if "" in returns or "list" in returns:
        raise UnsupportedError(
            f"{op.name} returns something other than tensors; fetch its inputs with .cpu() and compute there"
        )
    return "one" if len(returns) == 1 else "tuple"


def pack_outputs(
    call: Call, metas: Metas, layouts: Sequence[Layout | Sequence[Layout]]
) -> tuple[Output, ...]:
    """An output for each tensor that the op returns."""
    outputs: list[Output] = []
    returns = zip(call.op.returned_parameter, call.op.viewed_parameter, metas, layouts, strict=True)
    for parameter, viewed, meta, layout in returns:
        if parameter is not None:
            index = call.operands[parameter]
            assert isinstance(index, int), f"{call.op} returns a list that it wrote to"
            outputs.append(SameTensor(index))
        elif meta is None:
            outputs.append(NoOutput())
        elif isinstance(meta, TensorMeta):
            assert isinstance(layout, Layout)
            outputs.append(_output(call, viewed, meta, layout))
        else:
            each = [layout] * len(meta) if isinstance(layout, Layout) else layout
            outputs.extend(_output(call, viewed, item, where) for item, where in zip(meta, each, strict=True))
    return tuple(outputs)


def _output(call: Call, viewed: str | None, meta: TensorMeta, layout: Layout) -> NewOutput:
    index = call.operands.get(viewed) if viewed is not None else None
    if not isinstance(index, int):
        bits = lazy.bits_of_result(call)
        return NewOutput(intern_spec(meta.shape, meta.dtype, layout, meta.stride, *bits))
    bits = lazy.bits_of_view(call, index)
    spec = intern_spec(meta.shape, meta.dtype, layout, meta.stride, *bits)
    is_absolute = call.op.base == "aten::as_strided" and call.get("storage_offset") is not None
    return NewOutput(spec, Window(index, meta.offset, is_absolute))


def default_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a factory that was given none."""
    return torch.get_default_dtype() if dtype is None else dtype
