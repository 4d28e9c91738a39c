"""Ring attention: every device keeps its queries, and blocks of keys and values go round the axis.

Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (arXiv:2310.01889).

A step of the ring is a redistribution to the same mesh with its devices moved by one along the axis: each device sends
the one block that it holds to its neighbour. The ops on blocks have inputs on meshes that are moved differently, so
they are issued here, and not planned from specs as ops of one mesh are. Shapes are global.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dtorch.auto_issue import copy_into
from dtorch.graph import Graph
from dtorch.issue import issue, make_entry, make_symbol, transfer
from dtorch.location import capture
from dtorch.meshes import layout_record
from dtorch.op_plan import NewOutput, OpPlan
from dtorch.propagate import propagate
from dtorch.spec import Spec, intern_spec
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Replicate, Shard, split
from dtorch_runtime.wire.records import Arg, DeviceArg, ListArg, LocalStart, ScalarSlot, Slot

aten = torch.ops.aten

#: Blocks of keys beyond this go round in several parts, so that little more than what a device keeps is under way.
_PART_BYTES = 1 << 18
_NUM_PARTS = 4
#: From so many queries a device on, a causal ring is worth the exchanges that give all devices the same work.
_MIN_BALANCED = 1024


@dataclass(frozen=True, slots=True)
class Ring:
    """The constants of a call: the mesh axis that the sequence is cut over, and what attention is told."""

    axis: int
    is_causal: bool
    scale: float
    dropout_p: float = 0.0


def ring_attention(query: Any, key: Any, value: Any, mask: Any, ring: Ring) -> Any:
    """Attention of queries, keys and values that are cut by sequence over an axis; placed as the queries.

    Args:
        query: [..., heads, queries, features]; key, value: [..., key heads, keys, features]; on one mesh, cut alike but
            for the sequence.
        mask: None, or broadcast to [..., heads, queries, keys]: cut as the queries are, with all its columns.
    """
    seed = _Issuer(query, key, ring).seed() if ring.dropout_p else None
    tensors = (x for x in (query, key, value, mask) if x is not None)
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if needs_gradient:
        return _apply(query, key, value, mask, seed, ring)
    return _forward(query, key, value, mask, seed, ring)[0]


class _RingAttention(torch.autograd.Function):
    """The backward pass goes round once more, with the derivatives of keys and values beside them."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, seed: Any, ring: Ring) -> Any:
        out, lse = _forward(query, key, value, mask, seed, ring)
        ctx.save_for_backward(query, key, value, mask, out, lse, seed)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        query, key, value, mask, out, lse, seed = ctx.saved_tensors
        like: Layout = out._spec.layout
        gradient = gradient.redistribute(device_mesh=like.mesh, placements=like.placements)
        wants_mask = bool(ctx.needs_input_grad[3])
        found = _backward(gradient, query, key, value, mask, out, lse, seed, ctx.ring, wants_mask)
        return *found, None, None


_apply: Any = _RingAttention.apply  # torch declares it without types


def _forward(query: Any, key: Any, value: Any, mask: Any, seed: Any, ring: Ring) -> tuple[Any, Any]:
    issuer = _Issuer(query, key, ring)
    layout: Layout = query._spec.layout
    dtype = _wide(query.dtype)
    out = issuer.full((*query.shape[:-1], value.shape[-1]), dtype, layout, 0.0)
    lse = issuer.full(tuple(query.shape[:-1]), dtype, layout, float("-inf"))
    runs = _runs(query._spec, key._spec, mask is not None, ring)
    for part in _parts(query._spec, key._spec, len(runs)):
        sums = [part.of_queries(x) for x in (out, lse)]
        keys = [part.of_keys(x) for x in (key, value)]
        shared = [part.of_mask(mask, query.ndim), seed]
        _forward_part(issuer, part, runs, sums, part.of_queries(query), keys, shared)
        issuer.free_dropped()
    return out.to(query.dtype), lse


def _forward_part(
    issuer: _Issuer,
    part: _Part,
    runs: Sequence[_Run],
    homes: list[Any],
    query: Any,
    keys: list[Any],
    shared: list[Any],
) -> None:
    """Add all that goes round to ``homes``, the output and its log-sum-exp.

    Args:
        shared: what all blocks are given: the mask, and the seed of a dropout.
    """
    out, lse = homes
    held = [
        (issuer.sums(out, run, 0.0), issuer.sums(lse, run, float("-inf")), issuer.spread(query, run))
        for run in runs
    ]
    moving = [[issuer.spread(x, run) for x in keys] for run in runs]
    for step in range(issuer.num_steps):
        following = [issuer.turned(pair, run, step + 1) for pair, run in zip(moving, runs, strict=True)]
        for i, j in _visible(runs):
            is_first = step == 0 and j == 0
            operands = [*held[i], *moving[j], *shared]
            issuer.block("attention_block", 2, operands, part, runs[i], runs[j], is_first=is_first)
        del operands
        moving = following
        issuer.free_dropped()
    for (*sums, _), run in zip(held, runs, strict=True):
        for total, home in zip(sums, homes, strict=True):
            issuer.bring_home(total, home, run)


def _as_terms(found: Any, query: Any, mask: Any) -> Any:
    """What each device found, as terms of a sum where devices have other queries and the same mask."""
    layout: Layout = mask._spec.layout
    placements = tuple(
        Partial("sum") if isinstance(cut, Shard) and own == Replicate() else own
        for cut, own in zip(query._spec.layout.placements, layout.placements, strict=True)
    )
    spec: Spec = found._spec
    terms = intern_spec(spec.shape, spec.dtype, Layout(layout.mesh, placements), spec.stride)
    return make_symbol(found._symbol_class, terms, found._handle).to(mask.dtype)


def _backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    out: Any,
    lse: Any,
    seed: Any,
    ring: Ring,
    wants_mask: bool,
) -> list[Any]:
    """The derivatives of query, key, value, and of the mask: None unless it is wanted."""
    issuer = _Issuer(query, key, ring)
    of_mask = None
    if wants_mask:
        of_mask = issuer.full(tuple(mask.shape), _wide(mask.dtype), mask._spec.layout, 0.0)
    inputs = (query, key, value)
    made = [issuer.full(tuple(x.shape), _wide(x.dtype), x._spec.layout, 0.0) for x in inputs]
    runs = _runs(query._spec, key._spec, mask is not None, ring)
    for part in _parts(query._spec, key._spec, len(runs)):
        homes = [part.of_queries(made[0]), part.of_keys(made[1]), part.of_keys(made[2])]
        kept = [part.of_queries(x) for x in (out, lse, gradient, query)]
        keys = [part.of_keys(x) for x in (key, value)]
        shared = [part.of_mask(x, query.ndim) for x in (of_mask, mask)]
        _backward_part(issuer, part, runs, homes, kept, keys, [*shared, seed])
        issuer.free_dropped()
    found = [x.to(like.dtype) for x, like in zip(made, inputs, strict=True)]
    return [*found, None if of_mask is None else _as_terms(of_mask, query, mask)]


def _backward_part(
    issuer: _Issuer,
    part: _Part,
    runs: Sequence[_Run],
    homes: list[Any],
    kept: list[Any],
    keys: list[Any],
    shared: list[Any],
) -> None:
    """Add all that goes round to ``homes``, the derivatives of query, key and value.

    Args:
        kept: the output and its log-sum-exp, the derivative of the output, and the query.
        shared: what the derivative of the mask is added to, or None; and as for ``_forward_part``.
    """
    of_mask, *shared = shared
    num_written = 3 if of_mask is None else 4
    totals = [[issuer.sums(home, run, 0.0) for home in homes] for run in runs]
    held = [[issuer.spread(x, run) for x in kept] for run in runs]
    moving = [[issuer.spread(x, run) for x in keys] for run in runs]
    for step in range(issuer.num_steps):
        following = [issuer.turned(pair, run, step + 1) for pair, run in zip(moving, runs, strict=True)]
        for i, j in _visible(runs):
            sums = (totals[i][0], *totals[j][1:])
            operands = [of_mask, *sums, *held[i], *moving[j], *shared]
            issuer.block("attention_block_backward", num_written, operands, part, runs[i], runs[j])
        del sums, operands
        moving = following
        if step + 1 < issuer.num_steps:  # the sums of keys follow their block, and go home at last
            totals = [
                [own, *issuer.turned(of_keys, run, step + 1)]
                for (own, *of_keys), run in zip(totals, runs, strict=True)
            ]
        issuer.free_dropped()
    for of_run, run in zip(totals, runs, strict=True):
        for total, home in zip(of_run, homes, strict=True):
            issuer.bring_home(total, home, run)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of several blocks are kept in."""
    return torch.promote_types(dtype, torch.float32)


# ---- runs ----


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of the sequence that is cut over the ring by itself.

    Attributes:
        offset: where it starts in the sequence.
        mesh: the devices that have its queries, and its keys before the first step.
        turns_back: whether its blocks go round against the order of ``mesh``.
        source: the devices that have it in the sequence as it was given; None when the run is all of it.
    """

    offset: int
    mesh: DeviceMesh
    turns_back: bool = False
    source: DeviceMesh | None = None


@lru_cache(maxsize=1024)
def _runs(query: Spec, key: Spec, has_mask: bool, ring: Ring) -> tuple[_Run, ...]:
    """All of the sequence; or, under a causal mask, its halves, the later one cut over the devices in reverse.

    Under a causal mask the last device of a ring has work in every step, the first one in one only. With an early and
    a late piece each, all have the same in every step: of the early queries or of the late keys exactly one sees, or is
    seen, and the late queries see all early keys. (The zigzag of ring-flash-attention and of Llama 3's training.)
    """
    mesh, axis = query.layout.mesh, ring.axis
    num, length = mesh.shape[axis], query.shape[-2]
    whole = (_Run(0, mesh),)
    if not ring.is_causal or has_mask or num % 2 or length % num or key.shape[-2] != length:
        return whole
    if length // num < _MIN_BALANCED:
        return whole
    early, late = (_picked(mesh, axis, range(num)[half]) for half in (slice(num // 2), slice(num // 2, None)))
    backwards = _picked(mesh, axis, range(num)[::-1])
    return _Run(0, mesh, source=early), _Run(length // 2, backwards, turns_back=True, source=late)


def _visible(runs: Sequence[_Run]) -> list[tuple[int, int]]:
    """Which runs' queries see which runs' keys: never later ones."""
    return [(i, j) for i in range(len(runs)) for j in range(i + 1)]


def _picked(mesh: DeviceMesh, axis: int, places: Sequence[int]) -> DeviceMesh:
    """The mesh with these places of an axis, in this order."""
    inner = math.prod(mesh.shape[axis + 1 :])
    num_blocks = math.prod(mesh.shape[:axis])
    starts = [(block * mesh.shape[axis] + place) * inner for block in range(num_blocks) for place in places]
    devices = [device for start in starts for device in mesh.devices[start : start + inner]]
    shape = (*mesh.shape[:axis], len(places), *mesh.shape[axis + 1 :])
    return DeviceMesh.from_flat(mesh.device_type, shape, devices)


@lru_cache(maxsize=1024)
def _turned_mesh(mesh: DeviceMesh, axis: int, steps: int) -> DeviceMesh:
    """Where block i is after so many steps: at the device that is so many further along the axis."""
    num = mesh.shape[axis]
    return _picked(mesh, axis, [(place + steps) % num for place in range(num)])


# ---- parts ----


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of the batch or of the heads; ``dim`` is None for everything. There are ``times`` query heads a key head."""

    dim: int | None
    start: int
    stop: int
    times: int

    def of_keys(self, x: Any) -> Any:
        return x if self.dim is None else x.narrow(self.dim, self.start, self.stop - self.start)

    def of_queries(self, x: Any) -> Any:
        if self.dim is None:
            return x
        return x.narrow(self.dim, self.start * self.times, (self.stop - self.start) * self.times)

    def of_mask(self, mask: Any, ndim: int) -> Any:
        """Of a mask, whose dims are counted from the right."""
        dim = -1 if mask is None or self.dim is None else self.dim - (ndim - mask.ndim)
        if dim < 0 or mask.shape[dim] == 1:
            return mask
        return mask.narrow(dim, self.start * self.times, (self.stop - self.start) * self.times)


@lru_cache(maxsize=1024)
def _parts(query: Spec, key: Spec, num_runs: int) -> list[_Part]:
    """Parts along a dim that no device cuts; one where there is none, or where blocks are small."""
    ndim = len(key.shape)
    cuts = zip(key.layout.mesh.shape, key.layout.placements, strict=True)
    num_blocks = math.prod(size for size, placement in cuts if isinstance(placement, Shard))
    cut = [p.dim for spec in (query, key) for p in spec.layout.placements if isinstance(p, Shard)]
    free = [dim for dim in range(ndim - 2) if dim not in cut and key.shape[dim] > 1]
    if not free or ndim > 4 or key.num_bytes // num_blocks < _PART_BYTES:
        return [_Part(None, 0, 0, 1)]
    wanted = _NUM_PARTS * num_runs  # halves have copies of the queries too
    dim = max(free, key=lambda d: min(key.shape[d], wanted))
    times = query.shape[dim] // key.shape[dim]
    pieces = split(key.shape[dim], min(key.shape[dim], wanted))
    return [_Part(dim, start, stop, times) for start, stop in pieces]


# ---- issuing ----


class _Issuer:
    """Issues what a ring consists of, in the graph of the query, as of the program's line."""

    def __init__(self, query: Any, key: Any, ring: Ring) -> None:
        self.graph: Graph = query._handle.graph
        self.symbol_class: type[torch.Tensor] = query._symbol_class
        self.location = capture(sys._getframe(1), self.graph.thread_id)
        self.ring = ring
        self.num_steps: int = query._spec.layout.mesh.shape[ring.axis]
        #: The dim of the sequence, in queries, keys and log-sum-exps alike.
        self.dim: int = query.ndim - 2
        #: Of all weights, of which each block drops its own.
        self.weights_shape: tuple[int, ...] = (*query.shape[:-1], key.shape[-2])
        self.layout: Layout = query._spec.layout

    def seed(self) -> Any:
        """What the dropout of a call depends on, the next of the program, as a number on each device.

        It is a value, and not a constant of the ops, so that a replay of a captured call takes the next one.
        """
        key = ("attention_seed", self.layout.mesh)
        entry = self.graph.entries.get(key)
        if entry is None:
            mesh = self.layout.mesh
            whole = Layout(mesh, (Replicate(),) * mesh.ndim)
            plan = OpPlan(
                op="dtorch::attention_seed",
                args=(ScalarSlot(0), DeviceArg()),
                outputs=(NewOutput(intern_spec((), torch.int64, whole)),),
                num_seeds=1,
            )
            entry = self.graph.entries[key] = make_entry(self.graph.session, plan, "seed", 0)
        return issue(self.symbol_class, entry, self.graph, (), self.location)

    def full(self, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, value: float) -> Any:
        """A new tensor."""
        key = ("attention_full", shape, dtype, layout, value)
        entry = self.graph.entries.get(key)
        if entry is None:
            full = aten.full.default
            plan = propagate(full, (list(shape), value), {"dtype": dtype}, default_layout=layout)
            entry = self.graph.entries[key] = make_entry(self.graph.session, plan, full, 0)
        return issue(self.symbol_class, entry, self.graph, (), self.location)

    def moved(self, tensor: Any, layout: Layout) -> Any:
        return transfer(self.symbol_class, tensor, layout, self.location)

    def turned(self, tensors: Sequence[Any], run: _Run, steps: int) -> list[Any]:
        """The blocks of a run so many steps from where they started; none when they have been everywhere."""
        if steps == self.num_steps:
            return []
        steps = self.num_steps - steps if run.turns_back else steps
        mesh = _turned_mesh(run.mesh, self.ring.axis, steps)
        return [self.moved(x, Layout(mesh, x._spec.layout.placements)) for x in tensors]

    def spread(self, tensor: Any, run: _Run) -> Any:
        """A run of a tensor, cut over the ring by itself."""
        if run.source is None:
            return tensor
        return self.moved(self._piece(tensor, run.source), Layout(run.mesh, tensor._spec.layout.placements))

    def sums(self, home: Any, run: _Run, value: float) -> Any:
        """What blocks of a run are added to: ``home``, which has the value, or a tensor like its run."""
        if run.source is None:
            return home
        spec: Spec = home._spec
        return self.full(self._half(spec), spec.dtype, Layout(run.mesh, spec.layout.placements), value)

    def bring_home(self, total: Any, home: Any, run: _Run) -> None:
        """Write the sums of a run to where they belong."""
        if total is home:
            return
        source = home._spec.layout.mesh if run.source is None else run.source
        target = home if run.source is None else self._piece(home, source)
        if total._spec.layout.mesh != source:
            total = self.moved(total, Layout(source, total._spec.layout.placements))
        copy_into(self.symbol_class, target, total, self.location)

    def _piece(self, tensor: Any, source: DeviceMesh) -> Any:
        """The half of a sequence that some of its devices have: the same value, of which others have no part."""
        spec: Spec = tensor._spec
        half = intern_spec(self._half(spec), spec.dtype, Layout(source, spec.layout.placements))
        return make_symbol(self.symbol_class, half, tensor._handle)

    def _half(self, spec: Spec) -> tuple[int, ...]:
        return (*spec.shape[: self.dim], spec.shape[self.dim] // 2, *spec.shape[self.dim + 1 :])

    def block(
        self,
        op: str,
        num_written: int,
        operands: Sequence[Any],
        part: _Part,
        queries: _Run,
        keys: _Run,
        is_first: bool | None = None,
    ) -> None:
        """An op on a block. ``operands`` are tensors and None; the first ``num_written`` are written to.

        Args:
            queries, keys: the runs that the block's are of.
            is_first: of the forward pass: whether no block was added before.
        """
        given = [x for x in operands if x is not None]
        specs = [None if x is None else x._spec for x in operands]
        origin = self._origin(part, queries, keys) if self.ring.dropout_p else None
        offset = queries.offset - keys.offset
        key = (op, *specs, self.ring, offset, is_first, origin, self.weights_shape if origin else None)
        entry = self.graph.entries.get(key)
        if entry is None:
            numbers = iter(range(len(given)))
            *_, query, first_keys, _, _, _ = specs
            args: list[Arg] = [None if x is None else Slot(next(numbers)) for x in operands]
            args += [_start(query, -2), _start(first_keys, -2), offset, self.ring.is_causal, self.ring.scale]
            args += [] if is_first is None else [is_first]
            if origin is not None:
                starts: list[Arg] = [_start(query, dim) for dim in range(self.dim)]
                args += [
                    self.ring.dropout_p,
                    ListArg([*self.weights_shape]),
                    ListArg([*origin]),
                    ListArg(starts),
                ]
            plan = OpPlan(
                op=f"dtorch::{op}",
                args=tuple(args),
                layouts=tuple(x._spec.layout for x in given),
                returns="none",
                mutates=tuple(range(num_written)),
            )
            entry = self.graph.entries[key] = make_entry(self.graph.session, plan, op, len(given))
        issue(self.symbol_class, entry, self.graph, given, self.location)

    def _origin(self, part: _Part, queries: _Run, keys: _Run) -> tuple[int, ...]:
        """Where in all weights those of a part and of two runs start."""
        starts = [0] * self.dim
        if part.dim is not None:
            starts[part.dim] = part.start * part.times
        return (*starts, queries.offset, keys.offset)

    def free_dropped(self) -> None:
        """Let the devices free the blocks that went on, before more come."""
        with self.graph.lock:
            if self.graph.dropped:
                if not self.graph.words:
                    self.graph.begin_batch()
                self.graph.free_dropped()


def _start(spec: Spec | None, dim: int) -> LocalStart:
    """Where the local piece starts in a dim."""
    assert spec is not None, "queries and keys are never None"
    return LocalStart(list(spec.shape), layout_record(spec.layout), dim % len(spec.shape))
