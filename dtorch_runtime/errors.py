"""Every error that DTorch raises, in one tree.

::

    DTorchError
    |-- UserError                 you wrote something that DTorch refuses; nothing was changed
    |   |-- PlacementError        no placement signature fits, or placements do not fit a shape (ValueError)
    |   |-- MeshError             a mesh that cannot be, or tensors of different meshes in one op (ValueError)
    |   |-- MixedTensorError      a plain tensor with data met a dtorch tensor (RuntimeError)
    |   |-- UnsupportedError      an op or a use that DTorch does not have (NotImplementedError)
    |   |-- CaptureError          a captured function does what cannot be replayed (RuntimeError)
    |   |-- SettingError          a setting or argument with a value that it cannot have (ValueError)
    |   |-- StateDictError        a state dict that does not fit what it is loaded into (RuntimeError)
    |   `-- ForkError             DTorch used in a forked child of the process that started it
    |-- RemoteOpError             your op was issued, and failed on a worker
    |-- InfrastructureError       the cluster failed, not your program
    |   |-- NodeLost              a node agent died or went silent
    |   |-- ControllerLost        the controller died or went silent
    |   |-- ClusterTimeout        a wait with a name passed its deadline (TimeoutError)
    |   |-- TransportError        a socket could not be bound, connected or used
    |   |-- HandshakeError        the other side speaks another version, or refused the session key
    |   `-- SecurityError         an open socket without keys, or keys that do not match
    |-- SessionClosed             the session that held this tensor was closed by you
    `-- InternalError             a bug of DTorch: please report it

A class in parentheses is also a base, so that code written for plain PyTorch still catches it.
The classes carry fields; ``str()`` is made of them: what was given, what is allowed, what to write.
"""

from __future__ import annotations

from dataclasses import dataclass


class DTorchError(Exception):
    """Base of everything that DTorch raises on purpose."""


class UserError(DTorchError):
    """The call was refused before anything was sent. State is as it was. Correct the call."""


class PlacementError(UserError, ValueError):
    """No placement signature of the op fits the inputs, or placements do not fit the tensor.

    You get it from the call that issues the op, never later. The message lists what was given, every
    legal signature, and the ``redistribute()`` that would make the call legal.
    """


class MeshError(UserError, ValueError):
    """A mesh is malformed, names devices that the cluster does not have, or differs between inputs."""


class MixedTensorError(UserError, RuntimeError):
    """A plain tensor with data and a dtorch tensor met in one op (0-dim CPU tensors are allowed).

    Not a TypeError: torch's operators turn that into "unsupported operand type(s)", and the advice is lost.
    """


class UnsupportedError(UserError, NotImplementedError):
    """DTorch does not have this op or this use. The message says what to write instead."""


class CaptureError(UserError, RuntimeError):
    """A function under ``dtorch.capture`` does what a replay could not do again. The message names the line."""


class SettingError(UserError, ValueError):
    """A setting, environment variable or argument has a value that it cannot have."""


class StateDictError(UserError, RuntimeError):
    """A state dict does not fit the model or the optimizer that it was to be loaded into, which is as it was."""

    def __init__(self, what: str, problems: tuple[str, ...]) -> None:
        self.what = what
        self.problems = problems
        super().__init__(
            f"Error(s) in loading state_dict for {what}, into which nothing was loaded:\n\t"
            + "\n\t".join(problems)
            + "\nMake the model as it was when this was saved, or convert the tensors first"
        )


class ForkError(UserError, RuntimeError):
    """DTorch was used in a process forked after it had started. Use the 'spawn' start method."""


@dataclass(frozen=True)
class RemoteFailure:
    """What a worker reports about one failed op; plain, so that it can cross processes."""

    op: str
    device: int
    node: str
    error_type: str
    message: str
    traceback: str


class RemoteOpError(DTorchError, RuntimeError):
    """An op failed on a worker. Raised where a value that depends on it is fetched, or by ``sync()``.

    Independent values stay fetchable. It shows two places: the line of your program that issued the op,
    and the worker's traceback.
    """

    def __init__(self, failure: RemoteFailure, location: str) -> None:
        self.failure = failure
        self.location = location
        super().__init__(
            f"{failure.op} failed on device {failure.device} (node {failure.node}): "
            f"{failure.error_type}: {failure.message}\n"
            f"  issued at {location}\n"
            f"  traceback of the worker:\n{_indent(failure.traceback)}"
        )


class InfrastructureError(DTorchError, RuntimeError):
    """The cluster failed, not the program that ran on it."""


class NodeLost(InfrastructureError):
    """A node agent died or went silent. Values that lived on its devices are gone."""

    def __init__(self, node: str, reason: str) -> None:
        self.node = node
        self.reason = reason
        super().__init__(
            f"node {node!r} is lost: {reason}. Values on its devices are gone; restart the agent "
            f"(dtorch-launch agent) and run the program again"
        )


class ControllerLost(InfrastructureError):
    """The controller died or went silent. The session is over."""

    def __init__(self, address: str, reason: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(
            f"the controller at {address} is lost: {reason}. Every value of this session is gone; "
            f"call dtorch.init() to start a new one"
        )


class ClusterTimeout(InfrastructureError, TimeoutError):
    """A wait passed its deadline. The work itself was not cancelled: waiting again is allowed."""

    def __init__(self, what: str, waited_s: float, hint: str = "") -> None:
        self.what = what
        self.waited_s = waited_s
        super().__init__(f"waited {waited_s:.3g} s for {what}" + (f". {hint}" if hint else ""))


class TransportError(InfrastructureError):
    """A socket could not be bound, connected or used. The message names the endpoint and the reason."""


class HandshakeError(InfrastructureError):
    """The other side speaks another version of the protocol or refused the session key."""


class SecurityError(InfrastructureError):
    """A socket that strangers can reach was to be opened without keys, or the keys do not match."""


class SessionClosed(DTorchError, RuntimeError):
    """The session that held this tensor was closed by you (``shutdown()`` or the end of ``connect()``)."""


class InternalError(DTorchError):
    """DTorch broke one of its own invariants. This is our bug: please report it with the message."""


def _indent(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())
