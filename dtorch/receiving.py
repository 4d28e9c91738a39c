"""Who reads a session's link: its thread, or for a moment a user's thread that waits for a value.

A thread that wakes another costs 50 us, so a user's thread that waits reads the answer itself. When that takes long it
steps back; the session's thread stands aside for a moment after each such help, as more of them are likely.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dtorch_runtime.transport.base import Message, ThreadLink
from dtorch_runtime.transport.interrupts import DeferredInterrupts

#: How long a waiting thread reads by itself, and how long the session's thread stands aside afterwards, in seconds.
HELP_S = 0.005


class Receiver:
    """Reads the link of a session, with one thread at a time.

    Args:
        on_messages: takes what was read, on the thread that read it. It must not raise.
    """

    def __init__(self, link: ThreadLink, on_messages: Callable[[list[Message]], None]) -> None:
        self._link = link
        self._on_messages = on_messages
        #: Guards what follows. At most one of the first two is set.
        self._turn = threading.Condition(threading.Lock())
        self._is_served = False
        self._has_helper = False
        #: Somebody waits who does not read: the session's thread is to go on.
        self._is_needed = False
        self._aside_until_s = 0.0

    def serve(self, timeout_s: float) -> None:
        """The session's thread: read once, waiting for at most ``timeout_s``, or stand aside for a moment.

        Raises:
            TransportError: the link is closed.
        """
        with self._turn:
            aside_s = HELP_S if self._has_helper else self._aside_until_s - time.monotonic()
            if aside_s > 0:
                # A wake that was meant for this thread may have ended a helper's reading: the caller looks for itself.
                self._turn.wait(min(aside_s, timeout_s))
                return
            self._is_served = True
        try:
            # Handled within the turn: a helper that read on meanwhile would overtake what was read here.
            self._on_messages(self._link.receive(timeout_s))
        finally:
            with self._turn:
                self._is_served = False
                self._turn.notify_all()

    def help(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """A waiting thread: read until ``is_done()``, for a moment at most. Interrupts are deferred by that moment.

        Raises:
            TransportError: the link is closed.
        """
        # Deferred as a whole: what was read must be handled, and a turn that was taken must be given back.
        with DeferredInterrupts():
            self._help(is_done, time.monotonic() + min(timeout_s, HELP_S))

    def _help(self, is_done: Callable[[], bool], end_s: float) -> None:
        if not self._take_over(end_s):
            return
        try:
            while not is_done():
                remaining_s = end_s - time.monotonic()
                if remaining_s <= 0:
                    break
                self._on_messages(self._link.receive(remaining_s))
        finally:
            self._step_back(is_done())

    def need(self) -> None:
        """Somebody waits who does not read."""
        with self._turn:
            self._aside_until_s = 0.0
            if self._has_helper:
                self._is_needed = True
            else:
                self._turn.notify_all()

    def _take_over(self, end_s: float) -> bool:
        with self._turn:
            if self._has_helper:
                return False
            self._has_helper = True
            if self._is_served:
                self._link.wake()
            while self._is_served:
                if not self._turn.wait(max(0.0, end_s - time.monotonic())):
                    self._has_helper = False
                    self._turn.notify_all()
                    return False
            return True

    def _step_back(self, is_done: bool) -> None:
        with self._turn:
            self._has_helper = False
            if is_done and not self._is_needed:
                # Nobody is woken: the session's thread looks again by itself.
                self._aside_until_s = time.monotonic() + HELP_S
            else:
                self._is_needed = False
                self._aside_until_s = 0.0
                self._turn.notify_all()
