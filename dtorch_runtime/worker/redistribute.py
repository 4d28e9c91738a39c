"""Executes the plans of ``ir.transfer``: what each device of this agent gives and builds in each step.

``TransferPlanner`` turns a plan into a ``Transfer``, once for each (shape, dtype, layouts); ``Redistributor`` makes
of it the runner of a template on one device.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from dtorch_runtime.errors import ClusterTimeout, DTorchError
from dtorch_runtime.ir.exchange import Send, Source, Step
from dtorch_runtime.ir.layout import Box, Layout, box_shape, intersect, local_shape, num_elements
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.records import layout_from_record
from dtorch_runtime.ir.transfer import plan_redistribute
from dtorch_runtime.wire.records import TemplateRecord, TransferArg
from dtorch_runtime.worker.assembly import Index, Locate, Recipe, index_of, make_recipe
from dtorch_runtime.worker.blobs import Blob, Poison, dtype_of
from dtorch_runtime.worker.collectives.base import Exchange, Group, Network, ParcelKey, ParcelName, StepKey
from dtorch_runtime.worker.collectives.run_ahead import RunAhead
from dtorch_runtime.worker.failures import InternalFailure, SessionEnded
from dtorch_runtime.worker.kernels import REDISTRIBUTE

#: From this size on each receiver builds its own piece, in parallel; below, waking costs more than computing.
PARALLEL_BYTES = 512 * 1024
#: A way to another thread and back costs as much as an agent needs to move so many times as many bytes among its own
#: devices as come from another agent in that time. Measured where the devices have a core each and none is left for the
#: other way: a training step with 18 all-reduces of 1 MiB took 5 to 7 % longer with 8.
INSIDE_FACTOR = 32
#: Plans kept; a program that makes a new shape at every step would else keep all of them.
_MAX_PLANS = 4096


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A parcel that a device sends to another agent: ``index`` of its piece, named ``parcel`` there."""

    node: str
    parcel: int
    index: Index


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """What one device does in one step. ``recipe`` is set when it needs nothing of others."""

    sends: tuple[Outgoing, ...]
    group: Group | None
    recipe: Recipe | None
    #: Whether it gives something away and does not wait until that has been read.
    gives: bool


@dataclass(frozen=True, eq=False)
class Transfer:
    """A plan as the devices of one agent carry it out."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Layout
    target: Layout
    #: The shape of each source device's piece.
    source_shapes: Mapping[int, tuple[int, ...]]
    steps: tuple[Mapping[int, DeviceStep], ...]
    #: Whether it is large enough to be carried out beside other ops; the same on all devices.
    is_beside: bool

    def made_bytes(self, device: int) -> int:
        """Bytes of a device's new piece."""
        if self.target.mesh.coordinate(device) is None:
            return 0
        return num_elements(local_shape(self.shape, self.target, device)) * self.dtype.itemsize

    def read_bytes(self, device: int) -> int:
        """Bytes of a device's piece of the source."""
        return num_elements(self.source_shapes.get(device, (0,))) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"redistribute {list(self.shape)} from {self.source} to {self.target}"


class TransferPlanner:
    """Plans transfers for the devices of one agent.

    Args:
        node: the agent's own name.
        local: the agent's devices and where their tensors are.
        node_of: the node of every device of the cluster, kept up to date by the owner.
        beside_bytes: from how many bytes on a transfer is carried out beside other ops; 0 for never.
    """

    def __init__(
        self,
        node: str,
        local: Mapping[int, torch.device],
        node_of: Mapping[int, str],
        beside_bytes: int = 0,
    ) -> None:
        self._beside_bytes = beside_bytes
        self._node = node
        self._local = local
        self._node_of = node_of
        self._lock = threading.Lock()
        self._planned: dict[tuple[tuple[int, ...], torch.dtype, Layout, Layout], Transfer] = {}

    def plan(self, shape: Sequence[int], dtype: torch.dtype, source: Layout, target: Layout) -> Transfer:
        """The transfer of a tensor of global ``shape``.

        Raises:
            InternalFailure: a device of the meshes is not of this cluster.
        """
        key = (tuple(shape), dtype, source, target)
        with self._lock:
            found = self._planned.get(key)
            if found is None:
                if len(self._planned) >= _MAX_PLANS:
                    self._planned.clear()
                found = self._planned[key] = self._plan(*key)
        return found

    def of(self, record: TemplateRecord, meshes: Mapping[int, DeviceMesh]) -> Transfer:
        """The transfer that a template of ``dtorch::redistribute`` names.

        Raises:
            InternalFailure: it names none.
        """
        arg = next((arg for arg in record.args if isinstance(arg, TransferArg)), None)
        if arg is None or record.num_inputs != 1 or record.num_outputs != 1:
            raise InternalFailure(f"{REDISTRIBUTE} takes one input, a transfer, and one output")
        source, target = layout_from_record(arg.source, meshes), layout_from_record(arg.target, meshes)
        return self.plan(arg.shape, dtype_of(arg.dtype), source, target)

    def torch_device_of(self, device: int) -> torch.device | None:
        """Where the tensors of a device are; None when it is another agent's."""
        return self._local.get(device)

    def node_of(self, device: int) -> str:
        """The name of the node that has a device.

        Raises:
            InternalFailure: none of this cluster does.
        """
        if device not in self._node_of:
            raise InternalFailure(f"device {device} is of no node of this cluster")
        return self._node_of[device]

    def _plan(self, shape: tuple[int, ...], dtype: torch.dtype, source: Layout, target: Layout) -> Transfer:
        unknown = sorted({*source.mesh.devices, *target.mesh.devices} - self._node_of.keys())
        if unknown:
            raise InternalFailure(f"a transfer names devices {unknown}, which no node of this cluster has")
        steps = plan_redistribute(shape, source, target, itemsize_bytes=dtype.itemsize, node_of=self._node_of)
        shapes = {device: local_shape(shape, source, device) for device in source.mesh.devices}
        held = shapes
        planned = []
        for step in steps:
            planned.append(_StepPlanner(step, held, dtype, self._node, self._local, self._node_of).plan())
            held = {device: part.shape for device, part in step.parts.items()}
        is_beside = self._beside_bytes > 0 and any(
            _is_large(step, dtype.itemsize, self._node_of, self._beside_bytes) for step in steps
        )
        return Transfer(shape, dtype, source, target, shapes, tuple(planned), is_beside)


def _is_large(step: Step, itemsize_bytes: int, node_of: Mapping[int, str], beside_bytes: int) -> bool:
    """Whether some device receives so much in a step that two ways to another thread do not matter."""
    inside: Counter[int] = Counter()
    between: Counter[int] = Counter()
    for (source, device), num_bytes in step.bytes_by_link(itemsize_bytes).items():
        (inside if node_of[source] == node_of[device] else between)[device] += num_bytes
    return (
        max(between.values(), default=0) >= beside_bytes
        or max(inside.values(), default=0) >= INSIDE_FACTOR * beside_bytes
    )


class _StepPlanner:
    """Plans one step: groups of local devices, their recipes, and parcels to and from other agents.

    Args:
        held: the shape of each source device's piece before the step.
    """

    def __init__(
        self,
        step: Step,
        held: Mapping[int, tuple[int, ...]],
        dtype: torch.dtype,
        node: str,
        local: Mapping[int, torch.device],
        node_of: Mapping[int, str],
    ) -> None:
        self._step = step
        self._held = held
        self._dtype = dtype
        self._node = node
        self._local = local
        self._node_of = node_of
        #: The devices whose pieces each destination reads.
        self._used = {
            device: {source.device for piece in part.pieces for source in piece.sources}
            for device, part in step.parts.items()
        }
        self._receivers = [d for d in step.parts if d in local and self._used[d] - {d}]

    def plan(self) -> dict[int, DeviceStep]:
        group_of: dict[int, Group] = {}
        for index, receivers in enumerate(self._components()):
            group = self._group(index, receivers)
            group_of.update(dict.fromkeys((*group.receivers, *group.contributors), group))
        steps = {}
        for device in self._local:
            recipe = None
            if device in self._step.parts and device not in self._receivers:
                recipe = self._recipe(device, self._own_piece)
            sends = tuple(self._outgoing(device))
            if recipe is not None or sends or device in group_of:
                own_group = group_of.get(device)
                gives = bool(sends) or (own_group is not None and device in own_group.snapshots)
                steps[device] = DeviceStep(sends, own_group, recipe, gives)
        return steps

    def _components(self) -> list[list[int]]:
        """Receivers that share a source, directly or through others, or are one another's sources."""
        components: list[tuple[set[int], list[int]]] = []
        for receiver in self._receivers:
            touched = {receiver, *self._used[receiver]}
            members = [receiver]
            separate = []
            for other in components:
                if other[0] & touched:
                    touched |= other[0]
                    members = other[1] + members
                else:
                    separate.append(other)
            components = [*separate, (touched, members)]
        return [members for _, members in components]

    def _group(self, index: int, receivers: Sequence[int]) -> Group:
        step, local, used = self._step, self._local, self._used
        sources = {device for receiver in receivers for device in used[receiver]}
        contributors = frozenset(sources & local.keys())
        snapshots = {
            device: _bounding([send.box for send in step.sends[device] if send.device in receivers])
            for device in contributors
            if device not in receivers
        }
        remote = sorted(sources - local.keys())
        parcels = {device: _parcels(step.sends[device], self._node, self._node_of) for device in remote}

        def locate(source: Source) -> tuple[ParcelName, Box]:
            if source.device in parcels:
                return _find_parcel(source, parcels[source.device])
            if source.device in snapshots:
                return (source.device, 0), snapshots[source.device]
            return self._own_piece(source)

        recipes = {device: self._recipe(device, locate) for device in receivers}
        num_bytes = max(num_elements(recipe.shape) for recipe in recipes.values()) * self._dtype.itemsize
        return Group(
            index=index,
            receivers=recipes,
            contributors=contributors,
            snapshots={device: index_of(box, self._held[device]) for device, box in snapshots.items()},
            remote=tuple((device, number) for device in remote for number in range(len(parcels[device]))),
            is_parallel=bool(remote)
            or any(recipe.torch_device.type != "cpu" for recipe in recipes.values())
            or (num_bytes >= PARALLEL_BYTES and len(receivers) > 1),
            read_by_others=frozenset(
                device for device in receivers if any(device in used[r] for r in receivers if r != device)
            ),
        )

    def _recipe(self, device: int, locate: Locate) -> Recipe:
        step = self._step
        return make_recipe(step.parts[device], step.reduce, locate, self._dtype, self._local[device])

    def _own_piece(self, source: Source) -> tuple[ParcelName, Box]:
        return (source.device, 0), tuple((0, size) for size in self._held[source.device])

    def _outgoing(self, device: int) -> Iterator[Outgoing]:
        sends = self._step.sends.get(device, ())
        for node in dict.fromkeys(self._node_of[send.device] for send in sends):
            if node != self._node:
                for parcel, box in enumerate(_parcels(sends, node, self._node_of)):
                    yield Outgoing(node, parcel, index_of(box, self._held[device]))


def _parcels(sends: Sequence[Send], node: str, node_of: Mapping[int, str]) -> list[Box]:
    """The boxes that a device sends to an agent: each once, and as one where that sends no more bytes."""
    boxes = list(dict.fromkeys(send.box for send in sends if node_of[send.device] == node))
    whole = _bounding(boxes)
    if num_elements(box_shape(whole)) <= sum(num_elements(box_shape(box)) for box in boxes):
        return [whole]
    return boxes


def _find_parcel(source: Source, boxes: Sequence[Box]) -> tuple[ParcelName, Box]:
    for index, box in enumerate(boxes):
        if intersect(source.box, box) == source.box:
            return (source.device, index), box
    raise AssertionError(f"no parcel of {boxes} holds {source}")


def _bounding(boxes: Sequence[Box]) -> Box:
    spans = zip(*boxes, strict=True)
    return tuple((min(a for a, _ in span), max(b for _, b in span)) for span in spans)


class Redistributor:
    """Runs transfers of one agent's devices: what is shared by all of them."""

    def __init__(
        self, planner: TransferPlanner, exchange: Exchange, network: Network | None, run_ahead: RunAhead
    ) -> None:
        self.planner = planner
        self._run_ahead = run_ahead
        self._exchange = exchange
        self._network = network

    def run(
        self,
        transfer: Transfer,
        device: int,
        value: Blob | None,
        session: int,
        value_id: int,
        fail: Callable[[Exception], Poison],
    ) -> Blob | None:
        """One device's part of a transfer. Returns its new piece, or None where it gets none.

        A device that has failed still gives its poison, so that no peer waits for it.

        Args:
            value: the device's piece of the source; None where the source has none on it.
            value_id: the output, which names the transfer to all devices.
            fail: makes the poison of an error, and reports it.

        Raises:
            SessionEnded: the session ended meanwhile.
        """
        if not transfer.steps and isinstance(value, torch.Tensor):
            return value.clone(memory_format=torch.contiguous_format)
        for number, steps in enumerate(transfer.steps):
            step = steps.get(device)
            if step is None:
                value = None
                continue
            key = StepKey(session, value_id, number)
            value = self.take_step(step, key, device, value, transfer, fail)
        return value

    def take_step(
        self,
        step: DeviceStep,
        key: StepKey,
        device: int,
        value: Blob | None,
        what: object,
        fail: Callable[[Exception], Poison],
    ) -> Blob | None:
        """One device's part of one step of ``what``; arguments and result as those of ``run``.

        Raises:
            SessionEnded: the session ended meanwhile.
        """
        if step.gives:
            value = self._give(what, step, key, device, value, fail)
        try:
            result = None
            if step.group is not None:
                result = self._exchange.take_part(key, step.group, device, value, what)
            if step.recipe is not None:
                result = step.recipe.build({} if value is None else {(device, 0): value})
            return result
        except SessionEnded:
            raise
        except Exception as error:  # noqa: BLE001  it becomes the poison of all that depends on it
            return fail(error)

    def _give(
        self,
        what: object,
        step: DeviceStep,
        key: StepKey,
        device: int,
        value: Blob | None,
        fail: Callable[[Exception], Poison],
    ) -> Blob | None:
        """Send what other agents need; what goes wrong becomes poison, for the local peers too."""
        try:
            self._run_ahead.wait_for_room(device, what)
        except ClusterTimeout as error:
            value = fail(error)
        if not step.sends:
            return value
        try:
            self._send(step.sends, key, device, value)
        except Exception as error:  # noqa: BLE001  it becomes the poison of all that depends on it
            value = fail(error)
            # The peers must not wait; when not even this can be sent, their own deadline ends it.
            with suppress(DTorchError, InternalFailure):
                self._send(step.sends, key, device, value)
        return value

    def _send(self, sends: Sequence[Outgoing], key: StepKey, device: int, value: Blob | None) -> None:
        assert value is not None, f"device {device} sends in {key} without a value"
        if self._network is None:
            raise InternalFailure(f"this agent has no data plane and cannot send to node {sends[0].node}")
        for send in sends:
            part = value
            if isinstance(value, torch.Tensor) and send.index is not None:
                part = value[send.index]
            self._network.send(send.node, ParcelKey(*key, device, send.parcel), part)


def check_piece(value: Blob | None, value_id: int, transfer: Transfer, device: int) -> None:
    """Whether a device's piece is what the transfer takes for granted.

    Raises:
        InternalFailure: it is not there, or its shape or dtype is another.
    """
    if value is None:
        raise InternalFailure(f"{transfer} reads value {value_id}, which device {device} does not hold")
    expected = transfer.source_shapes[device]
    if isinstance(value, torch.Tensor) and (value.shape != expected or value.dtype != transfer.dtype):
        raise InternalFailure(
            f"device {device} holds {value.dtype}{list(value.shape)}; {transfer} expects "
            f"{transfer.dtype}{list(expected)} there"
        )
