"""``scaled_dot_product_attention``: over devices that each have a part of the sequence, and with a dropout.

Mesh axes named ``ulysses_cp`` and ``ring_cp`` say how a sequence that is cut over them is brought together. Ulysses
(Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509): an all-to-all exchanges the cut of the sequence for one of the
heads, and one goes back. Ring: ``ring_attention``. With both, heads are exchanged first. Where keys alone are cut, as
those of a cache are when a token is decoded: ``merged_attention``. Shapes are global.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dtorch import auto
from dtorch.dispatch import special
from dtorch.gradients import DIFFERENTIABLE
from dtorch.graph import is_default_mesh
from dtorch.merged_attention import merged_attention, with_placement
from dtorch.propagate import propagate
from dtorch.ring_attention import Ring, ring_attention
from dtorch.spec import Spec
from dtorch.whole_attention import whole_attention
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
_sdpa = aten.scaled_dot_product_attention.default

#: The second name is a common misspelling.
ULYSSES_AXES = ("ulysses_cp", "ulysess_cp")
RING_AXIS = "ring_cp"


def sequence_axes(mesh: DeviceMesh) -> list[str]:
    """The axes of a mesh that cut sequences over several devices."""
    names = (*ULYSSES_AXES, RING_AXIS)
    return [name for name in names if mesh.has_axis(name) and mesh.size(name) > 1]


@dataclass(frozen=True, slots=True)
class _Axes:
    """The axes of a mesh that the sequence of a call is cut over, by their use; None where it is not.

    Attributes:
        of_keys: those along which keys are cut, and queries whole.
        of_queries: those along which queries are cut, and keys whole, which a causal mask does not allow.
    """

    ulysses: int | None = None
    ring: int | None = None
    of_keys: tuple[int, ...] = ()
    of_queries: tuple[int, ...] = ()


@dataclass(slots=True)
class _Call:
    """The arguments of a call."""

    query: Any
    key: Any
    value: Any
    mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def inputs(self) -> tuple[Any, Any, Any]:
        return self.query, self.key, self.value

    @property
    def mesh(self) -> DeviceMesh:
        mesh: DeviceMesh = self.query._spec.layout.mesh
        return mesh


@special(_sdpa)
def _special(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """With a dropout, attention is made of the ops that torch makes it of when it is differentiated."""
    found = _over_sequence(*args, **kwargs)
    if found is not NotImplemented:
        return found
    dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return func.decompose(*args, **kwargs) if dropout else NotImplemented


def _differentiable(*args: Any) -> Any:
    found = _over_sequence(*args)
    if found is NotImplemented:
        found = whole_attention(*args)
    if found is not NotImplemented:
        return found
    *given, scale, enable_gqa = args
    return _sdpa._op_dk(
        torch._C.DispatchKey.CompositeImplicitAutograd, *given, scale=scale, enable_gqa=enable_gqa
    )


DIFFERENTIABLE[_sdpa] = _differentiable


def _over_sequence(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The result of a call whose sequence is cut over one of the axes; NotImplemented for others.

    Raises:
        PlacementError: the three are cut differently, the heads cannot be cut, or the mask cannot be brought.
    """
    call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if any(getattr(x, "_spec", None) is None for x in call.inputs) or min(x.ndim for x in call.inputs) < 2:
        return NotImplemented
    axes = _axes_of(*(x._spec for x in call.inputs), is_causal, auto.current() is not None)
    if axes is None:
        return NotImplemented
    if is_causal and attn_mask is not None:
        raise RuntimeError(
            "scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
        )
    call.query, call.key, call.value = (_plain(x) for x in call.inputs)
    call.mask = _mask_on_mesh(call)
    if axes.of_keys or axes.of_queries:
        return _over_some(call, axes)
    placements = query._spec.layout.placements
    if axes.ulysses is not None:
        _exchange_for_heads(call, axes.ulysses)
    if axes.ring is None:
        out = _sdpa(*call.inputs, call.mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    else:
        out = _round(call, axes.ring)
    return out if axes.ulysses is None else out.redistribute(placements=placements)


def _over_some(call: _Call, axes: _Axes) -> Any:
    """The result of a call that is cut along some axes in its queries only, or in its keys only.

    What is whole is cut where it is, which moves nothing; but keys stay where they are when all that is asked for is
    what they give to queries that every device has: a cache and the next token.

    Raises:
        PlacementError, RuntimeError: as ``_over_sequence``.
    """
    cut = Shard(call.query.ndim - 2)
    tensors = (*call.inputs, call.mask)
    needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    alone = not axes.of_queries and axes.ulysses is None and axes.ring is None
    if alone and not needs_gradient and not call.dropout_p:
        try:
            return merged_attention(
                tensors, axes.of_keys, bool(call.is_causal), call.scale, bool(call.enable_gqa)
            )
        except PlacementError:
            if auto.current() is None:
                raise
            return NotImplemented
    placements = call.query._spec.layout.placements
    for axis in axes.of_keys:
        call.query = _placed(call.query, axis, cut)
    for axis in axes.of_queries:
        call.key, call.value = (_placed(x, axis, cut) for x in (call.key, call.value))
    options = {"scale": call.scale, "enable_gqa": call.enable_gqa}
    out = _sdpa(*call.inputs, call.mask, call.dropout_p, call.is_causal, **options)
    return out.redistribute(placements=placements)


def _plain(x: Any) -> Any:
    """A tensor of its own in the place of a view that is linked to a converted copy."""
    return x if type(x) is x._symbol_class else x.clone()


@lru_cache(maxsize=4096)
def _axes_of(query: Spec, key: Spec, value: Spec, is_causal: bool, may_move: bool) -> _Axes | None:
    """Which axes they are cut over by sequence; None when there is none.

    Queries alone may be cut, as on any axis, where no causal mask counts them.

    Raises:
        PlacementError: keys or values alone are, and nothing is allowed to move them (``may_move``).
    """
    mesh = query.layout.mesh
    if mesh.mesh_dim_names is None or any(spec.layout.mesh != mesh for spec in (key, value)):
        return None
    found: dict[str, int] = {}
    of_keys: list[int] = []
    of_queries: list[int] = []
    for name in (*ULYSSES_AXES, RING_AXIS):
        if not mesh.has_axis(name):
            continue
        axis = mesh.axis(name)
        cut = [_is_cut(spec, axis) for spec in (query, key, value)]
        if all(cut):
            found["ring" if name == RING_AXIS else "ulysses"] = axis
        elif all(cut[1:]) and _is_whole(query, axis):
            of_keys.append(axis)
        elif cut[0] and is_causal and _is_whole(key, axis) and _is_whole(value, axis):
            of_queries.append(axis)
        elif (any(cut[1:]) or (cut[0] and is_causal)) and not may_move:
            raise _cut_differently(name, axis, (query, key, value))
    if not (found or of_keys or of_queries):
        return None
    return _Axes(found.get("ulysses"), found.get("ring"), tuple(of_keys), tuple(of_queries))


def _is_whole(spec: Spec, axis: int) -> bool:
    return spec.layout.placements[axis] == Replicate()


def _is_cut(spec: Spec, axis: int) -> bool:
    placement = spec.layout.placements[axis]
    return isinstance(placement, Shard) and placement.dim == len(spec.shape) - 2


def _cut_differently(name: str, axis: int, specs: Sequence[Spec]) -> PlacementError:
    names = ("query", "key", "value")
    given = ", ".join(f"{n} {spec.layout.placements[axis]}" for n, spec in zip(names, specs, strict=True))
    dim = len(specs[0].shape) - 2
    order = (*zip(names[1:], specs[1:], strict=True), (names[0], specs[0]))  # a query may be whole
    wrong = next(n for n, spec in order if not _is_cut(spec, axis))
    return PlacementError(
        f"scaled_dot_product_attention over the mesh axis {name!r} takes query, key and value that are all cut by "
        f"sequence (dim {dim}) there, or key and value alone, got {given}; write {wrong} = "
        f"{wrong}.redistribute_by_dict({{{name!r}: Shard({dim})}})"
    )


# ---- masks ----


def _mask_on_mesh(call: _Call) -> Any:
    """The mask on the mesh of the others; one that nobody gave a mesh is brought there, whole."""
    mask = call.mask
    if mask is None or mask._spec.layout.mesh == call.mesh:
        return mask
    if not is_default_mesh(mask._spec.layout.mesh):
        raise PlacementError(
            f"scaled_dot_product_attention got attn_mask on {mask.device_mesh!r}, and query on {call.mesh!r}; write "
            f"attn_mask.redistribute(device_mesh=query.device_mesh, placements=[...])"
        )
    return mask.redistribute(device_mesh=call.mesh, placements=[Replicate()] * call.mesh.ndim)


def _mask_placed(call: _Call, axis: int, wanted: Placement) -> Any:
    """The mask with another placement on an axis of the sequence: whole there, or cut by rows, it can be given."""
    mask = call.mask
    if mask is None:
        return None
    given = mask._spec.layout.placements[axis]
    rows = Shard(mask.ndim - 2)
    if not (isinstance(given, Replicate) or (isinstance(given, Shard) and given.dim == rows.dim)):
        name = (call.mesh.mesh_dim_names or ())[axis]
        raise PlacementError(
            f"scaled_dot_product_attention over the mesh axis {name!r} takes an attn_mask that is whole there or cut "
            f"by queries, got {given} of a mask of shape {list(mask.shape)}; write attn_mask = "
            f"attn_mask.redistribute_by_dict({{{name!r}: Replicate()}}), or {rows}"
        )
    placements = list(mask._spec.layout.placements)
    placements[axis] = wanted
    return mask.redistribute(placements=placements)


# ---- Ulysses ----


def _exchange_for_heads(call: _Call, axis: int) -> None:
    """Cut the heads over an axis that the sequence was cut over. Heads that share keys stay together.

    With fewer key heads than devices, each is repeated as often as it takes, at most once for each query head.

    Raises:
        PlacementError: there are more devices than query heads.
    """
    dim = call.query.ndim - 3
    name = (call.mesh.mesh_dim_names or ())[axis]
    num_heads = call.query.shape[dim] if dim >= 0 else 1
    num_key_heads = call.key.shape[dim] if dim >= 0 else 1
    num_parts = _num_parts_of_heads(call, dim, axis)
    is_cut = call.mesh.shape[axis] > 1
    if is_cut and (num_heads < num_parts or dim < 0):
        raise PlacementError(
            f"scaled_dot_product_attention over the mesh axis {name!r} cuts the heads, and {num_heads} cannot be cut "
            f"into {num_parts}; allowed are at least as many heads as devices that share them. Write a mesh with a "
            f"shorter axis, or name the axis {RING_AXIS!r}, which cuts no heads"
        )
    group = num_heads // num_key_heads if num_key_heads else 1
    if num_heads == group * num_key_heads and num_key_heads < num_parts <= num_heads:
        times = next(n for n in range(1, group + 1) if group % n == 0 and num_key_heads * n >= num_parts)
        call.key, call.value = (_repeated(x, dim, times) for x in (call.key, call.value))
        group //= times
    if not is_cut:  # a single head would be cut, which is broadcast
        call.query, call.key, call.value = (_placed(x, axis, Replicate()) for x in call.inputs)
        call.mask = _mask_placed(call, axis, Replicate())
        return
    call.query = _placed(call.query, axis, Shard(dim, group))
    call.key, call.value = (_placed(x, axis, Shard(dim)) for x in (call.key, call.value))
    if call.mask is not None:
        of_heads = call.mask.ndim - 3
        has_heads = of_heads >= 0 and call.mask.shape[of_heads] > 1
        call.mask = _mask_placed(call, axis, Shard(of_heads, group) if has_heads else Replicate())
        if has_heads:
            call.mask = _with_heads_of_query(call, dim, of_heads)


def _with_heads_of_query(call: _Call, dim: int, of_heads: int) -> Any:
    """The mask with its heads cut on other axes as those of the query are, which moves nothing."""
    placements = list(call.mask._spec.layout.placements)
    for axis, placement in enumerate(call.query._spec.layout.placements):
        if isinstance(placement, Shard) and placement.dim == dim and placements[axis] == Replicate():
            placements[axis] = Shard(of_heads, placement.unit)
    return call.mask.redistribute(placements=placements)


def _num_parts_of_heads(call: _Call, dim: int, axis: int) -> int:
    """Into how many parts the heads are cut, over this axis and others."""
    placements = call.query._spec.layout.placements
    cuts = [
        size
        for number, (size, placement) in enumerate(zip(call.mesh.shape, placements, strict=True))
        if number == axis or (isinstance(placement, Shard) and placement.dim == dim)
    ]
    return math.prod(cuts)


def _repeated(x: Any, dim: int, times: int) -> Any:
    """Each head of keys or values several times, one after the other."""
    sizes = [-1] * (x.ndim + 1)
    sizes[dim + 1] = times
    return x.unsqueeze(dim + 1).expand(sizes).flatten(dim, dim + 1)


def _placed(x: Any, axis: int, placement: Placement) -> Any:
    placements = list(x._spec.layout.placements)
    placements[axis] = placement
    return x.redistribute(placements=placements)


# ---- ring ----


def _round(call: _Call, axis: int) -> Any:
    """Attention over a ring, on whatever the other axes do.

    Raises:
        RuntimeError: a dropout that is no probability.
        PlacementError: the cuts on other axes do not fit.
    """
    if call.mask is not None:
        call.mask = _mask_placed(call, axis, Replicate())
    if not 0 <= call.dropout_p <= 1:  # as torch says it
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {call.dropout_p}")
    mask_spec = None if call.mask is None else call.mask._spec
    specs = [x._spec for x in call.inputs]
    mask_layout = _check(*specs, mask_spec, axis, call.is_causal, call.enable_gqa)
    if call.mask is not None and mask_layout is not None:
        call.mask = call.mask.redistribute(placements=mask_layout.placements)
    size = call.query.shape[-1]
    scale = call.scale if call.scale is not None else 1 / math.sqrt(size) if size else 1.0
    ring = Ring(axis, bool(call.is_causal), float(scale), float(call.dropout_p))
    return ring_attention(*call.inputs, call.mask, ring)


@lru_cache(maxsize=4096)
def _check(
    query: Spec, key: Spec, value: Spec, mask: Spec | None, axis: int, is_causal: bool, enable_gqa: bool
) -> Layout | None:
    """Whether a ring can do a call: shapes fit, and so do the cuts on the axes beside the ring.

    They do where they would if the sequence were whole along the ring. Gives the layout that the mask needs.

    Raises:
        PlacementError, RuntimeError: they do not.
    """
    whole = [
        None if s is None else with_placement(s, (axis,), Replicate()) for s in (query, key, value, mask)
    ]
    plan = propagate(_sdpa, (*whole, 0.0, is_causal), {"enable_gqa": enable_gqa})
    if any(isinstance(p, Partial) for spec in (query, key, value) for p in spec.layout.placements):
        raise PlacementError(
            f"scaled_dot_product_attention over the mesh axis {RING_AXIS!r} takes no terms of a sum, got value "
            f"{value.layout}; write value = value.redistribute(placements=[...]) without Partial()"
        )
    if mask is None:
        return None
    layout = dict(plan.conversions).get(3, mask.layout)
    rows = Shard(len(mask.shape) - 2) if len(mask.shape) > 1 and mask.shape[-2] > 1 else Replicate()
    placements = list(layout.placements)
    placements[axis] = rows
    return Layout(layout.mesh, tuple(placements))
