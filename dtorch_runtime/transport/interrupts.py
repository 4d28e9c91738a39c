"""Keeps Ctrl-C from tearing a message apart."""

from __future__ import annotations

# The C functions: the public ones spend 5 us on turning numbers into enums, and a send calls them twice.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from types import FrameType, TracebackType

_SIGINT = int(signal.SIGINT)


class DeferredInterrupts:
    """While inside, SIGINT is noted; its handler runs on leaving.

    A message of several frames is several calls, and a KeyboardInterrupt between two of them would leave half a
    message in the socket, which the next message would be glued to. Python runs handlers on the main thread only,
    so elsewhere this does nothing. Costs about a microsecond.
    """

    def __init__(self) -> None:
        self._handler: object = None
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_SIGINT)
            if callable(handler):
                self._handler = handler
                _signal.signal(_SIGINT, self._note)

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        handler = self._handler
        if callable(handler):
            _signal.signal(_SIGINT, handler)
            if self._noted is not None:
                handler(*self._noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = (number, frame)
