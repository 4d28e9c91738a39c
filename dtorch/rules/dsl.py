"""The language of placement rules: one line an op, dims are letters, as in einsum.

::

    rule("aten::mm", "mk,kn->mn", linear="a*b")

reads: the first tensor has dims m and k, the second k and n, the result m and n; the result is linear in the
product of the first (a) and the second (b). From this follow all signatures along a mesh axis:

* m may be cut: ``S(0), R -> S(0)``; n may be cut: ``R, S(1) -> S(1)``;
* k is contracted, so cutting it leaves a partial sum: ``S(1), S(0) -> P``;
* a partial factor stays partial: ``P, R -> P`` and ``R, P -> P``.

``...`` stands for any dims, aligned from the right and broadcast; ``1`` for a dim of size 1; ``?mn`` for as many of
these dims as there are, from the right. Operands are the tensor
parameters of the schema in order; one that is None is skipped, a number in the place of a tensor is a constant, and
all tensors of a list have the same letters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

from dtorch import shapes
from dtorch.op_plan import OpPlan
from dtorch.rules import explain
from dtorch.rules.call import Call
from dtorch.rules.equation import (
    ALL_KINDS,
    LINEAR_KINDS,
    Dims,
    Equation,
    Matched,
    Mismatch,
    code,
    dim_cuts,
    has_empty_piece,
    match,
    nested_cuts,
    signatures,
)
from dtorch.rules.out import functional_call, into_targets, is_out
from dtorch.rules.registry import register
from dtorch.rules.unless_empty import unless_empty, with_empty_whole
from dtorch.rules.whole import plan_same_op
from dtorch.shapes import Metas, ShapeFunction, TensorMeta, register_shape
from dtorch.spec import Spec, contiguous_stride, intern_spec
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Partial, ReduceOp

#: A notation, or what writes it for a call (because of its ``dim`` argument, say).
Notation: TypeAlias = "str | Callable[[Call], str]"
#: Letters, or what names them for a call (dims of ``...`` are ``~1``, ``~2``, from the right).
Letters: TypeAlias = "str | Callable[[Call], Iterable[str]]"
#: What cutting leaves in outputs that lack the letter: one kind, or one for each output, or what says so for a call.
Kinds: TypeAlias = "ReduceOp | tuple[ReduceOp, ...] | None"
Reduce: TypeAlias = "Kinds | Callable[[Call], Kinds]"
#: How local arguments differ from the given ones, by parameter name.
Localize: TypeAlias = Callable[[Call, Matched, Metas], dict[str, Any]]
#: Another op on the local pieces, or None where the op itself does.
Specialize: TypeAlias = Callable[[Call, Matched, Metas], "OpPlan | None"]


@dataclass(frozen=True)
class EquationRule:
    """A rule whose signatures follow from an equation."""

    bind: Callable[[Call], Equation | None]
    localize: Localize | None = None
    specialize: Specialize | None = None
    always: bool = False
    #: Whether the kernel refuses tensors without elements: devices without any are given the result.
    nonempty: bool = False

    def plan(self, call: Call) -> OpPlan:
        """The plan of a call with at least one input. Raises PlacementError."""
        metas = _metas(call)
        equation = self.bind(call)
        if equation is None:
            raise explain.no_rule(call)
        out_shapes = _out_shapes(call, metas)
        try:
            matched = match(equation, call.inputs, out_shapes)
        except Mismatch as mismatch:
            changed, conversions = with_empty_whole(call)
            if not conversions:
                raise explain.mismatch(call, equation, mismatch) from None
            on_whole = self.plan(changed)
            return replace(on_whole, conversions=(*conversions, *on_whole.conversions))
        check_written_placements(call, equation, matched, out_shapes)
        if is_out(call.op) and (self.specialize or self._refuses_a_piece(call, equation, matched)):
            copied = self._copied_to_targets(call)
            if copied is not None:
                return copied
        if matched.conversions and not (call.op.writes or call.op.keeps_gaps):
            metas = _after_conversions(call, matched, metas)
        plan = self.specialize(call, matched, metas) if self.specialize is not None else None
        if plan is None:
            local = self.localize(call, matched, metas) if self.localize else None
            plan = plan_same_op(call, metas, matched.outputs, conversions=matched.conversions, replace=local)
        return unless_empty(call, matched, plan) if self._refuses_a_piece(call, equation, matched) else plan

    def _copied_to_targets(self, call: Call) -> OpPlan | None:
        """The plan of a call with ``out=`` when another kernel makes its pieces; None when the op itself does."""
        functional = functional_call(call)
        if functional is None:
            raise explain.no_rule(call)
        plan = self.plan(functional)
        return None if plan.op == functional.op.name else into_targets(call, plan)

    def _refuses_a_piece(self, call: Call, equation: Equation, matched: Matched) -> bool:
        """Whether the kernel needs an element, and some device has none: the largest of no elements does not exist."""
        extreme = equation.reduction(0) in ("max", "min") and call.op.base not in _EMPTY_IS_FINE
        for axis, letter in enumerate(matched.letters):
            contracts = any(isinstance(out.placements[axis], Partial) for out in matched.outputs)
            if letter is None or not (self.nonempty or (extreme and contracts)):
                continue
            for spec, layout in zip(call.inputs, matched.inputs, strict=True):
                if has_empty_piece(spec.shape, layout):
                    return True
        return False

    def signatures(self, call: Call) -> list[str]:
        """Every legal signature for these ranks."""
        equation = self.bind(call)
        return [] if equation is None else [explain.show(call, s) for s in signatures(equation)]


def _metas(call: Call) -> Metas:
    """What the call returns; for what is written, the meta of the target."""
    if not call.op.writes:
        return shapes.infer(call)
    shapes.check_written(call)
    if not call.op.returns:
        return ()
    result: list[Any] = []
    for parameter in call.op.returned_parameter:
        index = call.operands[parameter] if parameter is not None else None
        if not isinstance(index, int):
            return shapes.infer(call)
        spec = call.inputs[index]
        result.append(TensorMeta(spec.shape, spec.stride, spec.dtype))
    return tuple(result)


def _after_conversions(call: Call, matched: Matched, metas: Metas) -> Metas:
    """A converted piece is row-major whatever the tensor was, and strides of results follow those of inputs."""
    inputs = list(call.inputs)
    for index, _ in matched.conversions:
        spec = inputs[index]
        inputs[index] = intern_spec(spec.shape, spec.dtype, spec.layout)
    if all(new is old for new, old in zip(inputs, call.inputs, strict=True)):
        return metas
    return shapes.infer(call.with_inputs(inputs))


def _out_shapes(call: Call, metas: Metas) -> list[tuple[int, ...] | None]:
    """The shape of each return; None for a list, whose tensors share the uncut dims only."""
    if not call.op.returns:
        return [call.inputs[i].shape for i in call.written]
    return [meta.shape if isinstance(meta, TensorMeta) else None for meta in metas]


def check_written_placements(
    call: Call, equation: Equation, matched: Matched, out_shapes: Sequence[tuple[int, ...] | None]
) -> None:
    """A tensor that is written to keeps its placement: the result must come out there.

    An op that writes beside its results (running statistics) takes its targets as inputs, and says no more.

    Raises:
        PlacementError: it comes out elsewhere.
    """
    if call.op.returns and not any(call.op.returned_parameter):
        return
    for target, layout, shape in zip(call.written, matched.outputs, out_shapes):
        have = call.inputs[target].layout
        if shape is None or same_pieces(shape, have, layout):
            continue
        name = explain.input_names(call)[target]
        plain = call.op.base.removeprefix("aten::").removesuffix("_")
        raise explain.refused(
            call,
            f"it writes to {name}, which stays {have}, but the result is {layout}",
            [explain.show(call, s) for s in signatures(equation)],
            f"the op that makes a new tensor (torch.{plain}), or bring {name} there first: "
            f"{name} = {explain.redistribute(name, layout.placements)}",
        )


def same_pieces(shape: tuple[int, ...], a: Layout, b: Layout) -> bool:
    """Whether every device holds the same under both layouts (they may differ in units)."""
    if a.placements == b.placements:
        return True
    if any(code(p) != code(q) for p, q in zip(a.placements, b.placements, strict=True)):
        return False
    return all(
        nested_cuts(size, dim_cuts(a, dim)) == nested_cuts(size, dim_cuts(b, dim))
        for dim, size in enumerate(shape)
    )


_EMPTY_IS_FINE = frozenset({"aten::any", "aten::all"})


# ------------------------------------------------------------------------------------------------- notation


@dataclass(frozen=True, slots=True)
class _Parsed:
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@lru_cache(maxsize=4096)
def parse(notation: str) -> _Parsed:
    """Split ``"mk,kn->mn"`` into operands."""
    left, arrow, right = notation.replace(" ", "").partition("->")
    assert arrow, f"a notation has an arrow, got {notation!r}"
    return _Parsed(tuple(left.split(",")), tuple(right.split(",")))


#: Equations that one rule keeps: one for each pattern of ranks and sizes of 1.
_MAX_BOUND = 1024


@dataclass(frozen=True)
class Binder:
    """Turns a notation and a call into an equation."""

    notation: Notation
    whole: Letters = ""
    reduce: Reduce = None
    terms: tuple[tuple[int, ...], ...] = ()
    kinds: tuple[ReduceOp, ...] = LINEAR_KINDS
    lifts: bool = False
    slices: str = ""
    converts: str = ""
    spreads: str = ""
    grouped: str = ""
    unaffected: frozenset[int | tuple[int, str]] = frozenset()
    linear_if: Callable[[Call], bool] | None = field(default=None, repr=False)
    _bound: dict[Any, Equation | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def parsed(self, call: Call) -> _Parsed:
        """The notation of a call."""
        return parse(self.notation if isinstance(self.notation, str) else self.notation(call))

    def parts(self, call: Call) -> tuple[list[str | None], list[int | None]]:
        """The letters of each input, and the input of each operand."""
        parts: list[str | None] = [None] * len(call.inputs)
        of_operand: list[int | None] = []
        for parameter, letters in zip(_operands(call), self.parsed(call).inputs, strict=False):
            operand = call.operands[parameter]
            of_operand.append(operand if isinstance(operand, int) else None)
            for index in operand if isinstance(operand, tuple) else (operand,):
                if index is not None:
                    parts[index] = letters
        return parts, of_operand

    def __call__(self, call: Call) -> Equation | None:
        """The equation of a call; None when the ranks do not fit the notation."""
        key = self._key(call)
        if key not in self._bound:
            if len(self._bound) >= _MAX_BOUND:
                self._bound.clear()
            self._bound[key] = self._bind(call)
        return self._bound[key]

    def _key(self, call: Call) -> tuple[Any, ...]:
        """All of a call that decides about its equation. Of sizes, only whether they are 1."""
        return (
            call.op,
            self.notation if isinstance(self.notation, str) else self.notation(call),
            self.whole if isinstance(self.whole, str) else frozenset(self.whole(call)),
            self.reduce(call) if callable(self.reduce) else self.reduce,
            self.linear_if is None or self.linear_if(call),
            tuple([_given(call, name) if item is None else item for name, item in call.operands.items()]),
            tuple([tuple([size == 1 for size in spec.shape]) for spec in call.inputs]),
            call.written,
        )

    def _bind(self, call: Call) -> Equation | None:
        parsed = self.parsed(call)
        parts, of_operand = self.parts(call)
        dims = assign(parts, call.inputs)
        if dims is None:
            return None
        constants = [_is_constant(call, name) for name in _operands(call)]
        whole = self.whole if isinstance(self.whole, str) else self.whole(call)
        linear = self.linear_if is None or self.linear_if(call)
        return Equation(
            inputs=tuple(dims),
            outputs=tuple(_output_dims(letters, dims, parts) for letters in parsed.outputs),
            whole=frozenset(whole),
            reduce=self.reduce(call) if callable(self.reduce) else self.reduce,
            unaffected=self.unaffected,
            terms=_bound_terms(self.terms, of_operand, constants) if linear else (),
            kinds=self.kinds,
            lifts=self.lifts,
            slices=_numbers(self.slices, of_operand, len(call.inputs)),
            converts=_numbers(self.converts, of_operand, len(call.inputs)),
            spreads=_numbers(self.spreads, of_operand, len(call.inputs)),
            fixed=frozenset(call.written),
            grouped=frozenset(self.grouped),
        )


def _operands(call: Call) -> list[str]:
    """Tensor parameters in order, without those of ``out=``."""
    op = call.op
    is_out = () if op.is_inplace else op.returned_parameter
    return [p.name for p in op.tensor_parameters if not (p.writes and p.name in is_out)]


def _given(call: Call, name: str) -> str:
    """What a parameter without a tensor got."""
    return "nothing" if call.get(name) is None else "a constant"


def _is_constant(call: Call, name: str) -> bool:
    return call.operands[name] is None and call.get(name) is not None


def _bound_terms(
    terms: tuple[tuple[int, ...], ...], of_operand: Sequence[int | None], constants: Sequence[bool]
) -> tuple[tuple[int, ...], ...]:
    result = []
    for term in terms:
        present = tuple(n for i in term if i < len(of_operand) and (n := of_operand[i]) is not None)
        constant = any(i < len(constants) and constants[i] for i in term)
        # A term that is a number is an empty product: nothing in it can be partial. An absent one is dropped.
        if present or constant:
            result.append(present)
    return tuple(result)


def _numbers(letters: str, of_operand: Sequence[int | None], count: int) -> frozenset[int]:
    if letters == "*":
        return frozenset(range(count))
    found = (of_operand[ord(c) - 97] for c in letters if ord(c) - 97 < len(of_operand))
    return frozenset(n for n in found if n is not None)


def assign(parts: Sequence[str | None], inputs: Sequence[Spec]) -> list[Dims | None] | None:
    """Letters for the dims of each input. Ellipsis dims are named by their distance from the right."""
    named: list[list[str] | None] = []
    for letters, spec in zip(parts, inputs, strict=True):
        if letters is None:
            named.append(None)
            continue
        if letters.startswith("?"):
            letters = letters[1:][-len(spec.shape) :] if spec.shape else ""
        before, dots, after = letters.partition("...")
        extra = len(spec.shape) - len(before) - len(after)
        if extra < 0 or (extra and not dots):
            return None
        named.append([*before, *(f"~{i}" for i in range(extra, 0, -1)), *after])
    sizes: dict[str, int] = {}
    for names, spec in zip(named, inputs, strict=True):
        for name, size in zip(names or (), spec.shape):
            if sizes.get(name, 1) == 1:
                sizes[name] = size
    return [
        None
        if names is None
        else tuple(
            None if name == "1" or (size == 1 and sizes[name] != 1) else name
            for name, size in zip(names, spec.shape)
        )
        for names, spec in zip(named, inputs, strict=True)
    ]


def _output_dims(letters: str, dims: Sequence[Dims | None], parts: Sequence[str | None]) -> Dims:
    before, dots, after = letters.partition("...")
    extra = 0
    if dots:
        for found, part in zip(dims, parts, strict=True):
            if found is not None and part is not None and "..." in part:
                extra = max(extra, len(found) - len(part) + 3)
    named = [*before, *(f"~{i}" for i in range(extra, 0, -1)), *after]
    return tuple(None if name == "1" else name for name in named)


# ------------------------------------------------------------------------------------------------- rules


def parse_terms(text: str) -> tuple[tuple[int, ...], ...]:
    """``"a+b*c"`` -> ((0,), (1, 2))."""
    return tuple(tuple(ord(c) - 97 for c in term.split("*")) for term in text.split("+")) if text else ()


def rule(
    names: str,
    notation: Notation,
    *,
    linear: str = "",
    moves: str = "",
    whole: Letters = "",
    reduce: Reduce = None,
    slices: str = "",
    converts: str = "",
    spreads: str = "",
    lifts: bool = False,
    grouped: str = "",
    linear_if: Callable[[Call], bool] | None = None,
    kinds: tuple[ReduceOp, ...] | None = None,
    unaffected: Sequence[int | tuple[int, str]] = (),
    localize: Localize | None = None,
    specialize: Specialize | None = None,
    shape: ShapeFunction | str | None = None,
    always: bool = False,
    nonempty: bool = False,
) -> None:
    """Define the rule of one op or several (names with blanks between them).

    Args:
        names: ``aten::mm`` for all overloads, ``aten::max.dim`` for one; ``aten::`` may be left out.
        notation: the dims in letters, see the top of this module.
        linear: sum of products in which the op is linear, operands named a, b, c ...: ``"a+b*c"``.
        moves: as ``linear``, for ops that only move elements: every kind of Partial is kept.
        whole: letters that must not be cut.
        reduce: what cutting a letter leaves in an output without it, one kind for all outputs or one for each;
            "sum" for linear ops.
        slices: operands that are cut locally where they are whole and others are sharded; "*" for all.
        converts: operands that are brought to wherever they are needed, with communication.
        spreads: operands whose pieces become terms of a sum, held among zeros, where their cut fits no signature.
        lifts: replicated terms of a sum may become partial.
        grouped: letters of which one operand has a multiple of another's.
        linear_if: the op is linear only for such calls.
        kinds: the kinds of Partial that the terms keep, where they are not those of a linear op.
        unaffected: outputs (by position) that are whole on every device whatever is cut, or when a letter is.
        localize: local values of arguments that depend on global sizes.
        specialize: another op for some signatures.
        shape: how the result's shape is computed without a meta kernel; "letters" for contiguous results whose
            dims are the letters.
        always: the rule answers for replicated inputs too.
        nonempty: the kernel refuses tensors without elements; devices that have none do not run it.
    """
    terms = parse_terms(linear or moves)
    binder = Binder(
        notation,
        whole=whole,
        reduce=reduce if reduce is not None or not terms or moves else "sum",
        terms=terms,
        kinds=kinds or (ALL_KINDS if moves else LINEAR_KINDS),
        unaffected=frozenset(unaffected),
        lifts=lifts,
        slices=slices,
        converts=converts,
        spreads=spreads,
        grouped=grouped,
        linear_if=linear_if,
    )
    full = full_names(names)
    register(full, EquationRule(binder, localize, specialize, always, nonempty))
    if shape == "letters":
        register_shape(full, lambda call: letters_shape(binder, call))
    elif callable(shape):
        register_shape(full, shape)


def full_names(names: str) -> list[str]:
    """Names with their namespace."""
    return [name if "::" in name else f"aten::{name}" for name in names.split()]


def _has_all_letters(letters: str | None, dims: Dims | None) -> bool:
    """Whether no dim with a letter of its own is broadcast: products do not broadcast what they contract."""
    if letters is None or dims is None or letters.startswith("?"):
        return True
    before, _, after = letters.partition("...")
    named = zip([*before, *after], [*dims[: len(before)], *dims[len(dims) - len(after) :]])
    return all(name is not None or letter == "1" for letter, name in named)


def letters_shape(binder: Binder, call: Call) -> Metas | None:
    """Contiguous results whose sizes are those of the letters, in the dtype that all inputs have."""
    equation = binder(call)
    dtype = call.inputs[0].dtype
    if equation is None or any(spec.dtype is not dtype for spec in call.inputs):
        return None
    if not all(map(_has_all_letters, binder.parts(call)[0], equation.inputs)):
        return None
    sizes: dict[str | None, int] = {None: 1}
    for dims, spec in zip(equation.inputs, call.inputs, strict=True):
        for letter, size in zip(dims or (), spec.shape):
            if sizes.setdefault(letter, size) != size:
                return None
    metas = []
    for dims in equation.outputs:
        shape = tuple(sizes[letter] for letter in dims)
        metas.append(TensorMeta(shape, contiguous_stride(shape), dtype))
    return tuple(metas)
