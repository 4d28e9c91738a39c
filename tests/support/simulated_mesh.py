"""A mesh in one process: every device's piece in a list, ops run by the worker's own runners, one device at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtorch.meshes import mesh_id, mesh_of
from dtorch.op_plan import NewOutput, OpPlan, SameTensor, SameValue
from dtorch.propagate import propagate
from dtorch.spec import Spec, contiguous_stride, intern_spec
from dtorch_runtime.ir.layout import Layout, local_box
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Shard
from dtorch_runtime.ir.transfer import plan_redistribute
from dtorch_runtime.wire.records import TemplateRecord
from dtorch_runtime.worker import shard_kernels as _shard_kernels  # noqa: F401  registers its kernels
from dtorch_runtime.worker.arguments import compile_runner
from dtorch_runtime.worker.kernels import find_kernel

_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


@dataclass(eq=False)
class Sharded:
    """A distributed tensor: its spec, and the piece of each device."""

    spec: Spec
    pieces: dict[int, torch.Tensor]

    @property
    def layout(self) -> Layout:
        return self.spec.layout


def shard(
    whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], rng: torch.Generator | None = None
) -> Sharded:
    """Cut a tensor as placements say. Terms of partial axes are random, and reduce to the tensor."""
    layout = Layout(mesh, tuple(placements))
    rng = rng or torch.Generator().manual_seed(0)
    terms: dict[tuple[int, ...], torch.Tensor] = {(): whole}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            terms = {
                (*key, rank): term
                for key, value in terms.items()
                for rank, term in enumerate(_terms(value, mesh.shape[axis], placement.op, rng))
            }
        else:
            terms = {(*key, 0): value for key, value in terms.items()}
    pieces = {}
    for device in mesh.devices:
        coordinate = mesh.coordinate(device)
        assert coordinate is not None
        key = tuple(c if isinstance(p, Partial) else 0 for c, p in zip(coordinate, placements))
        box = local_box(whole.shape, layout, coordinate)
        piece = terms[key][tuple(slice(start, stop) for start, stop in box)]
        pieces[device] = _like_order(piece, whole)
    return Sharded(intern_spec(tuple(whole.shape), whole.dtype, layout, tuple(whole.stride())), pieces)


def _like_order(piece: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A copy of a piece whose dims lie in memory in the order of the whole."""
    order = sorted(range(whole.ndim), key=lambda dim: (-whole.stride()[dim], dim))
    copy = piece.permute(order).clone(memory_format=torch.contiguous_format)
    return copy.permute([order.index(dim) for dim in range(whole.ndim)])


def _terms(value: torch.Tensor, count: int, op: str, rng: torch.Generator) -> list[torch.Tensor]:
    def noise() -> torch.Tensor:
        return torch.randint(1, 4, value.shape, generator=rng).to(value.dtype)

    if op == "sum" and value.dtype is torch.bool:  # a sum of bools is true where one of them is
        return [*[value & (torch.rand(value.shape, generator=rng) < 0.5) for _ in range(count - 1)], value]
    if op in ("sum", "avg"):
        total = value * count if op == "avg" else value
        first = [noise() for _ in range(count - 1)]
        return [*first, total - sum(first, torch.zeros_like(value))]
    if op == "prod":
        first = [noise() for _ in range(count - 1)]
        rest = value
        for term in first:
            rest = rest / term
        return [*first, rest.to(value.dtype)]
    sign = -1 if op == "max" else 1
    if value.dtype is torch.bool:
        return [value, *[torch.full_like(value, op == "min") for _ in range(count - 1)]]
    return [value, *[value + sign * noise() for _ in range(count - 1)]]


def gather(sharded: Sharded) -> torch.Tensor:
    """The whole tensor; devices that must hold equal pieces are checked to do so."""
    spec, mesh = sharded.spec, sharded.layout.mesh
    by_coordinate = {}
    for device, piece in sharded.pieces.items():
        coordinate = mesh.coordinate(device)
        assert coordinate is not None
        box = local_box(spec.shape, spec.layout, coordinate)
        shape = tuple(stop - start for start, stop in box)
        assert tuple(piece.shape) == shape, f"device {device} has {tuple(piece.shape)}, its piece is {shape}"
        assert piece.dtype is spec.dtype, f"device {device} has {piece.dtype}, the spec says {spec.dtype}"
        by_coordinate[coordinate] = piece
    for axis in reversed(range(mesh.ndim)):
        by_coordinate = _merge(by_coordinate, axis, spec.layout.placements[axis])
    return by_coordinate[()]


def _merge(
    pieces: dict[tuple[int, ...], torch.Tensor], axis: int, placement: Placement
) -> dict[tuple[int, ...], torch.Tensor]:
    merged: dict[tuple[int, ...], torch.Tensor] = {}
    for key in dict.fromkeys(coordinate[:axis] for coordinate in pieces):
        parts = [pieces[c] for c in sorted(pieces) if c[:axis] == key]
        if isinstance(placement, Shard):
            merged[key] = torch.cat(parts, dim=placement.dim)
        elif isinstance(placement, Partial):
            result = parts[0]
            for part in parts[1:]:
                result = _REDUCE[placement.op](result, part)
            merged[key] = result / len(parts) if placement.op == "avg" else result
        else:
            for part in parts[1:]:
                torch.testing.assert_close(part, parts[0], rtol=0, atol=0, equal_nan=True)
            merged[key] = parts[0]
    return merged


def run(
    func: torch._ops.OpOverload,
    *args: Any,
    default_layout: Layout | None = None,
    moves_bytes: bool = False,
    seed: int = 7,
    **kwargs: Any,
) -> Any:
    """Plan one call and run it on every device.

    Args:
        args, kwargs: tensors as ``Sharded``.
        moves_bytes: whether the op is documented to convert inputs with communication.
        seed: what the op record of a random op carries.

    Raises:
        PlacementError: as ``propagate``.
    """
    plan = propagate(func, _specs(args), _specs(kwargs), default_layout=default_layout)
    inputs = list(_tensors((args, kwargs)))
    for index, layout in plan.conversions:
        inputs[index] = _convert(inputs[index], layout, moves_bytes)
    made = _run_plan(plan, inputs, default_layout, seed)
    results: list[Any] = []
    given = list(_tensors((args, kwargs)))
    for output in plan.outputs:
        match output:
            case NewOutput(spec):
                results.append(Sharded(spec, made.pop(0)))
            case SameTensor(index):
                results.append(given[index])
            case SameValue(index, spec):
                results.append(Sharded(spec, given[index].pieces))
            case _:
                results.append(None)
    if plan.returns == "none":
        return None
    return results[0] if plan.returns == "one" else results


def _run_plan(
    plan: OpPlan, inputs: list[Sharded], default_layout: Layout | None, seed: int
) -> list[dict[int, torch.Tensor]]:
    if plan.op is None:
        return []
    num_outputs = sum(isinstance(output, NewOutput) for output in plan.outputs)
    layout = inputs[0].layout if inputs else default_layout
    assert layout is not None
    assert plan.layouts == tuple(sharded.layout for sharded in inputs)
    record = TemplateRecord(
        template_id=1,
        op=plan.op,
        args=list(plan.args),
        kwargs=dict(plan.kwargs),
        num_inputs=len(inputs),
        num_outputs=num_outputs,
        num_scalars=plan.num_seeds,
        mesh_ids=[mesh_id(layout.mesh)],
        mutates=list(plan.mutates),
    )
    ids = range(1, len(inputs) + 1)
    out_ids = range(1001, 1001 + num_outputs)
    words = [1, 0, *ids, *out_ids, *(seed + i for i in range(plan.num_seeds))]
    made: list[dict[int, torch.Tensor]] = [{} for _ in out_ids]
    meshes = {mesh_id(layout.mesh): mesh_of(mesh_id(layout.mesh))}
    for device in layout.mesh.devices:
        blobs: Any = {i: sharded.pieces[device] for i, sharded in zip(ids, inputs)}
        runner = compile_runner(find_kernel(plan.op), record, blobs, meshes, device, torch.device("cpu"))
        with torch.no_grad():
            assert runner(words, 0) == len(words)
        for pieces, out_id in zip(made, out_ids):
            pieces[device] = blobs[out_id]
    return made


def _convert(sharded: Sharded, layout: Layout, moves_bytes: bool) -> Sharded:
    steps = plan_redistribute(
        sharded.spec.shape, sharded.layout, layout, itemsize_bytes=sharded.spec.dtype.itemsize
    )
    if not moves_bytes:
        assert all(step.is_local for step in steps), f"{sharded.layout} -> {layout} moves bytes"
    whole = gather(sharded)
    contiguous = torch.empty_strided(whole.shape, contiguous_stride(whole.shape), dtype=whole.dtype).copy_(
        whole
    )
    return shard(contiguous, layout.mesh, layout.placements)


def _specs(value: Any) -> Any:
    if isinstance(value, Sharded):
        return value.spec
    if isinstance(value, dict):
        return {key: _specs(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_specs(item) for item in value)
    return value


def _tensors(value: Any) -> Any:
    if isinstance(value, Sharded):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(_tensors(item) for item in value)
