"""Runs of ops that repeat: they are found, and what is sent in their place says the same as the ops did."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from dtorch.replay.automatic import AWAITED, MAX_RUNS, MAX_TEMPLATES, PAUSED, Replayer
from dtorch.replay.finder import BREAK, Finder, Repeat
from dtorch.replay.inner_ids import FIRST_INNER_ID
from dtorch_runtime.ir.body import expand, parse_body
from dtorch_runtime.ir.stream import FREE, WidthsOf, walk
from dtorch_runtime.wire.records import TemplateRecord

MAX_RUN = 16


def template(
    number: int, num_inputs: int, num_outputs: int, num_scalars: int = 0, **more: object
) -> TemplateRecord:
    values: dict[str, object] = {"mutates": [], "views": [-1] * num_outputs} | more
    return TemplateRecord(
        number,
        f"op{number}",
        [],
        {},
        num_inputs,
        num_outputs,
        num_scalars,
        [1],
        **values,  # type: ignore[arg-type]
    )


#: Of every kind: a factory, ops of one and two inputs, a view, a random op, a write, one of unknown aliasing.
TEMPLATES = (
    template(1, 0, 1),
    template(2, 1, 1),
    template(3, 2, 1),
    template(4, 1, 2, views=[0, -1]),
    template(5, 1, 1, 1),
    template(6, 2, 0, mutates=[0]),
    template(7, 2, 1, views=None),
)


@dataclass
class Graph:
    """What a graph does around its replayer, and everything that it was given and sent."""

    max_run: int = MAX_RUN
    templates: dict[int, TemplateRecord] = field(
        default_factory=lambda: {t.template_id: t for t in TEMPLATES}
    )
    given: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    frees: list[tuple[int, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.new_id = itertools.count(1).__next__
        self.new_seed = itertools.count(1000).__next__
        self._next_inner = FIRST_INNER_ID
        self.replayer = Replayer(self.templates, self._define, self._inner, self.max_run)

    def _define(self, record: TemplateRecord) -> int:
        number = self.numbers.setdefault(repr(record), len(self.templates) + 1)
        if number not in self.templates:
            self.templates[number] = record
        parse_body(record, self.templates)
        return number

    def _inner(self, count: int) -> int:
        self._next_inner += count
        return self._next_inner - count

    def issue(self, number: int, location: int, inputs: Sequence[int]) -> list[int]:
        record = self.templates[number]
        outputs = [self.new_id() for _ in range(record.num_outputs)]
        seeds = [self.new_seed() for _ in range(record.num_scalars)]
        words = (number, location, *inputs, *outputs, *seeds)
        self.given += words
        self.words += words
        return outputs

    def free(self, ids: Sequence[int]) -> None:
        if ids:
            self.given += (FREE, len(ids), *ids)
            self.frees.append((len(self.words), list(ids)))

    def send(self, why: str | None = None) -> None:
        found = self.replayer.rewrite(self.words, self.frees, why)
        assert why is None or found.rest == len(self.words)
        assert all(place >= 0 for place, _ in found.rest_frees)
        self.sent += found.words
        self.words, self.frees = self.words[found.rest :], found.rest_frees
        assert found.num_rest_ops == len([*walk(self.words, WidthsOf(self.templates))])
        self.replayer.validate()

    def check(self) -> None:
        """What was sent, expanded, is what was given, but for the names of values that exist inside of runs only."""
        given, freed = self._ops(self.given)
        sent, freed_there = self._ops(list(self._expanded()))
        name: dict[int, int] = {}
        assert len(given) == len(sent)
        for (head, inputs, outputs, seeds), (head2, inputs2, outputs2, seeds2) in zip(
            given, sent, strict=True
        ):
            assert (head, seeds) == (head2, seeds2)
            assert [name[value] for value in inputs] == list(inputs2)
            for value, other in zip(outputs, outputs2, strict=True):
                assert other == value or other >= FIRST_INNER_ID
                name[value] = other
        assert sorted(name[value] for value in freed) == sorted(freed_there)

    def _expanded(self) -> Iterator[int]:
        for start, stop in walk(self.sent, WidthsOf(self.templates)):
            record = self.templates.get(self.sent[start])
            if record is not None and record.body is not None:
                words, _, _ = expand(record, parse_body(record, self.templates), self.sent, start)
                yield from words
            else:
                yield from self.sent[start:stop]

    def _ops(self, words: Sequence[int]) -> tuple[list[tuple[tuple[int, ...], ...]], list[int]]:
        ops: list[tuple[tuple[int, ...], ...]] = []
        freed: list[int] = []
        held: set[int] = set()
        for start, stop in walk(words, WidthsOf(self.templates)):
            if words[start] == FREE:
                assert held.issuperset(words[start + 2 : stop]), "freed twice, or before it was made"
                held.difference_update(words[start + 2 : stop])
                freed += words[start + 2 : stop]
                continue
            record = self.templates[words[start]]
            first_output = start + 2 + record.num_inputs
            first_seed = first_output + record.num_outputs
            inputs, outputs = tuple(words[start + 2 : first_output]), tuple(words[first_output:first_seed])
            assert held.issuperset(inputs), "used after it was freed"
            held.update(outputs)
            ops.append((tuple(words[start : start + 2]), inputs, outputs, tuple(words[first_seed:stop])))
        return ops, freed


#: An op: its template, its line, which of the living values it takes, and which one is dropped after it, if any.
OPS = st.tuples(
    st.integers(1, len(TEMPLATES)),
    st.integers(1, 3),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
    st.none() | st.integers(0, 4),
)
#: Loops, one after the other, each some ops and how many turns.
LOOPS = st.lists(st.tuples(st.lists(OPS, min_size=1, max_size=8), st.integers(1, 9)), min_size=1, max_size=4)


@given(
    loops=LOOPS,
    num_turns=st.integers(1, 5),
    free_batch=st.integers(1, 5),
    random=st.randoms(use_true_random=False),
    ends=st.sampled_from([None, AWAITED]),
)
@settings(max_examples=60)
def test_what_is_sent_says_what_was_issued(
    loops: list[tuple[list[tuple[int, int, tuple[int, int], int | None]], int]],
    num_turns: int,
    free_batch: int,
    random: Random,
    ends: str | None,
) -> None:
    graph = Graph()
    living = graph.issue(1, 9, [])
    dropped: list[int] = []
    batch = random.choice([3, 20, 40])
    for turn in range(num_turns):
        for ops, count in loops:
            for number, line, picks, drop in ops * count:
                record = graph.templates[number]
                inputs = [living[-1 - pick % len(living)] for pick in picks[: record.num_inputs]]
                living += graph.issue(number, line, inputs)
                if drop is not None and len(living) > 1 and random.random() < 0.95:
                    dropped.append(living.pop(-1 - drop % len(living)))
                if len(dropped) >= free_batch:
                    graph.free(dropped)
                    dropped = []
                if len(graph.words) > 4 * batch:
                    graph.free(dropped)
                    dropped = []
                    graph.send(PAUSED if random.random() < 0.1 else None)
        if turn % 2:
            graph.free(dropped)
            dropped = []
            graph.send(ends)
    graph.free(dropped)
    graph.send(AWAITED)
    graph.check()


def loop(graph: Graph, num_turns: int, *, keeps: bool = False, line: int = 1) -> list[int]:
    """Six ops a turn, one value from turn to turn. ``keeps``: what the third op makes lives on."""
    [x] = graph.issue(1, 9, [])
    kept = []
    for _ in range(num_turns):
        [a] = graph.issue(2, line, [x])
        [b] = graph.issue(5, line, [a])
        [c] = graph.issue(3, line, [a, b])
        [d] = graph.issue(2, line + 1, [c])
        graph.issue(6, line, [d, x])
        [y] = graph.issue(3, line, [d, c])
        graph.free([x, a, b, d] if keeps else [x, a, b, c, d])
        kept += [c] * keeps
        x = y
        if len(graph.words) > 200:
            graph.send()
    return kept


def test_a_loop_is_sent_as_few_records() -> None:
    graph = Graph(max_run=128)
    loop(graph, 200)
    graph.send(AWAITED)
    graph.check()
    assert graph.replayer.num_replayed_ops > 0.85 * graph.replayer.num_ops
    assert graph.replayer.num_templates <= 2
    assert len(graph.sent) < len(graph.given) / 5
    [run] = graph.replayer.runs
    assert run.num_ops == 60, "several turns of a short loop are one run"
    assert run.layout is not None
    assert run.layout.record.num_outputs == 1, "what one turn hands to the next stays inside"


def test_what_lives_on_is_an_output() -> None:
    graph = Graph(max_run=6)
    kept = loop(graph, 40, keeps=True)
    graph.send(AWAITED)
    graph.check()
    assert graph.replayer.num_replays > 30
    assert set(kept) <= set(graph.sent), "they have the ids that their symbols know"


def test_a_run_learns_what_else_lives_on() -> None:
    graph = Graph(max_run=6)
    loop(graph, 40)
    loop(graph, 40, keeps=True)
    graph.send(AWAITED)
    graph.check()
    [run] = graph.replayer.runs
    assert run.num_versions == 2
    assert run.broken["a value was still in use"] == 1
    assert run.num_replays > 70


def test_steps_that_end_with_a_value_are_one_run_each() -> None:
    graph = Graph(max_run=128)
    for _ in range(10):
        loop(graph, 10)
        graph.send(AWAITED)
    graph.check()
    assert [run.num_ops for run in graph.replayer.runs] == [61]
    assert graph.replayer.num_replays >= 7


def test_a_run_that_breaks_off_is_sent_as_it_is() -> None:
    graph = Graph(max_run=128)
    for turn in range(12):
        loop(graph, 10)
        if turn > 8:
            graph.send(AWAITED)
            before = len(graph.sent)
            [x] = graph.issue(1, 9, [])
            [a] = graph.issue(2, 1, [x])
            [b] = graph.issue(5, 1, [a])
            [c] = graph.issue(3, 1, [a, b])
            graph.issue(2, 2, [c])
            graph.send()
            assert graph.sent[before:] == [], "the run may go on"
            graph.issue(2, 3, [b])
        graph.send(AWAITED)
    graph.check()
    [run] = [run for run in graph.replayer.runs if run.num_ops == 61]
    assert set(run.broken) == {"another op came"}


def test_ops_on_other_values_are_not_taken_for_a_run() -> None:
    graph = Graph(max_run=6)
    loop(graph, 20)
    graph.send(AWAITED)
    before = graph.replayer.num_replays
    assert before > 10
    [x] = graph.issue(1, 9, [])
    for _ in range(2):  # the same ops at the same lines, the fifth one with another input
        [a] = graph.issue(2, 1, [x])
        [b] = graph.issue(5, 1, [a])
        [c] = graph.issue(3, 1, [a, b])
        [d] = graph.issue(2, 2, [c])
        graph.issue(6, 1, [d, c])
        [x] = graph.issue(3, 1, [d, c])
    graph.send(AWAITED)
    graph.check()
    assert graph.replayer.num_replays == before


def test_a_value_that_is_used_after_the_run_is_an_output() -> None:
    graph = Graph(max_run=6)
    loop(graph, 30)
    graph.send(AWAITED)
    before = graph.replayer.num_replays
    [x] = graph.issue(1, 9, [])
    [a] = graph.issue(2, 1, [x])
    [b] = graph.issue(5, 1, [a])
    [c] = graph.issue(3, 1, [a, b])
    [d] = graph.issue(2, 2, [c])
    graph.issue(6, 1, [d, x])
    graph.issue(3, 1, [d, c])
    graph.issue(2, 7, [c])
    graph.free([c])
    graph.free([x, a, b, d])
    graph.send(AWAITED)
    graph.check()
    assert graph.replayer.num_replays == before + 1
    [run] = graph.replayer.runs
    assert run.broken["a value was still in use"] == 1


def test_a_stream_without_repeats_leaves_nothing() -> None:
    graph = Graph()
    [x] = graph.issue(1, 9, [])
    for line in range(20_000):
        [y] = graph.issue(2, line + 10, [x])
        graph.free([x])
        x = y
        if line % 100 == 0:
            graph.send()
    graph.send(AWAITED)
    assert graph.sent == graph.given
    assert graph.replayer.runs == []


def test_runs_and_templates_are_bounded() -> None:
    graph = Graph(max_run=12)
    for line in range(MAX_TEMPLATES + 50):
        for _ in range(2):
            loop(graph, 6, line=10 * line + 1)
            graph.send(AWAITED)
        assert len(graph.replayer.runs) <= MAX_RUNS
    graph.check()
    assert graph.replayer.num_templates == MAX_TEMPLATES
    assert len(graph.templates) <= len(TEMPLATES) + MAX_TEMPLATES


def tokens(text: str) -> list[int]:
    """A letter is an op that goes on with the one before it, a capital one an op that does not."""
    return [BREAK if c == "." else 2 * ord(c.lower()) + c.islower() for c in text]


def texts(repeats: Sequence[Repeat]) -> list[str]:
    return [
        "".join(chr(t // 2) if t & 1 else chr(t // 2).upper() for t in piece)
        for repeat in repeats
        for piece in repeat.pieces
    ]


@pytest.mark.parametrize(
    ("stream", "found"),
    [
        ("xyz" + "Abcde" * 26, "Abcde" * 12),
        ("x" + "Abcdefgh." * 3, "Abcdefgh"),
        ("Abcdefghijk" + "xyz" + "Abcdefghijk" + "Q", "Abcdefghijk"),
        ("Xyz" + "Head" * 3 + "Tail." + ("Head" * 3 + "Tail.") * 2, "HeadHeadHeadTail"),
    ],
    ids=["a loop", "steps", "a function", "a loop in a loop"],
)
@pytest.mark.parametrize("num_at_once", [1, 7, 1000])
def test_repeats_that_are_found(stream: str, found: str, num_at_once: int) -> None:
    finder = Finder(max_run=64)
    repeats: list[Repeat] = []
    stream_tokens = tokens(stream)
    for start in range(0, len(stream_tokens), num_at_once):
        repeats += finder.feed(stream_tokens[start : start + num_at_once])
        finder.validate()
    assert found in texts(repeats)


def test_long_runs_are_cut_where_an_op_does_not_go_on() -> None:
    finder = Finder(max_run=10)
    repeats = finder.feed(tokens("." + "Abcdefghijklm" * 3 + ".") * 3)
    assert all(len(piece) <= 10 for repeat in repeats for piece in repeat.pieces)
    assert "Abcdefg" in texts(repeats)


@given(st.lists(st.integers(0, 3), max_size=400), st.integers(1, 50))
def test_invariants_hold_for_any_stream(stream: list[int], num_at_once: int) -> None:
    finder = Finder(max_run=8, window=32)
    for start in range(0, len(stream), num_at_once):
        for repeat in finder.feed(stream[start : start + num_at_once]):
            assert all(4 <= len(piece) <= 8 and min(piece) > BREAK for piece in repeat.pieces)
        finder.validate()
