"""Words and protocols of exchanges.

A *parcel* is a box of the local piece of one source device, or the poison that stands in its place. A *group* is
what the devices of one agent do together in one step of a transfer: its *contributors* give parcels, others come
from the network, and its *receivers* each build a new local piece from them. Devices of an agent that need nothing
of one another are in different groups and do not wait for one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from dtorch_runtime.wire.records import NodeRecord
from dtorch_runtime.worker.assembly import Index, Recipe
from dtorch_runtime.worker.blobs import Blob

#: (source device, which of its parcels for this agent).
ParcelName: TypeAlias = tuple[int, int]


class StepKey(NamedTuple):
    """One step of one transfer: the same on every device, because all of them run the same stream."""

    session: int
    #: The output of the transfer.
    value_id: int
    step: int


class GroupKey(NamedTuple):
    """One group of one step, in one agent."""

    session: int
    value_id: int
    step: int
    group: int


class ParcelKey(NamedTuple):
    """One parcel on its way from a device to an agent."""

    session: int
    value_id: int
    step: int
    device: int
    number: int


@dataclass(frozen=True, eq=False)
class Group:
    """Who takes part in one agent, planned once for each transfer.

    A contributor that receives nothing does not wait: it gives a copy of ``snapshots[device]`` of its piece, and
    goes on. One that receives gives its memory itself, and stays until nobody reads from it.
    """

    index: int
    receivers: Mapping[int, Recipe]
    contributors: frozenset[int]
    snapshots: Mapping[int, Index]
    #: Parcels that come from other agents.
    remote: tuple[ParcelName, ...]
    #: Each receiver builds for itself, in parallel; otherwise the last contributor builds for all.
    #: Kernels of CUDA devices run in the stream of the thread that launches them, so these build for themselves.
    is_parallel: bool
    #: Contributors that receive, and whose memory another receiver of the group reads.
    read_by_others: frozenset[int]


class Exchange(Protocol):
    """Among the devices of one agent, with what the network brings."""

    def take_part(
        self, key: StepKey, group: Group, device: int, value: Blob | None, what: object
    ) -> Blob | None:
        """Called once by each contributor and receiver. Returns the receiver's new piece, else None.

        Args:
            value: the device's local piece; None where it has none.
            what: its text names the transfer in the error of a wait that passes its deadline.

        Raises:
            SessionEnded: the session ended meanwhile.
            ClusterTimeout: naming who did not come.
            Exception: what building the piece raised.
        """

    def deposit(self, key: ParcelKey, value: Blob) -> None:
        """A parcel has come from another agent. Called from the network's thread; does not block."""

    def lose(self, node: str, devices: Sequence[int], reason: str) -> None:
        """Parcels of these devices will not come any more: poison stands in their place."""

    def begin(self, session: int) -> None:
        """A session with this number begins."""

    def abort(self, session: int) -> None:
        """Wakes whoever waits for this session with SessionEnded, and forgets its parcels."""


class Mail(Protocol):
    """Parcels that lie ready and that nobody brings: whoever needs one collects them, and waits for the next."""

    def collect(self, num_rung: int = 0) -> None:
        """Deposit all that is there; ``num_rung`` of them were waited for."""

    def wait(self, deadline_s: float) -> bool:
        """Block until something may be there, on one thread at a time; False at the deadline or at a signal."""

    def ring(self) -> None:
        """Wake the one who waits."""


class Network(Protocol):
    """From this agent to others."""

    @property
    def mail(self) -> Mail | None:
        """Where parcels also come, if they do."""

    @property
    def endpoint(self) -> str:
        """Where other agents connect to."""

    def connect(self, record: NodeRecord) -> None:
        """Another agent can be sent to from now on."""

    def disconnect(self, node: str) -> None:
        """Another agent is gone; what is sent to it is dropped."""

    def send(self, node: str, key: ParcelKey, value: Blob) -> None:
        """Hand over a parcel; the caller may write to ``value`` as soon as this returns."""

    def sent_bytes(self) -> dict[str, int]:
        """Bytes of tensors that were sent to each other agent that is connected."""

    def close(self, timeout_s: float) -> None:
        """Send what is queued for at most ``timeout_s``, and end. Raises ClusterTimeout."""
