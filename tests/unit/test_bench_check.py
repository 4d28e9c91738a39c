"""When a figure counts as having regressed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.check import CHEAP, compare, newest
from benchmarks.harness import KEPT_RESULTS


def row(value: float, unit: str = "us", figure: str = "a step", **peers: float) -> dict[str, Any]:
    return {"figure": figure, "unit": unit, "dtorch": value, "peers": peers}


@pytest.mark.parametrize(
    ("old", "new", "is_worse"),
    [
        pytest.param(row(10, yardstick=5), [row(10, yardstick=5)] * 3, False, id="the same"),
        pytest.param(row(10, yardstick=5), [row(20, yardstick=10)] * 3, False, id="a slower machine"),
        pytest.param(row(10, yardstick=5), [row(20, yardstick=5)] * 3, True, id="twice the time"),
        pytest.param(
            row(10, yardstick=5), [row(10, yardstick=2)] * 3, True, id="a faster machine, no faster"
        ),
        pytest.param(row(10, yardstick=5), [row(11, yardstick=5)] * 3, False, id="below the floor"),
        pytest.param(
            row(10, yardstick=5), [row(v, yardstick=5) for v in (10, 20, 30)], False, id="one is as good"
        ),
        pytest.param(
            row(10, yardstick=5), [row(v, yardstick=5) for v in (13, 15, 17)], True, id="beyond the noise"
        ),
        pytest.param(
            row(10, yardstick=5), [row(v, yardstick=5) for v in (12, 15, 17)], False, id="within the noise"
        ),
        pytest.param(row(10, yardstick=5), [row(5, yardstick=5)] * 3, False, id="better"),
        pytest.param(row(513, "messages"), [row(513, "messages")] * 3, False, id="count"),
        pytest.param(row(513, "messages"), [row(1026, "messages")] * 3, True, id="more messages"),
        pytest.param(row(0, "messages"), [row(1, "messages")] * 3, True, id="a count that was zero"),
    ],
)
def test_verdict(old: dict[str, Any], new: list[dict[str, Any]], is_worse: bool) -> None:
    (verdict,) = compare([old], [[each] for each in new])
    assert verdict.is_worse is is_worse, str(verdict)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(row(10), row(99, yardstick=5), id="the old run has no peer"),
        pytest.param(
            row(10, **{"not captured": 5}), row(99, **{"not captured": 5}), id="only a figure of ours"
        ),
        pytest.param(row(10, "%"), row(1, "%"), id="more may be better"),
        pytest.param(row(10, "us", plain=1), row(10, "ms", plain=1), id="another unit"),
    ],
)
def test_what_cannot_be_compared_says_so(old: dict[str, Any], new: dict[str, Any]) -> None:
    (verdict,) = compare([old], [[new], [new]])
    assert not verdict.is_worse
    assert "not compared" in str(verdict)


def test_a_figure_that_is_gone_is_worse_and_a_new_one_is_not() -> None:
    old, new = [row(1, "x", "gone")], [row(1, "x", "new")]
    (verdict,) = compare(old, [new, new])
    assert (verdict.figure, verdict.is_worse) == ("gone", True)


def test_newest_is_of_the_same_name(tmp_path: Path) -> None:
    for name in ("2026-01-02-scale", "2026-11-01-scale", "2027-01-01-small-scale", "2026-12-01-fetch"):
        (tmp_path / f"{name}.json").write_text("{}")
    assert newest("scale", tmp_path) == tmp_path / "2026-11-01-scale.json"
    assert newest("decode", tmp_path) is None


@pytest.mark.parametrize("name", CHEAP)
def test_cheap_benchmarks_have_a_result_to_compare_with(name: str) -> None:
    kept = newest(name, KEPT_RESULTS)
    assert kept is not None
    rows = json.loads(kept.read_text())["rows"]
    assert any("not compared" not in str(verdict) for verdict in compare(rows, [rows, rows]))
