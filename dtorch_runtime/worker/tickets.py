"""What an executor counts until all devices of a session are done with a message, and the jobs that count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from dtorch_runtime.worker.session import DeviceSession

_T = TypeVar("_T")


class Ticket:
    """Calls back when the last of several workers is done with a message."""

    def __init__(self, num_workers: int, when_done: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._num_left = num_workers
        self._when_done = when_done

    def done(self) -> None:
        """One of the workers is done."""
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self._when_done()


def run_batch(values: DeviceSession, seq: int, words: list[int], ticket: Ticket) -> None:
    """The job of a device that runs op records. It is done with them when its transfers are, too."""
    try:
        if not values.session.is_ended:
            values.run(seq, words)
    finally:  # whoever waits for the batch is not to wait for ever, whatever happened
        values.call_behind(ticket.done)


def take_answer(
    values: DeviceSession, ask: Callable[[DeviceSession], _T | None], answers: list[_T], ticket: Ticket
) -> None:
    """The job of a device that answers a question."""
    try:
        answer = ask(values)
        if answer is not None:
            answers.append(answer)
    finally:
        ticket.done()
