"""Masks as indices of what is written: each picks one dim of the values, which nothing may cut."""

from __future__ import annotations

import torch

from tests.numerics.samples import aten, call, real

ROWS = torch.tensor([True, False, False, True])
#: Seven of [4, 5].
PLACES = torch.arange(20).reshape(4, 5) % 3 == 1

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
]
