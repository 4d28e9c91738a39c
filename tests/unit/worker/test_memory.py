"""Freed memory is there for the next tensor: counted in page faults, in a process of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from dtorch_runtime.worker.memory import keeping_environment

#: Two aligned blocks at a time, as the input and the result of an op; the faults of a later round.
SCRIPT = """
import ctypes, resource
from dtorch_runtime.worker.memory import keep_freed_memory
assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.posix_memalign.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def block(size):
    made = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(made), 64, size) == 0
    ctypes.memset(made, 1, size)
    return made
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first, second = block(8 << 20), block(8 << 20)
    libc.free(first)
    libc.free(second)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not that of glibc")
def test_blocks_of_a_size_are_used_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=keeping_environment(os.environ),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert int(done.stdout) < 100, "4096 pages would be fresh"


def test_what_the_user_has_tuned_stays() -> None:
    assert keeping_environment({"A": "b"}) == {"A": "b", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    other = {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    assert keeping_environment(other)["GLIBC_TUNABLES"] == "glibc.malloc.check=1:glibc.malloc.tcache_count=0"
    own = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=2"}
    assert keeping_environment(own) == own
