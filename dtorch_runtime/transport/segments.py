"""Shared-memory segments: files in /dev/shm that agents of one machine map, named after the process that made them.

They are kept and used again, because fresh memory costs a page fault for every 4 KiB. They go when their pool is
closed; those of a process that was killed are removed by whoever notices, with ``unlink_segments_of``.

Behind the bytes that are lent each has a *receipt*: the reader says there that it has read, and a sender that looks
needs no message. One that wants to be told all the same says so there too.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dtorch_runtime.errors import TransportError
from dtorch_runtime.transport.semaphores import HAS_SEMAPHORES, SEMAPHORE_BYTES, SharedSemaphore

_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"dtorch-(\d+)-[0-9a-f]{8}-\d+")
#: Smallest segment; sizes are powers of two, so that segments fit again.
_MIN_BYTES = 64 * 1024
_RECEIPT_BYTES = 2 * SEMAPHORE_BYTES
#: A pool takes at most this share of what is free in /dev/shm when it is made.
_SHARE_OF_FREE = 0.25


@dataclass(frozen=True, eq=False)
class Segment:
    """Mapped shared memory. The mapping lasts as long as somebody holds ``memory`` or a view of it."""

    name: str
    num_bytes: int
    memory: mmap.mmap

    @cached_property
    def receipt(self) -> Receipt:
        """Of what was written to it last."""
        return Receipt(self.memory, self.num_bytes)


class Receipt:
    """What reader and sender of a segment tell each other without a message. Only where there are semaphores."""

    def __init__(self, memory: mmap.mmap, offset_bytes: int) -> None:
        self._read = SharedSemaphore(memory, offset_bytes)
        self._wanted = SharedSemaphore(memory, offset_bytes + SEMAPHORE_BYTES)

    def set_up(self) -> None:
        """Nothing was read yet, and no message is wanted."""
        self._read.set_up(0)
        self._wanted.set_up(0)

    def sign(self) -> bool:
        """The reader: it has been read. Whether the sender wants a message."""
        self._read.post()
        return self._wanted.try_wait()

    def is_signed(self) -> bool:
        """The sender: whether it has been read; true once."""
        return self._read.try_wait()

    def want_message(self) -> None:
        """The sender: if it is not read by now, tell me."""
        self._wanted.post()


class SegmentPool:
    """Segments that this process made, each free or lent. Safe to use from any thread.

    Args:
        max_bytes: the most that it makes; by default a quarter of what is free in /dev/shm, and 1 GiB at most.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._lock = threading.Lock()
        self._prefix = f"dtorch-{os.getpid()}-{secrets.token_hex(4)}"
        self._max_bytes = _default_max_bytes() if max_bytes is None else max_bytes
        self._num_bytes = 0
        self._num_made = 0
        self._free: dict[int, list[Segment]] = defaultdict(list)
        self._lent: dict[str, Segment] = {}
        self._is_closed = False

    def lend(self, num_bytes: int) -> Segment | None:
        """A segment of at least ``num_bytes`` that nobody else uses; None when the pool is full."""
        size = max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length())
        with self._lock:
            if self._is_closed:
                return None
            free = self._free[size]
            segment = free.pop() if free else self._make(size)
            if segment is not None:
                self._lent[segment.name] = segment
                if HAS_SEMAPHORES:
                    segment.receipt.set_up()
            return segment

    def _make(self, size: int) -> Segment | None:
        if self._num_bytes + size > self._max_bytes:
            return None
        self._num_made += 1
        name = f"{self._prefix}-{self._num_made}"
        try:
            file = os.open(_FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            return None
        try:
            # Reserves the memory: without it a full /dev/shm kills the process at the first write.
            os.posix_fallocate(file, 0, size + _RECEIPT_BYTES)
            memory = mmap.mmap(file, size + _RECEIPT_BYTES)
        except OSError:
            _unlink(name)
            return None
        finally:
            os.close(file)
        self._num_bytes += size
        return Segment(name, size, memory)

    def give_back(self, segment: Segment) -> None:
        """Nobody reads what was written to it any more."""
        with self._lock:
            if self._lent.pop(segment.name, None) is not None:
                self._free[segment.num_bytes].append(segment)

    def hide(self, segment: Segment) -> None:
        """Whoever needs it has mapped it: without its name nothing is left behind, whatever happens to us."""
        _unlink(segment.name)

    def remove(self, segment: Segment) -> None:
        """Give it back for good: who it was for may still have it mapped, and write to it."""
        with self._lock:
            if self._lent.pop(segment.name, None) is not None:
                self._num_bytes -= segment.num_bytes
        _unlink(segment.name)

    def close(self) -> None:
        """Remove all segments. Who has mapped one can still read it."""
        with self._lock:
            self._is_closed = True
            segments = [segment for free in self._free.values() for segment in free]
            segments += self._lent.values()
            self._free.clear()
            self._lent.clear()
        for segment in segments:
            _unlink(segment.name)


class SegmentReader:
    """Maps segments of other processes, each once."""

    def __init__(self) -> None:
        self._mapped: dict[str, Segment] = {}

    def map(self, name: str) -> Segment:
        """The segment of that name.

        Raises:
            TransportError: that is no name of a segment, or there is none of this user.
        """
        found = self._mapped.get(name)
        if found is None:
            found = self._mapped[name] = _map(name)
        return found

    def forget(self, pid: int) -> None:
        """Drop the mappings of a process that is gone."""
        for name in [name for name in self._mapped if _pid_of(name) == pid]:
            del self._mapped[name]


def unlink_segments_of(pid: int) -> list[str]:
    """Remove what a process that is dead left in /dev/shm. Returns the names."""
    names = [path.name for path in _FOLDER.glob(f"dtorch-{pid}-*") if _NAME.fullmatch(path.name)]
    for name in names:
        _unlink(name)
    return names


def _map(name: str) -> Segment:
    if not _NAME.fullmatch(name):
        raise TransportError(f"{name!r} is no name of a shared-memory segment")
    try:
        file = os.open(_FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
        try:
            status = os.fstat(file)
            if status.st_uid != os.geteuid():
                raise TransportError(f"shared-memory segment {name} is another user's")
            if status.st_size <= _RECEIPT_BYTES:
                raise TransportError(f"shared-memory segment {name} of {status.st_size} bytes is too short")
            return Segment(name, status.st_size - _RECEIPT_BYTES, mmap.mmap(file, status.st_size))
        finally:
            os.close(file)
    except OSError as error:
        raise TransportError(f"cannot map shared-memory segment {name}: {error}") from error


def _pid_of(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else 0


def _unlink(name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(_FOLDER / name)


def _default_max_bytes() -> int:
    if not _FOLDER.is_dir():
        return 0
    free = os.statvfs(_FOLDER)
    return min(1 << 30, int(free.f_bavail * free.f_frsize * _SHARE_OF_FREE))
