"""Ctrl-C while a message is being sent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from dtorch_runtime.transport.interrupts import DeferredInterrupts


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_inside_is_raised_on_leaving() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117  where it is raised is what this test is about
        with DeferredInterrupts():
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")
    assert steps == ["went on"]


def test_the_handler_is_back_afterwards() -> None:
    with DeferredInterrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_several_interrupts_are_one() -> None:
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with DeferredInterrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("disposition", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_signal_without_a_handler_is_left_alone(disposition: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, disposition)
    with DeferredInterrupts():
        assert signal.getsignal(signal.SIGINT) is disposition
    assert signal.getsignal(signal.SIGINT) is disposition


def test_other_threads_leave_the_handler_alone() -> None:
    seen = []

    def look() -> None:
        with DeferredInterrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(10.0)
    assert seen == [signal.default_int_handler]
