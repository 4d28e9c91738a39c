"""Calls for linear algebra and Fourier transforms: batches of matrices, whose results do not depend on the batch."""

from __future__ import annotations

import torch

from tests.numerics.samples import aten, call, real, whole_numbers


def matrices(*shape: int) -> torch.Tensor:
    """Well-conditioned square matrices: [*shape, 3, 3]."""
    return real(*shape, 3, 3) + 4 * torch.eye(3, dtype=torch.float64)


def symmetric(*shape: int) -> torch.Tensor:
    """Positive definite."""
    m = matrices(*shape)
    return m @ m.mT


def complex_(*shape: int) -> torch.Tensor:
    return torch.complex(real(*shape), real(*shape))


def pivots(*shape: int) -> torch.Tensor:
    """Rows in place: [*shape, 3]."""
    return torch.tensor([1, 2, 3], dtype=torch.int32).expand(*shape, 3).clone()


def columns(count: int, rows: int) -> torch.Tensor:
    """Columns of one power of 2 each, [count, rows, 2]: least squares in exact numbers, wherever they lie in memory."""
    return torch.eye(rows, dtype=torch.float64)[:, :2] * 2.0 ** torch.arange(2 * count).view(count, 1, 2)


DECOMPOSITIONS = [
    call(aten._linalg_svd.default, real(4, 3, 2)),
    call(aten._linalg_svd.default, real(4, 3, 2), True, False, name="singular values only"),
    call(aten.linalg_qr.default, real(4, 3, 2)),
    call(aten.linalg_qr.default, real(4, 3, 2), "r", name="qr without q"),
    call(aten._linalg_eigh.default, symmetric(4)),
    call(aten._linalg_eigh.default, symmetric(4), "L", False, name="eigvalsh"),
    call(aten.linalg_eig.default, matrices(4)),
    call(aten._linalg_eigvals.default, matrices(4)),
    call(aten.linalg_cholesky_ex.default, symmetric(4)),
    call(aten.cholesky.default, symmetric(4)),
    call(aten.cholesky_inverse.default, symmetric(4).tril()),
    call(aten.linalg_matrix_exp.default, real(4, 3, 3)),
    call(aten.linalg_inv_ex.default, matrices(4)),
    call(aten.linalg_lu_factor_ex.default, real(4, 3, 2)),
    call(aten.linalg_lu.default, real(4, 3, 2)),
    call(aten.linalg_ldl_factor_ex.default, symmetric(4)),
    call(aten._linalg_det.default, matrices(4)),
    call(aten._linalg_slogdet.default, matrices(2, 4)),
    call(aten.geqrf.default, real(4, 3, 2)),
    call(aten.linalg_householder_product.default, real(4, 3, 2), real(4, 2)),
    call(aten.ormqr.default, real(4, 3, 2), real(4, 2), real(4, 3, 5)),
    call(aten.linalg_pinv.atol_rtol_tensor, real(4, 3, 2)),
    call(aten.linalg_pinv.atol_rtol_tensor, real(4, 3, 2), atol=real(4).abs() / 10, name="pinv with atol"),
]
SOLVERS = [
    call(aten._linalg_solve_ex.default, matrices(4), real(4, 3, 5)),
    call(aten._linalg_solve_ex.default, matrices(), real(4, 3, 5), name="solve with one matrix"),
    call(aten._linalg_solve_ex.default, matrices(4), real(4, 3), name="solve of vectors"),
    call(aten._linalg_solve_ex.default, matrices(4), real(4, 5, 3), left=False, name="solve from the right"),
    call(aten.linalg_lu_solve.default, matrices(4), pivots(4), real(4, 3, 5)),
    call(aten.linalg_solve_triangular.default, matrices(4), real(4, 3, 5), upper=True),
    call(
        aten.linalg_solve_triangular.default,
        matrices(4),
        real(4, 5, 3),
        upper=False,
        left=False,
        name="solve_triangular from the right",
    ),
    call(aten.triangular_solve.default, real(4, 3, 5), matrices(4)),
    call(aten.cholesky_solve.default, real(4, 3, 5), matrices(4).tril()),
    call(aten.linalg_ldl_solve.default, symmetric(4), pivots(4), real(4, 3, 5)),
    *(
        call(
            aten.linalg_lstsq.default,
            columns(4, 3),
            whole_numbers(9, 4, 3, 5).double(),
            driver=driver,
            name=f"lstsq {driver}",
        )
        for driver in ("gels", "gelsy", "gelsd")
    ),
    call(aten.linalg_lstsq.default, columns(4, 2), whole_numbers(9, 4, 2).double(), name="lstsq of vectors"),
]
DISTANCES = [
    *(
        call(aten._cdist_forward.default, real(2, 4, 3), real(2, 5, 3), p, None, name=f"cdist {p}")
        for p in (0.0, 1.0, 2.0, 3.0, float("inf"))
    ),
    call(aten._cdist_forward.default, real(2, 4, 3), real(5, 3), 2.0, None, name="cdist with one batch"),
    call(
        aten._cdist_forward.default,
        many := (real(30, 3) * 100 + 1000).float(),
        many[:5] + 1e-3,
        2.0,
        None,
        name="cdist by products",
    ),
    *(
        call(
            aten._cdist_backward.default,
            real(2, 4, 5),
            x := real(2, 4, 3),
            y := real(2, 5, 3),
            p,
            torch.cdist(x, y, p),
            name=f"cdist_backward {p}",
        )
        for p in (1.0, 2.0, 3.0, float("inf"))
    ),
    *(
        call(aten._pdist_forward.default, real(4, 3), p, name=f"pdist {p}")
        for p in (0.0, 1.0, 2.0, float("inf"))
    ),
    *(
        call(
            aten._pdist_backward.default,
            real(6),
            x := real(4, 3),
            p,
            torch.pdist(x, p),
            name=f"pdist_backward {p}",
        )
        for p in (1.0, 2.0)
    ),
    *(call(aten.dist.default, real(4, 5), real(5), p, name=f"dist {p}") for p in (0, 1, 2, float("inf"))),
    call(aten.linalg_cross.default, real(4, 3), real(4, 3)),
    call(aten.linalg_cross.default, real(3, 4, 2), real(3, 1, 2), dim=0, name="cross along the first dim"),
]
TRANSFORMS = [
    call(aten._fft_r2c.default, real(4, 6), [1], 0, True),
    call(aten._fft_r2c.default, real(4, 6), [0, 1], 0, False, name="fft of reals, both dims"),
    call(aten._fft_c2c.default, complex_(4, 3, 5), [0, 2], 0, True),
    call(aten._fft_c2r.default, complex_(4, 3, 5), [1], 2, 4),
]
LINALG = [*DECOMPOSITIONS, *SOLVERS, *DISTANCES, *TRANSFORMS]
