"""Cuts that fit no signature become terms of a sum, where a device may hold its piece among zeros."""

from __future__ import annotations

import itertools

import pytest
import torch

from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Replicate, Shard
from tests.numerics.samples import aten, call, real, whole_numbers
from tests.numerics.samples_linalg import columns, matrices
from tests.support.rule_checks import Sample, check, expected, tensors_of

ROWS = torch.tensor([3, 0, 3, 1])
#: Each with the number of the tensor that is cut, and its dims that no signature cuts.
SPREAD = [
    (call(aten.gather.default, real(4, 5), 0, whole_numbers(4, 3, 5)), 0, (0,)),
    (call(aten.index_select.default, real(4, 5), 0, ROWS), 0, (0,)),
    (call(aten.index.Tensor, real(4, 5), [ROWS]), 0, (0,)),
    (call(aten.index.Tensor, real(4, 5), [-ROWS], name="index from the end"), 0, (0,)),
    (call(aten.index.Tensor, real(4, 2, 5), [ROWS, None, ROWS], name="index of dims apart"), 0, (0, 2)),
    (call(aten.index.Tensor, real(2, 4, 5), [None, ROWS.view(2, 2)], name="index of a middle dim"), 0, (1,)),
    (call(aten.index.Tensor, real(4, 5) > 0, [ROWS, ROWS], name="index of bools"), 0, (0, 1)),
    (call(aten.take.default, real(4, 5), whole_numbers(20, 3, 2)), 0, (0, 1)),
    (call(aten.constant_pad_nd.default, real(4, 5), [1, -1, 2, 0]), 0, (0, 1)),
    (call(aten.reflection_pad2d.default, real(2, 4, 5), [1, -1, 2, 0]), 0, (1, 2)),
    (call(aten.replication_pad1d.default, real(2, 4, 5), [1, 2]), 0, (2,)),
    (call(aten._linalg_solve_ex.default, matrices(4), real(4, 3, 2)), 1, (1,)),
    (call(aten.linalg_solve_triangular.default, matrices().triu(), real(3, 2), upper=True), 1, (0,)),
    (call(aten.triangular_solve.default, real(3, 2), matrices().triu()), 0, (0,)),
    (call(aten.cholesky_solve.default, real(3, 2), matrices().tril()), 0, (0,)),
    (call(aten.repeat.default, real(4, 5), [2, 3, 1]), 0, (0,)),
    (call(aten.histogram.bin_ct, real(4, 5), 3, weight=real(4, 5)), 1, (0, 1)),
    (call(aten._histogramdd_from_bin_cts.default, real(5, 2), [3, 2], weight=real(5)), 1, (0,)),
    (call(aten.linalg_lstsq.default, columns(4, 2), whole_numbers(9, 4, 2, 3).double()), 1, (1,)),
]


@pytest.mark.parametrize(
    "mesh", [DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]])], ids=str
)
@pytest.mark.parametrize(("sample", "index", "dims"), SPREAD, ids=str)
def test_a_cut_that_fits_no_signature_is_spread(
    sample: Sample, index: int, dims: tuple[int, ...], mesh: DeviceMesh
) -> None:
    """On two axes, too: those of one dim, of another, with units, and whole."""
    want = expected(sample)
    tensors = tensors_of((sample.make(), sample.kwargs))
    options: list[Placement] = [Replicate(), *map(Shard, dims), Shard(dims[0], unit=2)]
    for chosen in itertools.product(options, repeat=mesh.ndim):
        placements = [chosen if i == index else (Replicate(),) * mesh.ndim for i in range(len(tensors))]
        check(sample, mesh, placements, want)


@pytest.mark.parametrize(
    "sample",
    [
        call(aten.index.Tensor, real(4, 5), [torch.tensor([0, 4])]),
        call(aten.index.Tensor, real(4, 5), [torch.tensor([-5])], name="index before the first"),
        call(aten.index_select.default, real(4, 5), 0, torch.tensor([4])),
        call(aten.gather.default, real(4, 5), 0, torch.full((1, 5), 4)),
        call(aten.take.default, real(4, 5), torch.tensor([20])),
    ],
    ids=str,
)
def test_a_place_that_no_device_holds_is_out_of_range(sample: Sample) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of (bounds|range)|index"):
        check(sample, DeviceMesh("cpu", [0, 1]), [(Shard(0),), (Replicate(),)], [])


@pytest.mark.parametrize(
    "sample",
    [
        call(aten.geqrf.default, torch.zeros(4, 0)),
        call(aten.linalg_qr.default, torch.zeros(4, 0)),
        call(aten._linalg_svd.default, torch.zeros(0, 4), compute_uv=False),
        call(aten.mm.default, torch.zeros(4, 0), torch.zeros(0, 3)),
        call(aten.cummax.default, torch.zeros(4, 0), 0),
    ],
    ids=str,
)
def test_tensors_without_elements_are_whole_wherever_an_op_needs_it(sample: Sample) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    tensors = tensors_of((sample.make(), sample.kwargs))
    want = expected(sample)
    for placements in itertools.product(*([(Replicate(),), (Shard(0),), (Shard(1),)] for _ in tensors)):
        check(sample, mesh, placements, want)
