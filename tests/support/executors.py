"""A small cluster of executors without controller and agents: what a node agent would tell them, told by a test."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.records import layout_to_record, mesh_to_record
from dtorch_runtime.node.executor import Completed, ExecutorEvent, OpRaised, ValueMissing, ValueReady
from dtorch_runtime.settings import Settings
from dtorch_runtime.transport.endpoint import make_ipc_folder
from dtorch_runtime.wire.messages import Upload
from dtorch_runtime.wire.records import (
    Arg,
    BodyRecord,
    FailureRecord,
    NodeRecord,
    Slot,
    TemplateRecord,
    TransferArg,
)
from dtorch_runtime.worker.blobs import bytes_of, dtype_of, name_of
from dtorch_runtime.worker.executor import WorkerExecutor

SESSION = 1
_WAIT_S = 20.0


@dataclass
class Node:
    """One executor and what it has reported."""

    name: str
    devices: list[int]
    executor: WorkerExecutor
    events: queue.SimpleQueue[ExecutorEvent] = field(default_factory=queue.SimpleQueue)
    failures: list[FailureRecord] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)
    values: dict[tuple[int, int], ValueReady | ValueMissing] = field(default_factory=dict)

    def pump(self) -> None:
        """Take one event in."""
        event = self.events.get(timeout=_WAIT_S)
        match event:
            case Completed(seq=seq):
                self.completed.append(seq)
            case OpRaised(failure=failure):
                self.failures.append(failure)
            case ValueReady() | ValueMissing():
                self.values[event.request_id, event.device] = event


class Rig:
    """Executors that know one another, with one session open on all of them.

    Args:
        nodes: the devices of each node.
        shares_memory: whether nodes exchange through shared memory.
    """

    def __init__(
        self,
        nodes: Sequence[Sequence[int]] = (range(12),),
        *,
        shares_memory: bool = False,
        settings: Settings | None = None,
    ) -> None:
        self._folder = make_ipc_folder()
        settings = settings or Settings(collective_timeout_s=10.0, num_threads=1, chunk_bytes=4096)
        self.nodes: list[Node] = []
        self.records: list[NodeRecord] = []
        for index, devices in enumerate(nodes):
            name = f"n{index}"
            events: queue.SimpleQueue[ExecutorEvent] = queue.SimpleQueue()
            executor = WorkerExecutor(
                settings,
                name,
                "cpu",
                events.put,
                host="here",
                data_endpoint=f"ipc://{self._folder}/{name}" if len(nodes) > 1 else "",
                session_key=b"key",
                shares_memory=shares_memory,
            )
            self.nodes.append(Node(name, list(devices), executor, events))
            self.records.append(NodeRecord(name, "here", 0, "cpu", list(devices), executor.data_endpoint))
        for node in self.nodes:
            others = [record for record in self.records if record.name != node.name]
            node.executor.start(node.devices, others)
            node.executor.open_session(SESSION)
        self._mesh_ids: dict[DeviceMesh, int] = {}
        self._templates: dict[int, TemplateRecord] = {}
        self._num_templates = 0
        self._num_values = 0
        self._num_requests = 0
        self._seq = 0

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for node in self.nodes:
                node.executor.close(5.0)
        finally:
            shutil.rmtree(self._folder)

    # ---- what a client and a controller would send ----

    def mesh_id(self, mesh: DeviceMesh) -> int:
        if mesh not in self._mesh_ids:
            self._mesh_ids[mesh] = len(self._mesh_ids) + 1
            for node in self.nodes:
                node.executor.define_mesh(SESSION, mesh_to_record(mesh, self._mesh_ids[mesh]))
        return self._mesh_ids[mesh]

    def template(
        self,
        op: str,
        *args: Arg,
        inputs: int,
        outputs: int = 1,
        scalars: int = 0,
        meshes: Sequence[DeviceMesh],
        mutates: Sequence[int] = (),
        **kwargs: Arg,
    ) -> int:
        """Define a template on every node; its id."""
        self._num_templates += 1
        record = TemplateRecord(
            template_id=self._num_templates,
            op=op,
            args=list(args),
            kwargs=kwargs,
            num_inputs=inputs,
            num_outputs=outputs,
            num_scalars=scalars,
            mesh_ids=[self.mesh_id(mesh) for mesh in meshes],
            mutates=list(mutates),
        )
        self._templates[self._num_templates] = record
        for node in self.nodes:
            node.executor.define_templates(SESSION, [record])
        return self._num_templates

    def captured(
        self,
        words: Sequence[int],
        inputs: Sequence[int],
        outputs: Sequence[int],
        meshes: Sequence[DeviceMesh],
    ) -> int:
        """Define a template whose body is these records of ops, with values as they stand there; its id.

        Its records have one scalar: from which id on there is room for the values that are no outputs.
        """
        self._num_templates += 1
        numbers = {value: number for number, value in enumerate((*inputs, *outputs), 1)}
        numbers[0] = 0
        num_outer, renamed, i = len(numbers) - 1, list(words), 0
        while i < len(renamed):
            record = self._templates.get(renamed[i])
            stop = i + (2 + renamed[i + 1] if record is None else record.width)
            for place in range(i + 2, stop):
                renamed[place] = numbers.setdefault(renamed[place], len(numbers))
            i = stop
        body = BodyRecord(renamed, len(numbers) - 1 - num_outer)
        mesh_ids = [self.mesh_id(mesh) for mesh in meshes]
        captured = TemplateRecord(
            *(self._num_templates, "dtorch::captured", [], {}, len(inputs), len(outputs), 1, mesh_ids),
            body=body,
        )
        for node in self.nodes:
            node.executor.define_templates(SESSION, [captured])
        return self._num_templates

    def call(self, template: int, inputs: Sequence[int], num_outputs: int) -> list[int]:
        """Run a captured call; its outputs."""
        outputs = [self.new_value() for _ in range(num_outputs)]
        room = self._num_values + 1
        self._num_values += 100
        self.run(template, 0, *inputs, *outputs, room)
        return outputs

    def transfer(self, shape: Sequence[int], dtype: torch.dtype, source: Layout, target: Layout) -> int:
        """Define a redistribution; its template's id."""
        arg = TransferArg(
            list(shape),
            name_of(dtype),
            layout_to_record(source, self.mesh_id(source.mesh)),
            layout_to_record(target, self.mesh_id(target.mesh)),
        )
        meshes = (source.mesh, target.mesh)
        return self.template("dtorch::redistribute", Slot(0), arg, inputs=1, meshes=meshes)

    def new_value(self) -> int:
        self._num_values += 1
        return self._num_values

    def run(self, *words: int) -> int:
        """Send a batch to every node; its seq."""
        self._seq += 1
        for node in self.nodes:
            node.executor.run(SESSION, self._seq, list(words))
        return self._seq

    def op(self, template: int, *inputs: int, location: int = 0, scalars: Sequence[int] = ()) -> int:
        """Run one op with one output; the output."""
        out = self.new_value()
        self.run(template, location, *inputs, out, *scalars)
        return out

    def put(self, pieces: Mapping[int, torch.Tensor], *, chunk_bytes: int = 1 << 20) -> int:
        """Upload a local piece to each device; the value."""
        value = self.new_value()
        for device, piece in pieces.items():
            data = bytes_of(piece)
            for offset in range(0, max(1, data.nbytes), chunk_bytes):
                self._seq += 1
                message = Upload(
                    session=SESSION,
                    seq=self._seq,
                    value_id=value,
                    devices=[device],
                    dtype=name_of(piece.dtype),
                    shape=list(piece.shape),
                    offset_bytes=offset,
                    total_bytes=data.nbytes,
                )
                self.node_of(device).executor.upload(message, data[offset : offset + chunk_bytes])
        return value

    # ---- what comes back ----

    def node_of(self, device: int) -> Node:
        return next(node for node in self.nodes if device in node.devices)

    def fetch(self, value: int, device: int) -> torch.Tensor | FailureRecord:
        """The device's piece, or why there is none."""
        self._num_requests += 1
        node = self.node_of(device)
        node.executor.fetch(SESSION, self._num_requests, value, device)
        while (self._num_requests, device) not in node.values:
            node.pump()
        event = node.values.pop((self._num_requests, device))
        return tensor_of(event) if isinstance(event, ValueReady) else event.failure

    def get(self, value: int, devices: Sequence[int]) -> dict[int, torch.Tensor]:
        """The piece of each device, which must have one."""
        pieces = {}
        for device in devices:
            piece = self.fetch(value, device)
            assert isinstance(piece, torch.Tensor), f"device {device} has no value: {piece}"
            pieces[device] = piece
        return pieces

    def sync(self, seq: int | None = None) -> None:
        """Wait until every node has completed the last message that went to all, or ``seq``."""
        if seq is None:
            seq = self.run()
        for node in self.nodes:
            while seq not in node.completed:
                node.pump()

    @property
    def failures(self) -> list[FailureRecord]:
        """What has been reported so far, by any node."""
        return [failure for node in self.nodes for failure in node.failures]


def tensor_of(event: ValueReady) -> torch.Tensor:
    """The tensor in a report."""
    dtype = dtype_of(event.dtype)
    if not event.data.nbytes:
        return torch.empty(event.shape, dtype=dtype)
    data: Any = bytearray(event.data)
    return torch.frombuffer(data, dtype=dtype).reshape(event.shape)
