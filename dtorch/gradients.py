"""Derivatives of products that stay one op.

Torch decomposes ``linear`` and ``matmul`` into views and ``mm`` before it differentiates them. A view that merges
batch with heads has no placement when heads are cut, so here the products stay whole and their derivatives are
written with products that do too. These are differentiable again. ``conj()`` of real numbers is the tensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from dtorch.deferred import Waiting, deferring
from dtorch.graph import is_default_mesh
from dtorch.spec import Spec
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.placement import Placement, Replicate, Shard

aten = torch.ops.aten


class _Matmul(torch.autograd.Function):
    """left: (k) or (..., m, k); right: (k) or (..., k, n); batch dims are broadcast. Global shapes."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        of_left, of_right = ctx.needs_input_grad
        # As torch: a factor that no derivative needs may be written to before the backward pass.
        ctx.save_for_backward(left if of_right else None, right if of_left else None)
        ctx.shapes = left.shape, right.shape
        result: Any = aten.matmul.default(left, right)
        ctx.spec = result._spec
        return result  # type: ignore[no-any-return]  # a tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        left, right = ctx.saved_tensors
        left_shape, right_shape = ctx.shapes
        gradient = _cut_like(gradient, ctx.spec)
        if len(right_shape) == 1:
            gradient = gradient.unsqueeze(-1)
        if len(left_shape) == 1:
            gradient = gradient.unsqueeze(-2)
        of_left = of_right = None
        if ctx.needs_input_grad[0]:
            columns = right if right.ndim > 1 else right.unsqueeze(1)
            is_matrix = len(left_shape) > 1
            of_left = _product(gradient, columns.mH, left_shape if is_matrix else (1, *left_shape))
            of_left = of_left if is_matrix else of_left.squeeze(0)
        if ctx.needs_input_grad[1]:
            rows = _rows_like(left if left.ndim > 1 else left.unsqueeze(0), gradient)
            is_matrix = len(right_shape) > 1
            of_right = _product(rows.mH, gradient, right_shape if is_matrix else (*right_shape, 1))
            of_right = of_right if is_matrix else of_right.squeeze(1)
        return of_left, of_right


class _Linear(torch.autograd.Function):
    """x: (..., k), weight: (n, k), bias: (n) or None. Global shapes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.weight_shape = weight.shape
        result: Any = aten.linear.default(x, weight, bias)
        ctx.spec = result._spec
        return result  # type: ignore[no-any-return]  # a tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = _cut_like(gradient, ctx.spec)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = torch.matmul(gradient, weight.conj())
        if ctx.needs_input_grad[1]:
            of_weight = _of_weight(gradient, x, ctx.weight_shape)
        if ctx.needs_input_grad[2]:
            of_bias = _of_bias(gradient)
        return of_x, of_weight, of_bias


class _LaterLinear(torch.autograd.Function):
    """``_Linear`` whose weight is given its gradient later, and takes no part in the backward pass itself.

    ``anchor`` requires a gradient, so that there is a backward pass where neither input nor bias wants one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, anchor: torch.Tensor, waiting: Waiting
    ) -> torch.Tensor:
        ctx.save_for_backward(x, waiting.weight)
        ctx.waiting = waiting
        result: Any = aten.linear.default(x, waiting.weight, bias)
        ctx.spec = result._spec
        return result  # type: ignore[no-any-return]  # a tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = _cut_like(gradient, ctx.spec)
        ctx.waiting.give(partial(_of_weight, gradient, x, weight.shape))
        of_x = torch.matmul(gradient, weight.conj()) if ctx.needs_input_grad[0] else None
        of_bias = _of_bias(gradient) if ctx.needs_input_grad[1] else None
        return of_x, of_bias, None, None


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    waiting = deferring(weight)
    function: Any = _Linear if waiting is None else _LaterLinear
    args = (x, weight, bias) if waiting is None else (x, bias, waiting.anchor, waiting)
    result: torch.Tensor = function.apply(*args)
    return result


def _of_weight(gradient: torch.Tensor, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The gradient of a linear layer's weight (n, k), from that of its output (..., n) and its input (..., k)."""
    rows, given = (t if t.ndim > 1 else t.unsqueeze(0) for t in (gradient, x))
    return _product(rows.mT, _rows_like(given, rows).conj(), shape)


def _of_bias(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.sum(dim=tuple(range(gradient.ndim - 1))) if gradient.ndim > 1 else gradient


def _cut_like(whole: Any, spec: Spec, *, but: int | None = None) -> Any:
    """A tensor cut as another is, except along the dim ``but``, where that is a local slice: no bytes.

    A gradient under ``vmap`` is torch's wrapper of several, which has no placements; it stays as it is.
    """
    given: Spec | None = getattr(whole, "_spec", None)
    if given is None:
        return whole
    mesh = spec.layout.mesh
    if given.layout.mesh != mesh and not (given.layout.is_replicated and is_default_mesh(given.layout.mesh)):
        return whole
    placements = _local_cut(given, spec, but)
    return whole if placements is None else whole.redistribute(device_mesh=mesh, placements=placements)


@lru_cache(maxsize=4096)
def _local_cut(given: Spec, like: Spec, but: int | None) -> tuple[Placement, ...] | None:
    """The placements that a tensor has once it is cut as another one, on the axes along which it is whole."""
    mesh = like.layout.mesh
    own = given.layout.placements if given.layout.mesh == mesh else (Replicate(),) * mesh.ndim
    kept = {p.dim for p in own if isinstance(p, Shard)} | {but}  # a second cut of a dim would move the first
    placements = tuple(
        wanted if old == Replicate() and isinstance(wanted, Shard) and wanted.dim not in kept else old
        for old, wanted in zip(own, like.layout.placements, strict=True)
    )
    return None if placements == own else placements


def _rows_like(whole: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A whole factor with the rows that the gradient of the product has: a local slice."""
    spec: Spec | None = getattr(gradient, "_spec", None)
    if spec is None or whole.shape[:-1] != gradient.shape[:-1]:
        return whole
    result: torch.Tensor = _cut_like(whole, spec, but=whole.ndim - 1)
    return result


def _product(left: torch.Tensor, right: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """``left @ right``, summed over the batch dims that ``shape`` lacks."""
    if len(shape) == 2 and left.ndim == right.ndim > 2 and left.shape[:-2] == right.shape[:-2]:
        folded = _folded(left, right)
        if folded is not None:
            return folded
    return torch.matmul(left, right).sum_to_size(shape)


def _folded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """The sum over batches as one product of long matrices; None where the cuts do not survive the folding."""
    try:
        return left.mT.flatten(0, -2).mT @ right.flatten(0, -2)
    except PlacementError:
        return None


#: The op with a derivative, by the op that stays whole.
DIFFERENTIABLE: dict[Any, Any] = {aten.matmul.default: _Matmul.apply, aten.linear.default: _linear}
