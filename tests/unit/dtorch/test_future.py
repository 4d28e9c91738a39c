"""Futures, in threads and event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dtorch.future import ClusterFuture
from dtorch_runtime.errors import ClusterTimeout


class Nobody:
    """A session whose thread does all the reading."""

    tape = None

    def __init__(self, wait_timeout_s: float) -> None:
        self.wait_timeout_s = wait_timeout_s
        self.num_needed = 0

    def help(self, future: ClusterFuture[Any], timeout_s: float) -> None:
        """It does not come to that."""

    def need_thread(self) -> None:
        self.num_needed += 1


class Answer(ClusterFuture[list[int]]):
    """Its result is a new list each time that it is made."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        super().__init__(lambda: "the answer", Nobody(timeout_s))
        self.num_made = 0

    def _make_result(self) -> list[int]:
        self.num_made += 1
        return [self.num_made]


def test_get_gives_the_same_object_from_every_thread() -> None:
    future = Answer()
    seen: list[list[int]] = []
    threads = [threading.Thread(target=lambda: seen.append(future.get())) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert not future.is_ready()
    future.finish()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert all(result is seen[0] for result in seen)
    assert future.num_made == 1


@pytest.mark.parametrize("ask", [lambda f: f.get(0.001), lambda f: f.get(), lambda f: f.wait()])
def test_a_wait_that_passes_its_deadline_says_for_what(ask: Callable[[Answer], object]) -> None:
    with pytest.raises(ClusterTimeout, match=r"waited 0\.001 s for the answer"):
        ask(Answer(timeout_s=0.001))


def test_wait_with_a_deadline_of_its_own_tells_and_does_not_raise() -> None:
    future = Answer()
    assert future.wait(0.001) is False
    future.finish()
    assert future.wait(0.001) is True


def test_the_error_is_made_for_every_get() -> None:
    future = Answer()
    future.finish(lambda: ValueError("no"))
    errors = []
    for _ in range(2):
        with pytest.raises(ValueError, match="no") as caught:
            future.get()
        errors.append(caught.value)
    assert errors[0] is not errors[1], "one exception raised in two places would mix their tracebacks"


def test_callbacks_run_once_before_or_after(caplog: pytest.LogCaptureFixture) -> None:
    future = Answer()
    calls: list[str] = []
    future.add_done_callback(lambda f: calls.append(f"early {f.get()}"))
    future.add_done_callback(lambda f: 1 / 0)
    future.finish()
    future.finish(lambda: ValueError("too late"))
    future.add_done_callback(lambda f: calls.append(f"late {f.get()}"))
    assert calls == ["early [1]", "late [1]"]
    assert "a done callback of the answer failed" in caplog.text


async def test_many_awaits_of_one_future() -> None:
    future = Answer()

    async def wait() -> list[int]:
        return await future

    tasks = [asyncio.create_task(wait()) for _ in range(100)]
    await asyncio.sleep(0)
    threading.Thread(target=future.finish).start()
    results = await asyncio.gather(*tasks)
    assert all(result is results[0] for result in results)


async def test_a_cancelled_await_leaves_the_value() -> None:
    future = Answer()

    async def wait() -> list[int]:
        return await future

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert future._callbacks == [], "nothing is left to call into the loop"
    future.finish()
    assert await future == [1]


async def test_an_await_has_a_deadline() -> None:
    with pytest.raises(ClusterTimeout, match="the answer"):
        await Answer(timeout_s=0.001)


def test_awaits_in_several_loops() -> None:
    future = Answer()
    results: list[list[int]] = []
    ready = threading.Barrier(4)

    async def wait() -> None:
        task = asyncio.ensure_future(_awaited(future))
        await asyncio.sleep(0)
        await asyncio.to_thread(ready.wait)
        results.append(await task)

    threads = [threading.Thread(target=lambda: asyncio.run(wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    ready.wait()
    future.finish()
    for thread in threads:
        thread.join()
    assert results == [[1]] * 3


async def _awaited(future: Answer) -> list[int]:
    return await future


def test_a_loop_that_was_closed_is_left_alone() -> None:
    future = Answer()

    async def give_up() -> None:
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)  # type: ignore[union-attr]
        await future

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(give_up())
    future.finish()
    assert future.get() == [1]


def test_a_long_wait_looks_for_signals_now_and_then() -> None:
    future = Answer(timeout_s=60.0)
    slept: list[float] = []

    class Done(threading.Event):
        """A sleep that ends early is over at once; the third finds the answer."""

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            slept.append(timeout)
            if len(slept) == 3:
                self.set()
            return self.is_set()

    future._done = Done()
    assert future.wait()
    assert len(slept) == 3
    assert max(slept) <= 0.5
