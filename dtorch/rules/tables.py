"""All tables of rules; importing this module registers them. Rules are looked up through it."""

from __future__ import annotations

from dtorch.rules import (
    activations,
    attention,
    complex,
    conv,
    counting,
    diagonals,
    element_shapes,
    experts,
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
    plane_shapes,
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
    experts,
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

#: Shapes of what their ops give, where a meta kernel would be slow.
SHAPES = (element_shapes, plane_shapes)

__all__ = ["SHAPES", "TABLES", "find_rule", "registered"]
