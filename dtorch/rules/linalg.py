"""Decompositions, solvers and distances: the dims of a batch may be cut, and columns that are solved one by one."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import torch

from dtorch.rules.call import Call
from dtorch.rules.dsl import Kinds, parse, rule
from dtorch.rules.equation import Matched
from dtorch.rules.view import LETTERS
from dtorch.shapes import Metas, TensorMeta, broadcast, is_contiguous, register_shape
from dtorch.spec import contiguous_stride


def batched(names: str, notation: str | Callable[[Call], str], *, cut: str = "", **rest: Any) -> None:
    """A rule for ops on matrices: small letters are whole, but for those in ``cut``; dims of a batch may be cut.

    Whole operands are cut locally to meet a cut batch. Results that a call does not ask for are empty, and lack the
    dims of the batch; they are so on every device.
    """

    def whole(call: Call) -> str:
        written = notation if isinstance(notation, str) else notation(call)
        return "".join(set("".join(parse(written).inputs)) & set(string.ascii_lowercase) - set(cut))

    rule(names, notation, whole=whole, slices="*", **rest)


def _if(asked: bool, dims: str) -> str:
    """The dims of a result, or those of an empty one (its shape is [0])."""
    return dims if asked else "1"


# ------------------------------------------------------------------------------------------------- decompositions


def _svd(call: Call) -> str:
    asked = call.get("compute_uv")
    return f"...mn->{_if(asked, '...mu')},...s,{_if(asked, '...vn')}"


def _qr(call: Call) -> str:
    return f"...mn->{_if(call.get('mode') != 'r', '...mq')},...qn"


def _eigh(call: Call) -> str:
    return f"...mm->...m,{_if(call.get('compute_v'), '...mm')}"


def _columns(call: Call) -> str:
    """Each column (or row, from the right) is multiplied on its own."""
    return "...pc" if call.get("left") else "...cp"


batched("_linalg_svd", _svd, unaffected=(0, 2))
batched("linalg_qr", _qr, unaffected=(0,))
batched("_linalg_eigh", _eigh, unaffected=(1,))
batched("linalg_eig", "...mm->...m,...mm")
batched("_linalg_eigvals", "...mm->...m")
batched("linalg_cholesky_ex", "...mm->...mm,...")
batched("cholesky cholesky_inverse linalg_matrix_exp", "...mm->...mm")
batched("linalg_inv_ex", "...mm->...mm,...")
batched("linalg_lu_factor_ex", "...mn->...mn,...p,...")
batched("linalg_lu", lambda call: f"...mn->{_if(call.get('pivot'), '...mm')},...mk,...kn", unaffected=(0,))
batched("linalg_ldl_factor_ex", "...mm->...mm,...m,...")
batched("_linalg_det", "...mm->...,...mm,...m")
batched("_linalg_slogdet", "...mm->...,...,...mm,...m")
batched("geqrf", "...mn->...mn,...k")
batched("linalg_householder_product", "...mn,...k->...mn")
batched(
    "ormqr",
    lambda call: f"...mk,...t,{_columns(call)}->{_columns(call)}",
    cut="c",
    linear="c",
)
batched("linalg_pinv.atol_rtol_tensor", "...mn,...,...->...nm")


# ------------------------------------------------------------------------------------------------- solvers
#
# Linear in the right side: one that is cut along its rows is solved for as the sum of its pieces.


def _solve_ex(call: Call) -> str:
    """Columns, or a vector for each matrix where the right side has one dim less. Factors have the matrices' batch."""
    matrix, right = call.spec("A").shape, call.spec("B").shape
    is_vector = len(right) == 1 or (len(matrix) - 1 == len(right) and matrix[:-1] == right)
    side = "m" if is_vector else "mk" if call.get("left") else "km"
    of_matrix, of_right = matrix[:-2], right[: len(right) - len(side)]
    ndim = max(len(of_matrix), len(of_right))
    names = LETTERS[:ndim].upper()
    have, other = names[ndim - len(of_matrix) :], names[ndim - len(of_right) :]
    sizes = dict(zip(other, of_right))
    kept = "".join("1" if n == 1 != sizes.get(name, 1) else name for name, n in zip(have, of_matrix))
    return f"{have}mm,{other}{side}->{names}{side},{kept}mm,{kept}m,{kept}"


def _matrix_side(call: Call) -> str:
    return "...mk" if call.get("left") else "...km"


def _lstsq(call: Call) -> str:
    """Residuals, ranks and singular values are empty unless the driver computes them."""
    matrix, right = call.spec("self").shape, call.spec("b").shape
    is_vector = len(right) == len(matrix) - 1
    driver = _driver(call)
    side, solution = ("...m", "...n") if is_vector else ("...mk", "...nk")
    residuals = _if(_has_residuals(call), "...1" if is_vector else "...k")
    return (
        f"...mn,{side}->{solution},{residuals},{_if(driver != 'gels', '...')},"
        f"{_if(driver in ('gelsd', 'gelss'), '...s')}"
    )


def _has_residuals(call: Call) -> bool:
    rows, columns = call.spec("self").shape[-2:]
    return rows > columns and _driver(call) != "gelsy"


def _driver(call: Call) -> str:
    asked = call.get("driver")
    assert call.mesh is not None
    return str(asked) if asked else "gelsy" if call.mesh.device_type == "cpu" else "gels"


batched("_linalg_solve_ex", _solve_ex, cut="k", linear="b", spreads="b", unaffected=(1, 2, 3))
batched(
    "linalg_lu_solve",
    lambda call: f"...mm,...m,{_matrix_side(call)}->{_matrix_side(call)}",
    cut="k",
    linear="c",
    spreads="c",
)
batched(
    "linalg_solve_triangular",
    lambda call: f"...mm,{_matrix_side(call)}->{_matrix_side(call)}",
    cut="k",
    linear="b",
    spreads="b",
)
batched("triangular_solve", "...mk,...mm->...mk,...mm", cut="k", linear="a", spreads="a", unaffected=(1,))
batched("cholesky_solve", "...mk,...mm->...mk", cut="k", linear="a", spreads="a")
batched("linalg_ldl_solve", "...mm,...m,...mk->...mk", cut="k", linear="c", spreads="c")
batched(
    "linalg_lstsq",
    _lstsq,
    linear="b",
    spreads="b",
    linear_if=lambda call: not _has_residuals(call),
    unaffected=(1, 2, 3),
)


# ------------------------------------------------------------------------------------------------- distances


def _terms_of_p(call: Call) -> Kinds:
    """A distance over a cut dim: sums for orders 0 and 1, the largest for infinity; roots of sums are no sums."""
    p = float(call.get("p"))
    return "sum" if p in (0.0, 1.0) else "max" if p == float("inf") else None


def _cross(call: Call) -> list[str]:
    """The dim of the vectors, counted from the right: the operands are broadcast."""
    ndim = max(len(spec.shape) for spec in call.inputs)
    dim = call.get("dim")
    return [f"~{-dim if dim < 0 else ndim - dim}"]


_BY_PRODUCTS, _BY_DIFFERENCES = 1, 2
#: Rows beyond which torch finds Euclidean distances by a product of matrices (ATen/native/Distance.cpp).
_MANY_ROWS = 25


def _mode_of_whole(call: Call, matched: Matched, metas: Metas) -> dict[str, Any]:
    """A piece is computed as the whole would be: the two ways differ in how they round."""
    if call.get("compute_mode"):
        return {}
    is_large = max(call.spec(name).shape[-2] for name in ("x1", "x2")) > _MANY_ROWS
    return {"compute_mode": _BY_PRODUCTS if is_large else _BY_DIFFERENCES}


rule("_cdist_forward", "...pm,...rm->...pr", reduce=_terms_of_p, slices="*", localize=_mode_of_whole)
rule("_cdist_backward", "...pr,...pm,...rm,...pr->...pm", linear="a", slices="*")
rule("_pdist_forward", "nm->z", whole="n", reduce=_terms_of_p)
rule("_pdist_backward", "z,nm,z->nm", whole="zn", linear="a")
rule("dist", "...,...->", reduce=_terms_of_p, slices="*")
rule("linalg_cross", "...,...->...", whole=_cross, linear="a*b", slices="*")


# ------------------------------------------------------------------------------------------------- no meta kernel


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(shape, contiguous_stride(shape), dtype)


def _pairs_shape(call: Call) -> Metas | None:
    """One distance for each pair of rows."""
    spec = call.inputs[0]
    if len(spec.shape) != 2 or not is_contiguous(spec.shape, spec.stride):
        return None
    rows = spec.shape[0]
    return (_meta((rows * (rows - 1) // 2,), spec.dtype),)


def _geqrf_shape(call: Call) -> Metas | None:
    """Reflectors in the place of the matrix, column by column, and a factor for each."""
    spec = call.inputs[0]
    if len(spec.shape) < 2:
        return None
    *batch, rows, columns = spec.shape
    swapped = contiguous_stride((*batch, columns, rows))
    reflectors = TensorMeta(spec.shape, (*swapped[:-2], swapped[-1], swapped[-2]), spec.dtype)
    return (reflectors, _meta((*batch, min(rows, columns)), spec.dtype))


def _lstsq_shape(call: Call) -> Metas | None:
    """LAPACK writes the solution, column by column, where the right side was: max(rows, columns) rows."""
    matrix, right = call.spec("self"), call.spec("b")
    if len(matrix.shape) < 2:
        return None
    is_vector = len(right.shape) == len(matrix.shape) - 1
    *batch, rows, columns = matrix.shape
    sides = right.shape if is_vector else right.shape[:-1]
    joined = broadcast([tuple(batch), sides[:-1]])
    if sides[-1:] != (rows,) or joined is None:
        return None
    count = 1 if is_vector else right.shape[-1]
    steps = contiguous_stride((*joined, count, max(rows, columns)))
    ends = (steps[-1],) if is_vector else (steps[-1], steps[-2])
    shape = (*joined, columns) if is_vector else (*joined, columns, count)
    real = matrix.dtype.to_real()
    driver = _driver(call)
    smallest = (*batch, min(rows, columns))
    return (
        TensorMeta(shape, (*steps[:-2], *ends), matrix.dtype),
        _meta((*joined, count) if _has_residuals(call) else (0,), real),
        _meta(tuple(batch) if driver != "gels" else (0,), torch.int64),
        _meta(smallest if driver in ("gelsd", "gelss") else (0,), real),
    )


register_shape(["aten::_pdist_forward"], _pairs_shape)
register_shape(["aten::geqrf"], _geqrf_shape)
register_shape(["aten::linalg_lstsq"], _lstsq_shape)
