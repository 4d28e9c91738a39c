"""What a plan makes devices send to one another in a step: from placements and styles alone. Pure decisions.

Bytes are those into the device that receives most, by the planner that the devices themselves use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from dtorch.parallel.tp_plan import (
    BATCH_AXES,
    PP_AXIS,
    TP_AXIS,
    ModuleFacts,
    ModulePlan,
    features_of,
    has_ranks,
)
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.exchange import busiest_bytes
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Placements, Replicate, Shard
from dtorch_runtime.ir.transfer import plan_redistribute

Phase: TypeAlias = Literal["forward", "backward"]
_ULYSSES = ("ulysses_cp", "ulysess_cp")
_RING = "ring_cp"


@dataclass(frozen=True, slots=True)
class Workload:
    """One step: how many sequences of how many tokens all devices together go through. Numbers of 4 bytes."""

    batch_size: int
    sequence_length: int
    itemsize_bytes: int = 4

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "itemsize_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingError(f"{name}= takes a number, 1 or more, got {value!r}")

    def shape(self, num_features: int) -> tuple[int, int, int]:
        """The global shape of an activation."""
        return self.batch_size, self.sequence_length, num_features


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective of a step: for which module or parameter, over which axes, bytes into the busiest device.

    How many bytes may depend on data; ``is_expected`` ones are those where experts are all chosen alike.
    """

    name: str
    phase: Phase
    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    is_expected: bool = False


@lru_cache(maxsize=4096)
def moved_bytes(shape: tuple[int, ...], itemsize_bytes: int, source: Layout, target: Layout) -> int:
    """Bytes into the device that receives most when a tensor of global ``shape`` is brought from one to the other."""
    steps = plan_redistribute(shape, source, target, itemsize_bytes=itemsize_bytes)
    return sum(busiest_bytes(step, itemsize_bytes)[0] for step in steps)


def activation_layout(mesh: DeviceMesh, on_axis: Mapping[str, Placement] | None = None) -> Layout:
    """Of an activation [batch, sequence, features]: cut by batch and by sequence where the mesh has axes for it."""
    usual: dict[str, Placement] = {
        **dict.fromkeys(BATCH_AXES, Shard(0)),
        **dict.fromkeys((*_ULYSSES, _RING), Shard(1)),
        **(on_axis or {}),
    }
    names = mesh.mesh_dim_names or ()
    return Layout(mesh, tuple(usual.get(name, Replicate()) for name in names))


def module_exchanges(
    facts: Sequence[ModuleFacts], plans: Mapping[str, ModulePlan], mesh: DeviceMesh, work: Workload
) -> Iterator[Exchange]:
    """Those of the styles, on the ``tp`` axis."""
    if not has_ranks(mesh, TP_AXIS):
        return
    plain = activation_layout(mesh)
    terms = activation_layout(mesh, {TP_AXIS: Partial("sum")})
    pieces = activation_layout(mesh, {TP_AXIS: Shard(2)})
    inputs: set[tuple[str, int]] = set()

    def exchange(name: str, phase: Phase, kind: str, size: int, source: Layout, target: Layout) -> Exchange:
        moved = moved_bytes(work.shape(size), work.itemsize_bytes, source, target)
        return Exchange(name, phase, kind, (TP_AXIS,), moved)

    for module in facts:
        style = plans[module.name].style
        if style == "embedding_rowwise":
            yield exchange(module.name, "forward", "all-reduce", module.weights["weight"][1], terms, plain)
        if module.kind not in ("linear", "conv1d") or style in ("replicate", "placements", "own"):
            continue
        num_in, num_out = features_of(module)
        if style.startswith("rowwise"):
            yield exchange(module.name, "forward", "all-reduce", num_out, terms, plain)
        if style == "rowwise_split_input":
            yield exchange(module.name, "backward", "all-gather", num_in, pieces, plain)
        if style == "colwise_gather_output":
            yield exchange(module.name, "forward", "all-gather", num_out, pieces, plain)
        if style.startswith("colwise"):
            # Neighbours (query, key and value; gate and up) have one input, whose gradients are added first.
            key = module.name.rpartition(".")[0], num_in
            if key not in inputs:
                inputs.add(key)
                yield exchange(module.name, "backward", "all-reduce", num_in, terms, plain)


def gradient_exchange(
    name: str, shape: Sequence[int], placements: Placements, mesh: DeviceMesh, itemsize_bytes: int
) -> Exchange | None:
    """That of a parameter's gradient: each part of the batch, and of the sequence, has a term of it."""
    axes = tuple(
        axis
        for axis, placement in zip(mesh.mesh_dim_names or (), placements, strict=True)
        if axis in (*BATCH_AXES, *_ULYSSES, _RING) and has_ranks(mesh, axis) and placement == Replicate()
    )
    if not axes:
        return None
    target = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
    terms = tuple(
        Partial("sum") if axis in axes else p
        for axis, p in zip(mesh.mesh_dim_names or (), target, strict=True)
    )
    moved = moved_bytes(tuple(shape), itemsize_bytes, Layout(mesh, terms), Layout(mesh, target))
    return Exchange(name, "backward", "all-reduce", axes, moved)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer: features of queries, keys and values, or of all of them at once, and those of what comes out."""

    name: str
    sizes: Sequence[int]
    num_out: int
    num_head_groups: int
    on_tp: Mapping[str, Placement]

    @property
    def num_heads(self) -> int:
        """Of queries; where keys have a layer of their own, its features say how many one head has."""
        num_key_features = self.sizes[1] if len(self.sizes) > 1 else self.num_out
        return max(1, self.num_out * self.num_head_groups // num_key_features)


def attention_layers(
    facts: Sequence[ModuleFacts], plans: Mapping[str, ModulePlan]
) -> Iterator[AttentionLayer]:
    """Those of which all projections are among these modules; the last one is that of the output."""
    layers: dict[str, list[ModuleFacts]] = {}
    for module in facts:
        if module.num_head_groups and module.kind in ("linear", "conv1d"):
            layers.setdefault(module.name.rpartition(".")[0], []).append(module)
    for name, modules in layers.items():
        *projections, output = modules
        is_cut = bool(projections) and plans[projections[0].name].style.startswith("colwise")
        yield AttentionLayer(
            name,
            [features_of(module)[1] for module in projections],
            features_of(output)[0],
            output.num_head_groups or 1,
            {TP_AXIS: Shard(2)} if is_cut else {},
        )


def attention_exchanges(
    facts: Sequence[ModuleFacts], plans: Mapping[str, ModulePlan], mesh: DeviceMesh, work: Workload
) -> Iterator[Exchange]:
    """Those of attention over a sequence that is cut: heads exchanged, or keys and values sent round."""
    for layer in attention_layers(facts, plans):
        yield from _of_attention(layer, mesh, work)


def _of_attention(layer: AttentionLayer, mesh: DeviceMesh, work: Workload) -> Iterator[Exchange]:
    for axis in _ULYSSES:
        if has_ranks(mesh, axis):
            by_place = activation_layout(mesh, layer.on_tp)

            def moved(size: int, is_back: bool, axis: str = axis, by_place: Layout = by_place) -> int:
                # Query heads stay with the key head that they share, where there are enough of those.
                groups = layer.num_head_groups
                unit = size // groups if size % groups == 0 and groups >= mesh.size(axis) else 1
                by_head = activation_layout(mesh, {**layer.on_tp, axis: Shard(2, unit)})
                ends = (by_head, by_place) if is_back else (by_place, by_head)
                return moved_bytes(work.shape(size), work.itemsize_bytes, *ends)

            total = sum(moved(size, False) for size in layer.sizes) + moved(layer.num_out, True)
            yield Exchange(layer.name, "forward", "all-to-all", (axis,), total)
            total = sum(moved(size, True) for size in layer.sizes) + moved(layer.num_out, False)
            yield Exchange(layer.name, "backward", "all-to-all", (axis,), total)
    if has_ranks(mesh, _RING):
        num_rounds = mesh.size(_RING) - 1
        block = (
            work.batch_size * work.sequence_length * work.itemsize_bytes * (sum(layer.sizes) - layer.num_out)
        )
        for other in (_RING, *BATCH_AXES, *_ULYSSES, *layer.on_tp):
            block = -(-block // mesh.size(other)) if has_ranks(mesh, other) else block
        yield Exchange(layer.name, "forward", "ring", (_RING,), num_rounds * block)
        # Keys and values once more, and their gradients, which make one step more, to come home.
        yield Exchange(layer.name, "backward", "ring", (_RING,), (2 * num_rounds + 1) * block)


def boundary_exchanges(path: Iterable[tuple[str, DeviceMesh, int]], work: Workload) -> Iterator[Exchange]:
    """Activations from stage to stage, and their gradients back.

    Args:
        path: units with weights in the order of the model: name, mesh, and features that go in.
    """
    before: DeviceMesh | None = None
    for name, mesh, num_features in path:
        if before is not None and mesh != before and num_features:
            source, target = activation_layout(before), activation_layout(mesh)
            shape = work.shape(num_features)
            there = moved_bytes(shape, work.itemsize_bytes, source, target)
            yield Exchange(name, "forward", "send", (PP_AXIS,), there)
            back = moved_bytes(shape, work.itemsize_bytes, target, source)
            yield Exchange(name, "backward", "send", (PP_AXIS,), back)
        before = mesh
