"""Random ops on tensors: a number depends on the seed and its place in the global tensor, not on the mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dtorch import shapes
from dtorch.op_plan import OpPlan
from dtorch.rules import explain
from dtorch.rules.call import ArgumentEncoder, Call
from dtorch.rules.dsl import full_names
from dtorch.rules.equation import layout_of
from dtorch.rules.factory import box_arguments
from dtorch.rules.registry import register
from dtorch.rules.whole import pack_outputs, packing, plan_whole
from dtorch.shapes import Metas, TensorMeta
from dtorch.spec import Spec
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Partial, Replicate

#: The op and the arguments of a kernel for one call, its tensors among them; seeds are taken from the encoder.
Kernel = Callable[[Call, TensorMeta, Layout, ArgumentEncoder], tuple[str, list[Any]]]


@dataclass(frozen=True)
class RandomRule:
    """Each device makes its box of what one device would make."""

    kernel: Kernel
    always: bool = False
    #: Whether only the shape of the input matters, so that a partial one will do.
    shape_only: bool = False

    def plan(self, call: Call) -> OpPlan:
        """The plan of a call. Raises PlacementError."""
        spec = call.inputs[0]
        if len(call.inputs) != 1:
            return _plan_of_several(call)
        layout = spec.layout
        if layout.is_partial:
            if not self.shape_only:
                raise explain.refused(
                    call, "self is Partial, and random ops need values", self.signatures(call)
                )
            layout = whole_where_partial(layout)
        metas = _metas(call)
        meta = metas[0]
        assert isinstance(meta, TensorMeta)
        encoder = ArgumentEncoder()
        op, args = self.kernel(call, meta, layout, encoder)
        encoded = tuple(encoder.encode(value) for value in args)
        return OpPlan(
            op=op,
            args=encoded,
            layouts=tuple(given.layout for given in call.inputs),
            outputs=pack_outputs(call, metas, [layout] * len(metas)),
            returns=packing(call.op),
            mutates=call.written,
            num_seeds=encoder.num_seeds,
        )

    def signatures(self, call: Call) -> list[str]:
        """Any dim may be cut."""
        ndim = len(call.inputs[0].shape)
        return ["self: R -> R", *(f"self: S({d}) -> S({d})" for d in range(ndim))]


def _plan_of_several(call: Call) -> OpPlan:
    """Several tensors: they must be whole. Raises PlacementError."""
    if not call.is_replicated:
        raise explain.no_rule(call)
    return plan_whole(call)


def whole_where_partial(layout: Layout) -> Layout:
    """The layout with Replicate in the place of Partial."""
    return layout_of(
        layout.mesh, tuple(Replicate() if isinstance(p, Partial) else p for p in layout.placements)
    )


def _metas(call: Call) -> Metas:
    if call.op.writes:
        spec = call.inputs[0]
        return (TensorMeta(spec.shape, spec.stride, spec.dtype),)
    return shapes.infer(call)


def _fill(call: Call, meta: TensorMeta, layout: Layout, encoder: ArgumentEncoder) -> tuple[str, list[Any]]:
    """In-place ops: ``uniform_(a, b)``."""
    numbers = [call.get(p.name) for p in call.op.parameters[1:] if p.name != "generator"]
    starts, _ = box_arguments(meta.shape, layout)
    args = [
        call.inputs[0],
        call.op.name,
        numbers,
        list(meta.shape),
        list(meta.stride),
        starts,
        encoder.seed(),
    ]
    return "dtorch::random_fill", args


def _like(operator: str) -> Kernel:
    """``*_like``: the in-place op on a new tensor."""

    def kernel(
        call: Call, meta: TensorMeta, layout: Layout, encoder: ArgumentEncoder
    ) -> tuple[str, list[Any]]:
        numbers: list[Any] = []
        if operator.startswith("aten::random_"):
            numbers = [call.get("low") if call.has("low") else 0, call.get("high")]
        starts, _ = box_arguments(meta.shape, layout)
        shape, stride = list(meta.shape), list(meta.stride)
        like: Spec = call.inputs[0]
        args = [like, operator, numbers, meta.dtype, shape, stride, starts, encoder.seed()]
        return "dtorch::random_like", args

    return kernel


def _bernoulli(
    call: Call, meta: TensorMeta, layout: Layout, encoder: ArgumentEncoder
) -> tuple[str, list[Any]]:
    starts, _ = box_arguments(meta.shape, layout)
    return "dtorch::bernoulli_shard", [call.inputs[0], list(meta.shape), starts, encoder.seed()]


def _dropout(call: Call, meta: TensorMeta, layout: Layout, encoder: ArgumentEncoder) -> tuple[str, list[Any]]:
    starts, _ = box_arguments(meta.shape, layout)
    probability = call.get("p") if call.get("train") is not False else 0.0
    return "dtorch::dropout_shard", [
        call.inputs[0],
        float(probability),
        list(meta.shape),
        starts,
        encoder.seed(),
    ]


register(
    full_names("uniform_ normal_ random_ bernoulli_.float exponential_ cauchy_ log_normal_ geometric_"),
    RandomRule(_fill),
)
register(full_names("rand_like"), RandomRule(_like("aten::uniform_"), always=True, shape_only=True))
register(full_names("randn_like"), RandomRule(_like("aten::normal_"), always=True, shape_only=True))
register(
    full_names("randint_like.default randint_like.low_dtype"),
    RandomRule(_like("aten::random_.from"), always=True, shape_only=True),
)
register(full_names("bernoulli.default"), RandomRule(_bernoulli, always=True))
register(full_names("native_dropout"), RandomRule(_dropout, always=True))
