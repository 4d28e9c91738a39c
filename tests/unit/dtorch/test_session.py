"""The decisions of a client about its connection."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dtorch.session import (
    Action,
    Answers,
    ControllerGone,
    FetchDone,
    FetchMissed,
    PeerLost,
    RoomFreed,
    SessionState,
    SyncReached,
)
from dtorch_runtime.wire.messages import (
    Answer,
    Asked,
    ClusterClosing,
    Credit,
    FetchFailed,
    NodeDown,
    NodeJoined,
    OpFailed,
    Refused,
    Status,
    ValueData,
)
from dtorch_runtime.wire.records import ClockReply, FailureRecord, NodeRecord


def new_state(*, max_ops: int = 10, max_bytes: int = 100) -> SessionState:
    nodes = [NodeRecord("a", "h", 1, "cpu", [0, 1], ""), NodeRecord("b", "h", 2, "cpu", [2, 3], "")]
    return SessionState(nodes, max_ops=max_ops, max_bytes=max_bytes)


def failure(failure_id: str = "f1") -> FailureRecord:
    return FailureRecord("op", failure_id, "aten::mm", 0, 0, "a", "ValueError", "bad", "")


def chunk(request_id: int, offset: int, total: int, device: int = 0) -> ValueData:
    return ValueData(
        session=1,
        request_id=request_id,
        device=device,
        dtype="uint8",
        shape=[total],
        offset_bytes=offset,
        total_bytes=total,
    )


def test_room_is_what_no_credit_covers() -> None:
    state = new_state(max_ops=10, max_bytes=100)
    assert state.issue(6, 0) == 1
    assert state.has_room(4, 0)
    assert not state.has_room(5, 0)
    assert state.issue(0, 90) == 2
    assert not state.has_room(0, 11)
    assert state.handle(Credit(seq=1)) == [RoomFreed()]
    assert state.has_room(10, 10)
    state.handle(Credit(seq=2))
    assert (state.num_ops, state.num_bytes) == (0, 0)
    state.validate()


def test_a_message_larger_than_the_limit_goes_alone() -> None:
    state = new_state(max_ops=10)
    assert state.has_room(11, 0)
    state.issue(11, 0)
    assert not state.has_room(1, 0)


def test_graphs_that_share_are_held_to_a_window_each() -> None:
    state = SessionState((), max_ops=100, max_bytes=100, shared_window_ops=10)
    state.issue(50, 0, graph_id=1)
    assert state.has_room(50, 0, 1), "nobody else is there"
    state.issue(4, 0, graph_id=2)
    assert not state.has_room(1, 0, 1), "it has more than its window already"
    assert state.has_room(6, 0, 2)
    assert not state.has_room(7, 0, 2)
    assert state.has_room(30, 0, 3), "the first message of a graph may be large"
    state.handle(Credit(seq=1))
    assert state.has_room(50, 0, 1)
    state.validate()


def test_a_graph_that_is_silent_for_long_leaves_the_room_to_others() -> None:
    state = SessionState((), max_ops=10**9, max_bytes=100, shared_window_ops=10)
    state.issue(1, 0, graph_id=2)
    for _ in range(1024):
        state.issue(10, 0, graph_id=1)
    assert state.has_room(10, 0, 1)
    state.validate()


def test_a_late_credit_changes_nothing() -> None:
    state = new_state()
    state.issue(1, 0)
    state.issue(1, 0)
    state.handle(Credit(seq=2))
    state.handle(Credit(seq=1))
    assert state.acknowledged_seq == 2
    state.validate()


def test_a_sync_ends_with_the_credit_that_covers_it() -> None:
    state = new_state()
    state.issue(1, 0)
    state.issue(1, 0)
    sync_id, known = state.start_sync(2)
    assert known == []
    assert state.handle(Credit(seq=1)) == [RoomFreed()]
    assert state.handle(Credit(seq=2)) == [RoomFreed(), SyncReached(sync_id)]
    later, known = state.start_sync(2)
    assert known == [SyncReached(later)]


@pytest.mark.parametrize("cuts", [[0, 5], [0, 2, 5], [0, 1, 2, 3, 4, 5]], ids=len)
def test_a_piece_in_chunks(cuts: list[int]) -> None:
    state = new_state()
    fetch_id, [(request_id, _)], _ = state.start_fetch([0])
    data = b"abcde"
    actions: list[Action] = []
    for start, stop in zip(cuts, cuts[1:]):
        assert actions == []
        actions = state.handle(chunk(request_id, start, 5), data[start:stop])
        state.validate()
    [done] = actions
    assert isinstance(done, FetchDone)
    assert done.fetch_id == fetch_id
    assert bytes(done.pieces[0].data) == data


@pytest.mark.parametrize(("offset", "data"), [(3, b"de"), (0, b"abcdefg"), (2, b"cdef")])
def test_a_chunk_out_of_place_fails_the_fetch(offset: int, data: bytes) -> None:
    state = new_state()
    fetch_id, [(request_id, _)], _ = state.start_fetch([0])
    state.handle(chunk(request_id, 0, 5), b"ab")
    [missed] = state.handle(chunk(request_id, offset, 5), data)
    assert isinstance(missed, FetchMissed)
    assert missed.fetch_id == fetch_id
    assert missed.failure.kind == "internal"
    state.validate()


def test_a_fetch_waits_for_every_piece() -> None:
    state = new_state()
    fetch_id, requests, _ = state.start_fetch([0, 2])
    (first, _), (second, _) = requests
    assert state.handle(chunk(second, 0, 1, device=2), b"b") == []
    [done] = state.handle(chunk(first, 0, 1), b"a")
    assert isinstance(done, FetchDone)
    assert {device: piece.data for device, piece in done.pieces.items()} == {0: b"a", 2: b"b"}


def test_one_missing_piece_ends_the_fetch_once() -> None:
    state = new_state()
    fetch_id, [(first, _), (second, _)], _ = state.start_fetch([0, 2])
    failed = FetchFailed(session=1, request_id=first, device=0, failure=failure())
    assert state.handle(failed) == [FetchMissed(fetch_id, failure())]
    assert state.handle(chunk(second, 0, 1, device=2), b"b") == []
    assert state.handle(failed) == []
    state.validate()


def test_a_failure_is_unfetched_until_it_was_raised() -> None:
    state = new_state()
    for failure_id in ("f1", "f2", "f1"):
        state.handle(OpFailed(session=1, failure=failure(failure_id)))
    state.mark_raised("f1")
    assert state.take_unfetched() == failure("f2")
    assert state.take_unfetched() is None
    state.handle(OpFailed(session=1, failure=failure("f1")))
    assert state.take_unfetched() is None, "it was raised at a fetch before its report came"


def test_a_lost_node_fails_what_waits_for_it_and_nothing_else() -> None:
    state = new_state()
    on_a, _, _ = state.start_fetch([0])
    on_both, _, _ = state.start_fetch([1, 3])
    on_b, _, _ = state.start_fetch([2])
    actions = state.handle(NodeDown(name="b", devices=[2, 3], reason="silent"))
    assert {action.fetch_id for action in actions if isinstance(action, FetchMissed)} == {on_both, on_b}
    assert all(
        isinstance(a, FetchMissed) and a.failure.kind == "node" and a.failure.node == "b" for a in actions
    )
    state.validate()
    _, requests, known = state.start_fetch([3])
    assert requests == []
    assert isinstance(known[0], FetchMissed)
    unfetched = state.take_unfetched()
    assert unfetched is not None
    assert unfetched.message == "silent"


def test_a_node_that_joins_is_known() -> None:
    state = new_state()
    record = NodeRecord("c", "h", 3, "cpu", [4], "")
    assert state.handle(NodeJoined(node=record)) == []
    assert state.nodes["c"] == record


@pytest.mark.parametrize(
    "event",
    [
        ClusterClosing(reason="asked to"),
        Refused(reason="no"),
        PeerLost("silent"),
        Status(nodes=[], sessions=[], num_ops=0, uptime_s=0.0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_the_end_is_told_once(event: Any) -> None:
    state = new_state()
    state.start_fetch([0])
    state.start_sync(5)
    gone, freed = state.handle(event)
    assert isinstance(gone, ControllerGone)
    assert freed == RoomFreed()
    assert state.handle(event) == []
    state.validate()


def test_invariants_hold_in_any_order(rng: random.Random) -> None:
    state = new_state(max_ops=50, max_bytes=1000)
    requests: list[tuple[int, int]] = []
    for _ in range(2000):
        match rng.randrange(7):
            case 0 if state.has_room(5, 10):
                state.issue(rng.randrange(6), rng.randrange(11), rng.randrange(3))
            case 1:
                state.handle(Credit(seq=rng.randint(0, state.seq)))
            case 2:
                requests += state.start_fetch(rng.sample(range(4), rng.randint(1, 4)))[1]
            case 3 if requests:
                request_id, device = rng.choice(requests)
                state.handle(chunk(request_id, rng.randrange(3), 3, device), b"x" * rng.randrange(4))
            case 4 if requests:
                request_id, device = rng.choice(requests)
                record = failure(f"f{rng.randrange(5)}")
                state.handle(FetchFailed(session=1, request_id=request_id, device=device, failure=record))
                state.mark_raised(record.failure_id)
            case 5:
                state.handle(OpFailed(session=1, failure=failure(f"f{rng.randrange(5)}")))
            case 6:
                state.start_sync(rng.randint(0, state.seq))
        state.validate()


def answer(request_id: int, node: str = "", clock_ns: int = 1) -> Answer:
    return Answer(session=1, request_id=request_id, node=node, reply=ClockReply(clock_ns))


@pytest.mark.parametrize("is_asked_last", [False, True])
def test_a_question_is_over_when_all_have_answered(is_asked_last):
    state = new_state()
    number = state.start_question()
    events = [answer(number), Asked(request_id=number, nodes=["a", "b"])]
    for event in reversed(events) if is_asked_last else events:
        assert state.handle(event) == []
    assert state.handle(answer(number, "b", 3)) == []
    assert state.handle(answer(number, "b", 4)) == [], "twice"
    replies = {"": ClockReply(1), "a": ClockReply(2), "b": ClockReply(3)}
    assert state.handle(answer(number, "a", 2)) == [Answers(number, replies, {})]
    assert state.handle(answer(number, "a", 2)) == []
    state.validate()


def test_the_controller_alone_may_answer():
    state = new_state()
    number = state.start_question()
    state.handle(Asked(request_id=number, nodes=[]))
    assert state.handle(answer(number)) == [Answers(number, {"": ClockReply(1)}, {})]


def test_a_question_does_not_wait_for_a_lost_node_and_names_it():
    state = new_state()
    first, second = state.start_question(), state.start_question()
    for number in (first, second):
        state.handle(Asked(request_id=number, nodes=["a", "b"]))
        state.handle(answer(number))
    state.handle(answer(first, "a", 2))
    actions = state.handle(NodeDown(name="b", devices=[2, 3], reason="silent"))
    assert actions == [Answers(first, {"": ClockReply(1), "a": ClockReply(2)}, {"b": "silent"})]
    (done,) = state.handle(answer(second, "a", 5))
    assert isinstance(done, Answers)
    assert done.lost == {"b": "silent"}
    state.validate()


def test_a_question_ends_with_the_session():
    state = new_state()
    number = state.start_question()
    assert ControllerGone("silent") in state.handle(PeerLost("silent"))
    assert state.handle(Asked(request_id=number, nodes=[])) == []
