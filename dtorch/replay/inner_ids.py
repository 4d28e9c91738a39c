"""Ids of values that live inside of captured calls only."""

from __future__ import annotations

import threading
from typing import Final

#: They begin here; those of other values are below.
FIRST_INNER_ID: Final = 1 << 48


class InnerIds:
    """Hands out ids, each once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = FIRST_INNER_ID

    def take(self, count: int) -> int:
        """The first of ``count`` consecutive ids."""
        with self._lock:
            first = self._next
            self._next += count
        return first
