"""One exchange between devices: which boxes of whose pieces each device assembles into its new piece, and how.

Boxes that several terms contribute to are reduced, in the order given, so that every rank computes the same bits. A
copy is a reduction of one term, so all-gather, all-to-all, reduce-scatter, all-reduce, broadcast and point-to-point
transfers are the same exchange with other boxes, on any mesh, with uneven and empty pieces included.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dtorch_runtime.ir.layout import Box, box_shape, intersect, num_elements, relative
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import ReduceOp


@dataclass(frozen=True, slots=True)
class Source:
    """One term: a box of the local piece of ``device``, in that piece's coordinates."""

    device: int
    box: Box


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the destination's new local piece, and the terms that are reduced into it."""

    box: Box
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What one destination device assembles: the shape of its new piece, and the boxes that fill it.

    ``fill`` is the value of elements that no piece covers (only where a value is spread into terms). Infinities
    stand for the largest and the smallest value of the dtype.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    fill: float | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """What one source device gives away: its ``box`` is term ``source_index`` of a piece of ``device``."""

    device: int
    piece_index: int
    source_index: int
    box: Box


@dataclass(frozen=True)
class Step:
    """One exchange. ``parts`` is keyed by destination device; ``sends`` by source device, others only."""

    reduce: ReduceOp | None
    parts: Mapping[int, Part]
    sends: Mapping[int, tuple[Send, ...]] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        sends: dict[int, list[Send]] = defaultdict(list)
        for device, part in self.parts.items():
            for piece_index, piece in enumerate(part.pieces):
                for source_index, source in enumerate(piece.sources):
                    if source.device != device:
                        sends[source.device].append(Send(device, piece_index, source_index, source.box))
        object.__setattr__(self, "sends", {device: tuple(items) for device, items in sends.items()})

    @property
    def is_local(self) -> bool:
        """Whether no device needs anything from another."""
        return not self.sends

    @property
    def devices(self) -> frozenset[int]:
        """Every device that takes part."""
        return frozenset(self.parts) | frozenset(self.sends)

    def bytes_by_link(self, itemsize_bytes: int) -> dict[tuple[int, int], int]:
        """Bytes that cross from one device to another, keyed by (source, destination)."""
        links: dict[tuple[int, int], int] = defaultdict(int)
        for source, sends in self.sends.items():
            for send in sends:
                links[source, send.device] += num_elements(box_shape(send.box)) * itemsize_bytes
        return dict(links)


def busiest_bytes(step: Step, itemsize_bytes: int) -> tuple[int, int]:
    """Bytes into the device that receives most, and out of the one that sends most."""
    received: dict[int, int] = defaultdict(int)
    sent: dict[int, int] = defaultdict(int)
    for (source, destination), num_bytes in step.bytes_by_link(itemsize_bytes).items():
        sent[source] += num_bytes
        received[destination] += num_bytes
    return max(received.values(), default=0), max(sent.values(), default=0)


@dataclass(frozen=True, slots=True)
class Holding:
    """Who holds what: the box of each device, in the order of ``mesh.devices``."""

    mesh: DeviceMesh
    boxes: tuple[Box, ...]

    def coordinates(self, axes: Sequence[int]) -> list[tuple[int, ...]]:
        """The coordinate of each device along some axes."""
        if not axes:
            return [()] * len(self.boxes)
        every = itertools.product(*map(range, self.mesh.shape))
        return [tuple([coordinate[axis] for axis in axes]) for coordinate in every]

    def split(self, kept: Sequence[int], dim: int | None = None) -> Holding:
        """The same, but devices that hold the same box share it, each a piece of nearly equal size.

        Args:
            kept: axes along which devices hold different terms, and share nothing.
            dim: which is cut; the one that makes the largest piece smallest when None.
        """
        sharers: dict[tuple[Box, tuple[int, ...]], list[int]] = defaultdict(list)
        for index, key in enumerate(zip(self.boxes, self.coordinates(kept), strict=True)):
            sharers[key].append(index)
        boxes = list(self.boxes)
        for (box, _), indices in sharers.items():
            for index, piece in zip(indices, _cut(box, len(indices), dim), strict=True):
                boxes[index] = piece
        return Holding(self.mesh, tuple(boxes))


def _cut(box: Box, num_parts: int, dim: int | None) -> list[Box]:
    """Pieces of a box: a grid of nearly equal ones, or along one dim. A 0-dim box is given to all."""
    if not box or num_parts == 1:
        return [box] * num_parts
    factor = next(f for f in range(2, num_parts + 1) if num_parts % f == 0)
    lengths = box_shape(box)
    largest = [-(-length // factor) / max(length, 1) for length in lengths]
    # Cuts of early dims leave long rows, so they are taken where others are hardly better.
    along = next(d for d, part in enumerate(largest) if part <= 1.02 * min(largest)) if dim is None else dim
    start, length = box[along][0], lengths[along]
    edges = [start + -(-length * part // factor) for part in range(factor + 1)]
    halves = [(*box[:along], (edges[i], edges[i + 1]), *box[along + 1 :]) for i in range(factor)]
    return [piece for half in halves for piece in _cut(half, num_parts // factor, dim)]


#: Coordinate along the axes of one kind.
_Coordinate: TypeAlias = tuple[int, ...]
#: Coordinate along the partial axes -> the devices that hold that term (of source), or shall hold it (of target).
_Terms: TypeAlias = dict[_Coordinate, list[int]]


@dataclass(frozen=True, slots=True)
class Axes:
    """The roles of axes of the source's mesh and of the target's in one exchange.

    Attributes:
        kept: partial axes that stay as they are; of equal sizes on both sides.
        terms: partial axes of one op: the terms of the source become those of the target, one if there are no axes.
    """

    kept: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    terms: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def exchange(
    source: Holding,
    target: Holding,
    op: ReduceOp | None,
    axes: Axes,
    node_of: Mapping[int, str],
) -> Step:
    """The step from one holding to another.

    Args:
        op: how the terms of ``axes.terms`` are reduced; None when there are none.
        node_of: a copy on the own node is preferred where there is a choice.
    """
    held = _by_kept_and_box(source, axes.kept[0], axes.terms[0])
    wanted = _by_kept_and_box(target, axes.kept[1], axes.terms[1])
    pieces: dict[int, list[Piece]] = {device: [] for device in target.mesh.devices}
    givers = _Givers(node_of, source.mesh if {*source.mesh.devices} == {*target.mesh.devices} else None)
    for kept, boxes in wanted.items():
        for box, takers in boxes.items():
            loads = dict.fromkeys(takers, 0)
            for source_box, terms in held[kept].items():
                common = intersect(source_box, box)
                if common is None:
                    continue
                inner, outer = relative(common, source_box), relative(common, box)
                size = num_elements(box_shape(common))
                for taker, taken in _assign(op, terms, takers, loads, size).items():
                    for device in takers[taker] if taken else ():
                        chosen = [givers.choose(terms[term], device, size) for term in taken]
                        pieces[device].append(Piece(outer, tuple(Source(giver, inner) for giver in chosen)))
    identity = _IDENTITY[op] if op is not None and axes.terms[1] else None
    parts = {
        device: _part(box, pieces[device], identity)
        for device, box in zip(target.mesh.devices, target.boxes, strict=True)
    }
    return Step(op if axes.terms[0] else None, parts)


def _by_kept_and_box(
    holding: Holding, kept: Sequence[int], terms: Sequence[int]
) -> dict[_Coordinate, dict[Box, _Terms]]:
    found: dict[_Coordinate, dict[Box, _Terms]] = {}
    mesh = holding.mesh
    for device, coordinate, box, term in zip(
        mesh.devices, holding.coordinates(kept), holding.boxes, holding.coordinates(terms), strict=True
    ):
        found.setdefault(coordinate, {}).setdefault(box, {}).setdefault(term, []).append(device)
    return found


def _assign(
    op: ReduceOp | None, terms: _Terms, takers: _Terms, loads: dict[_Coordinate, int], size: int
) -> Mapping[_Coordinate, Sequence[_Coordinate]]:
    """Which terms of the source each term of the target is made of: what its devices hold already, where possible.

    Args:
        loads: elements that each taker has been given so far; counted on here.
        size: elements of each term.
    """
    if len(takers) == 1:
        return {taker: tuple(terms) for taker in takers}
    if op == "avg" and len(terms) == 1:
        return {taker: tuple(terms) for taker in takers}
    assigned: dict[_Coordinate, list[_Coordinate]] = {taker: [] for taker in takers}
    for term, devices in terms.items():
        # An average of as many terms as before: one each.
        free = [taker for taker in takers if op != "avg" or not assigned[taker]]
        best = max(free, key=lambda taker: (len({*takers[taker]} & {*devices}), -loads[taker]))
        assigned[best].append(term)
        loads[best] += size
    if op in ("max", "min"):
        for taker, taken in assigned.items():
            at_hand = [term for term, devices in terms.items() if {*takers[taker]} <= {*devices}]
            taken += at_hand[: 1 - len(taken)] if not taken else []
    return assigned


class _Givers:
    """Decides which of several devices that hold the same bits gives them: none much more than others.

    Args:
        mesh: of the source where all its devices take: each is then served from its own row first, which is as
            even, and keeps rows that need nothing of each other apart (a failure in one does not reach the other).
    """

    def __init__(self, node_of: Mapping[int, str], mesh: DeviceMesh | None) -> None:
        self._node_of = node_of
        self._mesh = mesh
        self._given: dict[int, int] = defaultdict(int)

    def choose(self, devices: Sequence[int], device: int, size: int) -> int:
        """The giver of ``size`` elements to ``device``: itself, its own node, its own row, who has given least."""
        if device in devices:
            return device
        chosen = devices[0]
        if len(devices) > 1:
            node = self._node_of.get(device)
            near = [d for d in devices if self._node_of.get(d) == node] or devices
            chosen = min(near, key=lambda giver: (-self._num_shared(giver, device), self._given[giver]))
        self._given[chosen] += size
        return chosen

    def _num_shared(self, one: int, other: int) -> int:
        """Along how many axes two devices have the same coordinate."""
        if self._mesh is None:
            return 0
        a, b = self._mesh.coordinate(one), self._mesh.coordinate(other)
        assert a is not None
        assert b is not None
        return sum(i == j for i, j in zip(a, b, strict=True))


#: What a term is where it contributes nothing. An average has no such value.
_IDENTITY: dict[ReduceOp, float | None] = {
    "sum": 0.0,
    "prod": 1.0,
    "avg": None,
    "max": -math.inf,
    "min": math.inf,
}


def _part(box: Box, pieces: Sequence[Piece], identity: float | None) -> Part:
    shape = box_shape(box)
    if identity is not None:
        covered = sum(num_elements(box_shape(piece.box)) for piece in pieces)
        identity = None if covered == num_elements(shape) else identity
    return Part(shape, tuple(pieces), identity)


def spread_inner(target: Holding, groups: Sequence[tuple[ReduceOp, Sequence[int]]]) -> Step:
    """The step in which a value that is whole along some axes becomes partial there, without communication.

    Args:
        groups: partial axes of several ops, first axis first.
    """
    parts = {}
    for device, box in zip(target.mesh.devices, target.boxes, strict=True):
        coordinate = target.mesh.coordinate(device)
        assert coordinate is not None
        # For max, min and avg every rank holds the whole value; else rank 0 does.
        fills = [
            _IDENTITY[op] for op, axes in groups if op in ("sum", "prod") and any(coordinate[a] for a in axes)
        ]
        # Later axes are reduced first, so the identity of the last one is what must reach it.
        fill = fills[-1] if fills else None
        whole = tuple((0, size) for size in box_shape(box))
        keep = () if fills else (Piece(whole, (Source(device, whole),)),)
        parts[device] = Part(box_shape(box), keep, fill)
    return Step(None, parts)
