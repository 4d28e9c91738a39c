"""Ops that pick or place rows by numbers."""

from __future__ import annotations

import torch

from dtorch.meshes import layout_record
from dtorch.op_plan import OpPlan
from dtorch.rules.call import Call
from dtorch.rules.dsl import EquationRule, assign, full_names, rule
from dtorch.rules.equation import ALL_KINDS, LINEAR_KINDS, Dims, Equation, Matched
from dtorch.rules.factory import box_arguments
from dtorch.rules.reduce import other_op
from dtorch.rules.registry import register
from dtorch.rules.view import LETTERS, dim_of, letters
from dtorch.shapes import Metas, TensorMeta
from dtorch.spec import Spec, contiguous_stride
from dtorch_runtime.wire.records import LocalStart

# ------------------------------------------------------------------------------------------------- embedding


def _embedding_shape(call: Call) -> Metas | None:
    weight, indices = call.spec("weight"), call.spec("indices")
    if len(weight.shape) != 2:
        return None
    shape = (*indices.shape, weight.shape[1])
    return (TensorMeta(shape, contiguous_stride(shape), weight.dtype),)


def _rows_from_a_piece(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    """A cut vocabulary: each device looks up the rows that it holds and gives zeros for others."""
    if "v" not in matched.letters:
        return None
    weight, indices = call.inputs
    start = LocalStart(list(weight.shape), layout_record(matched.inputs[0]), 0)
    return other_op(call, matched, metas, "dtorch::embedding_shard", [weight, indices, start])


rule("embedding", "vd,...->...d", linear="a", specialize=_rows_from_a_piece, shape=_embedding_shape)
rule("embedding_dense_backward", "...d,...->vd", linear="a", slices="ab")


# ------------------------------------------------------------------------------------------------- along a dim


def _along(call: Call) -> str:
    ndim = len(call.inputs[0].shape)
    return LETTERS[dim_of(call)] if ndim else ""


def _same_dims(call: Call) -> str:
    names, picked = _picked_along(call)
    return f"{names},{picked},{picked}->{names}"


def _picked_along(call: Call) -> tuple[str, str]:
    """Letters of a tensor, and of what is picked along ``dim``: as many places there as one likes."""
    names = letters(len(call.inputs[0].shape))
    dim = dim_of(call)
    return names, f"{names[:dim]}Z{names[dim + 1 :]}" if names else ""


def _gather(call: Call) -> str:
    names, picked = _picked_along(call)
    return f"{names},{picked}->{picked}"


def _gathered_from_piece(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    """A cut dim: each device picks what it holds of it and gives zeros for the rest."""
    if _along(call) not in matched.letters:
        return None
    x, index = call.inputs
    dim = dim_of(call)
    args = [x, dim, index, LocalStart(list(x.shape), layout_record(matched.inputs[0]), dim), x.shape[dim]]
    return other_op(call, matched, metas, "dtorch::gather_shard", args)


rule("gather", _gather, moves="a", reduce="sum", slices="ab", specialize=_gathered_from_piece)
rule("scatter.src", _same_dims, moves="a+c", lifts=True, slices="*", whole=_along)
rule("scatter.value scatter.reduce scatter.value_reduce scatter_reduce", _same_dims, slices="*", whole=_along)
rule("scatter_add", _same_dims, linear="a+c", lifts=True, slices="*", whole=_along)


def _index_select(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    dim = dim_of(call)
    index = "Z" if call.spec("index").shape else ""
    return f"{names},{index}->{names[:dim]}{index or '1'}{names[dim + 1 :]}"


def _index_rows(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    dim = dim_of(call)
    index = "Z" if call.spec("index").shape else ""
    source = f"{names[:dim]}{index or '1'}{names[dim + 1 :]}"
    return f"{names},{index},{source}->{names}"


def _index_fill(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    return f"{names},{'Z' if call.spec('index').shape else ''},->{names}"


def _selected_from_piece(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    if _along(call) not in matched.letters:
        return None
    indices = [None] * dim_of(call) + [call.spec("index")]
    return _indexed_piece(call, matched, metas, indices)


def _indexed_piece(call: Call, matched: Matched, metas: Metas, indices: list[Spec | None]) -> OpPlan:
    """``x[indices]`` of cut dims: each device picks what it holds of them and gives zeros for the rest."""
    x = call.inputs[0]
    starts, _ = box_arguments(x.shape, matched.inputs[0])
    args = [x, indices, starts, list(x.shape)]
    return other_op(call, matched, metas, "dtorch::index_shard", args)


rule(
    "index_select",
    _index_select,
    moves="a",
    reduce="sum",
    whole=lambda call: "" if call.spec("index").shape else _along(call),
    specialize=_selected_from_piece,
)
rule("index_add", _index_rows, linear="a+c", lifts=True, slices="*", whole=_along)
rule("index_copy index_reduce", _index_rows, whole=lambda call: _along(call) + "Z")
rule("index_fill.int_Scalar index_fill.int_Tensor", _index_fill, whole=lambda call: _along(call) + "Z")
rule("bucketize.Tensor", "...,z->...", whole="z")


# ------------------------------------------------------------------------------------------------- x[i, :, j]


def indices_of(call: Call) -> list[tuple[int, list[int]]]:
    """Each index by its input number, with the dims that it stands for: one, or as many as a mask has."""
    of_indices = call.operands["indices"]
    assert isinstance(of_indices, tuple)
    found: list[tuple[int, list[int]]] = []
    dim = 0
    for number in of_indices:
        if number is None:
            dim += 1
        else:
            index = call.inputs[number]
            size = len(index.shape) if is_mask_dtype(index.dtype) else 1
            found.append((number, list(range(dim, dim + size))))
            dim += size
    return found


def is_mask_dtype(dtype: torch.dtype) -> bool:
    """Whether an index of this dtype says for each element if it is picked."""
    return dtype in (torch.bool, torch.uint8)


def picked_dims(call: Call, dims: list[Dims | None]) -> Dims | None:
    """The letters of ``x[indices]``: the dims of the indices stand together, in place or in front.

    What a mask picks is one dim, which nothing can cut.
    """
    own = dims[0]
    indices = indices_of(call)
    if own is None or not indices:
        return None
    index_dims = [(None,) if is_mask_dtype(call.inputs[i].dtype) else dims[i] or () for i, _ in indices]
    ndim = max(map(len, index_dims))
    joined = tuple(
        next((names[d] for names in index_dims if -d <= len(names) and names[d] is not None), None)
        for d in range(-ndim, 0)
    )
    indexed = [dim for _, covered in indices for dim in covered]
    together = indexed == list(range(indexed[0], indexed[-1] + 1))
    at = indexed[0] if together else 0
    rest = [name for dim, name in enumerate(own) if dim not in indexed]
    return (*rest[:at], *joined, *rest[at:])


def index_whole(call: Call, names: str) -> frozenset[str]:
    return frozenset(names[dim] for _, covered in indices_of(call) for dim in covered)


def _index(call: Call) -> Equation | None:
    names = letters(len(call.inputs[0].shape))
    dims = assign([names, *["..."] * (len(call.inputs) - 1)], call.inputs)
    picked = None if dims is None else picked_dims(call, dims)
    if dims is None or picked is None:
        return None
    by_mask = any(is_mask_dtype(call.inputs[number].dtype) for number, _ in indices_of(call))
    return Equation(
        inputs=tuple(dims),
        outputs=(picked,),
        whole=index_whole(call, names) if by_mask else frozenset(),
        reduce="sum",
        terms=((0,),),
        kinds=ALL_KINDS,
    )


def _index_of_piece(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    if not index_whole(call, letters(len(call.inputs[0].shape))) & set(matched.letters):
        return None
    return _indexed_piece(call, matched, metas, list(call.get("indices")))


def _index_put(call: Call) -> Equation | None:
    names = letters(len(call.inputs[0].shape))
    values = call.operands["values"]
    assert isinstance(values, int)
    parts: list[str | None] = [names, *["..."] * (len(call.inputs) - 1)]
    parts[values] = None
    masks = {
        number: covered for number, covered in indices_of(call) if is_mask_dtype(call.inputs[number].dtype)
    }
    for number in masks:
        parts[number] = None
    dims = assign(parts, call.inputs)
    picked = None if dims is None else picked_dims(call, dims)
    if dims is None or picked is None:
        return None
    for number, covered in masks.items():
        dims[number] = tuple(names[dim] for dim in covered)
    dims[values] = right_aligned(picked, call.inputs[values], call)
    accumulate = call.has("accumulate") and call.get("accumulate")
    return Equation(
        inputs=tuple(dims),
        outputs=(tuple(names),),
        whole=index_whole(call, names) - _masked_on_pieces(call, names, picked),
        reduce="sum" if accumulate else None,
        terms=((0,), (values,)),
        kinds=LINEAR_KINDS if accumulate else ALL_KINDS,
        lifts=True,
        slices=frozenset((0, *masks)) if masks else frozenset(),
        fixed=frozenset(call.written),
    )


def _masked_on_pieces(call: Call, names: str, picked: Dims) -> frozenset[str]:
    """The dims of one mask, where what it picks all gets the same values: each device writes where its piece says."""
    indices, values = indices_of(call), call.spec("values").shape
    number, covered = indices[0]
    num_behind = len(picked) - 1 - covered[0]
    if len(indices) > 1 or not is_mask_dtype(call.inputs[number].dtype):
        return frozenset()
    is_same = len(values) <= num_behind or values[-1 - num_behind] == 1
    return frozenset(names[dim] for dim in covered) if is_same else frozenset()


def right_aligned(picked: Dims, values: Spec, call: Call) -> Dims:
    """The letters of values that are broadcast to what was picked."""
    tail = picked[len(picked) - len(values.shape) :] if values.shape else ()
    sizes = dict(zip(letters(len(call.inputs[0].shape)), call.inputs[0].shape))
    return tuple(
        None if size == 1 and sizes.get(name or "", 0) != 1 else name
        for name, size in zip(tail, values.shape)
    )


register(full_names("index.Tensor _unsafe_index.Tensor"), EquationRule(_index, specialize=_index_of_piece))
register(
    full_names("index_put _unsafe_index_put _index_put_impl_ index_put_"),
    EquationRule(_index_put),
)
