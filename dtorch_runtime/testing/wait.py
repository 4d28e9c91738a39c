"""Waits for tests: a condition, a name for what is awaited, and a deadline.

A test that sleeps is either slow or flaky. These return as soon as the condition holds, or fail with a
sentence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from dtorch_runtime.errors import ClusterTimeout

T = TypeVar("T")

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02


def wait_until(
    predicate: Callable[[], T],
    what: str,
    timeout_s: float = 10.0,
    *,
    state: Callable[[], object] | None = None,
) -> T:
    """Call ``predicate`` until it returns something true, and return that.

    Args:
        predicate: the condition. What it raises is raised here, at once.
        what: what is awaited, to follow "waited 10 s for": "the agent to join".
        timeout_s: the deadline, in seconds.
        state: called once when the deadline passes; what it returns is shown in the error.

    Raises:
        ClusterTimeout: the condition did not hold in time.
    """
    started_s = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while True:
        result = predicate()
        if result:
            return result
        _check_deadline(started_s, what, timeout_s, result, state)
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


async def wait_until_async(
    predicate: Callable[[], T],
    what: str,
    timeout_s: float = 10.0,
    *,
    state: Callable[[], object] | None = None,
) -> T:
    """As ``wait_until``, and the event loop goes on running between two calls of ``predicate``.

    Raises:
        ClusterTimeout: the condition did not hold in time.
    """
    started_s = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while True:
        result = predicate()
        if result:
            return result
        _check_deadline(started_s, what, timeout_s, result, state)
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def _check_deadline(
    started_s: float, what: str, timeout_s: float, result: object, state: Callable[[], object] | None
) -> None:
    waited_s = time.monotonic() - started_s
    if waited_s >= timeout_s:
        seen = repr(state()) if state is not None else f"the condition returned {result!r}"
        raise ClusterTimeout(what, waited_s, f"At the end: {seen}")
