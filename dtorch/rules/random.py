"""Random ops: a number depends on the seed and its place in the global tensor, not on the mesh.

Each device makes its own box of what one device would make (``dtorch_runtime/worker/random_kernels.py``), so any dim
may be cut that a result shares with its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dtorch import shapes
from dtorch.meshes import layout_record
from dtorch.op_plan import NewOutput, OpPlan
from dtorch.rules.call import ArgumentEncoder, Call, Seed, local_shape
from dtorch.rules.dsl import Binder, EquationRule, Notation, Specialize, full_names, rule
from dtorch.rules.equation import Matched, layout_of
from dtorch.rules.factory import box_arguments, check_layout
from dtorch.rules.reduce import other_op
from dtorch.rules.registry import register
from dtorch.rules.whole import pack_outputs, undrawable
from dtorch.shapes import Metas, TensorMeta, preserved_stride, register_shape
from dtorch.spec import contiguous_stride, intern_spec
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Partial, Replicate
from dtorch_runtime.wire.records import DeviceArg, LocalStart

# ------------------------------------------------------------------------------------------------- distributions


def _distribution(call: Call, dtype: torch.dtype) -> tuple[str, list[Any]]:
    """What the worker calls the distribution of an op, and its parameters."""
    name = call.op.base.removeprefix("aten::").removesuffix("_like").removesuffix("_functional").strip("_")
    if name in ("random", "randint"):
        return "integers", list(_range(call, dtype))
    known, names = _DISTRIBUTIONS[name]
    parameters = [float(call.get(p)) if isinstance(p, str) else p for p in names]
    if not (dtype.is_floating_point or dtype.is_complex) and name not in ("bernoulli", "geometric"):
        raise TypeError(
            f"{call.op} makes floating point numbers, got {dtype}; give a dtype such as torch.float32, "
            f"or draw integers with torch.randint"
        )
    if known == "uniform" and not parameters[0] <= parameters[1]:
        raise RuntimeError(f"{call.op} expects from <= to, got from={parameters[0]}, to={parameters[1]}")
    if known == "bernoulli" and not 0 <= parameters[0] <= 1:
        raise RuntimeError(f"{call.op} expects p to be from 0 to 1, got p={parameters[0]}")
    return known, parameters


#: Name of an op -> name on the worker, and its parameters: arguments of the op by name, or numbers.
_DISTRIBUTIONS: dict[str, tuple[str, tuple[str | float, ...]]] = {
    "rand": ("uniform", (0.0, 1.0)),
    "randn": ("normal", (0.0, 1.0)),
    "uniform": ("uniform", ("from", "to")),
    "normal": ("normal", ("mean", "std")),
    "log_normal": ("log_normal", ("mean", "std")),
    "exponential": ("exponential", ("lambd",)),
    "cauchy": ("cauchy", ("median", "sigma")),
    "geometric": ("geometric", ("p",)),
    "bernoulli": ("bernoulli", ("p",)),
}


def _range(call: Call, dtype: torch.dtype) -> tuple[int, int]:
    """The first and the last integer that may be drawn, as torch documents them."""
    if not any(map(call.has, ("from", "to", "low", "high"))):
        return 0, _largest(dtype)
    low = call.get("from") if call.has("from") else call.get("low") if call.has("low") else 0
    high = call.get("to") if call.has("to") else call.get("high")
    first, last = int(low), _largest(dtype) if high is None else int(high) - 1
    if first > last:
        raise RuntimeError(f"{call.op} expects from to be less than to, got from={first}, to={last + 1}")
    smallest = -_largest(dtype) - 1 if dtype.is_signed else 0
    if not (dtype.is_floating_point or smallest <= first <= last <= _largest(dtype)):
        raise RuntimeError(
            f"{call.op} expects numbers that {dtype} holds, {smallest} to {_largest(dtype)}; got from={first}, "
            f"to={last + 1}"
        )
    return first, last


def _largest(dtype: torch.dtype) -> int:
    """Floating point numbers hold all integers up to a power of two."""
    if dtype is torch.bool:
        return 1
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


# ------------------------------------------------------------------------------------------------- new tensors


def _new(call: Call, meta: TensorMeta, layout: Layout) -> list[Any]:
    """The arguments of ``dtorch::random_new``."""
    name, parameters = _distribution(call, meta.dtype)
    return [name, parameters, *_made(meta, layout), DeviceArg(), *_place(meta.shape, layout)]


def _made(meta: TensorMeta, layout: Layout) -> list[Any]:
    """Dtype and local sizes of a result, and the order of its dims in memory."""
    order = sorted(range(len(meta.shape)), key=lambda dim: (-meta.stride[dim], dim))
    return [meta.dtype, local_shape(meta.shape, layout), order]


def _place(shape: tuple[int, ...], layout: Layout) -> list[Any]:
    """Global shape, start of the local box, and key."""
    starts, _ = box_arguments(shape, layout)
    return [list(shape), starts, Seed()]


def plan_random_factory(call: Call, layout: Layout) -> OpPlan:
    """``torch.randn`` and its like: no tensor among the arguments.

    Raises:
        PlacementError: the layout does not fit the shape, or is partial.
        UnsupportedError: an op that draws in a way of its own.
    """
    name = call.op.base.removeprefix("aten::")
    if name not in ("rand", "randn", "randint", "randperm", "normal"):
        raise undrawable(call)
    (meta,) = shapes.infer(call)
    assert isinstance(meta, TensorMeta)
    check_layout(call.op.name, meta.shape, layout)
    encoder = ArgumentEncoder()
    if name == "randperm":
        (size,) = meta.shape
        start = LocalStart([size], layout_record(layout), 0)
        args = [size, meta.dtype, start, local_shape(meta.shape, layout), DeviceArg(), Seed()]
    else:
        args = _new(call, meta, layout)
    stride = contiguous_stride(meta.shape)
    return OpPlan(
        op="dtorch::randperm_shard" if name == "randperm" else "dtorch::random_new",
        args=tuple(encoder.encode(value) for value in args),
        outputs=(NewOutput(intern_spec(meta.shape, meta.dtype, layout, stride)),),
        num_seeds=encoder.num_seeds,
    )


@dataclass(frozen=True)
class RandomLikeRule:
    """A new tensor placed as the given one, whole where that is partial (its values do not matter)."""

    always: bool = True

    def plan(self, call: Call) -> OpPlan:
        """The plan of a call."""
        metas = shapes.infer(call)
        (meta,) = metas
        assert isinstance(meta, TensorMeta)
        layout = whole_where_partial(call.inputs[0].layout)
        encoder = ArgumentEncoder()
        return OpPlan(
            op="dtorch::random_new",
            args=tuple(encoder.encode(value) for value in _new(call, meta, layout)),
            layouts=tuple(spec.layout for spec in call.inputs),
            outputs=pack_outputs(call, metas, [layout]),
            num_seeds=encoder.num_seeds,
        )

    def signatures(self, call: Call) -> list[str]:
        """Any placement will do."""
        return ["self: any -> as self, R where self is P"]


def whole_where_partial(layout: Layout) -> Layout:
    """The layout with Replicate in the place of Partial."""
    return layout_of(
        layout.mesh, tuple(Replicate() if isinstance(p, Partial) else p for p in layout.placements)
    )


_IN_PLACE = "uniform_ normal_ random_ bernoulli_.float exponential_ cauchy_ log_normal_ geometric_"
_LIKE = "rand_like randn_like randint_like"
_OUT_OF_PLACE = "uniform normal_functional random bernoulli.p exponential cauchy geometric log_normal"
register(full_names(f"{_LIKE} {_OUT_OF_PLACE}"), RandomLikeRule())


# ------------------------------------------------------------------------------------------------- by element


class RandomRule(EquationRule):
    """Each device makes its piece of what one device would make. Asked for replicated inputs too."""


#: The kernel and its arguments, for the first result and where it lives.
_Kernel = Callable[[Call, TensorMeta, Layout], tuple[str, list[Any]]]


def _drawn(kernel: _Kernel) -> Specialize:
    def specialize(call: Call, matched: Matched, metas: Metas) -> OpPlan:
        meta = metas[0]
        assert isinstance(meta, TensorMeta)
        return other_op(call, matched, metas, *kernel(call, meta, matched.outputs[0]))

    return specialize


def _fill(call: Call, meta: TensorMeta, layout: Layout) -> tuple[str, list[Any]]:
    name, parameters = _distribution(call, meta.dtype)
    return "dtorch::random_fill", [call.inputs[0], name, parameters, *_place(meta.shape, layout)]


def _bernoulli(call: Call, meta: TensorMeta, layout: Layout) -> tuple[str, list[Any]]:
    place = _place(meta.shape, layout)
    if call.op.writes:
        return "dtorch::bernoulli_fill", [call.get("self"), call.get("p"), *place]
    return "dtorch::bernoulli_shard", [call.get("self"), *_made(meta, layout), *place]


def _normal(call: Call, meta: TensorMeta, layout: Layout) -> tuple[str, list[Any]]:
    args = [call.get("mean"), call.get("std"), *_made(meta, layout), DeviceArg(), *_place(meta.shape, layout)]
    return "dtorch::normal_shard", args


def _sampled(name: str) -> _Kernel:
    def kernel(call: Call, meta: TensorMeta, layout: Layout) -> tuple[str, list[Any]]:
        args = [name, list(call.inputs), *_made(meta, layout), *_place(meta.shape, layout)]
        return "dtorch::sampled_shard", args

    return kernel


def _dirichlet(call: Call, meta: TensorMeta, layout: Layout) -> tuple[str, list[Any]]:
    return "dtorch::dirichlet_shard", [
        call.inputs[0],
        *_made(meta, layout)[1:],
        *_place(meta.shape, layout),
    ]


def _dropout(call: Call, meta: TensorMeta, layout: Layout) -> tuple[str, list[Any]]:
    """``_fused_dropout`` is given the probability to keep, ``native_dropout`` that to drop."""
    is_fused = call.op.base == "aten::_fused_dropout"
    dropped = 1.0 - call.get("p") if is_fused else call.get("p") if call.get("train") is not False else 0.0
    mask = torch.uint8 if is_fused else torch.bool
    return "dtorch::dropout_shard", [
        call.inputs[0],
        float(dropped),
        mask,
        *_place(meta.shape, layout),
    ]


def _rrelu(call: Call, meta: TensorMeta, layout: Layout) -> tuple[str, list[Any]]:
    x, low, high = call.get("self"), float(call.get("lower")), float(call.get("upper"))
    if not call.get("training"):
        return f"aten::leaky_relu{'_' if call.op.is_inplace else ''}.default", [x, (low + high) / 2]
    place = _place(meta.shape, layout)
    return "dtorch::rrelu_shard", [x, call.get("noise"), low, high, call.op.is_inplace, *place]


def _multinomial(call: Call, meta: TensorMeta, layout: Layout) -> tuple[str, list[Any]]:
    shape = call.inputs[0].shape
    rows = shape[0] if len(shape) == 2 else 1
    start = LocalStart(list(meta.shape), layout_record(layout), 0) if len(shape) == 2 else 0
    args = [call.inputs[0], call.get("num_samples"), call.get("replacement"), rows, start, Seed()]
    return "dtorch::multinomial_shard", args


def _with_means(call: Call) -> str:
    return ",".join(["..."] * len(call.inputs)) + "->..."


def _by_rows(call: Call) -> str:
    return "nc->ns" if len(call.inputs[0].shape) == 2 else "c->s"


def _random(names: str, notation: Notation, kernel: _Kernel, slices: str = "", whole: str = "") -> None:
    binder = Binder(notation, slices=slices, whole=whole)
    register(full_names(names), RandomRule(binder, specialize=_drawn(kernel), always=True))


_random(_IN_PLACE, "...->...", _fill)
_random("bernoulli.default", "...->...", _bernoulli)
_random("bernoulli_.Tensor", "...,...->...", _bernoulli, slices="b")
_random("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor", _with_means, _normal, slices="*")
_random("poisson", "...->...", _sampled("poisson"))
_random("binomial", "...,...->...", _sampled("binomial"), slices="*")
_random("_standard_gamma", "...->...", _sampled("gamma"))
_random("_sample_dirichlet", "...d->...d", _dirichlet, whole="d")
_random("native_dropout _fused_dropout", "...->...,...", _dropout)
_random("rrelu_with_noise rrelu_with_noise_", "...,...->...", _rrelu)
_random("multinomial", _by_rows, _multinomial, whole="c")
rule("_standard_gamma_grad", "...,...->...", slices="*")
rule("_dirichlet_grad", "...,...,...->...", slices="*")


# ------------------------------------------------------------------------------------------------- shapes


def _like_shape(call: Call) -> Metas | None:
    if call.get("memory_format") is not None:
        return None
    spec = call.inputs[0]
    return (TensorMeta(spec.shape, preserved_stride(spec), call.get("dtype") or spec.dtype),)


def _dropout_shape(call: Call) -> Metas:
    spec = call.inputs[0]
    stride = preserved_stride(spec)
    mask = torch.uint8 if call.op.base == "aten::_fused_dropout" else torch.bool
    return TensorMeta(spec.shape, stride, spec.dtype), TensorMeta(spec.shape, stride, mask)


def _multinomial_shape(call: Call) -> Metas:
    spec, count = call.inputs[0], call.get("num_samples")
    if len(spec.shape) not in (1, 2) or not spec.dtype.is_floating_point:
        raise RuntimeError(
            f"{call.op} takes floating point weights of 1 or 2 dims, got {spec.dtype} of shape {list(spec.shape)}"
        )
    if count <= 0 or (count > spec.shape[-1] and not call.get("replacement")):
        raise RuntimeError(
            f"{call.op} cannot draw {count} of {spec.shape[-1]} categories; give num_samples from 1 to "
            f"{spec.shape[-1]}, or replacement=True"
        )
    shape = (*spec.shape[:-1], count)
    return (TensorMeta(shape, contiguous_stride(shape), torch.int64),)


def _randint_shape(call: Call) -> Metas | None:
    low, high = call.get("low") if call.has("low") else 0, call.get("high")
    size = tuple(call.get("size"))
    if any(n < 0 for n in size) or not low < high:
        return None
    given = call.get("dtype")
    dtype = given if isinstance(given, torch.dtype) else torch.int64  # the schema's default is a number
    if not dtype.is_floating_point and (dtype is torch.bool or not _fits(low, high, dtype)):
        return None
    return (TensorMeta(size, contiguous_stride(size), dtype),)


def _fits(low: int, high: int, dtype: torch.dtype) -> bool:
    return not dtype.is_complex and low >= torch.iinfo(dtype).min and high - 1 <= torch.iinfo(dtype).max


def _row_major_shape(call: Call) -> Metas | None:
    """The parameters broadcast, whatever their strides, in the dtype of the first."""
    shape = shapes.broadcast([spec.shape for spec in call.inputs])
    return None if shape is None else (TensorMeta(shape, contiguous_stride(shape), call.inputs[0].dtype),)


register_shape(full_names("rand_like randn_like"), _like_shape)
register_shape(full_names("multinomial"), _multinomial_shape)
register_shape(
    full_names("binomial poisson _standard_gamma _standard_gamma_grad _sample_dirichlet _dirichlet_grad"),
    _row_major_shape,
)
register_shape(full_names("native_dropout _fused_dropout"), _dropout_shape)
register_shape(full_names("randint"), _randint_shape)
