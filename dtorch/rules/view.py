"""Ops that give another look at the same elements, or move them: a cut dim goes where the elements go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dtorch import shapes
from dtorch.op_plan import OpPlan
from dtorch.rules import explain, view_shapes as shape
from dtorch.rules.call import Call, local_shape
from dtorch.rules.dim_groups import CannotView, view_layout
from dtorch.rules.dsl import EquationRule, assign, full_names, rule
from dtorch.rules.equation import ALL_KINDS, Equation, Matched
from dtorch.rules.registry import register
from dtorch.rules.whole import pack_outputs, packing, plan_same_op
from dtorch.shapes import Metas, TensorMeta, register_shape, wrap
from dtorch_runtime.ir.placement import Replicate, Shard
from dtorch_runtime.wire.records import ListArg, Slot

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letters(ndim: int) -> str:
    """A letter for each dim."""
    return LETTERS[:ndim]


def dim_of(call: Call, name: str = "dim") -> int:
    """A dim argument of the first tensor, counted from the front (a wrong one was refused before)."""
    ndim = len(call.inputs[0].shape)
    dim = wrap(call.get(name), ndim)
    return 0 if dim is None else dim


# ------------------------------------------------------------------------------------------------- regrouping


_CUT_OF_A_VIEW = (
    "self: S(d) -> S(e), where d leads the dims that are merged or split, e those they become, and no cut falls "
    "inside an element of e"
)


@dataclass(frozen=True)
class ViewRule:
    """``view`` and its kin, by the algorithm on groups of dims."""

    always: bool = False

    def plan(self, call: Call) -> OpPlan:
        """The plan of a call. Raises PlacementError."""
        spec = call.inputs[0]
        metas = shapes.infer(call)
        (meta,) = metas
        assert isinstance(meta, TensorMeta)
        try:
            layout = view_layout(spec.shape, meta.shape, spec.layout)
        except CannotView as refused:
            raise explain.refused(
                call, refused.reason, self.signatures(call), self._fix(call, refused)
            ) from None
        return plan_same_op(call, metas, [layout], replace={"size": local_shape(meta.shape, layout)})

    def signatures(self, call: Call) -> list[str]:
        """Which single dims may be cut, along one axis of the mesh."""
        return [
            "self: R -> R",
            _CUT_OF_A_VIEW,
            "self: P -> P",
        ]

    def _fix(self, call: Call, refused: CannotView) -> str:
        spec = call.inputs[0]
        _, found, unit = refused.reason.partition("unit=")
        placements = [
            (Shard(p.dim, int(unit)) if found and unit.isdigit() else Replicate())
            if isinstance(p, Shard) and p.dim == refused.dim
            else p
            for p in spec.layout.placements
        ]
        return explain.redistribute("self", placements)


_VIEWS = full_names("view.default _unsafe_view _reshape_copy view_copy.default")
register(_VIEWS, ViewRule())
register_shape(["aten::view.default", "aten::_unsafe_view"], shape.view)


# ------------------------------------------------------------------------------------------------- dims that move


def _permuted(order: list[int]) -> str:
    return f"{letters(len(order))}->{''.join(LETTERS[dim] for dim in order)}"


def _transpose(call: Call) -> str:
    order = list(range(len(call.inputs[0].shape)))
    a, b = dim_of(call, "dim0"), dim_of(call, "dim1")
    if order:
        order[a], order[b] = order[b], order[a]
    return _permuted(order)


def _permute(call: Call) -> str:
    ndim = len(call.inputs[0].shape)
    return _permuted([dim % max(ndim, 1) for dim in call.get("dims")])


def _unsqueeze(call: Call) -> str:
    ndim = len(call.inputs[0].shape)
    dim = wrap(call.get("dim"), ndim + 1) or 0
    names = letters(ndim)
    return f"{names}->{names[:dim]}1{names[dim:]}"


def _squeeze(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    gone = shape.squeezed_dims(call) or []
    given = "".join("1" if dim in gone else name for dim, name in enumerate(names))
    return f"{given}->{given.replace('1', '')}"


def _squeeze_same_dims(call: Call, matched: Matched, metas: Metas) -> OpPlan:
    """A dim that is short only because it is cut must stay: name the dims that go."""
    gone = shape.squeezed_dims(call) or []
    return OpPlan(
        op=f"{call.op.base}.dims",
        args=(Slot(0), ListArg(list(gone))),
        layouts=matched.inputs,
        outputs=pack_outputs(call, metas, matched.outputs),
        returns=packing(call.op),
    )


def _expand(call: Call) -> str:
    """Dims that are repeated cannot be cut; the others stay where they are, counted from the right."""
    given = call.inputs[0].shape
    size = call.get("size")
    missing = len(size) - len(given)
    names = [
        "1" if have == 1 and want not in (1, -1) else LETTERS[dim]
        for dim, (have, want) in enumerate(zip(given, size[missing:]))
    ]
    return f"{''.join(names)}->{'1' * missing}{''.join(names)}"


def _local_size(call: Call, matched: Matched, metas: Metas) -> dict[str, Any]:
    (meta,) = metas
    assert isinstance(meta, TensorMeta)
    return {"size": local_shape(meta.shape, matched.outputs[0])}


rule("transpose.int transpose_copy.int", _transpose, moves="a", shape=shape.of_copy(shape.transpose))
rule(
    "t t_copy",
    lambda call: _permuted(list(range(len(call.inputs[0].shape)))[::-1]),
    moves="a",
    shape=shape.of_copy(shape.t),
)
rule("permute permute_copy", _permute, moves="a", shape=shape.of_copy(shape.permute))
rule("unsqueeze unsqueeze_copy", _unsqueeze, moves="a", shape=shape.of_copy(shape.unsqueeze))
rule(
    "squeeze squeeze_copy",
    _squeeze,
    moves="a",
    specialize=_squeeze_same_dims,
    shape=shape.of_copy(shape.squeeze),
)
rule("expand expand_copy", _expand, moves="a", localize=_local_size, shape=shape.of_copy(shape.expand))


# ------------------------------------------------------------------------------------------------- parts


def _drop(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    dim = dim_of(call)
    return f"{names}->{names[:dim]}{names[dim + 1 :]}"


def _same(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    return f"{names}->{names}"


def _that_dim(call: Call, name: str = "dim") -> str:
    return letters(len(call.inputs[0].shape))[dim_of(call, name)] if call.inputs[0].shape else ""


def _sliced_dim(call: Call) -> str:
    """A slice of everything is local on every device; any other one needs the dim whole."""
    found = shape.slice_range(call)
    if found is not None and found[1:] == (0, call.inputs[0].shape[found[0]], 1):
        return ""
    return _that_dim(call)


rule("select.int select_copy.int", _drop, moves="a", whole=_that_dim, shape=shape.of_copy(shape.select))
rule("slice.Tensor slice_copy.Tensor", _same, moves="a", whole=_sliced_dim, shape=shape.of_copy(shape.slice_))
rule(
    "split.Tensor split_with_sizes split_copy.Tensor split_with_sizes_copy unsafe_split.Tensor "
    "unsafe_split_with_sizes narrow_copy",
    _same,
    moves="a",
    whole=_that_dim,
)
register_shape(full_names("split.Tensor split_with_sizes"), shape.split)
rule("unbind.int unbind_copy.int", _drop, moves="a", whole=_that_dim)
register_shape(["aten::unbind.int"], shape.unbind)
rule("flip roll", _same, moves="a", whole=lambda call: "".join(_listed_dims(call)))
rule(
    "unfold unfold_copy",
    lambda call: f"{_same(call)}Z",
    moves="a",
    whole=lambda call: f"Z{_that_dim(call, 'dimension')}",
)
rule("view_as_complex", "...z->...", linear="a", whole="z")
rule("view_as_real", "...->...z", linear="a", whole="z")


def _listed_dims(call: Call) -> list[str]:
    dims = call.get("dims")
    ndim = len(call.inputs[0].shape)
    return [LETTERS[dim % max(ndim, 1)] for dim in (dims or range(ndim))]


def _repeat(call: Call) -> str:
    repeats = call.get("repeats")
    names = letters(len(call.inputs[0].shape))
    missing = len(repeats) - len(names)
    return f"{names}->{LETTERS[20 : 20 + missing].upper()}{names}"


def _repeated_dims(call: Call) -> str:
    repeats = call.get("repeats")
    names = letters(len(call.inputs[0].shape))
    missing = len(repeats) - len(names)
    new = LETTERS[20 : 20 + missing].upper()
    return new + "".join(name for name, times in zip(names, repeats[missing:]) if times != 1)


rule("repeat", _repeat, moves="a", spreads="a", whole=_repeated_dims)


def _padded_dims(call: Call) -> str:
    pad = call.get("pad")
    names = letters(len(call.inputs[0].shape))
    return "".join(name for i, name in enumerate(reversed(names)) if any(pad[2 * i : 2 * i + 2]))


rule(
    "constant_pad_nd",
    _same,
    linear="a",
    spreads="a",
    whole=_padded_dims,
    linear_if=lambda call: call.get("value") == 0,
)


# Derivatives: the size of what was cut from is global


def local_input_sizes(call: Call, matched: Matched, metas: Metas) -> dict[str, Any]:
    """The size of what a view was taken of is global."""
    (meta,) = metas
    assert isinstance(meta, TensorMeta)
    return {"input_sizes": local_shape(meta.shape, matched.outputs[0])}


def _select_backward(call: Call) -> str:
    ndim = len(call.get("input_sizes"))
    dim = call.get("dim") % ndim
    names = letters(ndim)
    return f"{names[:dim]}{names[dim + 1 :]}->{names}"


rule(
    "select_backward",
    _select_backward,
    linear="a",
    whole=lambda call: LETTERS[call.get("dim") % len(call.get("input_sizes"))],
    localize=local_input_sizes,
)


def _slice_derivative_dim(call: Call) -> str:
    """As ``_sliced_dim``: where the slice was everything, its gradient is that of everything."""
    sizes = call.get("input_sizes")
    dim = call.get("dim") % max(len(sizes), 1)
    is_all = call.get("step") == 1 and call.inputs[0].shape[dim] == sizes[dim]
    return "" if is_all else _that_dim(call)


rule("slice_backward", _same, linear="a", whole=_slice_derivative_dim, localize=local_input_sizes)


# ------------------------------------------------------------------------------------------------- joining


def _join(call: Call, new_dim: bool) -> Equation | None:
    ndim = max(len(spec.shape) for spec in call.inputs)
    dim = wrap(call.get("dim"), ndim + new_dim)
    names = letters(ndim)
    parts = [None if spec.shape == (0,) and ndim != 1 else names for spec in call.inputs]
    dims = assign(parts, call.inputs)
    if dims is None or dim is None or not names:
        return None
    everyone = frozenset(range(len(dims)))
    return Equation(
        inputs=tuple(dims),
        outputs=(tuple((*names[:dim], None, *names[dim:]) if new_dim else names),),
        whole=frozenset() if new_dim else frozenset(names[dim]),
        terms=tuple((i,) for i in range(len(dims))),
        kinds=ALL_KINDS,
        lifts=True,
        slices=everyone,
    )


def _chunk_cat(call: Call) -> Equation | None:
    """Dims in front of ``dim`` are those of every tensor; the others are padded, regrouped and joined."""
    dim = wrap(call.get("dim"), len(call.inputs[0].shape))
    if dim is None or any(len(spec.shape) <= dim for spec in call.inputs):
        return None
    names = letters(dim)
    everyone = frozenset(range(len(call.inputs)))
    return Equation(
        inputs=tuple((*names, *"Z" * (len(spec.shape) - dim)) for spec in call.inputs),
        outputs=((*names, None, None),),
        whole=frozenset("Z"),
        terms=tuple((i,) for i in sorted(everyone)),
        lifts=True,
        slices=everyone,
    )


register(full_names("_chunk_cat"), EquationRule(_chunk_cat))
register(full_names("cat"), EquationRule(lambda call: _join(call, new_dim=False)))
register(full_names("stack"), EquationRule(lambda call: _join(call, new_dim=True)))
register_shape(["aten::cat"], shape.cat)
