"""Which results are lazy conjugates and lazy negatives, by the bits of the inputs: as torch's kernels make them."""

from __future__ import annotations

from dtorch.rules.call import Call

#: ``is_conj`` and ``is_neg`` of a ``Spec``.
Bits = tuple[bool, bool]


def bits_of_view(call: Call, index: int) -> Bits:
    """Of a view of an input."""
    spec = call.inputs[index]
    return spec.is_conj != (call.op.base == "aten::_conj"), spec.is_neg != (call.op.base == "aten::_neg_view")


def bits_of_result(call: Call) -> Bits:
    """Of a result that shares no memory as far as the schema tells."""
    base = call.op.base
    if base == "aten::_unsafe_view":
        return bits_of_view(call, 0)
    if base in ("aten::dot", "aten::vdot"):
        left, right = (spec.is_conj for spec in call.inputs)
        # The product of conjugates is the conjugate of another, which torch computes, and leaves it at that.
        return right and left == (base == "aten::dot"), False
    return False, False
