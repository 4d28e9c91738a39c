"""POSIX semaphores in memory that several processes map: what one wrote before ``post`` another sees after ``wait``.

Of the C library through ctypes, because Python's own have names in a folder that all users share, which would have to
be removed after a process that was killed. These go with the memory.
"""

from __future__ import annotations

import ctypes
import mmap
import time

#: Room for one on every platform, in bytes, and so that no two share a cache line.
SEMAPHORE_BYTES = 64
#: Longest single wait, in seconds: far below where the C type of a time ends.
_MAX_WAIT_S = 1e6


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# Calls of the first kind keep the interpreter's lock, which is right for what never blocks; waiting gives it up.
_QUICK, _BLOCKING = ctypes.PyDLL(None), ctypes.CDLL(None)
#: Whether the C library has them all; the last one came with glibc 2.30.
HAS_SEMAPHORES = all(
    hasattr(_BLOCKING, name) for name in ("sem_init", "sem_post", "sem_trywait", "sem_clockwait")
)
if HAS_SEMAPHORES:
    _init, _post, _try_wait = _QUICK.sem_init, _QUICK.sem_post, _QUICK.sem_trywait
    _clock_wait = _BLOCKING.sem_clockwait
    _init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    _post.argtypes = _try_wait.argtypes = (ctypes.c_void_p,)
    _clock_wait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_TimeSpec))


class SharedSemaphore:
    """A semaphore at a place in mapped memory, which lasts as long as this. One process calls ``set_up`` first."""

    def __init__(self, memory: mmap.mmap, offset_bytes: int) -> None:
        self._memory = ctypes.c_char.from_buffer(memory, offset_bytes)
        self._address = ctypes.addressof(self._memory)

    def set_up(self, value: int) -> None:
        """Begin with this value, before any other process knows of it."""
        _init(self._address, 1, value)

    def post(self) -> None:
        """Add one, and wake one that waits."""
        _post(self._address)

    def try_wait(self) -> bool:
        """Take one if it is there."""
        return bool(_try_wait(self._address) == 0)

    def wait(self, deadline_s: float) -> bool:
        """Take one, and block until it is there; False when it was not there in time, or a signal came.

        Args:
            deadline_s: of ``time.monotonic``.
        """
        if _try_wait(self._address) == 0:
            return True
        until_s = min(deadline_s, time.monotonic() + _MAX_WAIT_S)
        seconds = int(until_s)
        when = _TimeSpec(seconds, int((until_s - seconds) * 1e9))
        return bool(_clock_wait(self._address, time.CLOCK_MONOTONIC, ctypes.byref(when)) == 0)
