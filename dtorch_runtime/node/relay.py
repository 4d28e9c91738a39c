"""A node's seat in a relay: in which order it takes what comes directly and what is passed on. Decisions only.

See ``dtorch_runtime.controller.fanout`` for what a relay is. Messages are passed on when they arrive, before they are
taken, so that a node which waits for a direct message does not hold up those below it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dtorch_runtime.node.progress import ProtocolBroken
from dtorch_runtime.wire.messages import Message, RelayBeat, RelayBegin, Relayed, RelayEnd, RelayMark

#: Beats of the node above that may be missing before it counts as out of reach.
MAX_SILENT_TICKS = 20
#: Connections of nodes above that are remembered; the present one is the last.
_MAX_PARENTS = 16


@dataclass(frozen=True, slots=True)
class Packet:
    """A message whose turn it is. ``is_relayed`` ones are still encoded: frames are its header and its payload."""

    message: Message | None
    frames: Sequence[Any]
    is_relayed: bool


class Seat:
    """The place of this node in one relay."""

    def __init__(self, begin: RelayBegin, parent: bytes | None) -> None:
        self.relay = begin.relay
        self._position = begin.position
        self.has_parent = begin.has_parent
        self.children = [child.name for child in begin.children]
        #: The connection of the node above; None for a top, and while it is not there yet.
        self.parent = parent
        #: The last number whose turn has come, and the last one that was passed on. taken <= passed while it lasts.
        self._taken = 0
        self.passed = 0
        #: Messages that came directly and whose turn has come.
        self._num_direct = 0
        #: What the last mark said.
        self._mark = 0
        #: number -> what waits for its turn, above ``taken``.
        self._inbox: dict[int, tuple[Relayed, Sequence[Any]]] = {}
        #: (number that comes before it, message, frames), in order of arrival.
        self._direct: deque[tuple[int, Message, Sequence[Any]]] = deque()
        self._num_silent_ticks = 0
        #: The controller was told that this relay does not work.
        self.is_broken = False

    def arrive_direct(self, message: Message, frames: Sequence[Any]) -> None:
        """Something of the controller that is not relayed."""
        self._direct.append((self._mark, message, frames))

    def mark(self, message: RelayMark) -> None:
        """What comes directly from here on comes after a number.

        Raises:
            ProtocolBroken: it is of another relay, or goes back.
        """
        if message.relay != self.relay or message.number < self._mark:
            raise ProtocolBroken(f"a mark {message} came in relay {self.relay} after mark {self._mark}")
        self._mark = message.number

    def arrive_relayed(self, message: Relayed, frames: Sequence[Any], *, is_from_above: bool) -> bool:
        """A number came. Whether it is to be passed on: it is the next one, and not a repetition by the controller.

        ``is_from_above``: it came the way that it should, from the node above or, at the top, from the controller.
        """
        if message.number > self._taken:
            self._inbox.setdefault(message.number, (message, frames))
        if not is_from_above or message.number != self.passed + 1:
            return False
        self.passed = message.number
        return True

    def lacks(self, number: int) -> bool:
        """Whether the node above has passed on what did not come, though it came on the same connection."""
        return number > self.passed

    def ready(self) -> Iterator[Packet]:
        """What has come and whose turn it is, in order. At most one of the two is next, whatever arrived first."""
        direct, inbox = self._direct, self._inbox
        while True:
            if direct and direct[0][0] <= self._taken:
                _, message, frames = direct.popleft()
                self._num_direct += 1
                yield Packet(message, frames, is_relayed=False)
                continue
            waiting = inbox.get(self._taken + 1)
            if waiting is None or waiting[0].after.get(self._position, 0) > self._num_direct:
                return
            del inbox[self._taken + 1]
            self._taken += 1
            if waiting[1]:
                yield Packet(None, waiting[1], is_relayed=True)

    def check_end(self, message: RelayEnd) -> None:
        """The relay is over.

        Raises:
            ProtocolBroken: something is lacking.
        """
        if message.relay != self.relay or self._taken != message.number or self._inbox or self._direct:
            raise ProtocolBroken(
                f"relay {message.relay} ended with number {message.number}, and {self._taken} of relay "
                f"{self.relay} is the last that came"
            )

    def tick(self) -> bool:
        """Some time has passed. Whether the node above has been silent for too long."""
        self._num_silent_ticks += self.has_parent
        return self._num_silent_ticks > MAX_SILENT_TICKS

    def beat(self, message: RelayBeat) -> bool:
        """A sign of life of the node above. Whether something that it passed on did not come."""
        self._num_silent_ticks = 0
        return self.lacks(message.number)

    def validate(self) -> None:
        """Check the invariants that the attributes state."""
        assert all(number > self._taken for number in self._inbox)
        assert self._taken + 1 not in self._inbox or self._direct or self._inbox[self._taken + 1][0].after
        assert all(mark <= self._mark for mark, _, _ in self._direct)


class Doorway:
    """What other nodes have sent on connections of theirs, before and after this node knows that it has a seat."""

    def __init__(self) -> None:
        #: Connection of a node above that has shown the key -> the relay that it said it is of.
        self._parents: dict[bytes, int] = {}
        #: relay -> what came of it before this node was told of it.
        self._early: dict[int, list[tuple[Relayed, Sequence[Any]]]] = {}
        #: The last relay that this node was told of.
        self.last_relay = 0

    def let_in(self, peer: bytes, relay: int) -> None:
        """A node has shown the key."""
        self._parents.pop(peer, None)
        self._parents[peer] = relay
        if len(self._parents) > _MAX_PARENTS:
            del self._parents[next(iter(self._parents))]

    def knows(self, peer: bytes) -> bool:
        """Whether the one at this connection has shown the key."""
        return peer in self._parents

    def keep(self, message: Relayed, frames: Sequence[Any]) -> None:
        """A number of a relay that this node has not heard of. Of one that is over there is nothing to keep."""
        if message.relay > self.last_relay:
            self._early.setdefault(message.relay, []).append((message, frames))

    def begin(self, relay: int) -> tuple[bytes | None, list[tuple[Relayed, Sequence[Any]]]]:
        """This node was told of a relay: who is above it, and what came of it before."""
        self.last_relay = relay
        early = self._early.pop(relay, [])
        self._early = {number: kept for number, kept in self._early.items() if number > relay}
        parent = next((peer for peer, number in self._parents.items() if number == relay), None)
        return parent, early
