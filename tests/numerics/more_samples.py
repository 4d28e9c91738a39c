"""Calls for the rest of the rules, those that follow a pattern: made from lists of names."""

from __future__ import annotations

from typing import Any

import torch

from tests.numerics.samples import aten, call, mask, real, whole_numbers
from tests.support.rule_checks import Sample


def overload(name: str) -> Any:
    """``exp`` or ``pow.Tensor_Tensor``."""
    packet, _, rest = name.partition(".")
    return getattr(getattr(aten, packet), rest or "default")


def unit(*shape: int) -> torch.Tensor:
    """Between 0.1 and 0.9, where every function is smooth."""
    return real(*shape).sigmoid() * 0.8 + 0.1


def each(names: str, *make: Any) -> list[Sample]:
    """The same arguments for each of these ops; a function makes a tensor of its own for each."""
    return [call(overload(n), *(a() if callable(a) else a for a in make), name=n) for n in names.split()]


def x() -> torch.Tensor:
    return real(4, 5)


def u() -> torch.Tensor:
    return unit(4, 5)


def n() -> torch.Tensor:
    return whole_numbers(9, 4, 5) + 1


def row() -> torch.Tensor:
    return unit(5)


UNARY = [
    *each(
        "acos asin atan asinh atanh ceil celu cosh deg2rad digamma elu erfc erfinv exp2 expm1 floor frac hardshrink "
        "hardsigmoid hardswish hardtanh i0 leaky_relu lgamma log log10 log1p log2 logit mish nan_to_num rad2deg "
        "reciprocal relu6 round selu sgn sign sin sinc sinh softplus softshrink special_entr special_erfcx "
        "special_i0e special_i1 special_i1e special_log_ndtr special_ndtri sqrt square tan trunc isinf isneginf "
        "isposinf signbit",
        u,
    ),
    call(aten.acosh.default, unit(4, 5) + 1),
    call(aten.threshold.default, real(4, 5), 0.5, 2.0),
    call(aten.clamp_min.default, real(4, 5), 0.0),
    call(aten.clamp_max.Tensor, real(4, 5), real(5)),
    call(aten.bitwise_not.default, whole_numbers(9, 4, 5)),
    call(aten.abs.default, torch.complex(real(4, 5), real(4, 5))),
    call(aten._conj.default, torch.complex(real(4, 5), real(4, 5))),
    call(aten._conj_physical.default, torch.complex(real(4, 5), real(4, 5))),
    call(aten.pow_.Scalar, real(4, 5), 2),
    call(aten.fill_.Tensor, real(4, 5), real()),
    call(aten.copy_.default, real(4, 5), real(4, 5).float(), moves_bytes=True, name="copy_ to another dtype"),
]
BINARY = [
    *each(
        "atan2 copysign.Tensor fmax fmin fmod.Tensor hypot logaddexp logaddexp2 minimum nextafter remainder.Tensor "
        "special_xlog1py special_zeta xlogy.Tensor floor_divide",
        u,
        row,
    ),
    *each(
        "bitwise_and.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor gcd lcm "
        "__and__.Tensor __or__.Tensor __xor__.Tensor __lshift__.Tensor __rshift__.Tensor",
        n,
        n,
    ),
    *each("ge.Tensor gt.Tensor le.Tensor ne.Tensor logical_or logical_xor", x, row),
]
BACKWARD = [
    call(aten.elu_backward.default, x(), 1.0, 1.0, 1.0, False, x()),
    *each("hardsigmoid_backward hardswish_backward mish_backward", x, x),
    call(aten.logit_backward.default, x(), u()),
    call(aten.hardtanh_backward.default, x(), x(), -1.0, 1.0),
    call(aten.leaky_relu_backward.default, x(), x(), 0.1, False),
    call(aten.softplus_backward.default, x(), x(), 1.0, 20.0),
    call(aten.hardshrink_backward.default, x(), x(), 0.5),
    call(aten.softshrink_backward.default, x(), x(), 0.5),
    call(aten.native_dropout_backward.default, x(), mask(4, 5), 2.0),
    call(aten._standard_gamma_grad.default, real(4, 5).abs() + 0.5, real(4, 5).abs() + 0.1),
    call(aten._dirichlet_grad.default, real(4, 5).sigmoid(), real(4, 5).exp(), real(4, 5).exp() + 5),
]
COPIES = [
    call(aten.view_copy.default, real(4, 6), [2, 2, 6]),
    call(aten._reshape_copy.default, real(4, 6), [24]),
    call(aten.transpose_copy.int, x(), 0, 1),
    call(aten.t_copy.default, x()),
    call(aten.permute_copy.default, x(), [1, 0]),
    call(aten.unsqueeze_copy.default, x(), 1),
    call(aten.squeeze_copy.default, real(4, 1, 5)),
    call(aten.expand_copy.default, real(4, 1), [4, 5]),
    call(aten.select_copy.int, x(), 1, 2),
    call(aten.slice_copy.Tensor, x(), 0, 1, 3),
    call(aten.split_copy.Tensor, x(), 2, 1),
    call(aten.split_with_sizes_copy.default, x(), [1, 3], 0),
    call(aten.unbind_copy.int, x(), 1),
    call(aten.diagonal_copy.default, real(3, 4, 4), 0, 1, 2),
    call(aten.triu.default, real(2, 4, 4), 1),
    call(aten.view_as_complex.default, real(4, 3, 2)),
    call(aten.view_as_real.default, torch.complex(x(), x())),
]
REDUCE = [
    *each("argmin count_nonzero median min nanmedian nansum", x),
    *each("median.dim nanmedian.dim min.dim mode", x, 1),
    *each("cummax cummin logcumsumexp", x, 0),
    call(aten.kthvalue.default, x(), 2, 1),
    call(aten.aminmax.default, x(), dim=1),
    *each("std.correction std_mean.correction var_mean.correction", x, [1]),
    call(aten.norm.Scalar, x(), 2),
    call(aten.norm.ScalarOpt_dim, x(), 1, [0]),
]
MATMUL = [
    call(aten.addmv.default, real(4), real(4, 5), real(5)),
    call(aten.addbmm.default, real(4, 3), real(2, 4, 5), real(2, 5, 3)),
    call(aten.vdot.default, real(5), real(5)),
]
INDEX = [
    call(aten.bucketize.Tensor, real(4, 5), torch.linspace(-1, 1, 4, dtype=torch.float64)),
    call(aten.index_copy.default, x(), 1, torch.tensor([0, 2]), real(4, 2)),
    call(aten.index_fill.int_Scalar, x(), 1, torch.tensor([0, 2]), 3.0),
    call(aten.scatter.reduce, x(), 1, whole_numbers(5, 4, 1), real(4, 1), reduce="add"),
    call(aten.scatter.value_reduce, x(), 1, whole_numbers(5, 4, 1), 2.0, reduce="multiply"),
    call(aten.scatter_reduce.two, x(), 1, whole_numbers(5, 4, 2), real(4, 2), "amax"),
    call(aten._unsafe_index.Tensor, x(), [None, whole_numbers(5, 3)]),
    call(aten._unsafe_index_put.default, x(), [torch.tensor([2, 0])], real(2, 5)),
    call(aten._index_put_impl_.default, x(), [torch.tensor([2, 0])], real(2, 5)),
]
NN = [
    *(
        call(
            getattr(aten, name).default,
            u(),
            (u() > 0.5).double() if "entropy" in name else u(),
            *rest,
            name=f"{name} {rest}",
        )
        for name in ("smooth_l1_loss", "huber_loss", "soft_margin_loss")
        for rest in ((0,), (1,), (2,))
    ),
    *(
        call(getattr(aten, name).default, *grad, u(), u(), reduction, *extra, name=f"{name} {reduction}")
        for name, extra in (
            ("smooth_l1_loss_backward", (1.0,)),
            ("huber_loss_backward", (1.0,)),
            ("soft_margin_loss_backward", ()),
        )
        for reduction, grad in ((0, (x(),)), (1, (real(),)), (2, (real(),)))
    ),
    *(call(aten.binary_cross_entropy.default, u(), u(), row(), r, name=f"bce {r}") for r in (0, 1, 2)),
    *(
        call(
            aten.binary_cross_entropy_backward.default,
            real() if r else x(),
            u(),
            u(),
            row(),
            r,
            name=f"bce_backward {r}",
        )
        for r in (0, 1, 2)
    ),
    *(
        call(
            aten.nll_loss2d_forward.default,
            real(3, 4, 2, 2),
            whole_numbers(4, 3, 2, 2),
            None,
            r,
            -100,
            moves_bytes=r == 1,
            name=f"nll2d {r}",
        )
        for r in (0, 1, 2)
    ),
    *(
        call(
            aten.nll_loss2d_backward.default,
            real() if r else real(3, 2, 2),
            real(3, 4, 2, 2),
            whole_numbers(4, 3, 2, 2),
            None,
            r,
            -100,
            torch.tensor(12.0, dtype=torch.float64),
            name=f"nll2d_backward {r}",
        )
        for r in (0, 1, 2)
    ),
    call(
        aten.max_pool2d_with_indices_backward.default,
        real(3, 3, 2, 2),
        real(3, 3, 4, 4),
        [2, 2],
        [2, 2],
        [0, 0],
        [1, 1],
        False,
        whole_numbers(16, 3, 3, 2, 2),
    ),
    call(aten.upsample_nearest2d.default, real(3, 3, 4, 4), [8, 8]),
    call(aten.upsample_bilinear2d.default, real(3, 3, 4, 4), [8, 8], False),
]
_UNARY_FOREACH = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round "
    "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
)


def foreach(names: str, overload_name: str, *rest: Any) -> list[Sample]:
    """The op on two lists, and the one in place."""
    return [
        call(
            overload(f"_foreach_{name}{suffix}{overload_name}"),
            [unit(3, 4), unit(5)],
            *rest,
            name=f"_foreach_{name}{suffix}",
        )
        for name in names.split()
        for suffix in ("", "_")
    ]


FOREACH = [
    *foreach(_UNARY_FOREACH, ""),
    *foreach("clamp_max clamp_min maximum minimum div sub pow", ".Scalar", 0.5),
    *foreach("add mul sub", ".List", [real(3, 4), real(5)]),
    call(aten._foreach_lerp.Scalar, [real(3, 4)], [real(3, 4)], 0.5),
    call(aten._foreach_addcdiv.Scalar, [real(3, 4)], [real(3, 4)], [unit(3, 4)], 0.5),
    call(aten._foreach_addcmul.Scalar, [real(3, 4)], [real(3, 4)], [unit(3, 4)], 0.5),
    call(aten._foreach_zero_.default, [real(3, 4), real(5)]),
]
MORE = [*UNARY, *BINARY, *BACKWARD, *COPIES, *REDUCE, *MATMUL, *INDEX, *NN, *FOREACH]
