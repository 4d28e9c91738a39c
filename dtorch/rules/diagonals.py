"""Ops that follow a diagonal. Where it crosses a cut dim, each device has its part: its pieces lie off the diagonal of
the whole by as much as they start later in rows than in columns."""

from __future__ import annotations

from dtorch.meshes import layout_record
from dtorch.op_plan import OpPlan
from dtorch.rules.call import Call, local_shape
from dtorch.rules.dsl import EquationRule, full_names, rule
from dtorch.rules.equation import Dims, Equation, Matched
from dtorch.rules.reduce import other_op
from dtorch.rules.registry import register
from dtorch.rules.view import letters, local_input_sizes
from dtorch.shapes import Metas, TensorMeta, register_shape, result_type
from dtorch.spec import contiguous_stride
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Shard
from dtorch_runtime.wire.records import LocalStart

#: Global sizes of the tensor that has both dims, where they are in it, and the offset of the diagonal.
_Plane = tuple[tuple[int, ...], int, int, int]


def _plane(call: Call) -> _Plane:
    """Of any op of this file with ``offset, dim1, dim2``."""
    offset = call.get("offset")
    if call.has("input_sizes"):
        shape = tuple(call.get("input_sizes"))
    elif call.op.base == "aten::diag_embed":
        kept = call.inputs[0].shape
        both = [call.get("dim1") % (len(kept) + 1), call.get("dim2") % (len(kept) + 1)]
        rest = iter(kept[:-1])
        size = kept[-1] + abs(offset)
        shape = tuple(size if dim in both else next(rest) for dim in range(len(kept) + 1))
    else:
        shape = call.inputs[0].shape
    return shape, call.get("dim1") % len(shape), call.get("dim2") % len(shape), offset


def _leader(call: Call) -> int | None:
    """The dim of which every row (or column) has an element of the diagonal, so that both are cut alike."""
    shape, rows, columns, offset = _plane(call)
    leaders = []
    if offset >= 0 and shape[rows] + offset <= shape[columns]:
        leaders.append(rows)
    if offset <= 0 and shape[columns] - offset <= shape[rows]:
        leaders.append(columns)
    cut = {p.dim for p in call.inputs[0].layout.placements if isinstance(p, Shard)}
    if len(leaders) == 2 and len(call.inputs[0].shape) == len(shape) and columns in cut and rows not in cut:
        return columns
    return leaders[0] if leaders else None


def _letters(call: Call) -> tuple[str, str]:
    """Letters of the tensor that has both dims, and of its diagonal."""
    shape, rows, columns, _ = _plane(call)
    names = letters(len(shape))
    leader = _leader(call)
    last = "Z" if leader is None else names[leader]
    return names, "".join(n for dim, n in enumerate(names) if dim not in (rows, columns)) + last


def _whole(call: Call) -> str:
    shape, rows, columns, _ = _plane(call)
    names = letters(len(shape))
    leader = _leader(call)
    return "Z" + "".join(names[dim] for dim in (rows, columns) if dim != leader)


def _take(call: Call) -> str:
    names, diagonal = _letters(call)
    return f"{names}->{diagonal}"


def _give(call: Call) -> str:
    names, diagonal = _letters(call)
    return f"{diagonal}->{names}"


def _replace(call: Call) -> str:
    names, diagonal = _letters(call)
    return f"{names},{diagonal}->{names}"


def _starts(shape: tuple[int, ...], layout: Layout, rows: int, columns: int) -> list[LocalStart]:
    return [LocalStart(list(shape), layout_record(layout), dim) for dim in (rows, columns)]


def _is_cut(layout: Layout, *dims: int) -> bool:
    return any(isinstance(p, Shard) and p.dim in dims for p in layout.placements)


def _of_piece(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    """The diagonal that crosses this device's piece."""
    shape, rows, columns, offset = _plane(call)
    takes_whole = len(call.inputs[0].shape) == len(shape)
    layout = matched.inputs[0] if takes_whole else matched.outputs[0]
    if not _is_cut(layout, rows, columns):
        return None
    name, args = call.op.name, [call.get(p.name) for p in call.op.parameters]
    if not takes_whole:
        name = "aten::diagonal_backward"
        args = [call.inputs[0], local_shape(shape, layout), offset, call.get("dim1"), call.get("dim2")]
    at = len(args) - len(("offset", "dim1", "dim2"))
    starts = _starts(shape, layout, rows, columns)
    return other_op(call, matched, metas, "dtorch::along_diagonal", [name, args, at, *starts])


def _diagonal_shape(call: Call) -> Metas | None:
    """A view whose steps go along rows and columns at once; a copy lies as it is read."""
    spec = call.inputs[0]
    ndim, dims = len(spec.shape), (call.get("dim1"), call.get("dim2"))
    if any(not -ndim <= dim < ndim for dim in dims) or dims[0] % ndim == dims[1] % ndim:
        return None
    _, rows, columns, offset = _plane(call)
    size = max(min(spec.shape[rows] + min(offset, 0), spec.shape[columns] - max(offset, 0)), 0)
    kept = [dim for dim in range(ndim) if dim not in (rows, columns)]
    shape = (*(spec.shape[dim] for dim in kept), size)
    if call.op.base == "aten::diagonal_copy":
        return (TensorMeta(shape, contiguous_stride(shape), spec.dtype),)
    stride = (*(spec.stride[dim] for dim in kept), spec.stride[rows] + spec.stride[columns])
    start = max(offset, 0) * spec.stride[columns] + max(-offset, 0) * spec.stride[rows] if size else 0
    return (TensorMeta(shape, stride, spec.dtype, start),)


def _embedded_shape(call: Call) -> Metas | None:
    ndim = len(call.get("input_sizes")) if call.has("input_sizes") else len(call.inputs[0].shape) + 1
    dims = (call.get("dim1"), call.get("dim2"))
    if ndim < 2 or any(not -ndim <= dim < ndim for dim in dims) or dims[0] % ndim == dims[1] % ndim:
        return None
    shape = _plane(call)[0]
    return (TensorMeta(shape, contiguous_stride(shape), call.inputs[0].dtype),)


rule("diagonal diagonal_copy", _take, moves="a", whole=_whole, specialize=_of_piece, shape=_diagonal_shape)
rule("diagonal_scatter", _replace, moves="a+b", lifts=True, whole=_whole, specialize=_of_piece)
rule(
    "diagonal_backward",
    _give,
    linear="a",
    whole=_whole,
    specialize=_of_piece,
    localize=local_input_sizes,
    shape=_embedded_shape,
)
rule("diag_embed", _give, linear="a", whole=_whole, specialize=_of_piece, shape=_embedded_shape)


# ------------------------------------------------------------------------------------------------- triangles, trace


def _triangle_of_piece(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    spec, layout = call.inputs[0], matched.inputs[0]
    rows, columns = len(spec.shape) - 2, len(spec.shape) - 1
    if not _is_cut(layout, rows, columns):
        return None
    starts = _starts(spec.shape, layout, rows, columns)
    args = [call.op.name, [spec, call.get("diagonal")], 1, *starts]
    return other_op(call, matched, metas, "dtorch::along_diagonal", args)


def _trace_of_piece(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    spec, layout = call.inputs[0], matched.inputs[0]
    if not _is_cut(layout, 0, 1):
        return None
    return other_op(call, matched, metas, "dtorch::trace_shard", [spec, *_starts(spec.shape, layout, 0, 1)])


def _triangle_shape(call: Call) -> Metas | None:
    spec = call.inputs[0]
    if len(spec.shape) < 2:
        return None
    return (TensorMeta(spec.shape, contiguous_stride(spec.shape), spec.dtype),)


rule("tril triu", "...mn->...mn", linear="a", specialize=_triangle_of_piece, shape=_triangle_shape)
rule("trace", "mn->", linear="a", specialize=_trace_of_piece)


# ------------------------------------------------------------------------------------------------- blocks


def _blocks(call: Call) -> Equation:
    """A cut block leaves a term of the sum of blocks, each surrounded by zeros."""
    inputs: list[Dims] = [tuple(f"{i}.{d}" for d in range(len(s.shape))) for i, s in enumerate(call.inputs)]
    return Equation(
        inputs=tuple(inputs),
        outputs=((None, None),),
        reduce="sum",
        terms=tuple((i,) for i in range(len(inputs))),
        lifts=True,
    )


def _blocks_of_pieces(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    if not any(matched.letters):
        return None
    (meta,) = metas
    assert isinstance(meta, TensorMeta)
    shapes, starts = [], []
    for spec, layout in zip(call.inputs, matched.inputs, strict=True):
        record, ndim = layout_record(layout), len(spec.shape)
        shapes.append([1] * (2 - ndim) + list(spec.shape))
        starts.append([0] * (2 - ndim) + [LocalStart(list(spec.shape), record, dim) for dim in range(ndim)])
    args = [list(call.inputs), shapes, starts]
    return other_op(call, matched, metas, "dtorch::block_diag_shard", args, {"dtype": meta.dtype})


def _blocks_shape(call: Call) -> Metas | None:
    """Torch's meta kernel takes 0-dim tensors for ones with dims when it chooses the dtype."""
    shapes = [(1, 1, *spec.shape)[-2:] for spec in call.inputs]
    if any(len(spec.shape) > 2 for spec in call.inputs):
        return None
    shape = (sum(rows for rows, _ in shapes), sum(columns for _, columns in shapes))
    return (TensorMeta(shape, contiguous_stride(shape), result_type(call.inputs)),)


register_shape(["aten::block_diag"], _blocks_shape)
register(full_names("block_diag"), EquationRule(_blocks, specialize=_blocks_of_pieces))


# ------------------------------------------------------------------------------------------------- factors


def _unpacked(call: Call) -> str:
    """Rows of a wide matrix are rows of both factors, columns of a tall one columns of both."""
    rows, columns = call.inputs[0].shape[-2:]
    lower, upper = ("...mk", "...mn") if rows <= columns else ("...mn", "...kn")
    data, pivots = call.get("unpack_data"), call.get("unpack_pivots")
    return f"...mn,...p->{'...ij' if pivots else '1'},{lower if data else '1'},{upper if data else '1'}"


def _unpacked_whole(call: Call) -> str:
    rows, columns = call.inputs[0].shape[-2:]
    return "pm" if rows > columns else "pn"


def _unpacked_of_piece(call: Call, matched: Matched, metas: Metas) -> OpPlan | None:
    spec, layout = call.inputs[0], matched.inputs[0]
    ndim = len(spec.shape)
    if not _is_cut(layout, ndim - 2, ndim - 1):
        return None
    args = [call.get(p.name) for p in call.op.parameters]
    starts = _starts(spec.shape, layout, ndim - 2, ndim - 1)
    return other_op(call, matched, metas, "dtorch::lu_unpack_shard", [*args, *spec.shape[-2:], *starts])


rule(
    "lu_unpack",
    _unpacked,
    whole=_unpacked_whole,
    unaffected=(0, 1, 2),
    slices="*",
    specialize=_unpacked_of_piece,
)
