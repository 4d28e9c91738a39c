"""How the rows of tokens get to experts that are cut over a mesh, and what that moves. Pure decisions.

Where tokens and experts are cut over one axis of n devices there are two ways. By an all-to-all a row goes to the
device of each of the k experts that its token chose, and back: with tokens spread evenly a device gets ``k / n`` of the
bytes of all tokens each way. Or each device gets all tokens and computes what it has the experts of; the results are
terms of a sum, which are reduced to where the tokens are: ``1`` each way. Both times ``(n - 1) / n``. So rows travel
where an axis has more devices than a token has experts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dtorch.parallel.exchanges import Exchange, Phase, Workload, activation_layout, moved_bytes
from dtorch.parallel.tp_plan import TP_AXIS, ModuleFacts, ModulePlan, has_ranks
from dtorch_runtime.ir.layout import Layout, local_shape
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Placements, Replicate, Shard, split

_INT64_BYTES: Final = 8


def sends_rows(num_ranks: int, num_experts_per_token: int) -> bool:
    """Whether rows travel, where tokens and experts are cut over an axis of so many devices."""
    return num_ranks > num_experts_per_token


def axes_of_experts(weight: Placements) -> list[int]:
    """The numbers of the mesh axes that cut the experts of a weight ``[experts, ...]``."""
    return [axis for axis, p in enumerate(weight) if isinstance(p, Shard) and p.dim == 0]


def axis_of_rows(
    weight: Placements, tokens: Placements, mesh: DeviceMesh, num_experts_per_token: int
) -> int | None:
    """The number of the axis along which rows travel; None where each device gets the tokens instead."""
    cut = axes_of_experts(weight)
    if len(cut) != 1 or not isinstance(tokens[cut[0]], Shard):
        return None
    return cut[0] if sends_rows(mesh.shape[cut[0]], num_experts_per_token) else None


def cuts_features(weights: Iterable[Placements]) -> bool:
    """Whether some device has only a part of the features of an expert."""
    return any(isinstance(p, Shard) and p.dim != 0 for placements in weights for p in placements)


def expert_exchanges(
    facts: Sequence[ModuleFacts],
    plans: Mapping[str, ModulePlan],
    mesh: DeviceMesh,
    work: Workload,
    num_experts_per_token: int,
) -> Iterator[Exchange]:
    """Those of mixtures of experts: of rows that travel, as many as are expected where tokens are spread evenly."""
    for module in facts:
        layer = _layer(module, plans[module.name].placements, mesh, work, num_experts_per_token)
        if layer is not None:
            large = [
                plans[module.name].placements[name]
                for name, shape in module.weights.items()
                if len(shape) == 3
            ]
            yield from layer.exchanges(len(large) == len(module.weights) and not cuts_features(large))


def _layer(
    module: ModuleFacts, placements: Mapping[str, Placements], mesh: DeviceMesh, work: Workload, k: int
) -> _Layer | None:
    large = {name: shape for name, shape in module.weights.items() if len(shape) == 3}
    if module.kind != "experts" or not {"down_proj"} < large.keys():
        return None
    first = next(name for name in large if name != "down_proj")
    (_, out, inner), (num_experts, *of_down) = large[first], large["down_proj"]
    is_transposed = inner != of_down[0]
    width, hidden = reversed(of_down) if is_transposed else of_down
    turned = _transposed if is_transposed else tuple
    return _Layer(
        name=module.name,
        width=width,
        hidden=hidden,
        first_out=inner if is_transposed else out,
        first=turned(placements[first]),
        down=turned(placements["down_proj"]),
        num_experts=num_experts,
        mesh=mesh,
        work=work,
        k=k,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """The experts of a layer, of whose features ``width`` go in and out.

    ``first_out`` come out of the first weight, of which a gate makes the ``hidden`` ones that go into the second.
    """

    name: str
    width: int
    hidden: int
    first_out: int
    first: Placements
    down: Placements
    num_experts: int
    mesh: DeviceMesh
    work: Workload
    k: int

    def exchanges(self, is_whole: bool) -> Iterator[Exchange]:
        """``is_whole``: each device that has something of an expert has all of it."""
        axis = axis_of_rows(self.down, self.home, self.mesh, self.k) if is_whole else None
        if axis is not None:
            yield from self._of_travelling_rows(axis)
            return
        cut = axes_of_experts(self.down)
        whole: Placements = tuple(Replicate() if a in cut else p for a, p in enumerate(self.home))
        tokens, choices = self.work.shape(self.width), self.work.shape(self.k)
        yield from self._moved("forward", tokens, self.home, whole)
        yield from self._moved("forward", choices, self.home, whole, _INT64_BYTES)
        yield from self._moved("forward", choices, self.home, whole)
        terms: Placements
        if is_whole:
            terms = tuple(Partial("sum") if a in cut else p for a, p in enumerate(self.home))
        else:
            terms = yield from self._between(whole)
        if terms == self.home:  # every device has all experts
            return
        yield from self._moved("forward", tokens, terms, self.home)
        # The column-wise layers behind leave terms of the gradient along ``tp``, which are needed as their sum here.
        on_tp: dict[str, Placement] = {TP_AXIS: Partial("sum")} if has_ranks(self.mesh, TP_AXIS) else {}
        arriving = activation_layout(self.mesh, on_tp).placements
        yield from self._moved("backward", tokens, arriving, _of_gradient(terms))
        if whole != self.home:
            # Of the tokens and of the weights of their choices. Otherwise terms are left to the layer before.
            yield from self._moved("backward", tokens, terms, self.home)
            yield from self._moved("backward", choices, terms, self.home)

    @property
    def home(self) -> Placements:
        """Of tokens."""
        return activation_layout(self.mesh).placements

    def _moved(
        self, phase: Phase, shape: tuple[int, ...], old: Placements, new: Placements, itemsize_bytes: int = 0
    ) -> Iterator[Exchange]:
        size = itemsize_bytes or self.work.itemsize_bytes
        num_bytes = moved_bytes(shape, size, Layout(self.mesh, old), Layout(self.mesh, new))
        if num_bytes:
            names = zip(self.mesh.mesh_dim_names or (), old, new, strict=True)
            axes = tuple(name for name, a, b in names if a != b and has_ranks(self.mesh, name))
            yield Exchange(self.name, phase, _kind(old, new), axes, num_bytes)

    # ---- rows that travel ----

    def _of_travelling_rows(self, axis: int) -> Iterator[Exchange]:
        axes = ((self.mesh.mesh_dim_names or ())[axis],)
        counts = (self.mesh.shape[axis] - 1) * self.num_experts * _INT64_BYTES
        yield Exchange(self.name, "forward", "all-gather", axes, counts)
        row_bytes = self.width * self.work.itemsize_bytes
        phases: tuple[Phase, ...] = ("forward", "backward")
        for phase in phases:
            for num_rows in self._expected_rows(axis):
                num_bytes = round(num_rows * row_bytes)
                yield Exchange(self.name, phase, "all-to-all", axes, num_bytes, is_expected=True)

    def _expected_rows(self, axis: int) -> tuple[float, float]:
        """To the device that is sent most, and back to the one that gets most, where all experts are chosen alike."""
        runs = split(self.num_experts, self.mesh.shape[axis])
        shares = [(stop - start) / self.num_experts for start, stop in runs]
        lines: dict[tuple[int, ...], dict[int, int]] = {}
        for device in self.mesh.devices:
            place = self.mesh.coordinate(device) or ()
            rows, length, _ = local_shape(self.work.shape(1), activation_layout(self.mesh), device)
            line = lines.setdefault(place[:axis] + place[axis + 1 :], {})
            line[place[axis]] = rows * length * self.k
        there = max(
            (sum(line.values()) - pairs) * shares[rank]
            for line in lines.values()
            for rank, pairs in line.items()
        )
        back = max(pairs * (1 - shares[rank]) for line in lines.values() for rank, pairs in line.items())
        return there, back

    # ---- devices that have features ----

    def _between(self, tokens: Placements) -> Generator[Exchange, None, Placements]:
        """Between the two weights devices get rows of their own, with all features. Returns the placements behind."""
        num_rows = self.work.batch_size * self.work.sequence_length * self.k
        unit = self.work.sequence_length * self.k  # rows of a sequence stay together
        rows = tuple(Shard(0, unit) if isinstance(p, Shard) else p for p in tokens)
        given = _input(rows, self.first)
        made = _output(given, self.first)
        own: Placements = tuple(
            p if p == of_rows or isinstance(p, Replicate) else Shard(0)
            for p, of_rows in zip(made, rows, strict=True)
        )
        parts = _input(own, self.down)
        yield from self._moved("forward", (num_rows, self.first_out), made, own)
        yield from self._moved("forward", (num_rows, self.hidden), own, parts)
        back = _output(_of_gradient(_output(parts, self.down)), _transposed(self.down))
        yield from self._moved("backward", (num_rows, self.hidden), back, own)
        yield from self._moved("backward", (num_rows, self.first_out), own, _of_gradient(made))
        return tuple(
            Partial("sum") if isinstance(p, Partial) else of_tokens
            for p, of_tokens in zip(_output(parts, self.down), tokens, strict=True)
        )


def _kind(old: Placements, new: Placements) -> str:
    changes = {(type(a), type(b)) for a, b in zip(old, new, strict=True) if a != b}
    if (Partial, Replicate) in changes:
        return "all-reduce"
    if any(a is Partial for a, _ in changes):
        return "reduce-scatter"
    return "all-gather" if all(b is Replicate for _, b in changes) else "all-to-all"


def _input(rows: Placements, weight: Placements) -> Placements:
    """Of rows that meet a weight [experts, out, in]."""
    return tuple(
        (Shard(1, w.unit) if w.dim == 2 else Replicate()) if isinstance(w, Shard) else p
        for p, w in zip(rows, weight, strict=True)
    )


def _output(rows: Placements, weight: Placements) -> Placements:
    """Of what comes out of a weight."""
    return tuple(
        (Shard(1, w.unit) if w.dim == 1 else Partial("sum")) if isinstance(w, Shard) else p
        for p, w in zip(rows, weight, strict=True)
    )


def _of_gradient(placements: Placements) -> Placements:
    """Terms of a sum all have the gradient of the sum."""
    return tuple(Replicate() if isinstance(p, Partial) else p for p in placements)


def _transposed(weight: Placements) -> Placements:
    swapped = {1: 2, 2: 1}
    return tuple(Shard(swapped.get(p.dim, p.dim), p.unit) if isinstance(p, Shard) else p for p in weight)
