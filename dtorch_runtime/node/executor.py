"""What a node agent asks of the thing that runs kernels, and what that thing reports. No torch here.

The real executor is ``dtorch_runtime.worker.executor``; ``dtorch_runtime.testing.null_executor`` computes
nothing and serves simulations. Both pass the same conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from dtorch_runtime.wire.messages import Upload
from dtorch_runtime.wire.records import (
    FailureRecord,
    MeshRecord,
    NodeRecord,
    Question,
    Reply,
    TemplateRecord,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Every device of the node has finished the message ``seq`` of the session."""

    session: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRaised:
    """An op raised. Reported before the ``Completed`` of the message that held it."""

    session: int
    failure: FailureRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueReady:
    """The local piece that a fetch asked for. ``data`` is contiguous bytes that nobody writes to any more."""

    session: int
    request_id: int
    device: int
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueMissing:
    """The fetch has no value, and why."""

    session: int
    request_id: int
    device: int
    failure: FailureRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Replied:
    """The answer to a question."""

    session: int
    request_id: int
    reply: Reply


ExecutorEvent: TypeAlias = Completed | OpRaised | ValueReady | ValueMissing | Replied
#: Called from any thread; must not block.
ReportEvent: TypeAlias = Callable[[ExecutorEvent], None]


class Executor(Protocol):
    """Runs the ops of one node's devices. Called from the agent's event loop only; never blocks it.

    Work of one device runs in the order of the calls. Each ``run`` and each ``upload`` is answered by one
    ``Completed`` of its seq, and calls of one session come with rising seq.
    """

    def start(self, devices: Sequence[int], nodes: Sequence[NodeRecord]) -> None:
        """The node has its device ids and knows the other nodes."""

    def node_joined(self, node: NodeRecord) -> None:
        """Another node is reachable through its data endpoint."""

    def node_lost(self, name: str, devices: Sequence[int], reason: str) -> None:
        """Another node is gone: whatever waits for its devices fails with a failure of kind ``node``."""

    def open_session(self, session: int) -> None:
        """A session begins, with no values, meshes or templates."""

    def end_session(self, session: int) -> None:
        """The session is over: its queued work is dropped, its waits are abandoned, its values are freed."""

    def define_mesh(self, session: int, record: MeshRecord) -> None:
        """A mesh that templates of the session may name."""

    def define_templates(self, session: int, records: Sequence[TemplateRecord]) -> None:
        """Templates that ops of the session may name."""

    def run(self, session: int, seq: int, words: list[int]) -> None:
        """Op records (see ``dtorch_runtime.ir.stream``); each device runs those of its meshes."""

    def upload(self, message: Upload, data: Any) -> None:
        """A chunk of a value's local piece. ``data`` is valid during the call only."""

    def fetch(self, session: int, request_id: int, value_id: int, device: int) -> None:
        """Report the device's piece of a value once the work before this call is done."""

    def ask(self, session: int, request_id: int, question: Question) -> None:
        """Report the answer to a question; about traces and memory it is that behind the work before this call."""

    def close(self, timeout_s: float) -> None:
        """Stop the workers; called once. Raises ClusterTimeout naming a worker that does not stop."""
