"""Plain records inside messages: meshes, placements, templates and their arguments, failures.

An argument of a template is a msgpack scalar or one of the tagged structs below.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class PlacementRecord(msgspec.Struct, frozen=True, array_like=True):
    """One placement. ``kind`` is R, S or P; ``dim`` and ``unit`` belong to S, ``op`` to P."""

    kind: str
    dim: int = 0
    unit: int = 1
    op: str = "sum"


class MeshRecord(msgspec.Struct, frozen=True, array_like=True):
    """A mesh, named by a number from then on. ``devices`` are cluster-wide ids in row-major order."""

    mesh_id: int
    device_type: str
    shape: list[int]
    devices: list[int]


class LayoutRecord(msgspec.Struct, frozen=True, array_like=True):
    """A mesh and one placement for each of its axes."""

    mesh_id: int
    placements: list[PlacementRecord]


class Slot(msgspec.Struct, frozen=True, tag="slot", tag_field="t"):
    """The i-th input tensor of the op."""

    index: int


class ScalarSlot(msgspec.Struct, frozen=True, tag="scalar", tag_field="t"):
    """The i-th int64 that the op record carries after its outputs (a seed, a size)."""

    index: int


class DTypeArg(msgspec.Struct, frozen=True, tag="dtype", tag_field="t"):
    """``torch.<name>``."""

    name: str


class LayoutArg(msgspec.Struct, frozen=True, tag="layout", tag_field="t"):
    """A ``torch.layout`` by name, e.g. ``strided``."""

    name: str


class MemoryFormatArg(msgspec.Struct, frozen=True, tag="memory_format", tag_field="t"):
    """A ``torch.memory_format`` by name, e.g. ``contiguous_format``."""

    name: str


class DeviceArg(msgspec.Struct, frozen=True, tag="device", tag_field="t"):
    """The device on which the worker runs."""


class ComplexArg(msgspec.Struct, frozen=True, tag="complex", tag_field="t"):
    """A Python complex number."""

    real: float
    imag: float


class ListArg(msgspec.Struct, frozen=True, tag="list", tag_field="t"):
    """A list of arguments; its own struct, because the decoder has no untagged recursive types."""

    items: list[Arg]


class LocalShape(msgspec.Struct, frozen=True, tag="local_shape", tag_field="t"):
    """The shape of the local piece of a tensor of global ``shape`` under ``layout``; a list of ints."""

    shape: list[int]
    layout: LayoutRecord


class LocalStart(msgspec.Struct, frozen=True, tag="local_start", tag_field="t"):
    """Where, in dim ``dim`` of the global tensor, the local piece starts; an int."""

    shape: list[int]
    layout: LayoutRecord
    dim: int


class TransferArg(msgspec.Struct, frozen=True, tag="transfer", tag_field="t"):
    """The plan that brings a tensor of global ``shape`` and ``dtype`` from one layout to another."""

    shape: list[int]
    dtype: str
    source: LayoutRecord
    target: LayoutRecord


class RegionStep(msgspec.Struct, frozen=True, array_like=True):
    """An op in a region, with one result. ``inputs`` are values of the region, which slots of ``args`` index."""

    op: str
    args: list[Arg]
    kwargs: dict[str, Arg]
    inputs: list[int]


class RegionArg(msgspec.Struct, frozen=True, tag="region", tag_field="t"):
    """Several ops as one. Its values are the op's inputs from 0, then the result of each step.

    ``outputs`` are the values that are the op's results.
    """

    steps: list[RegionStep]
    outputs: list[int]


#: What stands in an argument place.
Arg: TypeAlias = (
    bool
    | int
    | float
    | str
    | ListArg
    | Slot
    | ScalarSlot
    | DTypeArg
    | LayoutArg
    | MemoryFormatArg
    | DeviceArg
    | ComplexArg
    | LocalShape
    | LocalStart
    | TransferArg
    | RegionArg
    | None
)


class BodyRecord(msgspec.Struct, frozen=True, array_like=True):
    """The ops that one template stands for: an op stream whose ids are numbers of the body's own.

    Values are numbered from 1: the inputs of the template, its outputs, then ``num_inner`` that nobody outside sees.
    A scalar is the index of one of the template's; its first, at index 0, is not a scalar of any op but the id of
    the first inner value of this call, so that every call has ids of its own. FREE records name inner values.
    """

    words: list[int]
    num_inner: int


class TemplateRecord(msgspec.Struct, frozen=True, array_like=True):
    """An op with everything but its value ids.

    ``op`` is ``namespace::name.overload`` (``aten::add.Tensor``; ``dtorch::...`` for our own kernels).
    ``mesh_ids`` name the meshes whose devices take part (two for a transfer between meshes).
    ``mutates`` lists the inputs that the op writes to; a mutated input that the op returns is no output.
    ``views`` says for each output which input's memory it lies in, -1 for memory of its own; None: not known.
    ``fits`` lists inputs that are as the only output: of its shape, dtype, placements and strides, row by row.
    With a ``body`` it stands for many ops, which were captured; ``args`` and ``kwargs`` are empty then.
    """

    template_id: int
    op: str
    args: list[Arg]
    kwargs: dict[str, Arg]
    num_inputs: int
    num_outputs: int
    num_scalars: int
    mesh_ids: list[int]
    mutates: list[int] = []
    body: BodyRecord | None = None
    views: list[int] | None = None
    fits: list[int] = []

    @property
    def width(self) -> int:
        """Number of int64 in an op record of this template."""
        return 2 + self.num_inputs + self.num_outputs + self.num_scalars


class LiveValueRecord(msgspec.Struct, frozen=True, array_like=True):
    """Memory that values of one device share, and the first of them: its id, and the op that made it.

    ``op`` is empty where the worker does not know it: then the client may.
    """

    value_id: int
    num_bytes: int
    num_values: int
    op: str = ""
    location_id: int = 0


class DeviceMemoryRecord(msgspec.Struct, frozen=True, array_like=True):
    """What the values of a session hold on one device. Memory that several share counts once.

    ``peak_bytes`` is -1 when it is not measured, ``limit_bytes`` 0 when there is none. ``largest`` comes first.
    """

    device: int
    current_bytes: int
    peak_bytes: int
    limit_bytes: int
    num_values: int
    largest: list[LiveValueRecord]


class ShortageRecord(msgspec.Struct, frozen=True, array_like=True):
    """Why an op found no memory: what it asked for, and what the values of the device hold.

    ``asked_bytes`` is -1 when the allocator did not say. ``value_id`` is the first value that it was to make, or 0.
    ``other_bytes`` are held by other sessions, as far as a limit counts them.
    """

    asked_bytes: int
    other_bytes: int
    value_id: int
    held: DeviceMemoryRecord


class FailureRecord(msgspec.Struct, frozen=True, array_like=True):
    """Why a value does not exist. ``kind`` is op (a kernel raised), node (a node is lost) or internal.

    ``failure_id`` is equal wherever the same failure arrives, so that it is reported once. ``shortage`` is there when
    the op found no memory, ``other_location_id`` (else 0) when the message names another op.
    """

    kind: str
    failure_id: str
    op: str
    location_id: int
    device: int
    node: str
    error_type: str
    message: str
    traceback: str
    shortage: ShortageRecord | None = None
    other_location_id: int = 0


class AskClock(msgspec.Struct, frozen=True, tag="ask_clock", tag_field="t"):
    """What time is it? Answered with a ``ClockReply``."""


class StartTrace(msgspec.Struct, frozen=True, tag="start_trace", tag_field="t"):
    """Note what the session's work takes from now on, the last ``max_spans`` spans of each lane.

    Answered with a ``ClockReply``. Workers begin behind the work that they have.
    """

    max_spans: int


class StopTrace(msgspec.Struct, frozen=True, tag="stop_trace", tag_field="t"):
    """Note no more. Answered with a ``TraceReply``, by workers behind the work that they have."""


class AskCounts(msgspec.Struct, frozen=True, tag="ask_counts", tag_field="t"):
    """How much has moved? Answered with a ``CountsReply``."""


class AskMemory(msgspec.Struct, frozen=True, tag="ask_memory", tag_field="t"):
    """What do the session's values hold? Answered with a ``MemoryReply``, by devices behind the work that they have.

    ``num_largest`` values are told a device at most. ``peak`` is "keep"; "reset" to measure it from now on; or "stop".
    """

    num_largest: int
    peak: str


#: What a client can ask the controller and all nodes.
Question: TypeAlias = AskClock | StartTrace | StopTrace | AskCounts | AskMemory


class LaneRecord(msgspec.Struct, frozen=True, array_like=True):
    """What one thread did. ``kind`` is controller, node, worker, communication or copy (a device's other workers);
    ``device`` is a worker's, else -1.

    ``spans`` are int64, five a span: what, detail, start and end on the clock of ``ClockReply``, extra. In the lanes
    of the controller and of nodes they are: index into ``names``, seq or request id, ..., bytes of the payload. In
    those of workers: template id, location id, ..., 1 when the op failed; or -1, seq, ..., 0 for a whole batch; or -2,
    location id, ..., 0 for a wait of this op for transfers beside it; or -3 and -4, 0, ..., 1 when it failed, for a
    value that came from the client or went to it.
    """

    kind: str
    device: int
    names: list[str]
    num_dropped: int
    spans: bytes
    #: Those that a worker's spans name and that have no body: passes make some that the client does not know.
    templates: list[TemplateRecord] = []


class ClockReply(msgspec.Struct, frozen=True, tag="clock", tag_field="t"):
    """``time.monotonic_ns()`` of the process that answers."""

    clock_ns: int


class TraceReply(msgspec.Struct, frozen=True, tag="trace", tag_field="t"):
    """The lanes of the process that answers."""

    lanes: list[LaneRecord]


class ThreadsRecord(msgspec.Struct, frozen=True, array_like=True):
    """How a node divides its cores: so many intra-op threads for each of its workers that were started.

    ``num_cores`` are this node's share of its machine, which it divides with the other nodes there; ``is_fixed`` says
    that the setting ``num_threads`` was given instead.
    """

    num_cores: int
    num_workers: int
    num_threads: int
    is_fixed: bool


class CountsReply(msgspec.Struct, frozen=True, tag="counts", tag_field="t"):
    """Bytes of tensors that the node has sent to other nodes since it joined, by their names, and its threads."""

    sent_bytes: dict[str, int]
    #: None from a process without workers.
    threads: ThreadsRecord | None = None


class MemoryReply(msgspec.Struct, frozen=True, tag="memory", tag_field="t"):
    """What the session's values hold, for each device of the node."""

    devices: list[DeviceMemoryRecord]


Reply: TypeAlias = ClockReply | TraceReply | CountsReply | MemoryReply


class NodeRecord(msgspec.Struct, frozen=True, array_like=True):
    """A node as others see it. ``devices`` are its cluster-wide ids; ``data_endpoint`` its data plane."""

    name: str
    host: str
    pid: int
    device_type: str
    devices: list[int]
    data_endpoint: str
