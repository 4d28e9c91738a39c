"""What counts as rounding, and what does not though it is small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.numerics.opinfo.check import EQUAL, ROUNDING, Outcome, reference_of
from tests.numerics.opinfo.driver import Check, Result
from tests.numerics.opinfo.entries import Run, Sample
from tests.numerics.opinfo.report import failure, row_of, summary, table
from tests.numerics.opinfo.rounding import is_rounding, widened

TRUE = torch.linspace(-3, 5, 64, dtype=torch.float64)
EPS = torch.finfo(torch.float32).eps


def off_by(units: float, at: int = 7) -> torch.Tensor:
    """The float32 of TRUE with one element off by units in the last place of the largest."""
    moved = TRUE.clone()
    moved[at] += units * EPS * 5
    return moved.float()


@pytest.mark.parametrize(
    ("own", "found", "verdict"),
    [
        (0.0, 3.0, True),
        (0.0, 6.0, False),  # plain torch was lucky: a few units, no more
        (50.0, 150.0, True),  # a problem that is hard for plain torch too
        (50.0, 250.0, False),
        (50.0, -150.0, True),  # the errors need not have one sign
    ],
)
def test_a_result_may_be_a_few_times_as_far_off_as_plain_torch(
    own: float, found: float, verdict: bool
) -> None:
    assert is_rounding(off_by(found), off_by(own, at=20), TRUE) is verdict


def test_what_is_off_by_as_much_elsewhere_is_judged_by_the_largest_error() -> None:
    assert is_rounding(off_by(150.0, at=1), off_by(50.0, at=2), TRUE)


@pytest.mark.parametrize(
    "exact",
    [
        None,
        TRUE[:5],
        -TRUE,  # another solution, as of an eigenvector: plain torch is far off, which excuses nothing
        TRUE * float("nan"),
    ],
    ids=["none", "shape", "sign", "nan"],
)
def test_without_a_true_value_both_results_are_within_a_few_units(exact: Any) -> None:
    if exact is None or exact.isfinite().all():
        assert is_rounding(off_by(10.0), TRUE.float(), exact)
    assert not is_rounding(off_by(20.0), TRUE.float(), exact)
    assert not is_rounding(-TRUE.float(), TRUE.float(), exact)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_must_be_the_same(wrong: float) -> None:
    true = TRUE.clone()
    true[3] = float("inf")
    plain, found = true.float(), true.float()
    found[9] += 2 * EPS
    assert is_rounding(found, plain, true)
    found[4] = wrong
    assert not is_rounding(found, plain, true)
    found[4], found[3] = plain[4], 1e30
    assert not is_rounding(found, plain, true)


def test_integers_do_not_round() -> None:
    assert not is_rounding(torch.tensor([1, 2]), torch.tensor([1, 3]), torch.tensor([1, 3]))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    true = TRUE.to(torch.complex128 if dtype.is_complex else torch.float64)
    plain, eps = true.to(dtype), torch.finfo(dtype).eps
    assert is_rounding((true + 2 * eps * 5).to(dtype), plain, true)
    assert not is_rounding((true + 16 * eps * 5).to(dtype), plain, true)


class Entry:
    """What ``reference_of`` needs of an entry."""

    name = "made_up"

    def __init__(self, op: Callable[..., Any]) -> None:
        self.op = op


def sample_of(*leaves: Any) -> Sample:
    return Sample(leaves, pytree.tree_flatten(([0] * len(leaves), {}))[1])


#: Faults of a sharded sum, smaller than what is easily seen: they must not pass in a sum that rounds much.
FAULTS = {
    "a term of the other device twice": lambda x, y: x @ y + x[:, 500:501] @ y[500:501] * 2,
    "a term left out": lambda x, y: x[:, 1:] @ y[1:],
    "a factor": lambda x, y: x @ y * (1 + 1e-4),
    "a row of another device": lambda x, y: (x @ y).roll(1, 0),
}
ORDERS = {
    "two parts": lambda x, y: x[:, :600] @ y[:600] + x[:, 600:] @ y[600:],
    "many parts": lambda x, y: sum(a @ b for a, b in zip(x.split(50, 1), y.split(50), strict=True)),
}


@pytest.mark.parametrize("name", [*FAULTS, *ORDERS])
def test_a_product_in_another_order_rounds_and_a_wrong_one_does_not(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(shape, generator=generator) for shape in ((6, 1000), (1000, 7)))
    pair = reference_of(Entry(torch.matmul), sample_of(x, y), with_grad=False)
    assert pair is not None
    exact = pair[1].exact()
    assert exact is not None
    found = (FAULTS | ORDERS)[name](x, y)
    assert is_rounding(found, pair[1].leaves[0], exact.leaves[0]) is (name in ORDERS)


def test_gradients_have_a_true_value_too() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    pair = reference_of(Entry(lambda x, dtype: x.to(dtype) ** 3), sample_of(x, torch.float32), with_grad=True)
    assert pair is not None
    exact = pair[1].exact()
    assert exact is not None
    assert exact.grads is not None
    assert exact.leaves[0].dtype is torch.float64
    (gradient,), (plain,) = exact.grads, pair[1].grads or ()
    assert gradient is not None
    torch.testing.assert_close(gradient.float(), plain)
    assert torch.get_default_dtype() is torch.float32


def test_an_op_that_takes_no_float64_has_no_true_value() -> None:
    def only_float32(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is torch.float32
        return x

    pair = reference_of(Entry(only_float32), sample_of(torch.ones(2)), with_grad=False)
    assert pair is not None
    assert pair[1].exact() is None
    assert torch.get_default_dtype() is torch.float32


def test_integers_and_flags_stay_as_they_are_in_float64() -> None:
    sample = widened(sample_of(torch.ones(2), torch.ones(2, dtype=torch.int64), torch.bool, True, 2))
    assert [t.dtype for t in sample.tensors] == [torch.float64, torch.int64]
    assert sample.leaves[2:] == [torch.bool, True, 2]


def test_rounding_is_counted_apart_and_does_not_fail() -> None:
    outcomes = [
        Outcome(EQUAL),
        Outcome(ROUNDING, "off by a little", EQUAL),
        Outcome(EQUAL, "", ROUNDING, "off by a little"),
        Outcome(ROUNDING, "off by a little", "value", "wrong"),
    ]
    checks = [Check(number, "S0", True, outcome) for number, outcome in enumerate(outcomes)]
    assert [failure(check, "auto") for check in checks] == [None, None, None, "grad value"]
    row = row_of(Result("matmul", checks), "auto")
    assert (row.num_rounding, row.failures, row.num_sharded_equal) == (2, {"grad value": 1}, 4)
    figures = summary([row])
    assert (figures["checks with rounding"], figures["entries with rounding"]) == (2, 1)
    assert "rounding=2  off by a little [sample 1, S0]" in table([row], Run(mode="auto"))
