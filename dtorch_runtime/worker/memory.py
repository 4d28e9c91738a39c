"""How the process's allocator treats memory that tensors have freed. No torch here: that comes later."""

from __future__ import annotations

import ctypes

# malloc.h of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_LARGEST_REUSED_BYTES = 1 << 30
_NEVER_TRIM = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep freed memory for later tensors instead of giving it back to the system.

    By default glibc maps each large tensor afresh, and every 4 KiB of it cost a page fault: an addition of 64 MiB takes
    several times as long. One arena, because memory freed in one thread is then there for all. To be called before the
    process starts threads. Whether the allocator is one that takes the advice.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False  # not glibc
    options = (
        (_M_MMAP_THRESHOLD, _LARGEST_REUSED_BYTES),
        (_M_TRIM_THRESHOLD, _NEVER_TRIM),
        (_M_ARENA_MAX, 1),
    )
    taken = [mallopt(option, value) == 1 for option, value in options]
    return all(taken)
