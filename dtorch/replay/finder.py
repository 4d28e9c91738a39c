"""Finds what repeats in a stream of tokens, over a bounded window of it. Decisions only.

A token stands for an op: two ops with one token do the same and were issued at the same line; it is odd when the first
input of the op is what the op before it made. The stream is compared
with itself at a distance: while each token equals the one that came ``distance`` before it, nothing else is looked at.
Where that ends, the next distance is found by the last ``GRAM`` tokens, in a table of where these came last. So a loop
in a loop is first found as the inner one, and once the outer one has come again as a whole, its distance holds.

The idea of finding repeats in the stream of a program's own tasks is that of automatic tracing, e.g. Apophenia (Yadav
et al., ASPLOS 2025), which uses suffix arrays; one distance at a time is cheaper, and enough for programs with one loop
around the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: A token that stands for no op: somebody waited for what was issued before it.
BREAK: Final = 0
#: So many tokens must be equal before anything else is compared.
GRAM: Final = 4
#: A repeat that did not come twice in a row is told of when it is so long.
MIN_ODD: Final = 8
#: Shorter loops are taken several turns at once.
_MIN_LOOP: Final = 64


@dataclass(frozen=True, slots=True)
class Repeat:
    """Tokens that came twice.

    Attributes:
        pieces: the runs of ops in it, in order, none of them across a token that stands for no op.
        period: for a loop, how many tokens one turn has; 0 for what came again somewhere.
    """

    pieces: tuple[tuple[int, ...], ...]
    period: int


class Finder:
    """Takes a stream and tells of its repeats; of a loop again, ever less often, while it goes on."""

    def __init__(self, *, max_run: int, window: int = 8192) -> None:
        """``max_run``: the longest piece. ``window``: how many tokens are remembered; up to twice as many are kept."""
        self._max_run = max_run
        self._window = window
        #: The end of the stream, and how many tokens came before it.
        self._history: list[int] = []
        self._base = 0
        #: ``GRAM`` tokens -> where in the stream the last of them stood, when they came last.
        self._grams: dict[tuple[int, ...], int] = {}
        #: How far back the stream is compared with itself; 0 while no repeat is known.
        self._distance = 0
        #: How many tokens were equal at this distance, and how many when that was last told of.
        self._num_equal = 0
        self._num_told = 0
        #: Whether it began after tokens that had not come before: then what repeats begins where it began.
        self._is_new = False
        #: Tokens since the last repeat ended.
        self._num_searched = 0
        #: Tokens up to here are in the table.
        self._num_indexed = 0

    def feed(self, tokens: Sequence[int]) -> list[Repeat]:
        """Take the next tokens; what was found with them."""
        found: list[Repeat] = []
        start = 0
        while start < len(tokens):
            if self._distance:
                start = self._compare(tokens, start, found)
            else:
                start = self._search(tokens, start)
        if len(self._history) > 2 * self._window:
            self._trim()
        return found

    def _compare(self, tokens: Sequence[int], start: int, found: list[Repeat]) -> int:
        """Take tokens while they equal those before them; returns where the others begin."""
        history, distance = self._history, self._step()
        there = len(history) - distance
        new = list(tokens[start : start + distance])
        before = history[there : there + len(new)]
        if new != before:
            num_same = next(
                index for index, pair in enumerate(zip(new, before, strict=True)) if pair[0] != pair[1]
            )
            new = new[:num_same]
        history += new
        self._num_equal += len(new)
        self._tell_loop(found)
        if start + len(new) < len(tokens) and len(new) < distance:
            self._end_of_repeat(found)
        return start + len(new)

    def _step(self) -> int:
        """The distance, or a multiple of a short one, so that many tokens are compared at once."""
        distance = self._distance
        if distance >= _MIN_LOOP:
            return distance
        return distance * max(1, min(self._num_equal, _MIN_LOOP) // distance)

    def _tell_loop(self, found: list[Repeat]) -> None:
        """Tell of a loop once it has come twice, and again when it has come twice as often."""
        distance, num_new = self._distance, self._num_equal - self._num_told
        if num_new < max(distance, self._num_told):
            return
        turn = self._history[-distance:]
        if min(turn) <= BREAK:
            first = next(index for index, token in enumerate(turn) if token <= BREAK)
        else:
            num_turns = max(1, min(_MIN_LOOP, self._max_run) // distance)
            if num_new < num_turns * distance:
                return
            # From where the second turn began: there, or near to it, is the head of the loop.
            first = -self._num_equal % distance
            turn = turn[first:] + turn[:first]
            first = 0 if self._is_new else _first_head(turn) % distance
            turn *= num_turns
        self._num_told = self._num_equal
        found.append(Repeat(self._pieces(turn[first:] + turn[:first]), distance))

    def _end_of_repeat(self, found: list[Repeat]) -> None:
        if not self._num_told and self._num_equal >= MIN_ODD:
            same = self._history[-self._num_equal :]
            first = 0 if self._is_new else _first_head(same)
            found.append(Repeat(self._pieces(same[first:]), 0))
        end = self._base + len(self._history)
        for place in range(max(self._num_indexed, end - self._distance), end):
            stop = place - self._base + 1
            self._grams[tuple(self._history[max(stop - GRAM, 0) : stop])] = place
        self._num_indexed = end
        self._num_searched = 0
        self._distance = self._num_equal = self._num_told = 0

    def _search(self, tokens: Sequence[int], start: int) -> int:
        """Take tokens until the last ones came before; returns where the others begin."""
        history, grams, farthest = self._history, self._grams, self._window // 2
        end, stop = self._base + len(history), start
        for token in tokens[start:]:
            history.append(token)
            gram = tuple(history[-GRAM:])
            before = grams.get(gram)
            grams[gram] = end
            end += 1
            stop += 1
            if before is not None and end - 1 - before <= farthest:
                self._distance, self._num_equal = end - 1 - before, GRAM
                break
        self._num_searched += stop - start
        self._num_indexed = end
        self._is_new = self._num_searched >= GRAM
        return stop

    def _pieces(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The runs of ops, the long ones cut into parts of about the same length."""
        runs: list[list[int]] = [[]]
        for token in tokens:
            if token <= BREAK:
                runs.append([])
            else:
                runs[-1].append(token)
        pieces: list[tuple[int, ...]] = []
        for run in runs:
            start = 0
            while start < len(run):
                stop = self._end_of_piece(run, start)
                if stop - start >= GRAM:
                    pieces.append(tuple(run[start:stop]))
                start = stop
        return tuple(pieces)

    def _end_of_piece(self, run: Sequence[int], start: int) -> int:
        """Where the next piece begins: before an op that does not go on with the last one, if there is any."""
        num_left, max_run = len(run) - start, self._max_run
        if num_left <= max_run:
            return len(run)
        for stop in range(start + max_run, start + max_run // 2, -1):
            if not run[stop] & 1:
                return stop
        num_parts = -(-num_left // max_run)
        return start + -(-num_left // num_parts)

    def _trim(self) -> None:
        cut = len(self._history) - self._window
        del self._history[:cut]
        self._base += cut
        if len(self._grams) > 2 * self._window:
            self._grams = {key: place for key, place in self._grams.items() if place >= self._base}

    def validate(self) -> None:
        """Check what the attributes state."""
        history, distance = self._history, self._distance
        assert len(history) <= 2 * self._window
        assert len(self._grams) <= 5 * self._window
        assert 0 <= distance <= self._window // 2
        assert self._num_indexed <= self._base + len(history)
        assert (self._num_equal >= GRAM) == bool(distance)
        num_seen = min(self._num_equal, len(history) - distance) if distance else 0
        assert all(history[-index] == history[-index - distance] for index in range(1, num_seen + 1))


def _first_head(tokens: Sequence[int]) -> int:
    """The first op that does not go on with the one before it; the end when there is none."""
    return next((index for index, token in enumerate(tokens) if not token & 1), len(tokens))
