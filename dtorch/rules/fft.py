"""Fourier transforms: linear; the dims that are transformed are whole on every device."""

from __future__ import annotations

from dtorch.rules.call import Call
from dtorch.rules.dsl import rule
from dtorch.rules.view import LETTERS, letters


def _same(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    return f"{names}->{names}"


def _transformed(call: Call) -> str:
    ndim = len(call.inputs[0].shape)
    return "".join(LETTERS[dim % ndim] for dim in call.get("dim"))


rule("_fft_r2c _fft_c2c _fft_c2r", _same, linear="a", whole=_transformed, nonempty=True)
