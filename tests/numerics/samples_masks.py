"""Masks as indices of what is written: each picks one dim of the values, which nothing may cut."""

from __future__ import annotations

import torch

from tests.numerics.samples import aten, call, real

ROWS = torch.tensor([True, False, False, True])
#: Seven of [4, 5].
PLACES = torch.arange(20).reshape(4, 5) % 3 == 1

#: Places along a first dim, the last one beyond it.
SECOND = torch.tensor([3, 0, 0, 9]).unsqueeze(1)

MASKS = [
    call(aten.index_put.default, real(4, 5), [ROWS], real(2, 5), name="put rows of a mask"),
    call(aten.index_put.default, real(4, 5), [ROWS], real(5), True, name="add to rows of a mask"),
    call(aten.index_put.default, real(3, 4, 5), [None, PLACES], real(), name="put at the places of a mask"),
    call(
        aten.index_put.default,
        real(4, 5, 3),
        [PLACES],
        real(7, 3),
        name="put vectors at the places of a mask",
    ),
    call(
        aten.index_put.default,
        real(4, 5, 3),
        [ROWS, None, torch.tensor([2, 0])],
        real(2, 5),
        name="put with a mask and numbers",
    ),
    call(aten.index_put.default, real(4, 5), [ROWS], real(1, 5), name="put one row in rows of a mask"),
    call(aten.index_put_.default, real(4, 5), [ROWS], real(5), name="put into rows of a mask"),
    call(aten.index_put.default, real(3, 4, 5), [None, ROWS], real(3, 1, 5), name="put in rows of matrices"),
    call(aten.masked_scatter.default, real(4, 5), PLACES, real(3, 4)),
    call(aten.masked_scatter.default, real(4, 5), PLACES[0], real(4, 5), name="scatter by a row of a mask"),
    call(aten.masked_scatter.default, real(5), PLACES, real(8), name="scatter, broadcast"),
    call(aten.masked_scatter.default, real(4, 1), PLACES, real(8), name="scatter, broadcast within"),
    call(aten.masked_scatter_.default, real(4, 5), PLACES, real(8)),
    call(aten.masked_scatter_backward.default, real(4, 5), PLACES, [3, 4]),
    call(aten._unsafe_masked_index.default, real(4, 5), PLACES, [SECOND, torch.arange(5)], 0.5),
    call(
        aten._unsafe_masked_index.default,
        real(4, 5, 3),
        PLACES[:, :1],
        [None, SECOND, torch.arange(3)],
        0,
        name="index under a mask",
    ),
    call(
        aten._unsafe_masked_index_put_accumulate.default,
        real(4, 5),
        PLACES,
        [SECOND, torch.arange(5) % 3],
        real(4, 5),
    ),
    call(
        aten._unsafe_masked_index_put_accumulate.default,
        real(4, 5, 3),
        PLACES[:, :3],
        [None, torch.tensor([0, 4, 4, 7]), None],
        real(4, 4, 3),
        name="put under a mask",
    ),
]
