"""docs/operators.md says what the rules say."""

from __future__ import annotations

from tests.numerics.operators import PAGE, page


def test_the_page_of_operators_is_that_of_the_rules() -> None:
    assert PAGE.read_text() == page(), "write it anew: make operators"


def test_a_product_and_an_automatic_case_are_on_the_page() -> None:
    rows = {
        op.strip("`"): line
        for line in page().splitlines()
        if line.startswith("| `")
        for op in line.split("|")[1].split()
    }
    for signature in ("S(0), R → S(0)", "R, S(1) → S(1)", "S(1), S(0) → P", "P, R → P"):
        assert signature in rows["mm"]
    assert "moved: src" in rows["copy_"]
    assert "sliced: self, other" in rows["maximum"]
    assert "sliced: self" not in rows["copy_"]
    assert "P(*) → P(*)" in rows["transpose.int"]
