"""Rows that go to the experts which their tokens chose, products with the weight of each expert, and the way back.

A token that chooses k of the experts makes k *pairs*; ``send`` takes the rows of pairs ``[..., k, features]`` to the
devices that have the experts, and ``bring`` takes rows back to the places of their pairs. Each is the transpose of the
other, so each is the other's derivative. Where tokens and experts are cut over the same axis of the mesh, devices
exchange rows along it (``dtorch_runtime.worker.row_exchange``): what travels are the rows of pairs whose expert is
elsewhere. Where experts are cut over an axis along which tokens are whole, each device takes the rows of its own, and
what ``bring`` gives are terms of a sum.

In between, the rows of a device are as many as the data says. Nobody waits for that number: to the client they are a
tensor of all pairs, ``Shard(0)`` on the axes that cut tokens or experts, and only the devices know where it is cut. Ops
on elements work on it as on any other; it must not be redistributed or fetched. Rows that stay where they are need none
of this, but ``experts.expert_linear``. Shapes are global. Plain tensors work too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtorch.graph import Graph
from dtorch.issue import issue, make_entry
from dtorch.location import capture
from dtorch.meshes import layout_record
from dtorch.op_plan import NewOutput, OpPlan
from dtorch.spec import intern_spec
from dtorch.tensors import Tensor
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Partial, Placement, Placements, Replicate, Shard
from dtorch_runtime.wire.records import Arg, LocalShape, LocalStart, Slot
from dtorch_runtime.worker import (  # noqa: F401  register their kernels
    expert_kernels as _expert_kernels,
    route_kernels as _route_kernels,
)
from dtorch_runtime.worker.kernels import EXCHANGE_ROWS, find_kernel


@dataclass(frozen=True, eq=False)
class Routes:
    """Which pairs go where.

    Attributes:
        shape: of the choices, ``[..., k]``.
        order: the kept pairs of each device, sorted by expert.
        counts: how many of them each expert has, as ``expert_counts`` gives it, and known to all ranks of ``axis``.
        axis: the number of the mesh axis that experts and tokens are cut over, along which rows are exchanged.
        held: the numbers of those that experts are cut over, and tokens are not.
        layout: of the choices; None for plain tensors.
    """

    shape: tuple[int, ...]
    order: Any
    counts: Any
    num_experts: int
    axis: int | None
    held: tuple[int, ...]
    layout: Layout | None

    def cuts_experts(self, axis: int) -> bool:
        """Whether the experts are cut over an axis of the mesh."""
        return axis == self.axis or axis in self.held

    def is_cut(self, axis: int) -> bool:
        """Whether the tokens are cut over an axis of the mesh."""
        assert self.layout is not None
        return isinstance(self.layout.placements[axis], Shard)


def routes_of(choices: Any, num_experts: int, axis: int | None, held: tuple[int, ...] = ()) -> Routes:
    """How to send pairs to experts.

    Args:
        choices: the number of an expert for each pair, ``[..., k]``, ``Shard`` on ``axis``, ``Replicate`` on ``held``,
            and whole or cut on others, never by the last dim. ``num_experts`` stands for a pair that is dropped.
        axis, held: see ``Routes``. They are not both given.
    """
    layout = choices._spec.layout if isinstance(choices, Tensor) else None
    order = _call(
        "expert_order",
        [_own(choices, num_experts, held) if held else choices],
        [num_experts],
        (choices.numel(),),
        torch.int64,
        _rows_like(choices, held),
    )
    counts = expert_counts(choices, num_experts)
    if axis is not None:
        placements = [
            Replicate() if number == axis else p for number, p in enumerate(counts._spec.layout.placements)
        ]
        counts = counts.redistribute(placements=placements)
    return Routes(tuple(choices.shape), order, counts, num_experts, axis, held, layout)


def _own(choices: Any, num_experts: int, held: tuple[int, ...]) -> Any:
    """The choices that each device has the expert of; the others are dropped."""
    mesh = choices.device_mesh
    cut = Layout(mesh, tuple(Shard(0) if axis in held else Replicate() for axis in range(mesh.ndim)))
    first = LocalStart([num_experts], layout_record(cut), 0)
    number = LocalShape([num_experts], layout_record(cut))
    return _call(
        "own_choices",
        [choices],
        [num_experts, first, number],
        tuple(choices.shape),
        choices.dtype,
        choices.placements,
        key=held,
    )


def expert_counts(choices: Any, num_experts: int) -> Any:
    """How many pairs each expert has: ``[..., num_experts]``, int64, with a dim in front for each axis of the mesh.

    That of an axis which cuts the tokens is cut by it, and has a place for each rank; others have size 1.
    """
    shape: tuple[int, ...] = (num_experts,)
    placements: Placements = ()
    num_dims = 0
    if isinstance(choices, Tensor):
        mesh, given = choices.device_mesh, choices.placements
        is_cut = [isinstance(p, Shard) for p in given]
        shape = (*(size if cut else 1 for size, cut in zip(mesh.shape, is_cut, strict=True)), num_experts)
        placements = tuple(Shard(axis) if cut else Replicate() for axis, cut in enumerate(is_cut))
        num_dims = mesh.ndim
    return _call("expert_counts", [choices], [num_experts, num_dims], shape, torch.int64, placements)


def send(pairs: Any, routes: Routes) -> Any:
    """Rows of pairs ``[..., k, features]`` to the experts: ``[pairs, features]``. Differentiable."""
    return _Send.apply(pairs, routes)  # type: ignore[no-untyped-call]


def bring(rows: Any, routes: Routes) -> Any:
    """Rows ``[pairs, features]`` back from the experts: ``[..., k, features]``, 0 for dropped pairs. Differentiable."""
    return _Bring.apply(rows, routes)  # type: ignore[no-untyped-call]


def routed_linear(rows: Any, weights: Any, routes: Routes) -> Any:
    """Each row times the weight of its expert, transposed. Differentiable.

    Args:
        rows: ``[pairs, in]``, from ``send``.
        weights: ``[num_experts, out, in]``, ``Shard(0)`` where these are cut. On other axes that do not cut the
            tokens, ``Shard(1)`` gives rows cut by features, and ``Shard(2)`` takes such and gives partial sums.

    Raises:
        PlacementError: rows and weights are cut in ways that do not match.
    """
    return _Products.apply(rows, weights, routes)  # type: ignore[no-untyped-call]


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Any, routes: Routes) -> Any:
        ctx.routes = routes
        pairs = _placed_as_choices(pairs, routes)
        rows = _call(
            "rows_taken",
            [pairs, routes.order],
            [],
            (math.prod(routes.shape), pairs.shape[-1]),
            pairs.dtype,
            _mapped(pairs, routes, {pairs.ndim - 1: 1}, lambda _: Shard(0), Shard(0)),
        )
        return _exchanged(rows, routes, is_back=False)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return bring(gradient, ctx.routes), None


class _Bring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, routes: Routes) -> Any:
        ctx.routes = routes
        rows = _exchanged(rows, routes, is_back=True)
        shape: Arg | list[int] = list(routes.shape)
        placements: Placements = ()
        if routes.layout is not None:
            home = routes.layout.placements
            shape = LocalShape(list(routes.shape), layout_record(routes.layout))
            placements = _mapped(rows, routes, {1: len(routes.shape)}, lambda axis: home[axis], Partial())
        return _call(
            "rows_put",
            [rows, routes.order],
            [shape],
            (*routes.shape, rows.shape[1]),
            rows.dtype,
            placements,
        )

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return send(gradient, ctx.routes), None


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, weights: Any, routes: Routes) -> Any:
        ctx.save_for_backward(rows, weights)
        ctx.routes = routes
        return _call(
            "routed_linear",
            [rows, routes.counts, weights],
            [_first(weights)],
            (rows.shape[0], weights.shape[1]),
            rows.dtype,
            _of_axes(routes, rows, weights, _PRODUCT, Shard(0)),
        )

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        rows, weights = ctx.saved_tensors
        needs_rows, needs_weights, _ = ctx.needs_input_grad
        return (
            routed_linear(gradient, weights.mT, ctx.routes) if needs_rows else None,
            _OuterProducts.apply(gradient, rows, weights, ctx.routes) if needs_weights else None,  # type: ignore[no-untyped-call]
            None,
        )


class _OuterProducts(torch.autograd.Function):
    """By expert, the sum of the outer products of the rows of two tensors: placed as ``like`` where experts are cut."""

    @staticmethod
    def forward(ctx: Any, left: Any, right: Any, like: Any, routes: Routes) -> Any:
        ctx.save_for_backward(left, right)
        ctx.routes = routes
        shape = (routes.num_experts, left.shape[1], right.shape[1])
        local: Arg | list[int] = list(shape)
        placements = _of_axes(routes, left, right, _OUTER, Partial())
        if routes.layout is not None:
            # Terms of a sum have the shape of the sum.
            whole = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
            local = LocalShape(list(shape), layout_record(Layout(routes.layout.mesh, whole)))
        inputs = [left, right, routes.counts]
        return _call("routed_linear_backward", inputs, [_first(like), local], shape, left.dtype, placements)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        left, right = ctx.saved_tensors
        routes = ctx.routes
        return (
            routed_linear(right, gradient, routes),
            routed_linear(left, gradient.mT, routes),
            None,
            None,
        )


# ---- placements ----

_R, _P = Replicate(), Partial()
#: By the placements of rows and weights on an axis that cuts no tokens: that of their products.
_PRODUCT: dict[tuple[Placement, Placement], Placement] = {
    (_R, _R): _R,
    (_R, Shard(1)): Shard(1),
    (Shard(1), Shard(2)): _P,
    (_P, _R): _P,
}
#: And of two tensors of rows: that of their outer products.
_OUTER: dict[tuple[Placement, Placement], Placement] = {
    (_R, _R): _R,
    (Shard(1), _R): Shard(1),
    (_R, Shard(1)): Shard(2),
    (_P, _R): _P,
    (_R, _P): _P,
}


def _of_axes(
    routes: Routes,
    first: Any,
    second: Any,
    table: dict[tuple[Placement, Placement], Placement],
    where_cut: Placement,
) -> Placements:
    """The placements of a product. ``where_cut`` on axes that cut tokens alone; ``Shard(0)`` where experts are cut.

    Raises:
        PlacementError: there is none on some axis.
    """
    if routes.layout is None:
        return ()
    result: list[Placement] = []
    pairs = zip(first._spec.layout.placements, second._spec.layout.placements, strict=True)
    for axis, pair in enumerate(pairs):
        is_rows = table is _OUTER
        if routes.cuts_experts(axis):
            found: Placement | None = Shard(0) if pair == (Shard(0), Shard(0)) else None
        elif routes.is_cut(axis):
            found = where_cut if pair == (Shard(0), Shard(0) if is_rows else _R) else None
        else:
            found = table.get(pair)
        if found is None:
            raise PlacementError(
                f"a product of rows and matrices of experts got {pair[0]} and {pair[1]} on mesh axis {axis}; allowed "
                f"are {', '.join(f'{a} and {b}' for a, b in table)}, and Shard(0) where tokens or experts are cut"
            )
        result.append(found)
    return tuple(result)


def _rows_like(choices: Any, held: tuple[int, ...]) -> Placements:
    """The placements of what has a row for each pair."""
    if not isinstance(choices, Tensor):
        return ()
    return tuple(
        Shard(0) if isinstance(p, Shard) or axis in held else Replicate()
        for axis, p in enumerate(choices.placements)
    )


def _mapped(
    tensor: Any, routes: Routes, dims: dict[int, int], where_cut: Any, where_held: Placement
) -> Placements:
    """Placements between pairs and rows: ``where_cut(axis)`` where tokens are cut, else as they are, in other dims."""
    if routes.layout is None:
        return ()
    return tuple(
        where_cut(axis)
        if routes.is_cut(axis)
        else where_held
        if axis in routes.held
        else Shard(dims[p.dim], p.unit)
        if isinstance(p, Shard)
        else p
        for axis, p in enumerate(tensor._spec.layout.placements)
    )


def _placed_as_choices(pairs: Any, routes: Routes) -> Any:
    """Pairs cut as their tokens, whole where experts are held; elsewhere also terms of a sum, or cut by features."""
    if routes.layout is None:
        return pairs
    last = pairs.ndim - 1
    wanted = tuple(
        home
        if isinstance(home, Shard)
        else Replicate()
        if axis in routes.held or (isinstance(p, Shard) and p.dim != last)
        else p
        for axis, (home, p) in enumerate(zip(routes.layout.placements, pairs.placements, strict=True))
    )
    return pairs if wanted == pairs.placements else pairs.redistribute(placements=wanted)


# ---- issuing ----


def _exchanged(rows: Any, routes: Routes, *, is_back: bool) -> Any:
    if routes.axis is None:
        return rows
    name = EXCHANGE_ROWS.removeprefix("dtorch::")
    placements = rows._spec.layout.placements
    return _call(
        name, [rows, routes.counts], [routes.axis, is_back], tuple(rows.shape), rows.dtype, placements
    )


def _first(weights: Any) -> Arg:
    """Which of all experts is the first that a device has."""
    if not isinstance(weights, Tensor):
        return 0
    return LocalStart(list(weights.shape), layout_record(weights._spec.layout), 0)


def _call(
    op: str,
    tensors: Sequence[Any],
    constants: Sequence[Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    placements: Placements,
    key: tuple[int, ...] = (),
) -> Any:
    """One op of ours on tensors of one mesh, and then constants. On plain tensors its kernel runs here.

    Args:
        shape, dtype, placements: of the result.
        key: what the constants depend on, beside the tensors and the result.
    """
    if not isinstance(tensors[0], Tensor):
        return find_kernel(f"dtorch::{op}").function(*tensors, *constants)
    # A tensor of its own in the place of a view that is linked to a converted copy.
    given: list[Any] = [x if type(x) is x._symbol_class else x.clone() for x in tensors]
    graph: Graph = given[0]._handle.graph
    mesh = given[0]._spec.layout.mesh
    result = intern_spec(shape, dtype, Layout(mesh, placements))
    numbers = tuple(x for x in constants if isinstance(x, int))  # the others follow from the specs
    call = (op, *(x._spec for x in given), result, numbers, key)
    entry = graph.entries.get(call)
    if entry is None:
        plan = OpPlan(
            op=f"dtorch::{op}",
            args=(*(Slot(index) for index in range(len(given))), *constants),
            layouts=tuple(x._spec.layout for x in given),
            outputs=(NewOutput(result),),
        )
        entry = graph.entries[call] = make_entry(graph.session, plan, op, len(given))
    location = capture(sys._getframe(1), graph.thread_id)
    return issue(given[0]._symbol_class, entry, graph, given, location)
