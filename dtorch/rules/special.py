"""Special functions, pointwise: Bessel functions, orthogonal polynomials, gamma functions."""

from __future__ import annotations

from dtorch.rules.dsl import rule
from dtorch.rules.pointwise import pointwise

pointwise(
    "special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 "
    "special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 "
    "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 "
    "polygamma mvlgamma",
    result="floating",
)
pointwise(
    "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
    "special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he "
    "special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t "
    "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
    "special_shifted_chebyshev_polynomial_w igamma igammac ldexp",
    result="floating",
)
pointwise("heaviside")
# aten::frexp.Tensor(self) -> (mantissa, exponent)
rule("frexp.Tensor", "...->...,...")
rule("fill.Scalar", "...->...")
rule("fill.Tensor", "...,->...")
