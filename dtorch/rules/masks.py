"""Masks that say which elements are taken or written: whole on every device, or cut as what they are a mask of."""

from __future__ import annotations

from dtorch import shapes
from dtorch.op_plan import OpPlan
from dtorch.rules.call import Call
from dtorch.rules.dsl import EquationRule, assign, rule
from dtorch.rules.equation import ALL_KINDS, Dims, Equation, Matched
from dtorch.rules.factory import box_arguments
from dtorch.rules.index import index_whole, indices_of, picked_dims, right_aligned
from dtorch.rules.reduce import other_op
from dtorch.rules.registry import register
from dtorch.rules.view import letters
from dtorch.shapes import Metas, TensorMeta
from dtorch.spec import contiguous_stride

# ------------------------------------------------------------------------------------------------- in order of a mask


def _named(call: Call, name: str) -> tuple[str, ...]:
    """Names for the dims of an operand that are those of no other."""
    return tuple(f"{name}{dim}" for dim in range(len(call.spec(name).shape)))


def _masked_scatter(call: Call) -> Equation | None:
    """The mask counts through all of it: it is whole, and so is the source, whose elements are taken in turn."""
    mask, source = _named(call, "mask"), _named(call, "source")
    given = call.spec("self").shape
    shape = shapes.broadcast([given, call.spec("mask").shape])
    if shape is None:
        return None
    names = letters(len(shape))[len(shape) - len(given) :]
    own = tuple(
        None if n != m else name for name, n, m in zip(names, given, shape[len(shape) - len(given) :])
    )
    return Equation(
        inputs=(own, mask, source, *[None] * (len(call.inputs) - 3)),  # out= takes no part
        outputs=((*[None] * (len(shape) - len(given)), *own),),
        whole=frozenset((*mask, *source)),
        terms=((0,), (2,)),
        kinds=ALL_KINDS,
        lifts=True,
        spreads=frozenset((0, 2)),
        fixed=frozenset(call.written),
    )


def _scatter_into_piece(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    """A device counts through the whole mask, and writes what falls into its piece."""
    if not any(matched.letters):
        return None
    shape = shapes.broadcast([call.spec("self").shape, call.spec("mask").shape])
    assert shape is not None
    starts, sizes = box_arguments(shape, matched.outputs[0])
    args = [*call.inputs, list(shape), starts, sizes, call.op.is_inplace]
    return other_op(call, matched, metas, "dtorch::masked_scatter_shard", args)


register(["aten::masked_scatter"], EquationRule(_masked_scatter, specialize=_scatter_into_piece))


def _taken(call: Call) -> str:
    """What was written, in the order of the mask: no dim of it is one of the mask's."""
    grad = letters(len(call.spec("grad_output").shape))
    mask = letters(len(call.spec("mask").shape)).upper()
    return f"{grad},{mask}->{'1' * len(call.get('sizes'))}"


def _taken_shape(call: Call) -> Metas:
    shape = tuple(call.get("sizes"))
    return (TensorMeta(shape, contiguous_stride(shape), call.spec("grad_output").dtype),)


rule(
    "masked_scatter_backward",
    _taken,
    linear="a",
    spreads="a",
    whole=lambda call: _taken(call).partition("->")[0].replace(",", ""),
    shape=_taken_shape,
)


# ------------------------------------------------------------------------------------------------- x[i, j] under a mask


def _masked_index(call: Call) -> Equation | None:
    """``x[indices]``, and ``fill`` where the mask is false, which has the dims of the result."""
    found = _masked(call, ())
    if found is None:
        return None
    dims, picked, names = found
    return Equation(
        inputs=dims,
        outputs=(picked,),
        whole=index_whole(call, names),
        terms=((0,),) if call.get("fill") == 0 else (),
        spreads=frozenset((0,)),
        slices=frozenset(range(1, len(dims))),
    )


def _masked_index_put(call: Call) -> Equation | None:
    """Values are added where the mask is true, so those of a cut dim add up to a sum."""
    values = call.operands["values"]
    assert isinstance(values, int)
    found = _masked(call, (values,))
    if found is None:
        return None
    dims, _, names = found
    return Equation(
        inputs=dims,
        outputs=(tuple(names),),
        whole=index_whole(call, names),
        reduce="sum",
        terms=((0,), (values,)),
        lifts=True,
        slices=frozenset(range(1, len(dims))),
    )


def _masked(call: Call, others: tuple[int, ...]) -> tuple[tuple[Dims | None, ...], Dims, str] | None:
    """Letters of the inputs, of what is picked, of ``self``. Mask and ``others`` are broadcast to what is picked."""
    mask = call.operands["mask"]
    assert isinstance(mask, int)
    names = letters(len(call.inputs[0].shape))
    aligned = (mask, *others)
    of_indices = {number for number, _ in indices_of(call)}
    parts = [names if i == 0 else "..." if i in of_indices else None for i in range(len(call.inputs))]
    dims = assign(parts, call.inputs)
    picked = None if dims is None else picked_dims(call, dims)
    if dims is None or picked is None or any(len(call.inputs[i].shape) > len(picked) for i in aligned):
        return None
    for index in aligned:
        dims[index] = right_aligned(picked, call.inputs[index], call)
    return tuple(dims), picked, names


register(["aten::_unsafe_masked_index"], EquationRule(_masked_index))
register(["aten::_unsafe_masked_index_put_accumulate"], EquationRule(_masked_index_put))
