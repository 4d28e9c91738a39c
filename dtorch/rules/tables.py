"""All tables of rules; importing this module registers them. Rules are looked up through it."""

from __future__ import annotations

from dtorch.rules import (
    counting,
    fft,
    foreach,
    index,
    linalg,
    matmul,
    new_like,
    nn,
    pointwise,
    random,
    reduce,
    scatter,
    special,
    view,
)
from dtorch.rules.registry import find_rule, registered

#: One module a family of ops.
TABLES = (
    counting,
    fft,
    foreach,
    index,
    linalg,
    matmul,
    new_like,
    nn,
    pointwise,
    random,
    reduce,
    scatter,
    special,
    view,
)

__all__ = ["TABLES", "find_rule", "registered"]
