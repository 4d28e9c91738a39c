"""What cannot be captured says why, and what fails in a replay says where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import CaptureError, RemoteOpError
from tests.support.captured import numbers, replays, same, send

pytestmark = pytest.mark.usefixtures("cluster")


def test_an_op_that_fails_in_a_replay_names_its_line_and_the_rest_goes_on() -> None:
    @dtorch.capture
    def pick(table: Any, index: Any) -> Any:
        wrong = table.index_select(0, index)  # this line
        return wrong * 2, table + 1

    table = send(numbers(3, 2))
    pick(table, send(torch.tensor([0])))
    found, other = pick(table, send(torch.tensor([7])))
    with pytest.raises(RemoteOpError, match="index_select") as error:
        found.to_torch()
    assert "# this line" in error.value.location
    same(other, numbers(3, 2) + 1)
    same(pick(table, send(torch.tensor([1])))[0], numbers(3, 2)[[1]] * 2)


def test_a_function_that_raises_is_not_recorded() -> None:
    @dtorch.capture
    def broken(x: Any, *, fail: bool) -> Any:
        y = x + 1
        if fail:
            raise KeyError("mine")
        return y

    x = send(numbers(3))
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            broken(x, fail=True)
    same(broken(x, fail=False), numbers(3) + 1)
    same(broken(x, fail=False), numbers(3) + 1)
    assert replays(broken) == 1


class Cache:
    kept: Any = None


def reads_a_value(x: Any) -> Any:
    return x * x.sum().item()


def prints(x: Any) -> Any:
    print(x)
    return x


def depends_on_data(x: Any) -> Any:
    return x[x > 0]


def sends_a_tensor(x: Any) -> Any:
    return x + torch.ones(4, dtype=torch.float64).to("dtorch")


def keeps_a_tensor(x: Any) -> Any:
    Cache.kept = x * 2
    return x


def keeps_in_a_list(x: Any, kept: list[Any] = []) -> Any:  # noqa: B006  as people write it
    kept.append(x + 1)
    return x


def counts(x: Any, state: Any = {"calls": 0}) -> Any:  # noqa: B006
    state["calls"] += 1
    return x * state["calls"]


STEP = torch.zeros(())


def writes_to_a_plain_tensor(x: Any) -> Any:
    STEP.add_(1)
    return x * float(STEP)


def returns_an_object(x: Any) -> Any:
    return Cache()


def hidden() -> Any:
    return _HIDDEN.pop()


_HIDDEN: list[Any] = []


def three_times(function: Callable[..., Any], x: Any) -> None:
    for _ in range(3):
        function(x)


REFUSED = [
    (reads_a_value, "reads the value of a tensor"),
    (prints, "reads the value of a tensor"),
    (depends_on_data, "reads the shape of a tensor"),
    (sends_a_tensor, r"sends a tensor of shape \[4\]"),
    (keeps_a_tensor, "changes what the next call sees: .*Cache"),
    (keeps_in_a_list, r"changes what the next call sees: .*__defaults__.* [0-9] items"),
    (counts, r"changes what the next call sees: .*'calls'\] was [0-9] and is [0-9]"),
    (writes_to_a_plain_tensor, "a tensor of this process, was written to"),
    (returns_an_object, "returns a Cache"),
]


@pytest.mark.parametrize(("function", "message"), REFUSED)
def test_what_cannot_be_replayed_is_refused_with_the_reason(
    function: Callable[..., Any], message: str
) -> None:
    x = send(numbers(4))
    captured = dtorch.capture(function)
    with pytest.raises(CaptureError, match=message) as error:
        three_times(captured, x)
    assert "fallback=True" in str(error.value)
    with_fallback = dtorch.capture(fallback=True)(function)
    for _ in range(5):
        with_fallback(x)
    assert replays(with_fallback) == 0
    assert "not recorded: it " in with_fallback.explain()
    Cache.kept = None


def test_the_refusal_names_the_line() -> None:
    captured = dtorch.capture(reads_a_value)
    with pytest.raises(
        CaptureError,
        match=r"test_capture_refusals.py:[0-9]+ in reads_a_value: return x \* x.sum\(\).item\(\)",
    ):
        captured(send(numbers(4)))
    same(send(numbers(4)) + 1, numbers(4) + 1)


def test_a_tensor_that_cannot_be_watched_is_refused() -> None:
    class Odd:
        __slots__ = ("tensor",)

    odd = Odd()
    odd.tensor = send(numbers(4))
    captured = dtorch.capture(lambda x: x + odd.tensor)
    with pytest.raises(CaptureError, match=r"cannot be watched, in aten::add.*Pass it as an argument"):
        captured(send(numbers(4)))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, y: x + y.sum().item(), "reads the value of a tensor"),
        (lambda x, y: (y.add_(1), x + 1)[1], "writes to a tensor of shape .* of another graph"),
        (lambda x, y: (x + 1, y + 1), "cannot be watched"),
    ],
)
def test_ops_of_another_graph_are_not_recorded(function: Callable[..., Any], message: str) -> None:
    with dtorch.Graph():
        other = send(numbers(4))
    with pytest.raises(CaptureError, match=message):
        dtorch.capture(function)(send(numbers(4)), other)
    same(dtorch.capture(lambda x, y: x + y)(send(numbers(4)), other), numbers(4) + other.to_torch())


def test_wrong_uses_say_what_to_write() -> None:
    async def waits() -> None: ...

    with pytest.raises(dtorch.UnsupportedError, match="between two awaits"):
        dtorch.capture(waits)
    with pytest.raises(CaptureError, match="above a def"):
        dtorch.capture(3)  # type: ignore[call-overload]
    with pytest.raises(CaptureError, match="is not captured"):
        dtorch.capture.explain(numbers)
    with pytest.raises(CaptureError, match=r"t.to\('dtorch'\)"):
        dtorch.capture(torch.relu)(numbers(3))
    assert "not called yet" in dtorch.capture.explain(dtorch.capture(numbers))
