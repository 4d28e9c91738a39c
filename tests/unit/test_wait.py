"""Waiting with a name: returns what the condition returned, or says what did not happen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from dtorch_runtime.errors import ClusterTimeout
from dtorch_runtime.testing.wait import wait_until, wait_until_async


async def _blocking(*args: Any, **kwargs: Any) -> Any:
    return wait_until(*args, **kwargs)


@pytest.fixture(params=[_blocking, wait_until_async], ids=["sync", "async"])
def wait(request: pytest.FixtureRequest) -> Callable[..., Awaitable[Any]]:
    return request.param


async def test_returns_the_first_true_result(wait: Callable[..., Awaitable[Any]]) -> None:
    results: Iterator[str] = iter(["", "", "joined", "never asked for"])
    assert await wait(lambda: next(results), "the agent to join") == "joined"
    assert next(results) == "never asked for"


async def test_a_deadline_names_what_was_awaited_and_what_was_seen(
    wait: Callable[..., Awaitable[Any]],
) -> None:
    with pytest.raises(ClusterTimeout, match=r"waited .* s for the agent to join.*returned \[\]") as caught:
        await wait(list, "the agent to join", 0.0)
    assert caught.value.what == "the agent to join"
    with pytest.raises(ClusterTimeout, match="'1 of 2 agents'"):
        await wait(list, "the agents to join", 0.0, state=lambda: "1 of 2 agents")


async def test_what_the_condition_raises_is_not_swallowed(wait: Callable[..., Awaitable[Any]]) -> None:
    agents: dict[str, int] = {}
    with pytest.raises(KeyError):
        await wait(lambda: agents["missing"], "nothing")


async def test_the_loop_runs_on_while_the_async_form_waits() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_until_async(event.is_set, "the event")
