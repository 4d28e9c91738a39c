"""Gets errors of a backward pass to the user, and lets what a backward pass makes live where its gradients do.

Torch (2.13) gives a device that is written in Python a device guard that asks a Python method for its type. When an op
fails during a backward pass, the guard asks while the error is on its way through C++, Python refuses to return a
result beside an error, and the process aborts. So the guard here takes the error out of the way and keeps it, and the
engine raises it in place of the empty error that is left.

A backward function that is written in Python may make a tensor with ``torch.empty(..., device=grad.device)`` and write
to it. That names no mesh, and a tensor that is written to cannot follow the others to theirs: somebody else may look
at it. So it is made on the mesh of the gradients in the first place.

Backward passes run on threads of torch's, which have no graph of the user's. What they make of no tensor, such as the
zero of a ``where``, is issued on the graph of the thread that waits: between two graphs each op would end a batch.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import _ImperativeEngine
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from dtorch import auto
from dtorch.cluster import session_if_open
from dtorch.graph import Graph, guard_mesh_of, is_default_mesh
from dtorch.location import in_backward

#: Errors that were on their way when a guard was asked, the last one last; some were caught elsewhere.
_errors: deque[BaseException] = deque(maxlen=8)
#: Any function of the C API called through it raises the error that is set, if one is.
_raise_pending = ctypes.pythonapi.PyErr_Occurred
#: The graphs of threads that wait for a backward pass, the last to begin last.
_waiting: list[Graph | None] = []


class DeviceGuard(torch._C._acc.DeviceGuard):
    """Says that there is one device of type PrivateUse1, whatever is going wrong at the moment."""

    def type_(self) -> Any:
        try:
            _raise_pending()
        except BaseException as error:  # noqa: BLE001  raised again by Engine
            _errors.append(error)
        return torch._C._autograd.DeviceType.PrivateUse1


class Engine(_ImperativeEngine):
    """Torch's engine, which raises what a guard took out of the way, and tells who waits for a backward pass."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's.

        Raises:
            DTorchError: an op of the backward pass was refused.
        """
        thread_id = threading.get_ident()
        session = session_if_open()
        graph = None if session is None else session.default_graph()
        in_backward.append(thread_id)
        _waiting.append(graph)
        stashed = auto.stash(auto.current())
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:
            if not _errors:
                raise
            raise _errors.pop() from None
        finally:
            auto.stash(stashed)
            _waiting.remove(graph)
            in_backward.remove(thread_id)


def issuing_graph(graph: Graph) -> Graph:
    """Where a call without tensors is issued on this thread, whose current graph is ``graph``.

    In a backward pass, which a thread of torch's runs, that of the thread which waits; while several wait, ``graph``.
    """
    if not _waiting or threading.get_ident() in in_backward or torch._C._current_graph_task_id() == -1:
        return graph
    first = _waiting[0]
    return first if first is not None and all(other is first for other in _waiting) else graph


def _beside_gradients(apply: Callable[..., Any]) -> Callable[..., Any]:
    """``apply`` of the node of a function written in Python, with the mesh of the gradients as the default one.

    Not for a checkpoint: it runs the user's forward again, which must make its tensors where it made them before.
    """

    @functools.wraps(apply)
    def run(node: Any, *gradients: Any) -> Any:
        named = _on_a_named_mesh(gradients)
        if named is None or getattr(node, "_forward_cls", None) is CheckpointFunction:
            return apply(node, *gradients)
        with guard_mesh_of(named):
            return apply(node, *gradients)

    return run


def _on_a_named_mesh(gradients: Iterable[Any]) -> Any:
    flat = (x for given in gradients for x in (given if isinstance(given, list) else (given,)))
    return next((x for x in flat if hasattr(x, "_handle") and not is_default_mesh(x.device_mesh)), None)


def install() -> DeviceGuard:
    """Make torch use the engine; returns the guard to register, which must be kept alive."""
    torch.autograd.Variable._execution_engine = Engine()
    for name in ("apply", "apply_boxed"):  # the second takes the gradients in a list
        setattr(BackwardCFunction, name, _beside_gradients(getattr(BackwardCFunction, name)))
    return DeviceGuard()
