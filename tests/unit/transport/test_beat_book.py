"""Who is lost, by a clock that the test turns."""

from __future__ import annotations

import random

import pytest

from dtorch_runtime.errors import SettingError
from dtorch_runtime.transport.beat_book import BeatBook


class Clock:
    """A book that is looked at every second, as its thread does."""

    def __init__(self, timeout_s: float = 5.0, silence_limit_s: float = 60.0) -> None:
        self.book = BeatBook(interval_s=1.0, timeout_s=timeout_s, silence_limit_s=silence_limit_s)
        self.now_s = 100.0
        self.lost: list[str] = []
        self.look()

    def look(self) -> None:
        self.lost += self.book.expired(self.now_s)
        self.book.validate()

    def run(self, seconds: int, *, beating: tuple[str, ...] = (), reachable: tuple[str, ...] = ()) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            for peer in beating:
                self.book.beat(peer, self.now_s)
            for peer in reachable:
                self.book.reachable(peer, self.now_s)
            self.look()

    def stand_still(self, seconds: float) -> None:
        """This process was stopped, or its machine slept: time passed, and nobody looked."""
        self.now_s += seconds
        self.look()


@pytest.fixture
def clock() -> Clock:
    made = Clock()
    for peer in ("a", "b"):
        made.book.watch(peer, made.now_s)
    return made


def test_a_silent_peer_is_lost_after_the_timeout_and_told_once(clock: Clock) -> None:
    clock.run(5, beating=("a",))
    assert clock.lost == []
    clock.run(1, beating=("a",))
    assert clock.lost == ["b"]
    clock.run(20, beating=("a",))
    assert clock.lost == ["b"]


def test_a_beat_starts_the_time_anew(clock: Clock) -> None:
    clock.run(4)
    clock.book.beat("a", clock.now_s)
    clock.run(5)
    assert clock.lost == ["b"]
    clock.run(1)
    assert clock.lost == ["b", "a"]


def test_a_reachable_peer_is_not_lost_until_it_was_silent_too_long(clock: Clock) -> None:
    clock.run(60, beating=("b",), reachable=("a",))
    assert clock.lost == []
    clock.run(1, beating=("b",), reachable=("a",))
    assert clock.lost == ["a"]


def test_a_peer_that_was_reachable_is_lost_a_timeout_after_it_was(clock: Clock) -> None:
    clock.run(20, beating=("b",), reachable=("a",))
    clock.run(5, beating=("b",))
    assert clock.lost == []
    clock.run(1, beating=("b",))
    assert clock.lost == ["a"]


@pytest.mark.parametrize("stall_s", [3.0, 6.0, 100.0, 1e6])
def test_nobody_is_lost_because_this_process_stood_still(clock: Clock, stall_s: float) -> None:
    clock.run(3, beating=("a", "b"))
    clock.stand_still(stall_s)
    assert clock.lost == []
    clock.run(3, beating=("a",))
    assert clock.lost == []
    clock.run(10, beating=("a",))
    assert clock.lost == ["b"]


def test_a_stall_does_not_give_the_silent_a_second_life(clock: Clock) -> None:
    """Silence before the stall counts: only the stall itself is forgiven."""
    clock.run(4, beating=("a",))
    clock.stand_still(50.0)
    clock.run(1, beating=("a",))
    assert clock.lost == ["b"]


def test_repeated_stalls_do_not_hide_a_dead_peer_for_ever(clock: Clock) -> None:
    for _ in range(10):
        clock.stand_still(50.0)
        clock.book.beat("a", clock.now_s)
    assert clock.lost == ["b"]


def test_a_forgotten_peer_is_never_lost(clock: Clock) -> None:
    clock.book.forget("a")
    clock.book.forget("nobody")
    clock.run(10)
    assert clock.lost == ["b"]


def test_signs_of_life_of_peers_that_are_not_watched_are_ignored(clock: Clock) -> None:
    clock.book.forget("a")
    clock.run(10, beating=("a", "b", "stranger"), reachable=("stranger",))
    assert "a" not in clock.book
    assert "stranger" not in clock.book
    assert "b" in clock.book
    clock.run(10)
    assert clock.lost == ["b"]


def test_a_lost_peer_can_be_watched_again(clock: Clock) -> None:
    clock.run(6, beating=("b",))
    assert clock.lost == ["a"]
    clock.book.watch("a", clock.now_s)
    clock.run(5, beating=("b",))
    assert clock.lost == ["a"]
    clock.run(1, beating=("b",))
    assert clock.lost == ["a", "a"]


def test_silent_names_those_whose_beat_is_overdue(clock: Clock) -> None:
    clock.run(2, beating=("a",), reachable=("b",))
    assert clock.book.silent(clock.now_s) == ["b"]


@pytest.mark.parametrize(
    "interval_s, timeout_s, silence_limit_s", [(0, 1, 1), (-1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 3)]
)
def test_times_that_do_not_fit_are_refused(
    interval_s: float, timeout_s: float, silence_limit_s: float
) -> None:
    with pytest.raises(SettingError, match="interval_s < timeout_s <= silence_limit_s"):
        BeatBook(interval_s=interval_s, timeout_s=timeout_s, silence_limit_s=silence_limit_s)


def test_whatever_happens_those_that_beat_live_and_the_silent_are_lost_in_time(rng: random.Random) -> None:
    for _ in range(50):
        clock = Clock()
        for peer in ("good", "dead"):
            clock.book.watch(peer, clock.now_s)
        seen_s = 0
        while seen_s <= 5 + 1:  # the seconds in which this process was awake to hear something
            if rng.random() < 0.3:
                clock.stand_still(rng.uniform(2.1, 500.0))
                seen_s += 1
            else:
                clock.run(1)
                seen_s += 1
            clock.book.beat("good", clock.now_s)
        assert clock.lost == ["dead"]
