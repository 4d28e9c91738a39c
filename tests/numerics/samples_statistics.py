"""Calls for diagonals, histograms and look-ups, complex numbers, and reductions of several kinds."""

from __future__ import annotations

import math

import torch

from tests.numerics.samples import aten, call, real, whole_numbers
from tests.numerics.samples_linalg import complex_

DIAGONALS = [
    call(aten.trace.default, real(4, 4)),
    call(aten.trace.default, real(3, 5), name="trace of a wide matrix"),
    *(
        call(func, real(2, rows, columns), offset, 1, 2, name=f"{func} {rows}x{columns} {offset}")
        for func in (aten.diagonal.default, aten.diagonal_copy.default)
        for rows, columns, offset in ((4, 4, 0), (3, 5, 1), (5, 3, -2), (4, 3, 1))
    ),
    call(aten.diagonal.default, real(4, 2, 5), 0, 2, 0, name="diagonal of dims in turn"),
    *(
        call(aten.diagonal_scatter.default, real(4, 4, 2), real(2, 4 - n), n, name=f"diagonal_scatter {n}")
        for n in (0, 1)
    ),
    *(
        call(
            aten.diagonal_backward.default,
            real(2, n),
            shape,
            offset,
            1,
            2,
            name=f"diagonal_backward {offset}",
        )
        for n, shape, offset in ((4, [2, 4, 4], 0), (3, [2, 3, 5], 2), (3, [2, 5, 3], -1), (2, [2, 3, 3], 1))
    ),
    *(
        call(aten.diag_embed.default, real(2, 4), offset, name=f"diag_embed {offset}")
        for offset in (0, 1, -2)
    ),
    call(aten.diag_embed.default, real(2, 4), 0, 2, 0, name="diag_embed in turn"),
    *(
        call(func, real(2, *shape), offset, name=f"{func} {shape} {offset}")
        for func in (aten.tril.default, aten.triu.default, aten.tril_.default)
        for shape, offset in (((4, 4), 0), ((3, 5), 1), ((5, 3), -2))
    ),
]
BLOCKS = [
    call(aten.block_diag.default, [real(3, 4), real(5), real(2, 1)]),
    call(aten.block_diag.default, [real(), real(4, 3).float()], name="block_diag of two dtypes"),
    *(
        call(
            aten.lu_unpack.default,
            real(2, rows, columns),
            torch.arange(1, 1 + min(rows, columns), dtype=torch.int32)
            .flip(0)
            .clamp(min=2)
            .expand(2, -1)
            .clone(),
            *asked,
            name=f"lu_unpack {rows}x{columns} {asked}",
        )
        for rows, columns in ((3, 5), (5, 3), (4, 4))
        for asked in ((), (True, False), (False, True))
    ),
]
_edges = torch.tensor([-1.0, -0.25, 0.5, 2.0], dtype=torch.float64)
HISTOGRAMS = [
    call(aten.histc.default, real(4, 5), 6, -1, 1),
    call(aten.histc.default, real(4, 5), 6, name="histc between the extremes"),
    call(aten.histogram.bin_ct, real(4, 5), 3, range=[-1.0, 1.0]),
    call(aten.histogram.bin_ct, real(4, 5), 3, name="histogram between the extremes"),
    call(aten.histogram.bins_tensor, real(4, 5), _edges),
    call(aten.histogram.bins_tensor, real(4, 5), _edges, weight=real(4, 5), name="histogram with weights"),
    call(aten.histogram.bins_tensor, real(4, 5), _edges, density=True, name="density"),
    call(aten._histogramdd_bin_edges.default, real(5, 2), [3, 2], range=[-1.0, 1.0, -2.0, 2.0]),
    call(aten._histogramdd_bin_edges.default, real(5, 2), [3, 2], name="edges between the extremes"),
    call(aten._histogramdd_from_bin_cts.default, real(5, 2), [3, 2], range=[-1.0, 1.0, -2.0, 2.0]),
    call(
        aten._histogramdd_from_bin_cts.default,
        real(5, 2),
        [3, 2],
        weight=real(5),
        name="between the extremes",
    ),
    call(aten._histogramdd_from_bin_tensors.default, real(5, 2), [_edges, _edges[:3].clone()]),
    call(aten.histogram.bin_ct, real(4, 5), 3, weight=real(4, 5), name="weights between the extremes"),
    call(
        aten._histogramdd_from_bin_tensors.default,
        real(5, 2),
        [_edges, _edges[:3].clone()],
        weight=real(5),
        name="many dims with weights",
    ),
    call(
        aten._histogramdd_bin_edges.default, real(5, 2), [3, 2], weight=real(5), name="edges beside weights"
    ),
]
LOOK_UPS = [
    call(aten.searchsorted.Tensor, real(4, 5).sort()[0], real(4, 3)),
    call(aten.searchsorted.Tensor, real(5).sort()[0], real(4, 3), right=True, name="searchsorted in one row"),
    call(
        aten.searchsorted.Tensor,
        x := real(4, 5),
        real(4, 3),
        sorter=x.argsort(),
        name="searchsorted by order",
    ),
    call(aten.searchsorted.Scalar, real(5).sort()[0], 0.25),
    call(aten.isin.Tensor_Tensor, whole_numbers(9, 4, 5), whole_numbers(9, 3)),
    call(
        aten.isin.Tensor_Tensor,
        whole_numbers(9, 4, 5),
        whole_numbers(9, 3),
        invert=True,
        name="isin, inverted",
    ),
    call(aten.isin.Tensor_Scalar, whole_numbers(9, 4, 5), 3),
    call(aten.isin.Scalar_Tensor, 3, whole_numbers(9, 4, 5)),
    call(aten.renorm.default, real(4, 5, 2), 2, 1, 0.5),
    call(aten.hash_tensor.default, real(4, 5), [1]),
]
COMPLEX = [
    call(aten.complex.default, real(4, 5), real(5)),
    call(aten.polar.default, real(4, 5).abs(), real(5)),
    call(aten.angle.default, complex_(4, 5)),
    call(aten.angle.default, real(4, 5), name="angle of reals"),
    call(aten.abs.default, complex_(4, 5), name="abs of complex numbers"),
    call(aten._neg_view.default, real(4, 5)),
    call(aten._conj.default, complex_(4, 5)),
]
REDUCTIONS = [
    call(aten.aminmax.default, real(4, 5)),
    call(aten.aminmax.default, real(4, 5), dim=1, keepdim=True, name="aminmax of rows"),
    *(
        call(aten.linalg_vector_norm.default, real(4, 5), p, dims, name=f"vector_norm {p} {dims}")
        for p in (0, 1, 2, 3.5, math.inf, -math.inf)
        for dims in ([0], None)
    ),
    call(aten.norm.ScalarOpt_dim, real(4, 5), math.inf, [1], True, name="infinite norm"),
    call(aten.addr.default, real(4, 5), real(4), real(5)),
    call(aten.addr.default, real(5), real(4), real(5), beta=0.5, name="addr to rows"),
]
_LENGTHS = torch.tensor([1, 0, 4, 2])
SEGMENTS = [
    *(
        call(
            aten.segment_reduce.default,
            real(7, 3),
            reduce,
            lengths=_LENGTHS,
            initial=initial,
            name=f"{reduce} of segments from {initial}",
        )
        for reduce in ("sum", "mean", "max", "min", "prod")
        for initial in (None, 0.5)
    ),
    call(aten.segment_reduce.default, real(7, 3), "mean", offsets=torch.tensor([0, 3, 3, 7])),
    call(
        aten.segment_reduce.default,
        real(4, 7, 2),
        "mean",
        lengths=_LENGTHS.expand(4, 4).clone(),
        axis=1,
        name="segments of rows",
    ),
    *(
        call(
            aten._segment_reduce_backward.default,
            real(4, 3),
            torch.segment_reduce(data, reduce, lengths=_LENGTHS),
            data,
            reduce,
            lengths=_LENGTHS,
            name=f"derivative of the {reduce} of segments",
        )
        for reduce, data in (("sum", real(7, 3)), ("mean", real(7, 3)), ("max", real(7, 3)))
    ),
]
STATISTICS = [*DIAGONALS, *BLOCKS, *HISTOGRAMS, *LOOK_UPS, *COMPLEX, *REDUCTIONS, *SEGMENTS]
