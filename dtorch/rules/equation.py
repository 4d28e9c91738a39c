"""What an op does to dims, in letters; the signatures that follow from it; and the one that fits given placements.

A *signature* says, for one mesh axis, how each input is placed and how each output then is. Here a placement is
coded as None (Replicate), an int (Shard of that dim) or a string (Partial of that kind).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TypeAlias

from dtorch.spec import Spec
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Placements, ReduceOp, Replicate, Shard, split

#: A letter for each dim; None where the dim has size 1 and is broadcast, so that it can never be cut.
Dims: TypeAlias = tuple[str | None, ...]
#: How one mesh axis holds a tensor: None, the sharded dim, or the kind of Partial.
Code: TypeAlias = "int | ReduceOp | None"

#: A layout for each input.
Layouts: TypeAlias = tuple[Layout, ...]
#: The (ranks, unit) of each axis that cuts a dim, outermost first.
Ranks: TypeAlias = tuple[tuple[int, int], ...]

LINEAR_KINDS: tuple[ReduceOp, ...] = ("sum", "avg")
ALL_KINDS: tuple[ReduceOp, ...] = ("sum", "avg", "max", "min", "prod")


@dataclass(frozen=True, slots=True)
class Equation:
    """An op on inputs of given ranks.

    Attributes:
        inputs: letters of each input; None for a tensor that takes no part (the target of ``out=``).
        outputs: letters of each return.
        whole: letters whose dims every device needs whole.
        reduce: what sharding a letter leaves in an output that lacks it, one for all outputs or one for each;
            None: it must not be sharded.
        unaffected: outputs that are whole on every device whatever is cut, or (output, letter) when that letter is.
        terms: the op is a sum of these products of inputs; empty when it is not linear.
        kinds: kinds of Partial that the terms keep.
        lifts: replicated terms may become partial so that they count once (no bytes move).
        slices: inputs that are cut locally when they are whole and another input is sharded (no bytes move).
        converts: inputs that are brought to any placement that the others ask for (documented, e.g. ``copy_``).
        spreads: inputs whose cut dims become terms of a sum where no signature cuts them: a device holds its piece
            among zeros (no bytes move).
        fixed: inputs that are written to, so that their placement stays.
        grouped: letters whose dims are multiples of one another (heads and groups of heads); a cut of one is
            matched with the cut of the other times the ratio.
    """

    inputs: tuple[Dims | None, ...]
    outputs: tuple[Dims, ...]
    whole: frozenset[str] = frozenset()
    reduce: ReduceOp | tuple[ReduceOp, ...] | None = None
    unaffected: frozenset[int | tuple[int, str]] = frozenset()
    terms: tuple[tuple[int, ...], ...] = ()
    kinds: tuple[ReduceOp, ...] = LINEAR_KINDS
    lifts: bool = False
    slices: frozenset[int] = frozenset()
    converts: frozenset[int] = frozenset()
    spreads: frozenset[int] = frozenset()
    fixed: frozenset[int] = frozenset()
    grouped: frozenset[str] = frozenset()
    #: Kept, because equations are looked up by their value at every plan.
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        values = tuple(getattr(self, f.name) for f in fields(self) if f.compare)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash

    def reduction(self, output: int) -> ReduceOp | None:
        """What sharding a letter leaves in an output that lacks it."""
        return self.reduce[output] if isinstance(self.reduce, tuple) else self.reduce


@dataclass(frozen=True, slots=True)
class Signature:
    """How inputs and outputs are placed along one mesh axis. ``letter`` is what it cuts, if anything."""

    inputs: tuple[Code, ...]
    outputs: tuple[Code, ...]
    letter: str | None = None


@lru_cache(maxsize=4096)
def signatures(equation: Equation) -> tuple[Signature, ...]:
    """Every legal signature: all whole, each letter cut, each way to be linear in partial inputs."""
    result = [Signature((None,) * len(equation.inputs), (None,) * len(equation.outputs))]
    letters = dict.fromkeys(
        letter for dims in equation.inputs if dims is not None for letter in dims if letter is not None
    )
    for letter in letters:
        if letter not in equation.whole:
            result.extend(_cut(equation, letter))
    for kind in equation.kinds:
        for chosen in _one_of_each(equation.terms):
            inputs: list[Code] = [kind if i in chosen else None for i in range(len(equation.inputs))]
            outputs = [None if i in equation.unaffected else kind for i in range(len(equation.outputs))]
            result.append(Signature(tuple(inputs), tuple(outputs)))
    if len(equation.fixed) == 1 == len(equation.outputs):
        (target,) = equation.fixed
        if equation.inputs[target] is not None:
            result = [s for s in result if s.inputs[target] == s.outputs[0]]
    return tuple(result)


def _cut(equation: Equation, letter: str) -> Iterator[Signature]:
    outputs: list[Code] = []
    contracted = False
    for index, dims in enumerate(equation.outputs):
        if letter in dims:
            outputs.append(dims.index(letter))
        elif index in equation.unaffected or (index, letter) in equation.unaffected:
            outputs.append(None)
        elif equation.reduce is None:
            return
        else:
            outputs.append(equation.reduction(index))
            contracted = True
    has = [dims is not None and letter in dims for dims in equation.inputs]
    # A term without the letter would count once on every device: one of its factors must be partial.
    lacking = [term for term in equation.terms if not any(has[i] for i in term)] if contracted else []
    for chosen in _one_of_each(tuple(lacking)) if lacking else iter([frozenset[int]()]):
        inputs: list[Code] = []
        for i, names in enumerate(equation.inputs):
            if names is not None and letter in names:
                inputs.append(names.index(letter))
            else:
                inputs.append(equation.reduction(0) if i in chosen else None)
        yield Signature(tuple(inputs), tuple(outputs), letter)


def _one_of_each(terms: tuple[tuple[int, ...], ...]) -> Iterator[frozenset[int]]:
    """Each choice of one factor of each term; none when there are no terms or one has no tensor in it."""
    if terms:
        for chosen in itertools.product(*terms):
            yield frozenset(chosen)


def code(placement: Placement) -> Code:
    """The code of a placement; units are compared later."""
    if isinstance(placement, Shard):
        return placement.dim
    return placement.op if isinstance(placement, Partial) else None


@dataclass(slots=True)
class Mismatch(Exception):
    """No signature fits. ``axis`` is the mesh axis where it went wrong; ``{0}`` in the reason is input 0."""

    reason: str
    axis: int
    #: An input that is cut otherwise than another, and the placements that would agree.
    recut: tuple[int, Placements] | None = None


@dataclass(frozen=True, slots=True)
class Matched:
    """Layouts of inputs as the kernel sees them, of outputs, and the conversions that bring inputs there."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    conversions: tuple[tuple[int, Layout], ...]
    #: The letter that each mesh axis cuts.
    letters: tuple[str | None, ...]
    cuts: tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The tensors that have a letter which some axes cut."""

    letter: str
    axes: tuple[int, ...]
    #: (input, the dim with the letter, the (ranks, unit) of each axis that cuts it)
    inputs: tuple[tuple[int, int, Ranks], ...]
    #: The same for outputs.
    outputs: tuple[tuple[int, int, Ranks], ...]


def match(
    equation: Equation, inputs: Sequence[Spec], out_shapes: Sequence[tuple[int, ...] | None]
) -> Matched:
    """The signature of every mesh axis, put together.

    Raises:
        Mismatch: none fits along some axis, or two inputs are cut at different places.
    """
    found = _matched(equation, tuple([spec.layout for spec in inputs]))
    for cut in found.cuts:
        _check_cut(equation, inputs, out_shapes, cut)
    return found


@lru_cache(maxsize=16384)
def _matched(equation: Equation, layouts: Layouts) -> Matched:
    """What does not depend on sizes.

    Raises:
        Mismatch: no signature fits along some axis.
    """
    mesh = layouts[0].mesh
    chosen = [
        choose(equation, tuple(code(layout.placements[axis]) for layout in layouts), axis)
        for axis in range(mesh.ndim)
    ]
    units = _units(equation, layouts, chosen)
    wanted = []
    conversions = []
    for index, given in enumerate(layouts):
        layout = _input_layout(equation, index, given, chosen, units)
        if layout is not given:
            conversions.append((index, layout))
        wanted.append(layout)
    outputs = []
    for index in range(len(equation.outputs)):
        placements = tuple(_place(s.outputs[index], units[axis]) for axis, s in enumerate(chosen))
        outputs.append(layout_of(mesh, placements))
    letters = tuple(s.letter for s in chosen)
    cuts = tuple(
        Cut(
            letter,
            tuple(axis for axis, found in enumerate(letters) if found == letter),
            tuple(_cut_dims(letter, equation.inputs, wanted)),
            tuple(_cut_dims(letter, equation.outputs, outputs)),
        )
        for letter in dict.fromkeys(found for found in letters if found is not None)
    )
    return Matched(tuple(wanted), tuple(outputs), tuple(conversions), letters, cuts)


def _cut_dims(
    letter: str, tensors: Sequence[Dims | None], layouts: Sequence[Layout]
) -> Iterator[tuple[int, int, Ranks]]:
    for index, (dims, layout) in enumerate(zip(tensors, layouts, strict=True)):
        if dims is not None and letter in dims:
            dim = dims.index(letter)
            yield index, dim, dim_cuts(layout, dim)


@lru_cache(maxsize=16384)
def layout_of(mesh: DeviceMesh, placements: Placements) -> Layout:
    """One object for equal layouts, so that specs compare fast."""
    return Layout(mesh, placements)


def choose(equation: Equation, given: tuple[Code, ...], axis: int) -> Signature:
    """The signature of one axis: the one that fits as it is, or with the fewest allowed conversions.

    Raises:
        Mismatch: none fits.
    """
    legal = signatures(equation)
    best: Signature | None = None
    best_count = len(given) + 1
    for signature in legal:
        count = 0
        for index, (have, want) in enumerate(zip(given, signature.inputs)):
            if have != want and equation.inputs[index] is not None:
                if not _convertible(equation, index, have, want):
                    break
                count += 1
        else:
            if count == 0:
                return signature
            if count < best_count:
                best, best_count = signature, count
    if best is None:
        raise Mismatch(_why(equation, given), axis)
    return best


def _convertible(equation: Equation, index: int, have: Code, want: Code) -> bool:
    if index in equation.fixed:
        return False
    if index in equation.converts:
        return True
    if isinstance(have, int):
        return want == "sum" and index in equation.spreads
    if have is not None:
        return False
    if isinstance(want, str):
        return equation.lifts
    return index in equation.slices


def _name(index: int) -> str:
    """The place of an input's name in a reason."""
    return f"{{{index}}}"


def _why(equation: Equation, given: tuple[Code, ...]) -> str:
    cut: dict[str, int] = {}
    cuttable = {signature.letter for signature in signatures(equation)}
    for index, (have, dims) in enumerate(zip(given, equation.inputs)):
        if isinstance(have, int) and dims is not None:
            letter = dims[have]
            if letter is None:
                return f"dim {have} of {_name(index)} has size 1 and is broadcast, so it cannot be sharded"
            if letter not in cuttable:
                return f"the op needs dim {have} of {_name(index)} whole on every device"
            cut.setdefault(letter, index)
    partial = [index for index, have in enumerate(given) if isinstance(have, str)]
    if partial and not equation.terms:
        return f"{_name(partial[0])} is Partial, and the op is not linear in it"
    if partial and cut:
        return f"{_name(partial[0])} is Partial where {_name(next(iter(cut.values())))} is sharded"
    if partial:
        return f"{_name(partial[0])} is Partial, and the op is not linear in these inputs together"
    if len(cut) > 1:
        first, second, *_ = cut.values()
        return f"{_name(first)} and {_name(second)} are sharded on dims that do not correspond"
    return "the inputs are placed differently"


def _place(coded: Code, unit: int) -> Placement:
    if coded is None:
        return Replicate()
    return Shard(coded, unit) if isinstance(coded, int) else Partial(coded)


def _units(equation: Equation, layouts: Layouts, chosen: Sequence[Signature]) -> list[int]:
    """The unit of the cut on each axis: those of one input with the coarsest, so that nested cuts agree."""
    units = [1] * len(chosen)
    axes_of: dict[str, list[int]] = {}
    for axis, signature in enumerate(chosen):
        if signature.letter is not None:
            axes_of.setdefault(signature.letter, []).append(axis)
    for axes in axes_of.values():
        best: tuple[int, ...] = ()
        for index, layout in enumerate(layouts):
            found = []
            for axis in axes:
                placement = layout.placements[axis]
                want = chosen[axis].inputs[index]
                if isinstance(want, int) and isinstance(placement, Shard) and placement.dim == want:
                    found.append(placement.unit)
            if (len(found), *found) > best:
                best = (len(found), *found)
                if len(found) == len(axes):
                    for axis, unit in zip(axes, found, strict=True):
                        units[axis] = unit
        if best[0] < len(axes):
            for axis in axes:
                units[axis] = _first_unit(layouts, chosen[axis], axis)
    return units


def _first_unit(layouts: Layouts, signature: Signature, axis: int) -> int:
    for layout, want in zip(layouts, signature.inputs, strict=True):
        placement = layout.placements[axis]
        if isinstance(placement, Shard) and placement.dim == want:
            return placement.unit
    return 1


def _input_layout(
    equation: Equation, index: int, layout: Layout, chosen: Sequence[Signature], units: Sequence[int]
) -> Layout:
    if equation.inputs[index] is None:
        return layout
    placements = list(layout.placements)
    changed = False
    for axis, signature in enumerate(chosen):
        want, have = signature.inputs[index], placements[axis]
        if code(have) != want:
            placements[axis] = _place(want, units[axis])
            changed = True
            if index not in equation.converts and isinstance(want, int):
                _check_nested(index, want, axis, layout)
            elif index in equation.spreads and isinstance(have, Shard):
                staying = [s.inputs[index] for s in chosen[axis + 1 :]]
                if have.dim in staying:
                    raise Mismatch(f"{_name(index)} is cut along dim {have.dim} by several axes", axis)
    return layout_of(layout.mesh, tuple(placements)) if changed else layout


def _check_nested(index: int, dim: int, axis: int, layout: Layout) -> None:
    """A local slice must be inside what the device has: later axes must not cut the dim already."""
    for later in layout.placements[axis + 1 :]:
        if isinstance(later, Shard) and later.dim == dim:
            raise Mismatch(
                f"{_name(index)} is cut along dim {dim} by a later axis only, so a local slice does not give its part",
                axis,
            )


def _check_cut(
    equation: Equation, inputs: Sequence[Spec], out_shapes: Sequence[tuple[int, ...] | None], cut: Cut
) -> None:
    """Every tensor that has a cut letter must be cut at the same places.

    Raises:
        Mismatch: two of them are not.
    """
    tensors = [(index, inputs[index].shape[dim], ranks) for index, dim, ranks in cut.inputs]
    for index, dim, ranks in cut.outputs:
        shape = out_shapes[index]
        if shape is not None:
            tensors.append((-1, shape[dim], ranks))
    _, largest, ranks = tensors[0]
    if all(size == largest and other == ranks for _, size, other in tensors):
        return
    largest = max(size for _, size, _ in tensors)
    places: dict[tuple[int, ...], int] = {}
    for index, size, ranks in tensors:
        ends = nested_cuts(size, ranks)
        if cut.letter in equation.grouped and size:
            ends = tuple(at * (largest // size) for at in ends)
        places.setdefault(ends, index)
    if len(places) > 1:
        recut = _recut(equation, inputs, places, cut.letter, cut.axes)
        raise Mismatch(_cut_differently(places), cut.axes[-1], recut)


def _recut(
    equation: Equation,
    inputs: Sequence[Spec],
    places: dict[tuple[int, ...], int],
    letter: str,
    axes: Sequence[int],
) -> tuple[int, Placements] | None:
    """Cut the second input as the first."""
    first, second, *_ = places.values()
    if second == -1 or second in equation.fixed:
        return None
    dims = equation.inputs[second]
    assert dims is not None
    placements = list(inputs[second].layout.placements)
    for axis in axes:
        like = inputs[first].layout.placements[axis]
        placements[axis] = Shard(dims.index(letter), like.unit if isinstance(like, Shard) else 1)
    return second, tuple(placements)


def _cut_differently(places: dict[tuple[int, ...], int]) -> str:
    (first_cut, first), (second_cut, second), *_ = places.items()
    if second == -1:
        return f"the cuts of {_name(first)} at {list(first_cut)} are not cuts of the output"
    return (
        f"{_name(first)} and {_name(second)} are cut at different places, {list(first_cut)} and {list(second_cut)}; "
        f"give them the same Shard(..., unit=)"
    )


@lru_cache(maxsize=16384)
def nested_cuts(size: int, cuts: Ranks) -> tuple[int, ...]:
    """Where a dim is cut by axes of (ranks, unit), one inside the other: the ends of all pieces, in order."""
    pieces = [(0, size)]
    for num_ranks, unit in cuts:
        pieces = [
            (start + low, start + high)
            for start, stop in pieces
            for low, high in split(stop - start, num_ranks, unit)
        ]
    return tuple(stop for _, stop in pieces)


def dim_cuts(layout: Layout, dim: int) -> Ranks:
    """The (ranks, unit) of each axis that cuts a dim, outermost first."""
    return tuple(
        (layout.mesh.shape[axis], placement.unit)
        for axis, placement in enumerate(layout.placements)
        if isinstance(placement, Shard) and placement.dim == dim
    )


def has_empty_piece(shape: tuple[int, ...], layout: Layout) -> bool:
    """Whether some device holds no element of a tensor that has some."""
    for dim, size in enumerate(shape):
        cuts = dim_cuts(layout, dim)
        if size and cuts:
            ends = nested_cuts(size, cuts)
            if any(start == stop for start, stop in zip((0, *ends), ends)):
                return True
    return False
