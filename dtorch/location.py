"""Where in the user's program an op was issued: captured as a small int, turned into text only for an error."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import linecache
import os
import sys
import threading
from contextvars import ContextVar
from types import CodeType, FrameType

import torch

UNKNOWN = 0


def _folder(file: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(file)), "")


#: Files below these folders are not the user's; neither is what Python makes up itself.
_LIBRARY_PREFIXES = (
    _folder(torch.__file__),
    _folder(__file__),
    _folder(asyncio.__file__),
    _folder(concurrent.futures.__file__),
    threading.__file__,
    "<frozen",
)

_lock = threading.Lock()
#: (id of the code object, offset of the instruction) -> location id; UNKNOWN for a library's frame.
#: Code objects hash and compare by content, slowly and without their file name, so they are keyed by id.
known: dict[tuple[int, int], int] = {}
#: Location id - 1 -> the place. It keeps the code object alive, so that no other gets its id.
_places: list[tuple[CodeType, int]] = []
_library_codes: dict[int, CodeType] = {}


#: The place that a call was started from which runs on another thread.
caller: ContextVar[int] = ContextVar("dtorch_caller", default=UNKNOWN)
#: Threads that are inside a backward pass, the last to begin last.
in_backward: list[int] = []


def capture(frame: FrameType | None, thread_id: int | None = None) -> int:
    """The location of the innermost frame that is the user's, from ``frame`` outwards.

    Autograd's own threads have no such frame: then that of the thread which called ``backward()`` counts;
    ``thread_id`` when it is one of several. Nor has the thread of a ``call_async``: then ``caller`` counts.
    """
    found = _search(frame) or caller.get()
    if found == UNKNOWN and in_backward:
        waiting = thread_id if thread_id in in_backward else in_backward[-1]
        found = _search(_current_frame(waiting))
    return found


def _current_frame(thread_id: int) -> FrameType | None:
    """Where a thread is. A garbage collection inside the call may wait for a lock that the call holds (gh-106883)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread_id)
    finally:
        if was_enabled:
            gc.enable()


def _search(frame: FrameType | None) -> int:
    while frame is not None:
        code = frame.f_code
        if id(code) not in _library_codes:
            place = (id(code), frame.f_lasti)
            found = known.get(place)
            if found is not None:
                return found
            if not _is_library(code):
                return _intern(code, frame.f_lasti)
            _library_codes[id(code)] = code
        frame = frame.f_back
    return UNKNOWN


def _intern(code: CodeType, offset: int) -> int:
    with _lock:
        found = known.get((id(code), offset))
        if found is None:
            _places.append((code, offset))
            found = known[id(code), offset] = len(_places)
        return found


def _is_library(code: CodeType) -> bool:
    return code.co_filename.startswith(_LIBRARY_PREFIXES)


def describe(location_id: int) -> str:
    """``file:line in function: source text`` of a location that ``capture`` gave."""
    if not 0 < location_id <= len(_places):
        return "an unknown place"
    code, offset = _places[location_id - 1]
    line = next(
        (number for start, stop, number in code.co_lines() if start <= offset < stop and number),
        code.co_firstlineno,
    )
    source = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}" + (f": {source}" if source else "")
