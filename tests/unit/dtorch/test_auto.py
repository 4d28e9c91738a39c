"""The scope of ``auto_redistribute``: who is in it, and what its list says."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

import dtorch
from dtorch import auto
from dtorch.auto import Log, Moved
from dtorch_runtime.ir.placement import Partial, Replicate, Shard


def is_inside() -> bool:
    return auto.current() is not None


def test_scopes_nest_and_can_be_switched_off() -> None:
    assert not is_inside()
    with dtorch.auto_redistribute():
        outer = auto.current()
        with dtorch.auto_redistribute(enabled=False):
            assert not is_inside()
            with dtorch.auto_redistribute():
                assert is_inside()
                assert auto.current() is not outer
        with dtorch.auto_redistribute():
            assert auto.current() is outer
    assert not is_inside()


def test_one_object_can_be_entered_again_and_by_several_threads() -> None:
    scope = dtorch.auto_redistribute()
    inside, done = threading.Event(), threading.Event()
    found = []

    def run() -> None:
        found.append(is_inside())
        with scope:
            found.append(is_inside())
            inside.set()
            done.wait(10)
        found.append(is_inside())

    with scope, scope:
        thread = threading.Thread(target=run)
        thread.start()
        inside.wait(10)
    assert not is_inside()
    done.set()
    thread.join()
    assert found == [False, True, False]


def test_an_error_leaves_the_scope() -> None:
    with contextlib.suppress(KeyError), dtorch.auto_redistribute():
        raise KeyError
    assert not is_inside()


def test_functions_and_coroutine_functions_are_decorated() -> None:
    @dtorch.auto_redistribute()
    def inside(depth: int) -> bool:
        return inside(depth - 1) if depth else is_inside()

    @dtorch.auto_redistribute()
    async def inside_async() -> bool:
        await asyncio.sleep(0)
        return is_inside()

    async def both() -> tuple[bool, bool]:
        task = asyncio.ensure_future(inside_async())
        await asyncio.sleep(0)
        return is_inside(), await task

    assert inside(2)
    assert asyncio.run(both()) == (False, True)
    assert not is_inside()


def test_a_generator_is_not_decorated() -> None:
    def generate() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match="inside of it"):
        dtorch.auto_redistribute()(generate)


def moved(num_bytes: int = 10, op: str = "aten::mm.default") -> Moved:
    return Moved(op, "self", (Shard(0),), (Replicate(),), num_bytes)


def test_the_list_adds_up_equal_lines() -> None:
    log = Log()
    for _ in range(3):
        log.add([moved(), moved(5, "aten::relu.default")], 0, "auto")
    log.add([moved()], 0, "strict")
    records = log.records()
    assert [(r.op, r.num_bytes, r.count, r.mode) for r in records] == [
        ("aten::mm.default", 30, 3, "auto"),
        ("aten::relu.default", 15, 3, "auto"),
        ("aten::mm.default", 10, 1, "strict"),
    ]
    table = str(records).splitlines()
    assert table[0].split() == ["bytes", "count", "mode", "op", "input", "from", "->", "to", "line"]
    assert "[S(0)] -> [R]" in table[1]
    assert table[-1] == "55 bytes moved in all"


def test_the_list_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "MAX_RECORDS", 2)
    log = Log()
    for number in range(5):
        log.add([moved(1, f"aten::op{number}")], 0, "auto")
    assert sum(r.num_bytes for r in log.records()) == 5
    assert [r.op for r in log.records() if r.count > 1] == ["other ops"]


def test_the_list_is_that_of_the_scope_entered_last() -> None:
    with dtorch.auto_redistribute():
        log = auto.current()
        assert log is not None
        log.add([Moved("aten::relu.default", "self", (Partial(),), (Shard(0),), 8)], 0, "auto")
        with dtorch.auto_redistribute():
            assert len(dtorch.explain_redistributions()) == 1
    assert len(dtorch.explain_redistributions()) == 1
    with dtorch.auto_redistribute():
        assert str(dtorch.explain_redistributions()).endswith("0 bytes moved in all")
