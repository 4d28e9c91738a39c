"""How far a session's messages are on this node, and when somebody is to be told. Decisions only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

#: Messages that are done and that nobody was told of, at most, while there is more to do.
MAX_UNTOLD = 32


class ProtocolBroken(Exception):
    """The controller sent what the protocol does not allow."""


class Way:
    """Messages that came one way, and how far the one at its other end was told that they are done."""

    __slots__ = ("done", "num_untold", "pending")

    def __init__(self) -> None:
        #: Seqs of messages that are not done, rising, all above ``done``.
        self.pending: deque[int] = deque()
        #: The last one that is done; and so many messages of that the other end was not told of.
        self.done = 0
        self.num_untold = 0

    def advance(self, limit: int) -> None:
        """Everything up to ``limit`` is done."""
        pending = self.pending
        while pending and pending[0] <= limit:
            self.done = pending.popleft()
            self.num_untold += 1

    def is_worth_telling(self) -> bool:
        """Whether as much is done as there is left to do: the rest lasts until what the credit lets in has come.

        So a node that is behind by many messages does not answer each of them: the controller has a thousand such
        nodes, and what it reads from each is what a step costs it.
        """
        return 0 < self.num_untold >= min(len(self.pending), MAX_UNTOLD)

    def validate(self) -> None:
        seqs = list(self.pending)
        assert seqs == sorted(set(seqs))
        assert not seqs or self.done < seqs[0]


class SessionWork:
    """What one session has under way on this node."""

    __slots__ = ("below", "completed", "direct", "done", "fetches", "outstanding", "relayed")

    def __init__(self) -> None:
        #: Seqs that the executor was given and that are above ``done``, rising.
        self.outstanding: deque[int] = deque()
        #: Those of them that it has completed; never the first one.
        self.completed: set[int] = set()
        #: Everything up to here is done.
        self.done = 0
        #: What the controller sent itself, and is told of.
        self.direct = Way()
        #: What came through the relay. Done is what is done here and at all nodes below; the node above is told.
        self.relayed = Way()
        #: Name of a node below in the relay -> up to where it and those below it are done.
        self.below: dict[str, int] = {}
        #: request id -> device, asked of the executor and not answered.
        self.fetches: dict[int, int] = {}

    def start(self, seq: int, *, is_relayed: bool) -> None:
        """Raises ProtocolBroken for a message that is out of order."""
        last = self.outstanding[-1] if self.outstanding else self.done
        if seq <= last:
            raise ProtocolBroken(f"message {seq} came after message {last}")
        self.outstanding.append(seq)
        (self.relayed if is_relayed else self.direct).pending.append(seq)

    def complete(self, seq: int) -> None:
        """The executor has finished a message."""
        outstanding, completed = self.outstanding, self.completed
        completed.add(seq)
        while outstanding and outstanding[0] in completed:
            self.done = outstanding.popleft()
            completed.remove(self.done)
        self.direct.advance(self.done)

    def advance_relayed(self, children: Sequence[str]) -> None:
        """Take in how far this node and those right below it are."""
        below = self.below
        self.relayed.advance(min([self.done, *(below.get(name, 0) for name in children)]))

    def end_relay(self) -> None:
        """From now on the controller is told of everything; it does not know how far this node was."""
        self.below.clear()
        self.relayed = Way()
        self.direct.pending = deque(self.outstanding)
        self.direct.done = self.done
        if self.done:
            self.direct.num_untold += 1

    def validate(self) -> None:
        """Check the invariants that the attributes state."""
        seqs = list(self.outstanding)
        assert seqs == sorted(set(seqs))
        assert self.completed <= set(seqs)
        assert not seqs or (self.done < seqs[0] and seqs[0] not in self.completed)
        self.direct.validate()
        self.relayed.validate()
        assert set(seqs) <= {*self.direct.pending, *self.relayed.pending}
        assert not self.direct.num_untold or self.direct.pending, "idle, and the controller does not know"
        assert self.direct.num_untold < MAX_UNTOLD
