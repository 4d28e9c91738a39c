"""Bytes of files that hold tensors, for whoever reads them: a worker its piece, a client what workers cannot see.

Files are of the format of github.com/huggingface/safetensors ("Format"): eight bytes with the length of a header, the
header as JSON, and the elements. This module imports no torch.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

#: Each so many bytes of a file of a checkpoint have a checksum of their own, so that a part can be read and checked.
CHECKED_BYTES: Final = 1024 * 1024
#: No header of a safetensors file is longer.
_MAX_HEADER_BYTES: Final = 100_000_000


class StoredError(Exception):
    """A file is not there, cannot be read, or is not what it was; the message has its name and says what to do."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What tells a file from others of its name: its size, and the CRC-32 of its header, None where nobody kept it."""

    num_bytes: int
    header_crc32: int | None

    def is_of(self, found: FileFacts) -> bool:
        """Whether a file of which this is known can be one that was found."""
        return self.num_bytes == found.num_bytes and self.header_crc32 in (None, found.header_crc32)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as it was when it was first looked at.

    Attributes:
        crcs: of parts of ``CHECKED_BYTES`` by their number, where somebody kept them.
        checked: the part that was checked last: small tensors, and rows that follow one another, lie in it.
    """

    path: str
    facts: FileFacts
    crcs: Mapping[int, int] | None = field(default=None, compare=False)
    checked: dict[int, bytes] = field(default_factory=dict, compare=False, repr=False)


def read_header(path: str) -> bytes:
    """The JSON of a safetensors file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    with open(path, "rb", buffering=0) as file:
        return _header(file.fileno())


def _header(number: int) -> bytes:
    start = os.pread(number, 8, 0)
    num_bytes = int.from_bytes(start, "little")
    if len(start) < 8 or num_bytes > min(_MAX_HEADER_BYTES, os.fstat(number).st_size - 8):
        raise ValueError("it is not a safetensors file: it does not begin with a header")
    header = bytearray()
    while len(header) < num_bytes and (part := os.pread(number, num_bytes - len(header), 8 + len(header))):
        header += part
    return bytes(header)


def facts_of(path: str) -> FileFacts:
    """
    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file.
    """
    with open(path, "rb", buffering=0) as file:
        return _facts(file.fileno())


def _facts(number: int) -> FileFacts:
    found = os.fstat(number)
    key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    facts = _known.get(key)
    if facts is None:
        facts = FileFacts(found.st_size, zlib.crc32(_header(number)))
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = facts
    return facts


#: A header is read again for each tensor of its file else.
_known: dict[tuple[int, ...], FileFacts] = {}
_MAX_KNOWN: Final = 1024


class OpenFile:
    """Reads parts of a file, and checks what can be checked of them. For one thread.

    Raises:
        StoredError: there is no such file, it cannot be read, or it is another one by now.
    """

    def __init__(self, stored: StoredFile) -> None:
        self._stored = stored
        try:
            self._file = open(stored.path, "rb", buffering=0)  # noqa: SIM115  closed by ``__exit__``
        except OSError as error:
            raise StoredError(f"{stored.path} cannot be read: {error.strerror}") from error
        try:
            self._check_facts()
        except BaseException:
            self._file.close()
            raise

    def _check_facts(self) -> None:
        path, known = self._stored.path, self._stored.facts
        try:
            found = _facts(self._file.fileno())
        except (OSError, ValueError) as error:
            raise StoredError(f"{path} is damaged: {error}") from error
        if found.num_bytes != known.num_bytes:
            raise StoredError(
                f"{path} is damaged: it has {found.num_bytes} bytes, and had {known.num_bytes}; restore it, or load "
                f"another one"
            )
        if not known.is_of(found):
            raise StoredError(
                f"{path} is damaged or was written anew: its header differs; restore it, or load it again"
            )

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill ``memory`` with the bytes of the file from ``start`` on.

        Raises:
            StoredError: they cannot be read, or are not those that were written.
        """
        if self._stored.crcs is None:
            self._read(memory, start)
            return
        stop = start + len(memory)
        for number in range(start // CHECKED_BYTES, -(-stop // CHECKED_BYTES)):
            begin = number * CHECKED_BYTES
            low, high = max(start, begin), min(stop, begin + CHECKED_BYTES)
            memory[low - start : high - start] = self._part(number)[low - begin : high - begin]

    def check(self, start: int, stop: int) -> None:
        """Compare these bytes with what was written, where somebody kept checksums.

        Raises:
            StoredError: they cannot be read, or are others.
        """
        if self._stored.crcs is not None:
            for number in range(start // CHECKED_BYTES, -(-stop // CHECKED_BYTES)):
                self._part(number)

    def _part(self, number: int) -> bytes:
        assert self._stored.crcs is not None, "asked only where they are known"
        checked = self._stored.checked
        if number in checked:
            return checked[number]
        begin = number * CHECKED_BYTES
        part = bytearray(max(0, min(CHECKED_BYTES, self._stored.facts.num_bytes - begin)))
        self._read(memoryview(part), begin)
        if zlib.crc32(part) != self._stored.crcs.get(number):
            raise StoredError(
                f"{self._stored.path} is damaged: bytes {begin} to {begin + len(part)} are not those that were "
                f"written (their CRC-32 differs); restore it, or load another one"
            )
        checked.clear()
        checked[number] = bytes(part)
        return checked[number]

    def _read(self, memory: memoryview, start: int) -> None:
        path, done = self._stored.path, 0
        while done < len(memory):
            try:
                count = os.preadv(self._file.fileno(), [memory[done:]], start + done)
            except OSError as error:
                raise StoredError(f"{path} cannot be read: {error.strerror}") from error
            if count == 0:
                raise StoredError(f"{path} is damaged: it ends at byte {start + done}")
            done += count
