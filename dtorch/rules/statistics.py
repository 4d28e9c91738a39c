"""Look-ups in sorted values and lists, and slices cut down to a norm."""

from __future__ import annotations

from dtorch.rules.call import Call
from dtorch.rules.dsl import Kinds, rule
from dtorch.rules.view import LETTERS, dim_of, letters
from dtorch.shapes import Metas, TensorMeta, wrap
from dtorch.spec import contiguous_stride

# ------------------------------------------------------------------------------------------------- look-ups


def _searched(call: Call) -> str:
    """Each row of sorted values is searched for the values of the same row, or one row for all."""
    ndim = len(call.spec("sorted_sequence").shape)
    if ndim == 1:
        return "z,...,z->..." if call.op.func._overloadname == "Tensor" else "z,z->"
    rows = letters(ndim - 1)
    return f"{rows}Z,{rows}X,{rows}Z->{rows}X"


rule("searchsorted", _searched, whole="zZ", slices="*")


def _found(call: Call) -> Kinds:
    """A value is in a cut list when it is in some piece; it is in none when it is in no piece."""
    return "min" if call.get("invert") else "max"


def _members(call: Call) -> str:
    tested = LETTERS[: len(call.spec("test_elements").shape)].upper()
    return f"...,{tested}->..." if call.op.func._overloadname == "Tensor_Tensor" else f"{tested}->"


rule("isin.Tensor_Tensor isin.Scalar_Tensor", _members, reduce=_found)
rule("isin.Tensor_Scalar", "...->...")


# ------------------------------------------------------------------------------------------------- slices by norm


def _same(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    return f"{names}->{names}"


def _other_dims(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    return names.replace(names[dim_of(call)], "")


def _renorm_shape(call: Call) -> Metas | None:
    spec = call.inputs[0]
    if len(spec.shape) < 2 or wrap(call.get("dim"), len(spec.shape)) is None or not call.get("p") > 0:
        return None
    return (TensorMeta(spec.shape, contiguous_stride(spec.shape), spec.dtype),)


rule("renorm", _same, whole=_other_dims, shape=_renorm_shape)
