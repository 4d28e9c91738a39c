"""Which placements to bring the inputs of a call to when no signature fits them: the cheapest, by bytes moved. Pure.

Candidates come from the signatures of the op's rule, axis by axis; for rules without an equation they are tried out;
the last resort is every input whole on every device. A candidate counts when the rule plans it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from dtorch import shapes
from dtorch.auto import Moved
from dtorch.op_plan import OpPlan
from dtorch.propagate import propagate
from dtorch.rules.call import Call, op_of
from dtorch.rules.dsl import EquationRule, same_pieces
from dtorch.rules.equation import Equation, Mismatch, Signature, layout_of, match, signatures
from dtorch.rules.explain import input_names, is_trial
from dtorch.rules.foreach import ForeachRule
from dtorch.rules.tables import find_rule
from dtorch.rules.whole import replicated
from dtorch.shapes import is_contiguous, preserved_stride
from dtorch.spec import Spec, contiguous_stride, intern_spec
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Partial, Placement, Placements, Replicate, Shard
from dtorch_runtime.ir.transfer import STEP_COST_BYTES, plan_redistribute
from dtorch_runtime.ir.transfer_cost import bytes_at_once, transfer_bytes

#: Candidates that are ranked by bytes, and those of them that are planned, before every input is made whole.
MAX_RANKED, MAX_PLANNED = 1024, 48

#: A layout for each input.
Layouts: TypeAlias = tuple[Layout, ...]


@dataclass(frozen=True)
class AutoPlan:
    """A call on converted inputs.

    Attributes:
        plan: what runs, planned for the converted inputs.
        conversions: (input, layout it is brought to), before ``plan`` runs.
        written_back: inputs that the op wrote to on a converted copy: the copy is brought back into them.
        cost_bytes: what decided: bytes that the busiest device receives, summed over the redistributions.
        moves: the redistributions that move bytes.
    """

    plan: OpPlan
    conversions: tuple[tuple[int, Layout], ...]
    written_back: tuple[int, ...]
    cost_bytes: int
    moves: tuple[Moved, ...] = ()


def plan_cheapest(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], refused: PlacementError
) -> AutoPlan:
    """The cheapest way to run a call that ``propagate`` refused.

    Args:
        func, args, kwargs: as ``propagate`` takes them.
        refused: what it raised, and what is raised here when no placements help.

    Raises:
        PlacementError: not even whole inputs do.
        RuntimeError, IndexError, TypeError, ValueError: torch refuses these shapes, dtypes or arguments.
    """
    call = Call(op_of(func), args, kwargs)
    if call.op.writes:
        shapes.check_written(call)
    best: AutoPlan | None = None
    tried: set[Layouts] = set()
    for layouts in _candidates(call):
        if layouts in tried or len(tried) > MAX_PLANNED:
            continue
        tried.add(layouts)
        if best is not None and _total_cost(call.inputs, layouts, call.written) >= best.cost_bytes:
            break
        found = _planned(call, layouts)
        if found is not None and (best is None or found.cost_bytes < best.cost_bytes):
            best = found
    if best is None:
        assert call.mesh is not None
        best = _planned(call, (replicated(call.mesh),) * len(call.inputs))
    if best is None:
        raise refused
    return replace(best, moves=_moves(call, best))


def converted_spec(spec: Spec, layout: Layout) -> Spec:
    """What a tensor is after its conversion: the same global value, dense, its dims in the same order in memory."""
    order = memory_order(spec)
    if order is None:
        return intern_spec(spec.shape, spec.dtype, layout)
    steps = contiguous_stride([spec.shape[dim] for dim in order])
    stride = [0] * len(order)
    for dim, step in zip(order, steps, strict=True):
        stride[dim] = step
    return intern_spec(spec.shape, spec.dtype, layout, stride)


def memory_order(spec: Spec) -> list[int] | None:
    """The dims of a dense copy from the slowest to the fastest in memory; None when it is row-major."""
    stride = preserved_stride(spec)
    if is_contiguous(spec.shape, stride):
        return None
    return sorted(range(len(stride)), key=lambda dim: -stride[dim])


def repeated_dims(spec: Spec) -> set[int]:
    """The dims along which an expanded tensor repeats one row."""
    return {
        d for d, (size, step) in enumerate(zip(spec.shape, spec.stride, strict=True)) if size > 1 and not step
    }


def _moves(call: Call, found: AutoPlan) -> tuple[Moved, ...]:
    there = moved(call, call.inputs, found.conversions)
    if not found.plan.conversions and not found.written_back:
        return there
    changed = _converted(call, found.conversions)
    back = [(index, call.inputs[index].layout) for index in found.written_back]
    return (
        *there,
        *moved(call, changed, found.plan.conversions),
        *moved(call, changed, back, " (back)"),
    )


def moved(
    call: Call, given: Sequence[Spec], conversions: Iterable[tuple[int, Layout]], suffix: str = ""
) -> tuple[Moved, ...]:
    """Which conversions of the tensors given to a call move bytes between devices, and how many in all."""
    found = []
    names: list[str] = []
    for index, layout in conversions:
        spec = given[index]
        num_bytes = moved_bytes(spec, layout)
        if num_bytes:
            names = names or input_names(call)
            source, target = spec.layout.placements, layout.placements
            found.append(Moved(call.op.name, names[index] + suffix, source, target, num_bytes))
    return tuple(found)


@lru_cache(maxsize=4096)
def moved_bytes(spec: Spec, layout: Layout) -> int:
    """Bytes that cross from one device to another when a tensor is brought to ``layout``, all devices together."""
    itemsize_bytes = spec.dtype.itemsize
    if spec.layout == layout or not _cost(spec, layout):
        return 0
    if spec.num_bytes * spec.layout.mesh.size() <= STEP_COST_BYTES:  # then the plan is one exchange
        at_once = bytes_at_once(spec.shape, itemsize_bytes, spec.layout, layout)
        if at_once is not None:
            return at_once
    steps = plan_redistribute(spec.shape, spec.layout, layout, itemsize_bytes=itemsize_bytes)
    return sum(sum(step.bytes_by_link(itemsize_bytes).values()) for step in steps)


def _converted(call: Call, conversions: Sequence[tuple[int, Layout]]) -> list[Spec]:
    """The inputs after their conversion. Views show the strides that they would have in the memory of their base:
    torch decides by them what is a view again, and what a copy; the copy that they are of is at least as dense.
    So do ops whose results have the gaps of their inputs."""
    inputs = list(call.inputs)
    for index, layout in conversions:
        spec = inputs[index]
        as_it_was = intern_spec(spec.shape, spec.dtype, layout, spec.stride, spec.is_conj, spec.is_neg)
        inputs[index] = as_it_was if call.op.keeps_gaps else converted_spec(spec, layout)
    return inputs


def _cost(spec: Spec, layout: Layout, *, and_back: bool = False) -> int:
    """What a conversion costs; that of a tensor that is written to counts twice."""
    if spec.layout == layout:
        return 0
    cost = transfer_bytes(spec.shape, spec.dtype.itemsize, spec.layout, layout)
    if and_back:
        cost += transfer_bytes(spec.shape, spec.dtype.itemsize, layout, spec.layout)
    return cost


def _total_cost(inputs: Sequence[Spec], layouts: Sequence[Layout], written: Sequence[int]) -> int:
    return sum(
        _cost(spec, layout, and_back=index in written)
        for index, (spec, layout) in enumerate(zip(inputs, layouts, strict=True))
    )


def _planned(call: Call, layouts: Layouts) -> AutoPlan | None:
    """The plan of one candidate; None when the rule refuses it."""
    if call.op.is_view and repeated_dims(call.inputs[0]).intersection(_cut_dims(layouts[0])):
        return None  # what is written to one repetition has to be in all of them, on one device
    conversions = [
        (index, layout)
        for index, (spec, layout) in enumerate(zip(call.inputs, layouts, strict=True))
        if layout != spec.layout
    ]
    changed = call.with_inputs(_converted(call, conversions))
    token = is_trial.set(True)
    try:
        plan = propagate(call.op.func, changed.args, changed.kwargs)
    except PlacementError:
        return None
    finally:
        is_trial.reset(token)
    if call.op.is_view and plan.conversions:
        return None  # the result must be a view of the one copy that is kept equal to the tensor
    back = tuple(index for index, _ in conversions if index in call.written)
    if any(shapes.may_share_elements(call.inputs[index]) for index in back):
        return None  # torch copies into no tensor whose elements share memory
    cost = _total_cost(call.inputs, layouts, back)
    cost += sum(_cost(changed.inputs[index], layout) for index, layout in plan.conversions)
    return AutoPlan(plan, tuple(conversions), back, cost)


def _cut_dims(layout: Layout) -> list[int]:
    return [placement.dim for placement in layout.placements if isinstance(placement, Shard)]


# ------------------------------------------------------------------------------------------------- candidates


def _candidates(call: Call) -> Iterator[Layouts]:
    """Layouts to try, the cheapest first."""
    rule = find_rule(call.op)
    if rule is None:
        return iter(())
    if isinstance(rule, EquationRule):
        equation = rule.bind(call)
        return iter(()) if equation is None else iter(_ranked(call, range(len(call.inputs)), equation))
    if isinstance(rule, ForeachRule):
        return iter([_part_by_part(call, rule.parts(call))])
    return _by_trial(call)


def _part_by_part(call: Call, parts: Iterable[tuple[Sequence[int], Equation]]) -> Layouts:
    """The best of each part: an op on lists is as many ops as they are long."""
    result = [spec.layout for spec in call.inputs]
    for indices, equation in parts:
        inputs = [call.inputs[i] for i in indices]
        for found in itertools.islice(_ranked(call, indices, equation), MAX_PLANNED):
            changed = [converted_spec(spec, layout) for spec, layout in zip(inputs, found, strict=True)]
            if _matches(equation, changed):
                for index, layout in zip(indices, found, strict=True):
                    result[index] = layout
                break
    return tuple(result)


def _matches(equation: Equation, inputs: Sequence[Spec]) -> bool:
    shape = shapes.broadcast([spec.shape for spec in inputs])
    try:
        matched = match(equation, inputs, [shape])
    except Mismatch:
        return False
    return all(same_pieces(inputs[i].shape, inputs[i].layout, matched.outputs[0]) for i in equation.fixed)


#: One signature along one axis as placements: of each input (None: as it is), and of each output.
_Choice: TypeAlias = "tuple[tuple[Placement | None, ...], tuple[Placement, ...]]"


def _ranked(call: Call, indices: Sequence[int], equation: Equation) -> list[Layouts]:
    """Layouts for the inputs of an equation, the fewest bytes first, then those with sharded results."""
    inputs = [call.inputs[i] for i in indices]
    written = tuple([indices.index(i) for i in call.written if i in indices])
    given = tuple([spec.layout for spec in inputs])
    per_axis = _choices_per_axis(equation, given, written)
    if math.prod(map(len, per_axis)) <= MAX_RANKED:
        options = _options(given, written, per_axis)
    else:
        limit = max(2, int(MAX_RANKED ** (1 / len(per_axis))))
        options = _options(
            given,
            written,
            tuple(
                tuple(sorted(choices, key=lambda c: _one_axis_cost(inputs, axis, c, written))[:limit])
                for axis, choices in enumerate(per_axis)
            ),
        )
    costs = [_cost(inputs[index], layout, and_back=index in written) for index, layout in options.moves]
    ranked = [
        ((sum([costs[number] for number in numbers]), tie), layouts)
        for layouts, numbers, tie in options.candidates
    ]
    return [layouts for _, layouts in sorted(ranked, key=lambda item: item[0])]


@dataclass(frozen=True, slots=True)
class _Options:
    """What may be done about inputs of given placements, whatever their sizes."""

    #: (input, layout that it may be brought to)
    moves: tuple[tuple[int, Layout], ...]
    #: Layouts of all inputs, the moves that they need, and what decides between candidates that cost the same.
    candidates: tuple[tuple[Layouts, tuple[int, ...], tuple[int, ...]], ...]


@lru_cache(maxsize=4096)
def _options(given: Layouts, written: tuple[int, ...], per_axis: tuple[tuple[_Choice, ...], ...]) -> _Options:
    moves: dict[tuple[int, Layout], int] = {}
    candidates = []
    for position, combination in enumerate(itertools.product(*per_axis)):
        layouts = tuple([_layout(layout, i, combination) for i, layout in enumerate(given)])
        changed = [
            i for i, (layout, have) in enumerate(zip(layouts, given, strict=True)) if layout is not have
        ]
        numbers = tuple([moves.setdefault((i, layouts[i]), len(moves)) for i in changed])
        outputs = [placement for _, outs in combination for placement in outs]
        num_targets = sum(target in changed for target in written)
        candidates.append((layouts, numbers, (num_targets, *_unsharded(outputs), len(changed), position)))
    return _Options(tuple(moves), tuple(candidates))


def _unsharded(outputs: Sequence[Placement]) -> tuple[int, int]:
    """What a tie is decided by: how many outputs are partial, and how many are whole."""
    return sum(isinstance(p, Partial) for p in outputs), sum(isinstance(p, Replicate) for p in outputs)


@lru_cache(maxsize=4096)
def _choices_per_axis(
    equation: Equation, given: Layouts, written: tuple[int, ...]
) -> tuple[tuple[_Choice, ...], ...]:
    have = zip(*(layout.placements for layout in given), strict=True)
    return tuple(tuple(_choices(equation, placements, written)) for placements in have)


def _choices(equation: Equation, have: Sequence[Placement], written: Sequence[int]) -> list[_Choice]:
    """The signatures along one axis, with each unit that the inputs have there."""
    found: dict[_Choice, None] = {}
    for signature in signatures(equation):
        if not _is_reasonable(equation, signature, have):
            continue
        for unit in _units(have, signature):
            outputs = tuple(_place(c, unit) for c in signature.outputs)
            placements = [
                None if dims is None else _kept(own, _place(c, unit))
                for own, dims, c in zip(have, equation.inputs, signature.inputs, strict=True)
            ]
            for target, output in zip(written, outputs):
                if equation.inputs[target] is None:  # that of out=, which is where the result is
                    placements[target] = _kept(have[target], output)
            found[tuple(placements), outputs] = None
    return list(found)


def _is_reasonable(equation: Equation, signature: Signature, have: Sequence[Placement]) -> bool:
    """Making terms of a sum moves no bytes, but every device then computes on the whole: only what is partial
    already, or meets something partial, becomes so."""
    partial = [
        own
        for own, dims, c in zip(have, equation.inputs, signature.inputs, strict=True)
        if dims is not None and isinstance(c, str)
    ]
    if any(isinstance(own, Shard) for own in partial):
        return False
    return not partial or signature.letter is not None or any(isinstance(own, Partial) for own in partial)


def _units(have: Sequence[Placement], signature: Signature) -> list[int]:
    units = {
        p.unit for p, c in zip(have, signature.inputs, strict=True) if isinstance(p, Shard) and p.dim == c
    }
    return sorted(units) or [1]


def _place(coded: Any, unit: int) -> Placement:
    if coded is None:
        return Replicate()
    return Shard(coded, unit) if isinstance(coded, int) else Partial(coded)


def _kept(have: Placement, want: Placement) -> Placement | None:
    return None if have == want else want


def _layout(given: Layout, index: int, combination: Sequence[_Choice]) -> Layout:
    placements = tuple(
        [
            have if inputs[index] is None else inputs[index]
            for have, (inputs, _) in zip(given.placements, combination, strict=True)
        ]
    )
    return given if placements == given.placements else layout_of(given.mesh, placements)


def _one_axis_cost(
    inputs: Sequence[Spec], axis: int, choice: _Choice, written: Sequence[int]
) -> tuple[int, int, int]:
    layouts = []
    for spec, want in zip(inputs, choice[0], strict=True):
        placements = list(spec.layout.placements)
        placements[axis] = placements[axis] if want is None else want
        layouts.append(layout_of(spec.layout.mesh, tuple(placements)))
    return _total_cost(inputs, layouts, written), *_unsharded(choice[1])


# ------------------------------------------------------------------------------------------------- by trial


def _by_trial(call: Call) -> Iterator[Layouts]:
    """Every input as it is, whole, or sharded on some dim; the cheapest combinations first."""
    options = []
    limit = max(2, int(MAX_RANKED ** (1 / len(call.inputs))))
    for index, spec in enumerate(call.inputs):
        layouts = [layout_of(spec.layout.mesh, placements) for placements in _all_placements(spec)]
        costs = {layout: _cost(spec, layout, and_back=index in call.written) for layout in layouts}
        options.append(sorted(layouts, key=costs.__getitem__)[:limit])
    ranked = [
        (_total_cost(call.inputs, layouts, call.written), position, layouts)
        for position, layouts in enumerate(itertools.product(*options))
    ]
    return (layouts for _, _, layouts in sorted(ranked, key=lambda item: item[:2]))


def _all_placements(spec: Spec) -> Iterator[Placements]:
    """The placements themselves first, then all that are Replicate or Shard along each axis."""
    per_axis = [
        dict.fromkeys(
            (have, *(Shard(dim) for dim, size in enumerate(spec.shape) if size > 1), Replicate()),
        )
        for have in spec.layout.placements
    ]
    return itertools.islice(itertools.product(*per_axis), MAX_RANKED)
