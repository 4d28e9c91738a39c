"""How threads of an agent wait: each on a lock of its own, and one of them for the mail of all.

Parcels in mailboxes are brought by nobody. So one of the threads that wait for parcels of other agents is the
*listener*: it waits for the bell, collects what came, and with it frees the others. Whoever leaves while nobody listens
calls the next one to. Without anybody who waits, parcels stay in their boxes.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from dtorch_runtime.worker.collectives.base import Mail


class Waiter:
    """What one thread waits for, once. Opened with the lock held that guards the state it stands for."""

    __slots__ = ("_lock", "_mail", "is_open")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        #: Set while this is the listener, who does not wait on the lock.
        self._mail: Mail | None = None
        self.is_open = False

    def open(self) -> None:
        """What is awaited is there, or an error that says why not."""
        self.is_open = True
        self.call()

    def call(self) -> None:
        """Wake the thread, so that it looks what there is for it to do."""
        if self._lock.locked():
            self._lock.release()
        if self._mail is not None:
            self._mail.ring()

    def sleep(self, deadline_s: float) -> None:
        """Block until ``open`` or ``call``, or until the deadline (of ``time.monotonic``)."""
        left_s = deadline_s - time.monotonic()
        if left_s > 0:
            self._lock.acquire(timeout=min(left_s, threading.TIMEOUT_MAX))

    def listen(self, mail: Mail, deadline_s: float) -> None:
        """Collect mail until this is open, or until the deadline."""
        self._mail = mail
        try:
            num_rung = 0
            while True:
                mail.collect(num_rung)
                if self.is_open or time.monotonic() >= deadline_s:
                    return
                num_rung = int(mail.wait(deadline_s))
        finally:
            self._mail = None


class Listening:
    """Who listens, and who waits for the mail that it collects.

    Args:
        lock: guards the states that waiters stand for; held by whoever opens one.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._has_listener = False
        self._others: deque[Waiter] = deque()

    def wait(self, waiter: Waiter, mail: Mail, deadline_s: float) -> None:
        """Block until the waiter is open, or until the deadline, and listen where nobody else does."""
        try:
            while not waiter.is_open and time.monotonic() < deadline_s:
                self._wait_once(waiter, mail, deadline_s)
        finally:
            # Also by who was called to listen and has meanwhile got, from a thread that collected in passing, what it
            # waited for: it listens no more, and nobody else would be called.
            with self._lock:
                if not self._has_listener:
                    self._call_next()

    def _wait_once(self, waiter: Waiter, mail: Mail, deadline_s: float) -> None:
        with self._lock:
            is_listener = not self._has_listener
            if is_listener:
                self._has_listener = True
            else:
                self._others.append(waiter)
        if is_listener:
            try:
                waiter.listen(mail, deadline_s)
            finally:
                with self._lock:
                    self._has_listener = False
        else:
            waiter.sleep(deadline_s)
            with self._lock:
                if waiter in self._others:
                    self._others.remove(waiter)

    def _call_next(self) -> None:
        """The lock is held, and nobody listens."""
        while self._others:
            other = self._others.popleft()
            if not other.is_open:
                other.call()
                return
