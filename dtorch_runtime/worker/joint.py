"""A captured call for all devices of an agent at once, in one thread.

Threads of one process share an interpreter lock, so two that run small kernels get in each other's way: an op of some
microseconds takes several times as long, and a redistribution costs two wake-ups. Where all devices of a body are CPU
devices of one agent, they can instead meet at the call: the last to arrive runs each step for all of them in turn, and
a redistribution becomes a plain sum or copy. Large kernels are better off on threads of their own, which run at once.
The first call runs op by op and is weighed (``costs``); that decides for all others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from dtorch_runtime.ir.body import BodyOp, Step, expand
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.wire.records import TemplateRecord
from dtorch_runtime.worker.assembly import Index, Recipe
from dtorch_runtime.worker.blobs import Blobs, Poison
from dtorch_runtime.worker.bodies import BodyDevice, CompiledBody, Interrupted, JointMover
from dtorch_runtime.worker.collectives.base import ParcelName
from dtorch_runtime.worker.costs import Way, Weight, choose, joint_us, kernel_us
from dtorch_runtime.worker.failures import SessionEnded
from dtorch_runtime.worker.kernels import EXCHANGE_ROWS, REDISTRIBUTE
from dtorch_runtime.worker.redistribute import DeviceStep, Transfer, TransferPlanner, check_piece

#: Runs a call op by op, given its record, and returns what it did.
Weigh: TypeAlias = Callable[[list[int], int], Weight]


class Stopped(Exception):
    """A call that was run jointly stopped; the device goes on by itself."""

    def __init__(self, at: Interrupted) -> None:
        self.at = at


@dataclass(eq=False, slots=True)
class _Call:
    """The devices' meeting at one call.

    Attributes:
        num_missing: devices that have yet to arrive.
        num_inside: devices that have yet to leave.
        is_joint: whether the last to arrive runs it for all. False, too, when somebody waited for it too long.
        stopped: where each device goes on, when something was raised.
    """

    num_missing: int
    num_inside: int
    is_joint: bool = True
    stopped: Sequence[Interrupted] | None = None
    waiters: list[threading.Lock] = field(default_factory=list)

    def wake(self) -> None:
        """Let those go on who wait."""
        for waiter in self.waiters:
            waiter.release()
        self.waiters.clear()


class JointBody:
    """The meetings of the devices of one agent at the calls of one template. Each device has a ``JointMember``.

    Args:
        num_devices: that take part.
        timeout_s: how long a device waits for the others before it runs the call by itself.
        compile_joint: makes the body for all of them; called when all have arrived.
    """

    def __init__(
        self,
        num_devices: int,
        timeout_s: float,
        compile_joint: Callable[[], CompiledBody],
    ) -> None:
        self._num_devices = num_devices
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._compile = compile_joint
        #: By device, what the first call was.
        self._weights: dict[int, Weight] = {}
        #: None until everybody has weighed the first call.
        self._way: Way | None = None
        #: What a call takes for all, about.
        self._us = 0.0
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        #: By device: how many calls it has arrived at.
        self._num_calls = [0] * num_devices
        self._body: CompiledBody | None = None
        self._is_ended = False

    def forget(self) -> None:
        """The devices keep their values elsewhere now."""
        self._body = None

    def end(self) -> None:
        """Wake whoever waits with SessionEnded."""
        with self._lock:
            self._is_ended = True
            for call in self._calls.values():
                call.wake()

    @property
    def is_apart(self) -> bool:
        """Whether nobody needs to come to calls any more."""
        return self._way is Way.APART

    def ready_us(self) -> float | None:
        """What a call takes for all in one thread, about; None when it does not run so, or is not ready to."""
        return self._us if self._way is Way.JOINT and self._body is not None else None

    def run_idle(self, words: list[int], i: int) -> bool:
        """Run the next call for all devices, none of which is at work: on any thread, when ``ready_us`` says so.

        False when something was raised. Each device is then to come to the call, and goes on by itself.
        """
        call = _Call(0, self._num_devices)
        self._run(call, words, i)
        if call.stopped is None:
            self._num_calls = [number + 1 for number in self._num_calls]
            return True
        self._calls[self._num_calls[0]] = call
        return False

    def weighed(self, index: int, weight: Weight) -> None:
        """What a device did in the first call, which it has run by itself."""
        with self._lock:
            self._weights[index] = weight

    def arrive(self, index: int, words: list[int], i: int) -> _Call:
        """Meet the others at the next call. When this returns, it has been run, or is to be run apart.

        Raises:
            SessionEnded: the session ended meanwhile.
        """
        waiter = None
        with self._lock:
            if self._is_ended:
                raise SessionEnded
            number = self._num_calls[index]
            self._num_calls[index] += 1
            call = self._calls.get(number)
            if call is None:
                call = self._calls[number] = _Call(self._num_devices, self._num_devices)
            elif call.num_missing == 0:
                return call  # it was run while nobody was at work
            call.num_missing -= 1
            if call.num_missing == 0:
                self._decide(call)
            elif call.is_joint:
                waiter = threading.Lock()
                waiter.acquire()
                call.waiters.append(waiter)
        if waiter is not None:
            self._wait(call, waiter)
        elif call.num_missing == 0 and call.is_joint:
            self._run(call, words, i)
        return call

    def _decide(self, call: _Call) -> None:
        if self._way is None:
            weights = [self._weights.pop(index) for index in range(self._num_devices)]
            self._way = choose(weights, len(os.sched_getaffinity(0)))
            self._us = joint_us(weights)
        if self._way is Way.APART:
            call.is_joint = False
        if not call.is_joint:
            call.wake()

    def _wait(self, call: _Call, waiter: threading.Lock) -> None:
        while not waiter.acquire(timeout=self._timeout_s):
            with self._lock:
                if call.num_missing and waiter.locked():  # else somebody has begun to run it for this device
                    call.is_joint = False
                    call.wake()
        if self._is_ended:
            raise SessionEnded

    def _run(self, call: _Call, words: list[int], i: int) -> None:
        body = self._body
        try:
            if body is None:
                body = self._body = self._compile()
            body.run(words, i)
        except Exception as error:  # noqa: BLE001  whatever a kernel raises is the failure of its op
            found = None if body is None else body.interrupted(error)
            call.stopped = found or [Interrupted(0, {}, None)] * self._num_devices
        with self._lock:
            call.wake()

    def leave(self, index: int, call: _Call) -> None:
        """A device has finished with a call."""
        with self._lock:
            call.num_inside -= 1
            if call.num_inside == 0:
                del self._calls[self._num_calls[index] - 1]


class JointMember:
    """One device's part in a ``JointBody``: runs as a body does.

    Args:
        apart: the body of the device alone.
        weigh: runs the body op by op: a runner that returns what it did.
    """

    def __init__(self, joint: JointBody, index: int, apart: CompiledBody, width: int, weigh: Weigh) -> None:
        self._joint = joint
        self._index = index
        self._apart = apart
        self._width = width
        self.steps: Sequence[Step] = apart.steps
        self._weigh: Weigh | None = weigh

    def run(self, words: list[int], i: int) -> int:
        """A runner."""
        joint, index = self._joint, self._index
        if joint.is_apart:
            return self._apart.run(words, i)
        if self._weigh is not None:
            joint.weighed(index, self._weigh(words, i))
            self._weigh = None
            return i + self._width
        call = joint.arrive(index, words, i)
        try:
            if not call.is_joint:
                return self._apart.run(words, i)
            if call.stopped is not None:
                raise Stopped(call.stopped[index])
            return i + self._width
        finally:
            joint.leave(index, call)

    def interrupted(self, error: Exception) -> Sequence[Interrupted] | None:
        """As that of ``CompiledBody``, of the one device."""
        return [error.at] if isinstance(error, Stopped) else self._apart.interrupted(error)


class HasBodyDevice(Protocol):
    """What a session holds on a device."""

    @property
    def body_device(self) -> BodyDevice:
        """The device as captured calls see it."""


def weigh(
    record: TemplateRecord,
    steps: Sequence[Step],
    blobs: Blobs,
    run: Callable[[list[int]], None],
    words: list[int],
    i: int,
) -> Weight:
    """Run a captured call on one device op by op, and say what it did.

    Args:
        blobs: the values on the device.
        run: runs records of ops.
    """

    def tensors(values: Iterable[int]) -> list[torch.Tensor]:
        found = (blobs.get(ids[value]) for value in values)
        return [blob for blob in found if isinstance(blob, torch.Tensor)]

    expanded, starts, ids = expand(record, steps, words, i)
    kernels_us, num_moves = [], 0
    for step, start, stop in zip(steps, starts, (*starts[1:], len(expanded)), strict=True):
        inputs = tensors(step.inputs) if isinstance(step, BodyOp) else []
        run(expanded[start:stop])
        if isinstance(step, BodyOp):
            outputs = tensors(step.outputs)
            if step.template.op == REDISTRIBUTE:
                num_moves += 1
            elif inputs or outputs:
                kernels_us.append(kernel_us(step.template.op, inputs, outputs))
    for value_id in ids[1 + record.num_inputs + record.num_outputs :]:
        blobs.pop(value_id, None)
    return Weight(kernels_us, num_moves)


class JointBodies:
    """The joint bodies of a session in one agent.

    Args:
        timeout_s: how long a device waits for the others at a call.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        #: By template. They are added to while the agent's loop looks one up.
        self.bodies: dict[int, JointBody] = {}
        self._is_ended = False

    def join(
        self,
        record: TemplateRecord,
        apart: CompiledBody,
        device: int,
        here: Mapping[int, HasBodyDevice],
        meshes: Mapping[int, DeviceMesh],
        planner: TransferPlanner,
        weigh: Weigh,
    ) -> JointMember | None:
        """A device's part in running a captured call for all its devices at once; None where that cannot be.

        Args:
            apart: the body of the device alone.
            here: what the session holds on the devices of this agent.

        Raises:
            SessionEnded: the session has ended.
        """
        devices = sorted({device for mesh_id in record.mesh_ids for device in meshes[mesh_id].devices})
        if len(devices) < 2 or not here.keys() >= set(devices):
            return None
        members = [here[number] for number in devices]
        if any(not _can_take_turns(member.body_device) for member in members):
            return None
        templates = [step.template for step in apart.steps if isinstance(step, BodyOp)]
        if any(template.op == EXCHANGE_ROWS for template in templates):
            return None  # its devices meet inside of it
        transfers = {
            template.template_id: planner.of(template, meshes)
            for template in templates
            if template.op == REDISTRIBUTE
        }
        movers = {number: joint_mover(transfer, devices) for number, transfer in transfers.items()}
        if None in movers.values():
            return None

        def find(template: TemplateRecord) -> tuple[JointMover, Sequence[int], Sequence[int]]:
            transfer, mover = transfers[template.template_id], movers[template.template_id]
            assert mover is not None
            return mover, _indices(transfer.source.mesh, devices), _indices(transfer.target.mesh, devices)

        def compile_joint() -> CompiledBody:
            turns = [member.body_device for member in members]
            return CompiledBody(record, apart.steps, meshes, turns, find_joint_mover=find)

        with self._lock:
            if self._is_ended:
                raise SessionEnded
            joint = self.bodies.get(record.template_id)
            if joint is None:
                joint = JointBody(len(devices), self._timeout_s, compile_joint)
                self.bodies[record.template_id] = joint
        return JointMember(joint, devices.index(device), apart, record.width, weigh)

    def forget(self) -> None:
        """The devices keep their values elsewhere now."""
        with self._lock:
            for body in self.bodies.values():
                body.forget()

    def end(self) -> None:
        """Wake whoever waits with SessionEnded."""
        with self._lock:
            self._is_ended = True
            bodies = list(self.bodies.values())
        for body in bodies:
            body.end()


def _can_take_turns(device: BodyDevice) -> bool:
    """A GPU's kernels run at the same time as another's whoever launches them; counted ones are looked at singly."""
    return device.torch_device.type == "cpu" and device.ledger is None


def _indices(mesh: DeviceMesh, devices: Sequence[int]) -> list[int]:
    return [index for index, device in enumerate(devices) if mesh.coordinate(device) is not None]


def joint_mover(transfer: Transfer, devices: Sequence[int]) -> JointMover | None:
    """Carries out a transfer among devices of one agent in one thread; None when others take part in it.

    Args:
        devices: in the order of the pieces that the mover takes and returns.
    """
    steps = [_joint_step(step, devices) for step in transfer.steps]
    if None in steps:
        return None

    def move(values: Sequence[Any]) -> Sequence[Any]:
        for value, device in zip(values, devices, strict=True):
            if value is not None:
                check_piece(value, 0, transfer, device)
        if not steps:
            return [_copy(value) for value in values]
        for step in steps:
            assert step is not None
            values = step(values)
        return values

    return move


def _copy(value: Any) -> Any:
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True, eq=False)
class _JointStep:
    """One step of a transfer for all devices.

    Attributes:
        given: by contributor, its index and what is cut out of its piece.
        built: in order: the receiver's index, its recipe, and the index of a receiver whose new piece equals it.
        own: the index of a device that needs nothing of others, the device, and its recipe.
    """

    given: Sequence[tuple[ParcelName, int, Index]]
    built: Sequence[tuple[int, Recipe, int | None]]
    own: Sequence[tuple[int, ParcelName, Recipe]]
    num_devices: int

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        parcels = {}
        for name, index, cut in self.given:
            value = values[index]
            parcels[name] = value if cut is None or type(value) is Poison else value[cut]
        results: list[Any] = [None] * self.num_devices
        for index, recipe, twin in self.built:
            results[index] = recipe.build(parcels) if twin is None else _copy(results[twin])
        for index, name, recipe in self.own:
            results[index] = recipe.build({name: values[index]})
        return results


def _joint_step(step: Mapping[int, DeviceStep], devices: Sequence[int]) -> _JointStep | None:
    index_of = {device: index for index, device in enumerate(devices)}
    groups = {part.group for part in step.values() if part.group is not None}
    members = {device for group in groups for device in (*group.contributors, *group.receivers)}
    if not {*step, *members} <= index_of.keys() or any(group.remote for group in groups):
        return None
    if any(part.sends for part in step.values()):
        return None
    given = [
        ((device, 0), index_of[device], group.snapshots.get(device))
        for group in groups
        for device in group.contributors
    ]
    built: list[tuple[int, Recipe, int | None]] = []
    for group in groups:
        first: tuple[int, Recipe] | None = None
        for device, recipe in group.receivers.items():
            twin = first[0] if first is not None and recipe.same_as(first[1]) else None
            first = first or (index_of[device], recipe)
            built.append((index_of[device], recipe, twin))
    own = [
        (index_of[device], (device, 0), part.recipe)
        for device, part in step.items()
        if part.recipe is not None
    ]
    return _JointStep(given, built, own, len(devices))
