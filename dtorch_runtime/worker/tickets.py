"""The jobs that tell an executor when all devices of a session are done with a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dtorch_runtime.worker.session import DeviceSession
from dtorch_runtime.worker.thread import Ticket

_T = TypeVar("_T")


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
