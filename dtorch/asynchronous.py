"""``call_async``: any call that has to wait for the cluster, awaited by a program that runs in an event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

import torch

from dtorch import cluster, location
from dtorch_runtime.errors import UnsupportedError

_T = TypeVar("_T")


def call_async(function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> asyncio.Future[_T]:
    """``function(*args, **kwargs)``, beside the event loop; it begins at once, and what is awaited is its result.

    For calls that wait for data: those whose result has a shape that depends on it, ``.item()``, and functions and
    models that make such calls::

        rows = await dtorch.call_async(torch.nonzero, mask)
        text = await dtorch.call_async(model.generate, **inputs)

    It runs on a thread of the loop's executor as it would have run here: in the same graph, under the same
    ``torch.no_grad()``, ``torch.autocast``, default device and ``contextvars``. A result can be differentiated. To
    cancel the future gives up the result; the call itself runs on until its wait ends.

    Raises:
        UnsupportedError: there is no event loop here.
        Exception: whatever ``function`` raises, when it is awaited: ``RemoteOpError`` for an op that failed,
            ``ClusterTimeout`` for a wait longer than the setting ``wait_timeout_s``, ``SessionClosed``.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise UnsupportedError(
            "call_async() is awaited in an event loop, and none is running here; call the function itself"
        ) from None
    context = copy_context()
    context.run(location.caller.set, location.capture(sys._getframe(1)))
    state = _State()

    def run() -> _T:
        with state.entered():
            return function(*args, **kwargs)

    return loop.run_in_executor(None, context.run, run)


class _State:
    """What a thread's torch and its session are set to, taken from one thread to another."""

    def __init__(self) -> None:
        self._session = cluster.session_if_open()
        self._graph = self._session.default_graph() if self._session is not None else None
        self._device = torch.get_default_device()
        self._is_inference = torch.is_inference_mode_enabled()
        self._is_grad = torch.is_grad_enabled()
        self._autocast = torch.get_autocast_dtype("dtorch"), torch.is_autocast_enabled("dtorch")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the calling thread is as the other was."""
        with ExitStack() as stack:
            if self._session is not None:
                stack.callback(self._session.set_current_graph, self._session.set_current_graph(self._graph))
            if self._device != torch.get_default_device():
                stack.enter_context(self._device)
            stack.enter_context(torch.inference_mode(self._is_inference))
            stack.enter_context(torch.set_grad_enabled(self._is_grad))
            dtype, is_autocast = self._autocast
            stack.enter_context(torch.autocast("dtorch", dtype, enabled=is_autocast))
            yield
