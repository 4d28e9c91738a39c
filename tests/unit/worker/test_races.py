"""The clocks of the race detector, against all paths through a graph of what happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from hypothesis import given, strategies as st

from dtorch_runtime.worker.races import Access, Accesses, Clocks, DataRace
from dtorch_runtime.worker.watch import StreamWatch, Watch

STREAMS = ("a", "b", "c")


@dataclass(frozen=True)
class Use:
    """A stream uses memory."""

    stream: str
    memory: int
    is_write: bool


@dataclass(frozen=True)
class Record:
    """A stream records a point."""

    stream: str


@dataclass(frozen=True)
class Wait:
    """A stream waits for one of the points that were recorded, if any."""

    stream: str
    point: int


Step: TypeAlias = Use | Record | Wait
streams = st.sampled_from(STREAMS)
histories = st.lists(
    st.one_of(
        st.builds(Use, streams, st.integers(0, 1), st.booleans()),
        st.builds(Record, streams),
        st.builds(Wait, streams, st.integers(0, 20)),
    ),
    max_size=40,
)


def before(history: list[Step]) -> list[set[int]]:
    """Of each step, the steps that come before it: along its stream, and from points to those who wait for them."""
    found: list[set[int]] = []
    last: dict[str, int] = {}
    points: list[int] = []
    for index, step in enumerate(history):
        direct = [last[step.stream]] if step.stream in last else []
        if isinstance(step, Wait) and points:
            direct.append(points[step.point % len(points)])
        found.append(set(direct).union(*(found[other] for other in direct)))
        if isinstance(step, Record):
            points.append(index)
        last[step.stream] = index
    return found


@given(histories)
def test_a_race_is_found_where_no_path_orders_two_accesses(history):
    clocks, paths = Clocks(), before(history)
    accesses, points = Accesses(clocks), []
    for index, step in enumerate(history):
        if isinstance(step, Record):
            points.append(clocks.record(step.stream))
        elif isinstance(step, Wait):
            if points:
                clocks.wait_for(step.stream, points[step.point % len(points)])
        else:
            races = {
                other
                for other, earlier in enumerate(history[:index])
                if isinstance(earlier, Use)
                and earlier.memory == step.memory
                and (earlier.is_write or step.is_write)
                and earlier.stream != step.stream
                and other not in paths[index]
            }
            found = accesses.add(
                step.memory, Access(step.stream, clocks.epoch(step.stream), "op", index, step.is_write)
            )
            assert (found is not None) == bool(races)
            assert found is None or found.location_id in races


def test_forgotten_memory_is_another_one():
    clocks = Clocks()
    accesses = Accesses(clocks)
    assert accesses.add(1, Access("a", clocks.epoch("a"), "fill_", 1, True)) is None
    accesses.forget(1)
    assert accesses.add(1, Access("b", clocks.epoch("b"), "fill_", 2, True)) is None


def race_of(watch: StreamWatch, *args: object) -> DataRace | None:
    try:
        watch.ran(*args)
    except DataRace as race:
        return race
    return None


def test_views_are_the_memory_that_they_lie_in():
    watch = Watch()
    one, two = StreamWatch(watch, "one"), StreamWatch(watch, "two")
    x = torch.zeros(4)
    one.ran("ones", 1, (), (x,))
    race = race_of(two, "neg", 2, (x[2:],), (torch.zeros(2),))
    assert race is not None
    assert (race.access.location_id, race.other.location_id) == (2, 1)
    assert str(race).startswith("a data race: neg on two reads memory that ones on one writes, ")
    two.wait_for(one.record())
    assert race_of(two, "neg", 2, (x[2:],)) is None
    assert race_of(one, "view", 3, (x,), (x[1:],)) is None, "reads may go on at once"
    assert race_of(one, "add_", 4, (x[1:], x), (), (0,)) is not None


def test_freed_memory_that_is_used_again_is_no_race():
    watch = Watch()
    one, two = StreamWatch(watch, "one"), StreamWatch(watch, "two")
    for _ in range(3000):
        assert race_of(one, "ones", 1, (), (torch.ones(4),)) is None
        assert race_of(two, "ones", 2, (), (torch.ones(4),)) is None
    assert watch.num_seen < 2000, "what is gone is forgotten"
