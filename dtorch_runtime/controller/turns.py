"""Which session's messages go on to the nodes now, so that one that floods them starves no other. Decisions only.

Nodes run what they are sent in the order in which it comes, which is the same everywhere: two collectives in different
orders would wait for each other. So what a session waits for is what others have at the nodes already, and that is
bounded here: while there are several sessions, each may have so many ops at the nodes, and the rest of its messages
waits in line, as it came. One batch may always go, however large. A session that is alone is bounded by its credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from dtorch_runtime.wire.messages import Message, Ops

#: A message, and its payload frames.
Waiting = tuple[Message, Sequence[Any]]


class Flow(Protocol):
    """What takes turns: a session."""

    number: int

    @property
    def num_ops_at_nodes(self) -> int:
        """Ops that were sent to nodes and are not done at all of them."""


class Turns:
    """The lines of all sessions.

    Args:
        window_ops: ops that a session may have at the nodes while there is another one.
        flows: the live sessions, by number.
    """

    def __init__(self, window_ops: int, flows: Mapping[int, Flow]) -> None:
        self._window_ops = window_ops
        self._flows = flows
        #: session -> its messages that wait, in order; never empty. In the order in which they get their turns.
        self._lines: dict[int, deque[Waiting]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._lines

    def num_waiting(self, number: int) -> int:
        """Messages of a session that wait."""
        return len(self._lines.get(number, ()))

    def hold(self, flow: Flow, message: Message, frames: Sequence[Any]) -> bool:
        """Keep a message if it is not its turn. What follows one that is kept is kept behind it."""
        line = self._lines.get(flow.number)
        if line is None:
            if len(self._flows) < 2 or self._may_go(flow, message):
                return False
            line = self._lines[flow.number] = deque()
        line.append((message, frames))
        return True

    def forget(self, number: int) -> None:
        """A session is over."""
        self._lines.pop(number, None)

    def next_ones(self) -> Iterator[tuple[int, Waiting]]:
        """Take out what may go now, one message of each session in turn. Each must be sent before the next is taken."""
        is_moving = True
        while is_moving:
            is_moving = False
            for number in list(self._lines):
                line = self._lines.get(number)
                if line is None or not self._may_go(self._flows[number], line[0][0]):
                    continue
                taken = line.popleft()
                if not line:
                    del self._lines[number]
                is_moving = True
                yield number, taken

    def _may_go(self, flow: Flow, message: Message) -> bool:
        if type(message) is not Ops or len(self._flows) < 2:
            return True
        at_nodes = flow.num_ops_at_nodes
        return at_nodes == 0 or at_nodes + message.num_ops <= self._window_ops

    def validate(self) -> None:
        """Check the invariants that the attributes state."""
        assert self._lines.keys() <= self._flows.keys()
        assert all(self._lines.values())
        for number, line in self._lines.items():
            assert not self._may_go(self._flows[number], line[0][0]), "it waits, and it could go"
