"""Which rule answers for which op."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from dtorch.op_plan import OpPlan
from dtorch.rules.call import Call, Op


class Rule(Protocol):
    """Plans the calls of an op. ``always`` rules are asked even when every input is replicated."""

    @property
    def always(self) -> bool:
        """Whether the op differs from the plain one on replicated inputs too."""

    def plan(self, call: Call) -> OpPlan:
        """The plan of a call with at least one input.

        Raises:
            PlacementError: no signature fits.
        """

    def signatures(self, call: Call) -> list[str]:
        """Every legal signature for a call with these ranks, one line each, as an error message shows them."""


_rules: dict[str, Rule] = {}


def register(names: Iterable[str], rule: Rule) -> None:
    """Let ``rule`` answer for ops by name: ``aten::mm`` for all overloads, ``aten::max.dim`` for one.

    In-place variants (``aten::add_``) are answered by the rule of their namesake unless they have their own.
    """
    for name in names:
        assert name not in _rules, f"{name} has two rules"
        _rules[name] = rule


def find_rule(op: Op) -> Rule | None:
    """The rule that answers for an op: that of the overload before that of the name."""
    found = _rules.get(op.name) or _rules.get(op.base)
    if found is None and op.is_inplace and op.base.endswith("_"):
        base = op.base[:-1]
        found = _rules.get(f"{base}.{op.func._overloadname}") or _rules.get(base)
    return found


def registered() -> dict[str, Rule]:
    """All rules by name."""
    return dict(_rules)
