"""All tables of rules; importing this module registers them. Rules are looked up through it."""

from __future__ import annotations

from dtorch.rules import matmul, pointwise, view
from dtorch.rules.registry import find_rule, registered

#: One module a family of ops.
TABLES = (matmul, pointwise, view)

__all__ = ["TABLES", "find_rule", "registered"]
