"""``TensorFuture``: a value that is on its way; for threads and event loops, without polling."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch

from dtorch.insight.client_tape import ClientTape
from dtorch.session import Answers, LocalPiece
from dtorch.spec import Spec
from dtorch.values import assemble
from dtorch_runtime.errors import ClusterTimeout, SettingError

T = TypeVar("T")

#: A result of more bytes is assembled beside the event loop, not in it.
_LARGE_BYTES = 1024 * 1024
#: A thread sleeps for at most this long at once: a signal that comes between Python's last look for signals and the
#: sleep itself does not end the sleep, so Ctrl-C would be seen only at the deadline.
_SIGNALS_S = 0.5
_logger = logging.getLogger(__name__)


class Waiter(Protocol):
    """What a future asks of the session that answers it."""

    @property
    def wait_timeout_s(self) -> float:
        """The longest wait when none is given, in seconds."""

    @property
    def tape(self) -> ClientTape | None:
        """Notes waits, while somebody profiles."""

    def help(self, future: ClusterFuture[Any], timeout_s: float) -> None:
        """The calling thread is about to wait: it may do the reading for a moment."""

    def need_thread(self) -> None:
        """Somebody waits who does not read."""


class ClusterFuture(ABC, Generic[T]):
    """Something that the cluster will answer. Base of ``TensorFuture`` and of what ``sync_async`` returns.

    Every method may be called from any thread; ``await`` from any event loop, several at once.
    """

    def __init__(self, describe: Callable[[], str], waiter: Waiter) -> None:
        self._describe = describe
        self._waiter = waiter
        self._timeout_s = waiter.wait_timeout_s
        self._done = threading.Event()
        self._lock = threading.Lock()
        #: Guarded by the lock, as is setting ``_done``.
        self._callbacks: list[Callable[[Any], object]] = []
        self._failure: Callable[[], BaseException] | None = None
        self._result: T | None = None
        self._has_result = False

    def what(self) -> str:
        """What is waited for."""
        return self._describe()

    def is_ready(self) -> bool:
        """Whether ``get`` would return or raise at once."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the answer is here; False when it is not within ``timeout_s`` seconds.

        Without ``timeout_s`` the setting ``wait_timeout_s`` applies, and passing it raises.

        Raises:
            ClusterTimeout: no ``timeout_s`` was given and the setting's time has passed.
        """
        if self._wait_done(self._timeout_s if timeout_s is None else timeout_s):
            return True
        if timeout_s is None:
            raise self._timed_out(self._timeout_s)
        return False

    def get(self, timeout_s: float | None = None) -> T:
        """The answer; blocks until it is here. Calling it again gives the same object.

        Args:
            timeout_s: longest wait in seconds; the setting ``wait_timeout_s`` when None.

        Raises:
            RemoteOpError: an op that the value depends on failed.
            NodeLost, ControllerLost: the machine that held it is gone.
            ClusterTimeout: it took too long. Calling again waits again.
            SessionClosed: the session was closed before the value came.
        """
        if not self._done.is_set():
            wait_s = self._timeout_s if timeout_s is None else timeout_s
            if not self._wait_done(wait_s):
                raise self._timed_out(wait_s)
        if self._failure is not None:
            raise self._failure()
        if not self._has_result:
            with self._lock:
                if not self._has_result:
                    self._result = self._make_result()
                    self._has_result = True
        return self._result  # type: ignore[return-value]  # _make_result returned a T

    def _wait_done(self, timeout_s: float) -> bool:
        if self._done.is_set():
            return True
        if not isinstance(timeout_s, int | float):
            raise SettingError(
                f"timeout_s takes a number of seconds, got {timeout_s!r}; write e.g. 10.0, or None"
            )
        tape = self._waiter.tape
        if tape is None:
            return self._block(timeout_s)
        with tape.span(f"wait for {self._describe()}"):
            return self._block(timeout_s)

    def _block(self, timeout_s: float) -> bool:
        self._waiter.help(self, timeout_s)
        if self._done.is_set():
            return True
        self._waiter.need_thread()
        end_s = time.monotonic() + timeout_s
        while not self._done.wait(max(0.0, min(_SIGNALS_S, end_s - time.monotonic()))):
            if time.monotonic() >= end_s:
                return False
        return True

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(self)`` once the answer is here: on the thread that reads it, or now when it is already.

        It must not block. What it raises is logged.

        Raises:
            SettingError: it cannot be called.
        """
        if not callable(callback):
            raise SettingError(
                f"add_done_callback takes a function of the future, got {callback!r}; write e.g. lambda future: ..."
            )
        with self._lock:
            is_early = not self._done.is_set()
            if is_early:
                self._callbacks.append(callback)
        if is_early:
            self._waiter.need_thread()
        else:
            self._call(callback)

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done.is_set():
            yield from self._wait_in_loop().__await__()
        if self._num_result_bytes() > _LARGE_BYTES and not self._has_result and self._failure is None:
            return (yield from asyncio.get_running_loop().run_in_executor(None, self.get).__await__())
        return self.get()

    async def _wait_in_loop(self) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def release() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def wake(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(release)

        self.add_done_callback(wake)
        timer = loop.call_later(self._timeout_s, release)
        try:
            await waiter
        finally:
            timer.cancel()
            with self._lock:
                if wake in self._callbacks:
                    self._callbacks.remove(wake)
        if not self._done.is_set():
            raise self._timed_out(self._timeout_s)

    @abstractmethod
    def _make_result(self) -> T:
        """The answer, made from what came; called once, under the lock."""

    def _num_result_bytes(self) -> int:
        return 0

    def finish(self, failure: Callable[[], BaseException] | None = None) -> None:
        """The answer is here, or why it never will be: ``failure`` makes the error that ``get`` raises."""
        with self._lock:
            if self._done.is_set():
                return
            self._failure = failure
            callbacks, self._callbacks = self._callbacks, []
            self._done.set()
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Any], object]) -> None:
        try:
            callback(self)
        except Exception:
            _logger.exception("a done callback of %s failed", self._describe())

    def _timed_out(self, waited_s: float) -> ClusterTimeout:
        return ClusterTimeout(self._describe(), waited_s, "Waiting again is allowed")

    def __repr__(self) -> str:
        state = "pending" if not self._done.is_set() else "failed" if self._failure else "ready"
        return f"<{type(self).__name__} of {self._describe()}: {state}>"


class TensorFuture(ClusterFuture[torch.Tensor]):
    """The value of a tensor, as a CPU tensor of global shape; assembled when it is first asked for.

    That of ``item_async()`` and ``tolist_async()`` gives Python numbers instead: ``convert`` makes them.
    """

    def __init__(
        self,
        spec: Spec,
        describe: Callable[[], str],
        waiter: Waiter,
        convert: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        super().__init__(describe, waiter)
        self._spec = spec
        self._convert = convert
        self._pieces: Mapping[int, LocalPiece] = {}

    def __getattr__(self, name: str) -> NoReturn:
        """What a tensor has and its future has not."""
        message = f"'TensorFuture' object has no attribute {name!r}"
        if not name.startswith("_"):
            message += f"; it is a value to come: write (await future).{name} or future.get().{name}"
        raise AttributeError(message)

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            f"'TensorFuture' object is not subscriptable, got [{index!r}]; it is a value to come: write "
            f"(await future)[...] or future.get()[...]"
        )

    def deliver(self, pieces: Mapping[int, LocalPiece]) -> None:
        self._pieces = pieces
        self.finish()

    def _make_result(self) -> torch.Tensor:
        result = assemble(self._spec, self._pieces)
        self._pieces = {}
        return result if self._convert is None else self._convert(result)

    def _num_result_bytes(self) -> int:
        return self._spec.num_bytes


class AnswerFuture(ClusterFuture[Answers]):
    """What the controller and the nodes answer to a question."""

    _answers: Answers

    def deliver(self, answers: Answers) -> None:
        self._answers = answers
        self.finish()

    def _make_result(self) -> Answers:
        return self._answers


class SyncFuture(ClusterFuture[None]):
    """Ready when everything that was issued before it has been run."""

    def __init__(
        self, describe: Callable[[], str], waiter: Waiter, raise_unfetched: Callable[[], None]
    ) -> None:
        super().__init__(describe, waiter)
        self._raise_unfetched = raise_unfetched

    def _make_result(self) -> None:
        self._raise_unfetched()
