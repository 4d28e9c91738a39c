"""``_foreach_*`` and fused optimizers: the same op on each of many tensors, each with a placement of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtorch import shapes
from dtorch.op_plan import OpPlan
from dtorch.rules import explain
from dtorch.rules.call import Call
from dtorch.rules.dsl import assign, full_names, parse_terms, same_pieces
from dtorch.rules.equation import Dims, Equation, Mismatch, match, signatures
from dtorch.rules.registry import register
from dtorch.rules.whole import plan_same_op
from dtorch.shapes import Metas, TensorMeta, broadcast, elementwise_stride, register_shape, result_type
from dtorch.spec import Spec
from dtorch_runtime.ir.layout import Layout


@dataclass(frozen=True)
class ForeachRule:
    """Pointwise on each position of the lists; ``terms`` as in an equation, by the order of the operands."""

    terms: tuple[tuple[int, ...], ...] = ()
    #: Whether a number among the arguments is a term of the sum (and not a factor).
    adds_numbers: bool = False
    always: bool = False

    def plan(self, call: Call) -> OpPlan:
        """The plan of a call. Raises PlacementError."""
        metas = _metas(call)
        conversions: dict[int, Layout] = {}
        layouts: list[Layout] = []
        for position in range(_length(call)):
            indices = _at(call, position)
            equation = self._equation(call, indices)
            inputs = [call.inputs[i] for i in indices]
            shape = broadcast([spec.shape for spec in inputs])
            try:
                matched = match(equation, inputs, [shape])
            except Mismatch as mismatch:
                raise _refused(call, position, indices, equation, mismatch) from None
            if 0 in equation.fixed and not same_pieces(inputs[0].shape, inputs[0].layout, matched.outputs[0]):
                raise _refused(
                    call, position, indices, equation, Mismatch("{0} would change its placement", 0)
                )
            for index, layout in matched.conversions:
                conversions[indices[index]] = layout
            layouts.append(matched.outputs[0])
        per_return: list[list[Layout]] = [layouts] if call.op.returns else []
        return plan_same_op(call, metas, per_return, conversions=sorted(conversions.items()))

    def _equation(self, call: Call, indices: list[int]) -> Equation:
        inputs = [call.inputs[i] for i in indices]
        dims = assign(["..."] * len(inputs), inputs)
        assert dims is not None
        ndim = max(map(len, (d for d in dims if d is not None)))
        out: Dims = tuple(f"~{i}" for i in range(ndim, 0, -1))
        present = tuple(found for term in self.terms if (found := tuple(i for i in term if i < len(inputs))))
        linear = not (self.adds_numbers and _has_number(call))
        written = {i for i, index in enumerate(indices) if index in call.written}
        return Equation(
            inputs=tuple(dims),
            outputs=(out,),
            terms=present if linear else (),
            lifts=len(self.terms) > 1,
            slices=frozenset(range(len(inputs))),
            fixed=frozenset(written),
        )

    def parts(self, call: Call) -> Iterator[tuple[list[int], Equation]]:
        """The inputs at each position of the lists, and what the op is there."""
        for position in range(_length(call)):
            indices = _at(call, position)
            yield indices, self._equation(call, indices)

    def signatures(self, call: Call) -> list[str]:
        """Those of the first position."""
        indices = _at(call, 0)
        return _shown(call, indices, self._equation(call, indices))


def _has_number(call: Call) -> bool:
    return any(call.has(name) and call.get(name) is not None for name in ("scalar", "scalars"))


def _length(call: Call) -> int:
    first = call.operands[call.op.tensor_parameters[0].name]
    return len(first) if isinstance(first, tuple) else 1


def _at(call: Call, position: int) -> list[int]:
    """The inputs that the op at one position of the lists works on."""
    found = []
    for parameter in call.op.tensor_parameters:
        operand = call.operands[parameter.name]
        if isinstance(operand, int):
            found.append(operand)
        elif operand is not None and position < len(operand) and (index := operand[position]) is not None:
            found.append(index)
    return found


def _shown(call: Call, indices: list[int], equation: Equation) -> list[str]:
    names = [explain.input_names(call)[i] for i in indices]
    return [explain.show_codes(names, s) for s in signatures(equation)]


def _refused(
    call: Call, position: int, indices: list[int], equation: Equation, mismatch: Mismatch
) -> Exception:
    names = [explain.input_names(call)[i] for i in indices]
    inputs = [call.inputs[i] for i in indices]
    shown = _shown(call, indices, equation)
    fix = explain.fix_of(names, inputs, equation, mismatch.axis)
    reason = mismatch.reason.format(*names)
    return explain.refused(call, f"at position {position} of the lists, {reason}", shown, fix, indices)


def _metas(call: Call) -> Metas:
    if not call.op.returns:
        return ()
    return shapes.infer(call)


def _foreach_shape(call: Call) -> Metas | None:
    if not call.op.returns:
        return tuple(
            TensorMeta(call.inputs[i].shape, call.inputs[i].stride, call.inputs[i].dtype)
            for i in call.written
        )
    metas = []
    for position in range(_length(call)):
        inputs = [call.inputs[i] for i in _at(call, position)]
        shape = broadcast([spec.shape for spec in inputs])
        if shape is None or any(not spec.dtype.is_floating_point for spec in inputs):
            return None
        operands: list[Spec | bool | int | float | complex | None] = list(inputs)
        metas.append(TensorMeta(shape, elementwise_stride(shape, inputs), result_type(operands)))
    return (tuple(metas),)


def _foreach(names: str, linear: str = "", *, adds_numbers: bool = False) -> None:
    full = full_names(" ".join(f"_foreach_{name} _foreach_{name}_" for name in names.split()))
    register(full, ForeachRule(parse_terms(linear), adds_numbers))
    register_shape(full, _foreach_shape)


_foreach("add sub", "a+b", adds_numbers=True)
_foreach("mul", "a*b")
_foreach("div", "a")
_foreach("neg zero", "a")
_foreach("lerp", "a+b")
_foreach("addcmul", "a+b*c")
_foreach("addcdiv", "a+b")
_foreach(
    "abs acos asin atan ceil clamp_max clamp_min cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 "
    "maximum minimum pow reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
)
register(full_names("_foreach_copy_"), ForeachRule())
register_shape(full_names("_foreach_copy_"), _foreach_shape)

# They also write to the gradients, where these are scaled.
_fused = full_names("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_")
register(_fused, ForeachRule())
register_shape(_fused, _foreach_shape)
