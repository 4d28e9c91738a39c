"""Gets errors of a backward pass to the user.

Torch (2.13) gives a device that is written in Python a device guard that asks a Python method for its type. When an op
fails during a backward pass, the guard asks while the error is on its way through C++, Python refuses to return a
result beside an error, and the process aborts. So the guard here takes the error out of the way and keeps it, and the
engine raises it in place of the empty error that is left.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any

import torch
from torch._C import _ImperativeEngine

from dtorch import auto
from dtorch.location import in_backward

#: Errors that were on their way when a guard was asked, the last one last; some were caught elsewhere.
_errors: deque[BaseException] = deque(maxlen=8)
#: Any function of the C API called through it raises the error that is set, if one is.
_raise_pending = ctypes.pythonapi.PyErr_Occurred


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
        in_backward.append(thread_id)
        stashed = auto.stash(auto.current())
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:
            if not _errors:
                raise
            raise _errors.pop() from None
        finally:
            auto.stash(stashed)
            in_backward.remove(thread_id)


def install() -> DeviceGuard:
    """Make torch use the engine; returns the guard to register, which must be kept alive."""
    torch.autograd.Variable._execution_engine = Engine()
    return DeviceGuard()
