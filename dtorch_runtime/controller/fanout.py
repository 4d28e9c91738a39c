"""How the controller's messages reach many nodes: one by one, or passed on from node to node. Decisions only.

A *relay* is a tree of nodes. The controller sends what is for all of its members to the first few, and each passes it
on to a few others; reports come back the same way. The member at position ``i``, counted from 0, has those from
``fanout * (i + 1)`` on below it. There is one relay at a time, of all sessions, because the order of everything that
the controller sends must be the same at all nodes: two collectives that come in different orders wait for each other.

Relayed messages are numbered; what else a member is sent comes directly. A mark in front of a direct message says
behind which number it comes, and a relayed message says, for members that were sent something directly since the number
before, how many direct messages come before it. So a member knows the one order, whatever arrives first.

When a member is lost, or a message does not get through, the relay ends: every member is sent every number that is not
known to have arrived. A number is taken once and in its place, so it does no harm that some come twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dtorch_runtime.controller.events import Action, Log, Send
from dtorch_runtime.wire.codec import encode
from dtorch_runtime.wire.messages import (
    Message,
    RelayBegin,
    Relayed,
    RelayEnd,
    RelayMark,
    RelayMember,
)


@dataclass(frozen=True, slots=True)
class Group:
    """Live nodes that get the same: their numbers, and the peers that they are."""

    nodes: tuple[int, ...]
    peers: tuple[int, ...]


class RelayUser(Protocol):
    """What waits for the nodes of a relay: a session."""

    def end_relay(self, keys: Sequence[int], nodes: Sequence[int]) -> None:
        """Wait for each of ``nodes`` from now on, where the ``keys`` of a relay were waited for."""


@dataclass(slots=True)
class _Entry:
    message: Relayed
    #: Empty once its session is over.
    frames: Sequence[Any]
    #: The session, and the number of the message in it; 0 for messages that have none.
    session: int
    seq: int


class Relay:
    """One tree, from its beginning to its end."""

    def __init__(self, number: int, group: Group, fanout: int) -> None:
        self.number = number
        self.group = group
        self._fanout = fanout
        self.tops = group.peers[:fanout]
        #: What is waited for in the place of all members: a negative key for each of those at the top.
        self.keys = tuple(-node for node in group.nodes[:fanout])
        self._position = {peer: position for position, peer in enumerate(group.peers)}
        #: The last number.
        self._last = 0
        #: Position -> messages sent directly, and the number that the last mark named.
        self._num_direct = [0] * len(group.peers)
        self._marked = [0] * len(group.peers)
        #: Those of the first that changed since the last number.
        self._changed: dict[int, int] = {}
        #: What is not known to have reached every member, by rising number without gaps, up to the last.
        self._log: deque[_Entry] = deque()
        #: (session, seq) -> number, of those in the log that have a seq.
        self._numbers: dict[tuple[int, int], int] = {}
        #: key -> the number up to which everything has reached the nodes below it.
        self._reached = dict.fromkeys(self.keys, 0)

    def __contains__(self, peer: int) -> bool:
        return peer in self._position

    def begin(self, members: Mapping[int, RelayMember]) -> list[Action]:
        """Tell each member its place."""
        peers, fanout = self.group.peers, self._fanout
        return [
            Send(
                peers=(peer,),
                message=RelayBegin(
                    relay=self.number,
                    position=position,
                    has_parent=position >= fanout,
                    children=[
                        members[child] for child in peers[fanout * (position + 1) : fanout * (position + 2)]
                    ],
                ),
            )
            for position, peer in enumerate(peers)
        ]

    def send(self, message: Message, frames: Sequence[Any], session: int, seq: int) -> Action:
        """Send to all members. ``session`` and ``seq`` are how the members will say that they have it; 0 for none."""
        self._last += 1
        relayed = Relayed(relay=self.number, number=self._last, after=self._changed)
        self._changed = {}
        payload = (encode(message), *frames)
        self._log.append(_Entry(relayed, payload, session, seq))
        if seq:
            self._numbers[session, seq] = self._last
        return Send(peers=self.tops, message=relayed, frames=payload)

    def note_direct(self, peers: Iterable[int]) -> list[Action]:
        """Something is about to be sent directly: the marks that go before it."""
        unmarked: list[int] = []
        for peer in peers:
            position = self._position.get(peer)
            if position is None:
                continue
            if self._marked[position] != self._last:
                self._marked[position] = self._last
                unmarked.append(peer)
            self._num_direct[position] += 1
            self._changed[position] = self._num_direct[position]
        if not unmarked:
            return []
        return [Send(peers=tuple(unmarked), message=RelayMark(relay=self.number, number=self._last))]

    def reached(self, key: int, session: int, seq: int) -> None:
        """The node with this key and all below it are done with a message, so they have got all before it."""
        number = self._numbers.get((session, seq), 0)
        if number <= self._reached[key]:
            return
        self._reached[key] = number
        floor, log = min(self._reached.values()), self._log
        while log and log[0].message.number <= floor:
            entry = log.popleft()
            self._numbers.pop((entry.session, entry.seq), None)

    def forget_session(self, session: int) -> None:
        """A session is over: what is kept of it only keeps its number."""
        for entry in self._log:
            if entry.session == session:
                entry.frames = ()

    def end(self, live: Sequence[int]) -> list[Action]:
        """Send the members that are left what they may lack, and the end."""
        peers = tuple(live)
        lacking: list[Action] = [
            Send(peers=peers, message=entry.message, frames=entry.frames) for entry in self._log
        ]
        return [*lacking, Send(peers=peers, message=RelayEnd(relay=self.number, number=self._last))]

    def validate(self) -> None:
        """Check the invariants that the attributes state."""
        numbers = [entry.message.number for entry in self._log]
        assert numbers == list(range(self._last - len(numbers) + 1, self._last + 1))
        named = {(entry.session, entry.seq): entry.message.number for entry in self._log if entry.seq}
        assert named == self._numbers
        assert all(marked <= self._last for marked in self._marked)
        assert all(self._num_direct[position] == count for position, count in self._changed.items())
        assert self._last - len(numbers) == min(self._reached.values()), "it keeps what has arrived"


class Fanout:
    """Every message of the controller to nodes goes through here, in order; it becomes actions.

    Args:
        fanout: nodes that each passes messages on to.
        min_nodes: messages for fewer nodes go directly.
        users: the sessions, by number; those that are there when a relay ends.
    """

    def __init__(self, fanout: int, min_nodes: int, users: Mapping[int, RelayUser]) -> None:
        self._fanout = fanout
        self._min_nodes = min_nodes
        self._users = users
        #: What is to be done; the owner takes it.
        self.actions: list[Action] = []
        self.relay: Relay | None = None
        self._num_relays = 0
        #: peer -> where others reach it, of the live nodes that can pass messages on.
        self._members: dict[int, RelayMember] = {}
        #: A relay did not work with these nodes: none is tried before others are there.
        self._is_barred = False

    def add_node(self, peer: int, name: str, endpoint: str) -> None:
        """A node has joined."""
        self._is_barred = False
        if endpoint:
            self._members[peer] = RelayMember(name, endpoint)

    def lose_node(self, peer: int) -> None:
        """A node is gone."""
        self._is_barred = False
        self._members.pop(peer, None)
        if self.relay is not None and peer in self.relay:
            self._end("a member was lost")

    def stop(self) -> None:
        """Nothing is sent to nodes any more."""
        self.relay = None
        self._members.clear()

    def broken(self, peer: int, number: int, reason: str) -> None:
        """Messages of a relay do not reach a member."""
        if self.relay is not None and self.relay.number == number and peer in self.relay:
            self._is_barred = True
            self._end(reason)

    def keys(self, group: Group, *, may_begin: bool) -> tuple[int, ...]:
        """What to wait for when a message is sent to a group: its nodes, or the keys of the relay that will carry it.

        The largest group that is used gets the relay.
        """
        relay, peers = self.relay, group.peers
        if relay is not None:
            members = relay.group.peers
            if peers is members or peers == members:
                return relay.keys
        if may_begin and len(peers) >= self._min_nodes and self._begin(group):
            assert self.relay is not None
            return self.relay.keys
        return group.nodes

    def send(
        self,
        peers: tuple[int, ...],
        message: Message,
        frames: Sequence[Any] = (),
        *,
        session: int = 0,
        seq: int = 0,
    ) -> None:
        """Send to each of these peers, through the relay where they are its members."""
        relay = self.relay
        if relay is not None:
            members = relay.group.peers
            if peers is members or peers == members:
                self.actions.append(relay.send(message, frames, session, seq))
                return
            self.actions += relay.note_direct(peers)
        if peers:
            self.actions.append(Send(peers=peers, message=message, frames=frames))

    def _begin(self, group: Group) -> bool:
        if self._is_barred or not self._members.keys() >= set(group.peers):
            return False
        if self.relay is not None:
            if len(group.peers) <= len(self.relay.group.peers):
                return False
            self._end("a larger one begins")
        self._num_relays += 1
        self.relay = Relay(self._num_relays, group, self._fanout)
        self.actions += self.relay.begin(self._members)
        text = f"relay {self._num_relays} begins: {len(group.peers)} nodes, {self._fanout} below each"
        self.actions.append(Log(text=text))
        return True

    def _end(self, reason: str) -> None:
        relay, self.relay = self.relay, None
        assert relay is not None
        self.actions += relay.end([peer for peer in relay.group.peers if peer in self._members])
        for user in self._users.values():
            user.end_relay(relay.keys, relay.group.nodes)
        self.actions.append(Log(text=f"relay {relay.number} ended: {reason}"))

    def validate(self, live: Iterable[int]) -> None:
        """Check the invariants that the attributes state."""
        assert self._members.keys() <= set(live)
        if self.relay is not None:
            assert self._members.keys() >= set(self.relay.group.peers), "a relay has a member that is lost"
            self.relay.validate()
