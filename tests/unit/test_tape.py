"""Spans in memory: what is kept, what falls off, and who sees whose."""

from __future__ import annotations

from array import array

from dtorch_runtime.tape import SPAN_WORDS, SessionTapes, Tape
from dtorch_runtime.wire.records import LaneRecord


def rows(lane: LaneRecord) -> list[list[int]]:
    words = array("q")
    words.frombytes(lane.spans)
    return [list(words[i : i + SPAN_WORDS]) for i in range(0, len(words), SPAN_WORDS)]


def test_the_oldest_fall_off_and_are_counted() -> None:
    tape = Tape(3)
    for number in range(5):
        tape.add(number, 10 * number, 7, 1)
    lane = tape.lane("worker", 4)
    assert (lane.kind, lane.device, lane.num_dropped) == ("worker", 4, 2)
    assert [(row[0], row[1], row[2], row[4]) for row in rows(lane)] == [(n, 10 * n, 7, 1) for n in (2, 3, 4)]
    assert all(row[3] >= 7 for row in rows(lane))


def test_names_are_sent_once() -> None:
    tape = Tape(10)
    for name in ("ops", "done", "ops"):
        tape.add_named(name, 0, 0)
    lane = tape.lane("node")
    assert lane.names == ["ops", "done"]
    assert [row[0] for row in rows(lane)] == [0, 1, 0]


def test_a_session_sees_of_others_only_how_long_they_took() -> None:
    tapes = SessionTapes()
    assert not tapes
    tapes.start(1, 10)
    tapes.start(2, 10)
    tapes.add(1, "ops", 5, 0, 80)
    tapes.add(None, "node_hello", 6, 0, 0)
    own, other = tapes.stop(1), tapes.stop(2)
    assert own is not None
    assert other is not None
    assert own.lane("controller").names == ["ops", "node_hello"]
    lane = other.lane("controller")
    assert lane.names == ["work for another session", "node_hello"]
    assert rows(lane)[0][1] == rows(lane)[0][4] == 0
    assert tapes.stop(1) is None


def test_sessions_that_ended_are_forgotten() -> None:
    tapes = SessionTapes()
    tapes.start(1, 10)
    tapes.start(2, 10)
    tapes.keep([2].__contains__)
    assert tapes.stop(1) is None
    assert tapes
    assert tapes.stop(2) is not None
    assert not tapes
