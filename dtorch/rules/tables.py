"""All tables of rules; importing this module registers them. Rules are looked up through it."""

from __future__ import annotations

from dtorch.rules import (
    activations,
    attention,
    complex,
    conv,
    counting,
    diagonals,
    fft,
    foreach,
    forms,
    images,
    index,
    linalg,
    losses,
    masks,
    matmul,
    new_like,
    normalization,
    pointwise,
    pooling,
    random,
    reduce,
    scatter,
    special,
    statistics,
    view,
)
from dtorch.rules.registry import find_rule, registered

#: One module a family of ops.
TABLES = (
    activations,
    attention,
    conv,
    complex,
    counting,
    diagonals,
    fft,
    foreach,
    forms,
    images,
    index,
    linalg,
    losses,
    masks,
    matmul,
    new_like,
    normalization,
    pointwise,
    pooling,
    random,
    reduce,
    scatter,
    special,
    statistics,
    view,
)

__all__ = ["TABLES", "find_rule", "registered"]
