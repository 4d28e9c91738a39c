"""How the process's allocator treats memory that tensors have freed. No torch here: that comes later."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

# malloc.h of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# Its tunables, by name.
_TUNABLES = "GLIBC_TUNABLES"
_TCACHE = "glibc.malloc.tcache_count"

_LARGEST_REUSED_BYTES = 1 << 30
_NEVER_TRIM = 2**31 - 1


def keeping_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is to call ``keep_freed_memory``: some of it can only be set from outside.

    torch asks for aligned memory, for which glibc looks for a little more than it then gives. What it cuts off would
    stay in a cache of the thread, so a block that is freed would be too small for the next of its size, which would get
    fresh memory, at a page fault for every 4 KiB. Without that cache the rests join again; an op costs 0.1 us more.
    """
    tunables = environ.get(_TUNABLES, "")
    if _TCACHE in tunables:
        return dict(environ)
    return {**environ, _TUNABLES: ":".join(filter(None, (tunables, f"{_TCACHE}=0")))}


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
