"""The search for signatures finds what holds, and its comparison finds rules that lie or claim too little."""

from __future__ import annotations

import pytest
import torch

from dtorch.rules import registry
from dtorch.rules.dsl import Binder, EquationRule
from tests.numerics.samples import call, real
from tests.numerics.search.captured import captured_calls
from tests.numerics.search.compare import compare
from tests.numerics.search.isolated import isolated
from tests.numerics.search.signatures import find_signatures
from tests.support.rule_checks import Sample

aten = torch.ops.aten
PRODUCT = {
    "S(0), R -> S(0)",
    "R, S(1) -> S(1)",
    "S(1), S(0) -> P",
    "P, R -> P",
    "R, P -> P",
}


@pytest.mark.parametrize(
    ("sample", "signatures"),
    [
        (call(aten.mm.default, real(3, 5), real(5, 4)), PRODUCT),
        (call(aten._softmax.default, real(4, 5), 1, False), {"S(0) -> S(0)"}),
        (call(aten.cumsum.default, real(4, 5), 0), {"S(1) -> S(1)", "P -> P"}),
        (call(aten.amax.default, real(4, 5), [0]), {"S(0) -> P(max)", "S(1) -> S(0)"}),
        (
            call(aten.mul_.Tensor, real(4, 5), real(5)),
            {"S(0), R -> S(0), S(0)", "S(1), S(0) -> S(1), S(1)", "P, R -> P, P"},
        ),
    ],
    ids=lambda value: "" if isinstance(value, set) else str(value),
)
def test_the_search_finds_all_signatures_and_no_other(sample: Sample, signatures: set[str]) -> None:
    assert set(map(str, find_signatures(sample))) == signatures


def test_a_rule_that_claims_what_is_false_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lie = EquationRule(Binder("...->..."))
    monkeypatch.setitem(registry._rules, "aten::cumsum", lie)
    verdict = compare(call(aten.cumsum.default, real(4, 5), 0))
    assert [line.partition(":")[0] for line in verdict.false] == ["S(0)"]


def test_a_rule_that_claims_too_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    timid = EquationRule(Binder("mk,kn->mn", whole="mk"))
    monkeypatch.setitem(registry._rules, "aten::mm", timid)
    verdict = compare(call(aten.mm.default, real(3, 5), real(5, 4)))
    assert {str(found) for found in verdict.missing} == PRODUCT - {"R, S(1) -> S(1)"}
    assert not verdict.false


def test_the_true_table_is_right_about_a_product() -> None:
    verdict = compare(call(aten.mm.default, real(3, 5), real(5, 4)))
    assert verdict.has_rule
    assert not verdict.missing
    assert not verdict.false


def test_calls_of_the_operator_database_are_captured_with_their_derivatives() -> None:
    ops = {str(sample.func) for sample in captured_calls("softmax", 2)}
    assert {"aten._softmax.default", "aten._softmax_backward_data.default"} <= ops


def test_a_process_that_dies_gives_nothing() -> None:
    assert isolated(lambda: 7) == 7
    assert isolated(_die) is None


def _die() -> None:
    raise SystemExit(3)
