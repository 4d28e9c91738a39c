"""How far a device may run ahead of those who read what it gave away: a bound in bytes.

A device that only gives does not wait for its readers, so a quick one would fill memory with copies. It waits, before
it takes part in the next exchange, when too many bytes of its earlier gifts are unread. That cannot lock up: all
devices run one stream in one order, so the first exchange that is not complete needs nothing of later ones, and every
gift of those before it can be read. Each of a device's workers counts what it gave itself: the communication worker may
be behind the compute worker, and is not to wait until gifts of later ops are read.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from threading import get_ident

from dtorch_runtime.errors import ClusterTimeout

#: Smaller gifts are not counted: the bound on outstanding ops bounds them.
MIN_BYTES = 64 * 1024
_LOOK_AGAIN_S = 1.0


class RunAhead:
    """Bytes that each device has given away and that are unread, by the thread that gave. Safe to use from any thread.

    Args:
        max_bytes: a worker of a device with more than this unread waits before it gives more.
        timeout_s: longest wait.
    """

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        # Reentrant: dropping a tensor may release it on a thread that is inside one of these methods.
        self._changed = threading.Condition(threading.RLock())
        #: By device and thread.
        self._unread: defaultdict[tuple[int, int], int] = defaultdict(int)
        #: Takes note of what was read without a message, and asks for a message of the rest.
        self.look: Callable[[], None] = lambda: None

    def num_unread(self, device: int) -> int:
        """Bytes of the device's gifts that are unread."""
        with self._changed:
            return sum(num_bytes for (giver, _), num_bytes in self._unread.items() if giver == device)

    def wait_for_room(self, device: int, what: object) -> None:
        """Called before a device gives something away in an exchange.

        Raises:
            ClusterTimeout: earlier gifts were not read in time; the text of ``what`` names the exchange.
        """
        giver = (device, get_ident())
        if self._unread[giver] <= self._max_bytes:
            return
        deadline_s = time.monotonic() + self._timeout_s
        while not self._has_room(giver, deadline_s):
            if time.monotonic() >= deadline_s:
                raise ClusterTimeout(
                    f"what device {device} gave before to be read, ahead of {what}",
                    self._timeout_s,
                    f"{self._unread[giver]} bytes are unread",
                )

    def _has_room(self, giver: tuple[int, int], deadline_s: float) -> bool:
        """Whether there is room, after a wait that is the longest only without messages of what was read.

        Message and receipt may just miss each other: memory of two processors has no one order.
        """
        self.look()
        left_s = min(_LOOK_AGAIN_S, deadline_s - time.monotonic())
        with self._changed:
            return self._changed.wait_for(lambda: self._unread[giver] <= self._max_bytes, left_s)

    def lend(self, device: int, num_bytes: int) -> Callable[[], None]:
        """Count a gift. What is returned is to be called once, when it has been read."""
        giver = (device, get_ident())
        with self._changed:
            self._unread[giver] += num_bytes
        return partial(self._release, giver, num_bytes)

    def _release(self, giver: tuple[int, int], num_bytes: int) -> None:
        with self._changed:
            self._unread[giver] -= num_bytes
            self._changed.notify_all()
