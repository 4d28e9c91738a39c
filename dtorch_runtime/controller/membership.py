"""Which nodes there are, and which device ids they have. Decisions only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtorch_runtime.ir.mesh import DEVICE_TYPES
from dtorch_runtime.wire.messages import NodeHello
from dtorch_runtime.wire.records import NodeRecord

_MAX_NAME_CHARACTERS = 100
_MAX_DEVICES = 4096


class JoinRefused(Exception):
    """The node cannot join; the text is what it is told."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node agent, from its hello to its end. A node that comes back is another one with another number."""

    #: Counted from 1, never reused.
    number: int
    peer: int
    record: NodeRecord

    @property
    def name(self) -> str:
        return self.record.name


class Membership:
    """The nodes that are alive, and the device ids that each name ever had."""

    def __init__(self) -> None:
        #: node number -> node, alive only.
        self._nodes: dict[int, Node] = {}
        #: Every name that ever joined, with the ids that it last had. Ids of different names never overlap.
        self._ids_by_name: dict[str, tuple[int, ...]] = {}
        self._num_joined = 0
        #: Ids are given in rising order and never to another name.
        self._next_device = 0

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, number: int) -> Node | None:
        """A node that is alive."""
        return self._nodes.get(number)

    def named(self, name: str) -> Node | None:
        """The node of this name, if it is alive."""
        return next((node for node in self._nodes.values() if node.name == name), None)

    def join(self, peer: int, hello: NodeHello) -> Node:
        """Number the devices of a new node: contiguous, in the order of joining.

        A node that comes back under its name with as many devices gets the ids that it had.

        Raises:
            JoinRefused: a name that is in use or cannot be one, or an impossible number or type of devices.
        """
        _check(hello)
        if self.named(hello.name) is not None:
            raise JoinRefused(f"a node named {hello.name!r} is already there; give this one another name")
        devices = self._ids_by_name.get(hello.name)
        if devices is None or len(devices) != hello.num_devices:
            devices = tuple(range(self._next_device, self._next_device + hello.num_devices))
            self._next_device += hello.num_devices
        self._ids_by_name[hello.name] = devices
        self._num_joined += 1
        record = NodeRecord(
            name=hello.name,
            host=hello.host,
            pid=hello.pid,
            device_type=hello.device_type,
            devices=list(devices),
            data_endpoint=hello.data_endpoint,
        )
        node = self._nodes[self._num_joined] = Node(self._num_joined, peer, record)
        return node

    def leave(self, number: int) -> Node:
        """Forget a node that is alive. Its name keeps its ids."""
        return self._nodes.pop(number)

    def records(self, *, without: int | None = None) -> list[NodeRecord]:
        """The nodes as others see them."""
        return [node.record for node in self._nodes.values() if node.number != without]

    def validate(self) -> None:
        """Check the invariants that the attributes state."""
        names = [node.name for node in self._nodes.values()]
        assert len(set(names)) == len(names), f"two live nodes have one name: {names}"
        devices = [device for node in self._nodes.values() for device in node.record.devices]
        assert len(set(devices)) == len(devices), f"two live nodes have one device: {devices}"
        assert all(0 <= device < self._next_device for device in devices)
        assert all(number <= self._num_joined for number in self._nodes)


def _check(hello: NodeHello) -> None:
    if not 0 < hello.num_devices <= _MAX_DEVICES:
        raise JoinRefused(
            f"a node has 1 to {_MAX_DEVICES} devices, {hello.name!r} came with {hello.num_devices}"
        )
    if hello.device_type not in DEVICE_TYPES:
        raise JoinRefused(f"device_type is one of {', '.join(DEVICE_TYPES)}, got {hello.device_type!r}")
    if not 0 < len(hello.name) <= _MAX_NAME_CHARACTERS or not hello.name.isprintable() or " " in hello.name:
        raise JoinRefused(
            f"a node's name is 1 to {_MAX_NAME_CHARACTERS} printable characters without spaces, got {hello.name!r}"
        )
