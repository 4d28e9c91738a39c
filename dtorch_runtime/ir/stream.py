"""The op stream: packed int64 records, in program order.

::

    op    [template_id, location_id, *input ids, *output ids, *scalars]
    FREE  [0, n, *n value ids]        values that no later op uses

The width of an op record follows from its template. An output id 0 means "not wanted".
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from dtorch_runtime.wire.records import TemplateRecord

FREE = 0
#: Bytes of one word of the stream.
WORD_BYTES = 8


def pack(words: Sequence[int]) -> bytes:
    """Words to a payload frame."""
    return array("q", words).tobytes()


def unpack(frame: Any) -> list[int]:
    """A payload frame to words.

    Raises:
        ValueError: the frame is not a whole number of words.
    """
    view = memoryview(frame)
    if view.nbytes % WORD_BYTES:
        raise ValueError(f"an op stream is made of {WORD_BYTES}-byte words, got {view.nbytes} bytes")
    return view.cast("B").cast("q").tolist()


class Widths(Protocol):
    """Words of a record, by its template."""

    def get(self, number: int, /) -> int | None:
        """None for a template that is not known."""


class WidthsOf:
    """The widths of templates, looked up one by one: another thread may add templates meanwhile."""

    def __init__(self, templates: Mapping[int, TemplateRecord]) -> None:
        self._templates = templates

    def get(self, number: int, /) -> int | None:
        """None for a template that is not known."""
        found = self._templates.get(number)
        return None if found is None else found.width


def walk(words: Sequence[int], widths: Widths) -> Iterator[tuple[int, int]]:
    """The (start, stop) of each record.

    Raises:
        ValueError: a template is unknown or the last record is cut off.
    """
    start, end = 0, len(words)
    while start < end:
        head = words[start]
        if head == FREE:
            num_ids = words[start + 1] if start + 1 < end else -1
            stop = start + 2 + num_ids if num_ids >= 0 else end + 1
        else:
            width = widths.get(head)
            if width is None:
                raise ValueError(f"op stream names template {head}, which was not defined")
            stop = start + width
        if stop > end:
            raise ValueError(f"op stream ends inside a record at word {start} of {end}")
        yield start, stop
        start = stop
