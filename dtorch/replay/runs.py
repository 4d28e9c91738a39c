"""Runs of ops that were found to repeat: what one looks like in the op stream, and the template that stands for it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

import msgspec

from dtorch.replay.finder import GRAM
from dtorch.replay.templates import Op, free_inputs, make_template
from dtorch_runtime.ir.body import REPEATED
from dtorch_runtime.wire.records import TemplateRecord

#: A token is the template of an op, its location, which has so many bits, and one bit more.
_LOCATION_BITS: Final = 32
_LOCATION_MASK: Final = (1 << _LOCATION_BITS) - 1
#: So often a run may turn out to give away more than was known, before it counts as no run.
MAX_VERSIONS: Final = 4

#: Takes words at fixed places.
Picker = Callable[[Sequence[int]], tuple[int, ...]]


def token_of(template: int, location: int, is_chained: bool) -> int:
    """The token of an op; ``is_chained`` says whether its first input is what the op before it made."""
    return (template << _LOCATION_BITS | location) << 1 | is_chained


def head_of(token: int) -> tuple[int, int]:
    """The template and the location of the op of a token."""
    return token >> 1 >> _LOCATION_BITS, token >> 1 & _LOCATION_MASK


def picker(places: Sequence[int]) -> Picker:
    """What takes the words at these places."""
    match len(places):
        case 0:
            return lambda words: ()
        case 1:
            [place] = places
            return lambda words: (words[place],)
        case _:
            return itemgetter(*places)


@dataclass(frozen=True, slots=True)
class Layout:
    """A run as one template.

    Attributes:
        template: its number.
        record: the template.
        pick_values: the ids of its inputs, outputs and inner values, each once, from the words of the run.
        pick_ids: all ids in the words.
        spread: from each value once to all ids: the words are an instance if these are equal.
        pick_scalars: the seeds.
    """

    template: int
    record: TemplateRecord
    pick_values: Picker
    pick_ids: Picker
    spread: Picker
    pick_scalars: Picker

    @property
    def num_inputs(self) -> int:
        """Inputs."""
        return self.record.num_inputs

    @property
    def num_outer(self) -> int:
        """Inputs and outputs."""
        return self.record.num_inputs + self.record.num_outputs

    @property
    def num_inner(self) -> int:
        """Inner values, with those that passes may add."""
        assert self.record.body is not None
        return self.record.body.num_inner

    def values_in(self, words: Sequence[int]) -> tuple[int, ...] | None:
        """The value of each number of the body; None when ops are connected otherwise in these words."""
        values = self.pick_values(words)
        if self.pick_ids(words) != self.spread(values):
            return None
        # A value that the run reads from outside must not be one that it makes.
        return values if set(values[self.num_inputs :]).isdisjoint(values[: self.num_inputs]) else None


@dataclass(eq=False, slots=True)
class Run:
    """Ops in a row that may be issued as one record.

    Attributes:
        tokens: of the ops.
        width: words of the ops, without what is freed between them.
        last_output: where in the words the last output of the last op stands.
        head_places: where templates and locations stand in the words, and ``heads`` what stands there.
        layout: None until it came again as a whole.
        num_versions: how often a template was made for it.
        last_used: the number of the last batch that it was in.
        num_misses: how often its ops came since then, connected otherwise.
        broken: why it was not issued as one record where it began, and how often.
    """

    tokens: tuple[int, ...]
    width: int
    last_output: int
    head_places: tuple[int, ...]
    heads: tuple[int, ...]
    pick_heads: Picker
    layout: Layout | None = None
    num_versions: int = 0
    num_replays: int = 0
    last_used: int = 0
    num_misses: int = 0
    broken: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokens: tuple[int, ...], templates: Mapping[int, TemplateRecord]) -> Run:
        """The run of these tokens."""
        places: list[int] = []
        heads: list[int] = []
        width = last_output = 0
        for head in map(head_of, tokens):
            template = templates[head[0]]
            places += (width, width + 1)
            heads += head
            last_output = width + 1 + template.num_inputs + template.num_outputs
            width += template.width
        return cls(tokens, width, last_output, tuple(places), tuple(heads), picker(places))

    @property
    def num_ops(self) -> int:
        """Ops in it."""
        return len(self.tokens)

    def begins(self, words: Sequence[int], start: int) -> bool:
        """Whether the words from ``start`` to their end may be the beginning of the run, or all of it."""
        places = self.head_places[: 2 * self.num_ops_in(len(words) - start)]
        return tuple([words[start + place] for place in places]) == self.heads[: len(places)]

    def num_ops_in(self, num_words: int) -> int:
        """How many of its ops the first of its words are."""
        return bisect_left(self.head_places, num_words) // 2

    def has_begun(self, words: Sequence[int]) -> bool:
        """Whether the words begin with so many ops of the run that it is no accident."""
        places = self.head_places[: 2 * GRAM]
        return len(words) > places[-1] and [words[place] for place in places] == list(self.heads[: 2 * GRAM])

    def break_off(self, why: str) -> None:
        """Count that it began and was not replayed."""
        self.broken[why] = self.broken.get(why, 0) + 1


def make_layout(
    run: Run,
    words: Sequence[int],
    templates: Mapping[int, TemplateRecord],
    is_inner: Callable[[int], bool],
    define: Callable[[TemplateRecord], int],
) -> Layout | None:
    """A template for a run, after one instance of it.

    Args:
        words: of the instance.
        is_inner: whether a value that the run makes is not needed after it.
        define: gives a template its number.

    Returns:
        None when an output of an op is not wanted, which no run can have.
    """
    ops: list[Op] = []
    id_places: list[int] = []
    scalar_places: list[int] = []
    start = 0
    for number, location in zip(run.heads[::2], run.heads[1::2], strict=True):
        template = templates[number]
        first_output = start + 2 + template.num_inputs
        first_scalar, stop = first_output + template.num_outputs, start + template.width
        read, new = tuple(words[start + 2 : first_output]), tuple(words[first_output:first_scalar])
        ops.append(Op(template, location, read, new, (_no_draw,) * template.num_scalars))
        id_places += range(start + 2, first_scalar)
        scalar_places += range(first_scalar, stop)
        start = stop
    inputs = free_inputs(ops)
    made = [value for op in ops for value in op.outputs]
    if 0 in made or len({*inputs, *made}) != len(inputs) + len(made):
        return None
    used = {value for op in ops for value in op.inputs}
    # What nobody reads stays an output: were its op left out as dead, nobody would be told if it fails.
    outputs = [value for value in made if value not in used or not is_inner(value)]
    inner = [value for value in made if value not in set(outputs)]
    made_of, _ = make_template(ops, inputs, outputs, _written(ops, inputs))
    record = msgspec.structs.replace(made_of, op=REPEATED)
    order = {value: index for index, value in enumerate((*inputs, *outputs, *inner))}
    first_place: dict[int, int] = {}
    for place in id_places:
        first_place.setdefault(words[place], place)
    return Layout(
        define(record),
        record,
        picker([first_place[value] for value in order]),
        picker(id_places),
        picker([order[words[place]] for place in id_places]),
        picker(scalar_places),
    )


def _no_draw() -> int:
    raise AssertionError("the seeds of a run come with its ops")


def _written(ops: Sequence[Op], inputs: Sequence[int]) -> list[int]:
    """The inputs whose memory the ops may write to, as far as their views say."""
    roots: dict[int, frozenset[int]] = {value: frozenset((value,)) for value in inputs}
    written: set[int] = set()
    for op in ops:
        views = op.template.views
        for place, output in enumerate(op.outputs):
            if views is None:
                roots[output] = frozenset[int]().union(*(roots[value] for value in op.inputs))
            else:
                roots[output] = roots[op.inputs[views[place]]] if views[place] >= 0 else frozenset()
        for place in op.template.mutates:
            written |= roots[op.inputs[place]]
    return [value for value in inputs if value in written]
