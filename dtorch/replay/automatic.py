"""``Replayer``: finds runs of ops that repeat in the op stream of one graph, and puts one record in the place of each.

It sees a batch before it is sent. Records of known runs are replaced, everything else stays as it is; the end of a
batch that may become a run is left for the next one. Decisions only: what it has to ask of others is given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Final

from dtorch.replay.finder import BREAK, Finder, Repeat
from dtorch.replay.runs import MAX_VERSIONS, Run, make_layout, token_of
from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.wire.records import TemplateRecord

#: Runs that are known at once. The one that was not seen for the longest time makes room.
MAX_RUNS: Final = 64
#: Templates that are made in the life of a graph: the cluster keeps them.
MAX_TEMPLATES: Final = 256
#: So often the ops of a run may come connected otherwise before it counts as no run.
_MAX_MISSES: Final = 16
#: What is known is good enough for ops that need so few records each.
_FEW_RECORDS: Final = 1 / 16
#: Over so many ops that is looked at.
_NUM_COMPARED: Final = 512
#: Why all of a batch is sent at once.
AWAITED: Final = "the program waited for a value, or sent one"
PAUSED: Final = "the program paused"
#: Values that were freed, and the place in the words that they were freed before.
Frees = Sequence[tuple[int, Sequence[int]]]


@dataclass(slots=True)
class Rewritten:
    """A batch after it was looked at.

    Attributes:
        words: what is sent.
        rest: where in the words that were given the rest begins, which waits for more.
        rest_frees: what is freed in the rest.
        num_rest_ops: how many ops the rest has.
        num_replays: how many runs were replaced.
    """

    words: list[int]
    rest: int
    rest_frees: list[tuple[int, list[int]]] = field(default_factory=list)
    num_rest_ops: int = 0
    num_replays: int = 0


class Replayer:
    """For one graph.

    Args:
        templates: every template by its number.
        define: gives a template its number.
        new_inner_ids: the first of so many new ids for values inside a run.
        max_run: ops in a run at most.
    """

    def __init__(
        self,
        templates: Mapping[int, TemplateRecord],
        define: Callable[[TemplateRecord], int],
        new_inner_ids: Callable[[int], int],
        max_run: int,
    ) -> None:
        self._templates = templates
        self._define = define
        self._new_inner_ids = new_inner_ids
        self._finder = Finder(max_run=max_run)
        #: By their tokens, and by the first of these, the long ones first.
        self._runs: dict[tuple[int, ...], Run] = {}
        self._runs_at: dict[int, list[Run]] = {}
        #: Of the templates that were seen: words of a record, negative for captured calls, and where in it the last
        #: output stands.
        self._widths: dict[int, tuple[int, int]] = {}
        #: The last value that was made.
        self._last_output = 0
        self._num_batches = 0
        #: Whether the last token was a break.
        self._is_broken = True
        self.num_templates = 0
        self.num_replays = 0
        #: Ops that were issued, and those of them in runs that were replaced.
        self.num_ops = 0
        self.num_replayed_ops = 0

    @property
    def runs(self) -> list[Run]:
        """Those that are known, in no order."""
        return list(self._runs.values())

    def rewrite(self, words: list[int], frees: Frees, why: str | None = None) -> Rewritten:
        """Look at a batch.

        Args:
            words: whole records of ops, without FREE.
            why: what everything is sent for, ``AWAITED`` or ``PAUSED``. None: its end may wait for more.
        """
        self._num_batches += 1
        batch = _Batch(words, frees)
        tokens: list[int] = []
        start, end, num_rest = 0, len(words), 0
        while start < end:
            number = words[start]
            is_chained = start + 2 < end and words[start + 2] == self._last_output
            token = token_of(number, words[start + 1], is_chained)
            runs = self._runs_at.get(token)
            if runs is not None:
                held = (run for run in runs if start + run.width >= end and run.begins(words, start))
                begun = next(held, None) if why is None else None
                if begun is not None:
                    num_rest = begun.num_ops_in(end - start)
                    break
                run = self._replay(runs, batch, start, why)
                if run is not None:
                    tokens += run.tokens
                    self._last_output = words[start + run.last_output]
                    start += run.width
                    continue
            width, last_output = self._widths.get(number) or self._width_of(number)
            tokens.append(token if width > 0 else -number)
            self._last_output = words[start + last_output]
            start += abs(width)
        self._note(len(tokens), batch)
        if tokens:
            self._is_broken = False
        if why is AWAITED and not self._is_broken:
            tokens.append(BREAK)
            self._is_broken = True
        self._take(self._finder.feed(tokens))
        return batch.finish(start, num_rest)

    def _note(self, num_ops: int, batch: _Batch) -> None:
        self.num_ops += num_ops
        self.num_replays += batch.num_replays
        self.num_replayed_ops += batch.num_replayed_ops

    def _replay(self, runs: Sequence[Run], batch: _Batch, start: int, why: str | None) -> Run | None:
        """Put one record in the place of the longest run that is in the batch at ``start``."""
        words = batch.words
        broken: list[tuple[Run, str]] = []
        for run in runs:
            stop = start + run.width
            part = words[start:stop]
            if len(part) < run.width or run.pick_heads(part) != run.heads:
                if run.has_begun(part):
                    is_cut = why is not None and len(part) < run.width and run.begins(part, 0)
                    broken.append((run, why if why is not None and is_cut else "another op came"))
            elif self._bind(run, batch, part, stop):
                return run
        for run, reason in broken:
            run.break_off(reason)
        return None

    def _bind(self, run: Run, batch: _Batch, part: Sequence[int], stop: int) -> bool:
        """Put a record of the run in the place of ``part`` of the batch, the words up to ``stop``."""
        run.last_used = self._num_batches

        def is_inner(value: int) -> bool:
            return batch.are_dead((value,), stop)

        layout = run.layout
        if layout is None:
            if not self._make(run, part, is_inner):
                return False
            layout = run.layout
            assert layout is not None
        values = layout.values_in(part)
        if values is None:
            run.break_off("ops were connected otherwise")
            run.num_misses += 1
            if run.num_misses > _MAX_MISSES:
                self._forget(run)
            return False
        if not batch.are_dead(values[layout.num_outer :], stop):
            run.break_off("a value was still in use")
            known = set(values[layout.num_outer :])
            if not self._make(run, part, lambda value: value in known and is_inner(value)):
                return False
            layout = run.layout
            assert layout is not None
            values = layout.values_in(part)
            assert values is not None
        inner = values[layout.num_outer :]
        record = [layout.template, 0, *values[: layout.num_outer], self._new_inner_ids(layout.num_inner)]
        record += layout.pick_scalars(part)
        batch.replace(run, stop, record, inner)
        run.num_replays += 1
        run.num_misses = 0
        return True

    def _make(self, run: Run, part: Sequence[int], is_inner: Callable[[int], bool]) -> bool:
        """A template for a run, after an instance of it. False when it is to have none any more."""
        if self.num_templates == MAX_TEMPLATES or run.num_versions == MAX_VERSIONS:
            self._forget(run)
            return False
        layout = make_layout(run, part, self._templates, is_inner, self._define)
        if layout is None:
            self._forget(run)
            return False
        self.num_templates += 1
        run.num_versions += 1
        run.layout = layout
        return True

    def _width_of(self, number: int) -> tuple[int, int]:
        """What ``_widths`` says of a template."""
        record = self._templates[number]
        width = record.width if record.body is None else -record.width  # captured calls are in no run
        found = self._widths[number] = (width, 1 + record.num_inputs + record.num_outputs)
        return found

    # ---- runs ----

    def _take(self, repeats: Sequence[Repeat]) -> None:
        for found in repeats:
            pieces = found.pieces
            if not pieces or self.num_templates >= MAX_TEMPLATES or self._is_covered(pieces):
                continue
            if found.period:
                self._supersede(found)
            for piece in dict.fromkeys(pieces):
                if piece not in self._runs:
                    self._add(Run.of(piece, self._templates))

    def _is_covered(self, pieces: Sequence[tuple[int, ...]]) -> bool:
        """Whether known runs do about as well for these ops, if they come again and again."""
        tokens = tuple(chain.from_iterable(pieces))
        mean = len(tokens) / len(pieces)
        tokens *= -(-_NUM_COMPARED // len(tokens))
        first: int | None = None
        num_records = start = 0
        covered = (0, 1)
        while start < len(tokens):
            for run in self._runs_at.get(tokens[start], ()):
                if run.layout is not None and tokens[start : start + run.num_ops] == run.tokens:
                    first = start if first is None else first
                    start += run.num_ops
                    num_records += 1
                    covered = (start - first, num_records)
                    break
            else:
                start += 1
                num_records += first is not None
        # Its ends do not count: runs may begin elsewhere in a loop.
        num_ops, num_records = covered
        return num_ops > len(tokens) / 2 and num_records <= num_ops * max(_FEW_RECORDS, 1.5 / mean)

    def _supersede(self, repeat: Repeat) -> None:
        """Forget the shorter runs that begin inside of a loop which is now known as a whole: they are in its way."""
        inside = {token for piece in repeat.pieces for token in piece}
        for run in self.runs:
            if run.tokens[0] in inside and run.num_ops <= repeat.period and run.tokens not in repeat.pieces:
                self._forget(run)

    def _add(self, run: Run) -> None:
        if len(self._runs) == MAX_RUNS:
            self._forget(min(self._runs.values(), key=lambda known: known.last_used))
        run.last_used = self._num_batches
        self._runs[run.tokens] = run
        here = self._runs_at.setdefault(run.tokens[0], [])
        here.append(run)
        here.sort(key=lambda known: -known.num_ops)

    def _forget(self, run: Run) -> None:
        del self._runs[run.tokens]
        # A new list: the old one may be walked through right now.
        here = [known for known in self._runs_at[run.tokens[0]] if known is not run]
        if here:
            self._runs_at[run.tokens[0]] = here
        else:
            del self._runs_at[run.tokens[0]]

    def validate(self) -> None:
        """Check what the attributes state."""
        self._finder.validate()
        assert len(self._runs) <= MAX_RUNS
        assert self.num_templates <= MAX_TEMPLATES
        assert sum(map(len, self._runs_at.values())) == len(self._runs)
        for token, runs in self._runs_at.items():
            assert all(run.tokens[0] == token and self._runs[run.tokens] is run for run in runs)
            assert [run.num_ops for run in runs] == sorted((run.num_ops for run in runs), reverse=True)
        assert all(run.num_versions <= MAX_VERSIONS for run in self._runs.values())
        assert self.num_replayed_ops <= self.num_ops


class _Batch:
    """Words of a batch, and what is sent in their place."""

    def __init__(self, words: list[int], frees: Frees) -> None:
        self.words = words
        self.num_replays = 0
        self.num_replayed_ops = 0
        self._frees = frees
        self._freed_at: dict[int, int] | None = None
        self._out: list[int] = []
        #: Words and frees up to here are in the output.
        self._done = 0
        self._num_frees_done = 0
        #: Values that are only known inside of a run, and are not freed.
        self._inner: set[int] = set()

    def are_dead(self, values: Sequence[int], stop: int) -> bool:
        """Whether no op from ``stop`` on uses any of the values, neither in this batch nor later."""
        if self._freed_at is None:
            self._freed_at = {}
            for place, ids in self._frees:
                self._freed_at.update(zip(ids, repeat(place)))
        places = set(map(self._freed_at.get, values))
        if None in places:
            return False
        last = max(filter(None, places), default=0)
        return last <= stop or set(values).isdisjoint(self.words[stop:last])

    def replace(self, run: Run, stop: int, record: Sequence[int], inner: Sequence[int]) -> None:
        """One record in the place of the words of a run that ends at ``stop``; these values exist only inside of it."""
        self._copy(stop - run.width)
        self._out += record
        self._inner.update(inner)
        self._done = stop
        self._free(stop)
        self.num_replays += 1
        self.num_replayed_ops += run.num_ops

    def finish(self, rest: int, num_rest_ops: int) -> Rewritten:
        """What became of it; words from ``rest`` on wait."""
        self._copy(rest)
        left = [
            (place - rest, [value for value in ids if value not in self._inner])
            for place, ids in self._frees[self._num_frees_done :]
        ]
        return Rewritten(self._out, rest, left, num_rest_ops, self.num_replays)

    def _copy(self, stop: int) -> None:
        """Words as they are, with what is freed between them."""
        words, frees = self.words, self._frees
        while self._num_frees_done < len(frees) and frees[self._num_frees_done][0] <= stop:
            place = frees[self._num_frees_done][0]
            self._out += words[self._done : place]
            self._done = place
            self._free(place)
        self._out += words[self._done : stop]
        self._done = stop

    def _free(self, stop: int) -> None:
        """What is freed up to ``stop``."""
        ids: list[int] = []
        while self._num_frees_done < len(self._frees) and self._frees[self._num_frees_done][0] <= stop:
            ids += self._frees[self._num_frees_done][1]
            self._num_frees_done += 1
        if self._inner:
            ids = [value for value in ids if value not in self._inner]
        if ids:
            self._out += (FREE, len(ids), *ids)


def with_frees(words: list[int], frees: Frees) -> list[int]:
    """The words as they are, with FREE records between them."""
    return _Batch(words, frees).finish(len(words), 0).words
