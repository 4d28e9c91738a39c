"""Calls for the rules of special functions, and of ops that write a part into a tensor."""

from __future__ import annotations

import torch

from tests.numerics.more_samples import each, n, row, u, unit, x
from tests.numerics.samples import aten, call, real, whole_numbers

_POLYNOMIALS = (
    "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
    "special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he "
    "special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t "
    "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
    "special_shifted_chebyshev_polynomial_w"
)

SPECIAL = [
    *each(
        "special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 "
        "special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 "
        "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 frexp.Tensor",
        u,
    ),
    call(aten.polygamma.default, 2, unit(4, 5)),
    call(aten.mvlgamma.default, unit(4, 5) + 3, 2),
    *each(_POLYNOMIALS, u, n),
    call(aten.special_chebyshev_polynomial_t.n_scalar, unit(4, 5), 3),
    call(aten.special_hermite_polynomial_h.x_scalar, 0.5, whole_numbers(4, 4, 5)),
    *each("igamma igammac heaviside ldexp.Tensor", u, row),
    call(aten.fill.Scalar, real(4, 5), 2.5),
    call(aten.fill.Tensor, real(4, 5), real()),
]
SCATTER = [
    *each("alias_copy detach_copy lift_fresh_copy", x),
    call(aten.unsafe_split.Tensor, x(), 2, 1),
    call(aten.unsafe_split_with_sizes.default, x(), [1, 3], 0),
    call(aten.narrow_copy.default, x(), 1, 1, 3),
    call(aten.unfold_copy.default, real(4, 5, 3), 1, 3, 2),
    call(aten.select_scatter.default, real(4, 5, 3), real(4, 3), 1, 2),
    call(aten.slice_scatter.default, real(4, 5), real(2, 5), 0, 1, 3),
    call(aten.diagonal_scatter.default, real(4, 5, 3), real(5, 3), 0, 0, 2),
    call(aten.diagonal_backward.default, real(5, 3), [4, 5, 3], 0, 0, 2),
    call(aten.diag_embed.default, real(4, 5)),
    call(aten.diag_embed.default, real(4, 5), 1, 0, 1, name="diag_embed in front"),
    call(aten.unfold_backward.default, real(4, 2, 3, 3), [4, 5, 3], 1, 3, 2),
    call(aten.take.default, real(4, 5), whole_numbers(20, 3, 2)),
    call(aten.put.default, real(4, 5), whole_numbers(20, 4, 2), real(4, 2), True),
    call(aten.put_.default, real(4, 5), whole_numbers(1, 1), real(1), False),
    call(aten.index_reduce.default, x(), 1, torch.tensor([0, 2]), real(4, 2), "amax"),
    call(aten.index_fill.int_Tensor, x(), 1, torch.tensor([0, 2]), real()),
    call(aten.as_strided_copy.default, real(4, 5), [3, 2], [4, 7], 2),
    call(aten.as_strided_scatter.default, real(4, 5), real(3, 2), [3, 2], [4, 7], 2),
    call(aten.rot90.default, real(4, 5, 3), 1, [0, 2]),
    call(aten._chunk_cat.default, [real(4, 5, 3), real(4, 2)], 1, 2),
    call(aten._chunk_cat.default, [real(4, 5, 3), real(4, 5, 1)], -1, 2, name="_chunk_cat behind two dims"),
    call(aten._chunk_cat.default, [real(4, 5), real(3)], 0, 2, name="_chunk_cat of rows"),
    call(aten.rot90.default, real(4, 5, 3), 2, [1, 2], name="rot90 half"),
]
SCATTER_AND_SPECIAL = [*SPECIAL, *SCATTER]
