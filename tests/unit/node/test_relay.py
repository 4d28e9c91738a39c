"""A node's seat in a relay: whom it believes, what it passes on, and when it says that the relay does not work."""

from __future__ import annotations

from typing import Any

import pytest

from dtorch_runtime.node.events import (
    Action,
    Leave,
    LinkRelay,
    Received,
    ReceivedFromChild,
    ReceivedFromParent,
    RelayLinkFailed,
    Reported,
    RunOps,
    Send,
    SendDown,
    SendUp,
    StartFetch,
    Ticked,
)
from dtorch_runtime.node.executor import Completed
from dtorch_runtime.node.relay import MAX_SILENT_TICKS
from dtorch_runtime.node.state import NodeConfig, NodeState
from dtorch_runtime.wire.codec import encode
from dtorch_runtime.wire.messages import (
    Done,
    Fetch,
    Message,
    NodeWelcome,
    RelayBeat,
    RelayBegin,
    RelayBroken,
    RelayDone,
    Relayed,
    RelayEnd,
    RelayHello,
    RelayMark,
    RelayMember,
    SessionOpened,
    Subgraph,
)
from tests.support.control import KEY

PARENT = b"parent"
CHILDREN = [RelayMember("a", "ipc:///a"), RelayMember("b", "ipc:///b")]


class Rig:
    """A node with one session, whose seat in relay 1 is position 3, with a node above and two below."""

    def __init__(self) -> None:
        self.state = NodeState(
            NodeConfig(
                name="node0",
                host="host",
                pid=9,
                device_type="cpu",
                num_devices=1,
                data_endpoint="",
                relay_endpoint="ipc:///me",
                session_key=KEY,
                chunk_bytes=16,
                check=True,
            )
        )
        self.receive(NodeWelcome(devices=[0], nodes=[], heartbeat_endpoint=""))
        self.receive(SessionOpened(session=1))
        self.begun = self.receive(RelayBegin(relay=1, position=3, has_parent=True, children=CHILDREN))
        self.from_parent(RelayHello(session_key=KEY, relay=1))

    def receive(self, message: Message, *frames: Any) -> list[Action]:
        return self.state.handle(Received(message=message, frames=frames))  # type: ignore[arg-type]

    def from_parent(self, message: Message, *frames: Any, peer: bytes = PARENT) -> list[Action]:
        event = ReceivedFromParent(peer=peer, message=message, frames=frames)  # type: ignore[arg-type]
        return self.state.handle(event)

    def batch(self, number: int, *, seq: int = 0, after: int = 0, peer: bytes = PARENT) -> list[Action]:
        return self.from_parent(*batch(number, seq or number, after), peer=peer)

    def complete(self, *seqs: int) -> list[Action]:
        return self.state.handle(Reported(events=[Completed(session=1, seq=seq) for seq in seqs]))

    def below(self, name: str, seq: int) -> list[Action]:
        message = RelayDone(relay=1, session=1, seq=seq)
        return self.state.handle(ReceivedFromChild(name=name, message=message))


def batch(number: int, seq: int, after: int = 0) -> tuple[Any, ...]:
    relayed = Relayed(relay=1, number=number, after={3: after} if after else {})
    return relayed, encode(Subgraph(session=1, seq=seq)), b""


def run_seqs(actions: list[Action]) -> list[int]:
    return [action.seq for action in actions if isinstance(action, RunOps)]


def broken(actions: list[Action]) -> list[str]:
    return [
        action.message.reason
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, RelayBroken)
    ]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_seat_connects_to_the_nodes_below_and_shows_the_key(rig: Rig) -> None:
    link, hello = rig.begun
    assert link == LinkRelay(relay=1, children=tuple(CHILDREN))
    assert hello == SendDown(message=RelayHello(session_key=KEY, relay=1))


def test_batch_is_passed_on_and_run_and_reported_with_those_below(rig: Rig) -> None:
    actions = rig.batch(1)
    assert [type(action) for action in actions] == [SendDown, RunOps]
    assert rig.below("a", 1) == []
    assert rig.complete(1) == []
    (told,) = rig.below("b", 1)
    assert told == SendUp(peer=PARENT, message=RelayDone(relay=1, session=1, seq=1))


def test_direct_message_behind_a_mark_waits_and_others_are_passed_on_meanwhile(rig: Rig) -> None:
    rig.receive(RelayMark(relay=1, number=1))
    assert rig.receive(Fetch(session=1, request_id=1, value_id=5, device=0)) == []
    actions = rig.batch(1)
    assert [type(action) for action in actions] == [SendDown, RunOps, StartFetch]
    assert run_seqs(rig.batch(2, after=1)) == [2]


def test_relayed_message_waits_for_the_direct_ones_before_it(rig: Rig) -> None:
    assert [type(action) for action in rig.batch(1, after=1)] == [SendDown]
    actions = rig.receive(Fetch(session=1, request_id=1, value_id=5, device=0))
    assert [type(action) for action in actions] == [StartFetch, RunOps]


def test_strangers_and_wrong_keys_are_not_believed(rig: Rig) -> None:
    assert rig.batch(1, peer=b"stranger") == []
    rig.from_parent(RelayHello(session_key=b"x" * 32, relay=1), peer=b"stranger")
    assert rig.batch(1, peer=b"stranger") == []
    assert run_seqs(rig.batch(1)) == [1]


def test_what_comes_before_the_node_is_told_of_its_seat_waits(rig: Rig) -> None:
    rig.receive(RelayEnd(relay=1, number=0))
    rig.from_parent(RelayHello(session_key=KEY, relay=2), peer=b"next")
    early = Relayed(relay=2, number=1, after={})
    frames = (encode(Subgraph(session=1, seq=1)), b"")
    assert rig.from_parent(early, *frames, peer=b"next") == []
    actions = rig.receive(RelayBegin(relay=2, position=0, has_parent=True, children=[]))
    assert run_seqs(actions) == [1]


def test_number_that_is_missing_breaks_the_relay_once(rig: Rig) -> None:
    (reason,) = broken(rig.batch(2))
    assert "number 2 came after 0" in reason
    assert broken(rig.batch(3)) == []


def test_beats_tell_of_what_did_not_come_and_their_absence_too(rig: Rig) -> None:
    for _ in range(MAX_SILENT_TICKS):
        (beat,) = rig.state.handle(Ticked())
        assert beat == SendDown(message=RelayBeat(relay=1, number=0))
    assert broken(rig.from_parent(RelayBeat(relay=1, number=0))) == []
    for _ in range(MAX_SILENT_TICKS):
        assert broken(rig.state.handle(Ticked())) == []
    assert "no sign of life" in broken(rig.state.handle(Ticked()))[0]
    other = Rig()
    assert (
        "number 1 was sent, and 0 is the last" in broken(other.from_parent(RelayBeat(relay=1, number=1)))[0]
    )


def test_link_that_fails_breaks_the_relay_it_is_of(rig: Rig) -> None:
    assert broken(rig.state.handle(RelayLinkFailed(relay=7, reason="old"))) == []
    assert broken(rig.state.handle(RelayLinkFailed(relay=1, reason="a cannot be reached"))) == [
        "a cannot be reached"
    ]


def test_after_the_end_everything_is_reported_directly_and_nothing_is_run_twice(rig: Rig) -> None:
    rig.batch(1)
    rig.complete(1)
    repeated = [action for number in (1, 2) for action in rig.receive(*batch(number, number))]
    assert run_seqs(repeated) == [2]
    assert not [action for action in repeated if isinstance(action, SendDown)]
    actions = rig.receive(RelayEnd(relay=1, number=2))
    assert actions == [LinkRelay(relay=0, children=()), Send(message=Done(session=1, seq=1))]
    assert rig.complete(2) == [Send(message=Done(session=1, seq=2))]


def test_end_that_leaves_something_out_ends_the_node(rig: Rig) -> None:
    *_, leave = rig.receive(RelayEnd(relay=1, number=1))
    assert isinstance(leave, Leave)
    assert "the last that came" in leave.reason
