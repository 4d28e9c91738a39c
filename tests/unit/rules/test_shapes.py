"""Our arithmetic of shapes, strides and dtypes against torch: what is answered here is not asked of a meta kernel."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dtorch import shapes
from dtorch.rules.call import Call, op_of
from dtorch.rules.out import functional_of
from dtorch.rules.tables import SHAPES, registered
from dtorch.shapes import shape_function
from dtorch.spec import Spec, intern_spec
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Replicate
from tests.numerics.more_samples import MORE
from tests.numerics.samples import ALL
from tests.numerics.samples_linalg import LINALG
from tests.numerics.samples_losses import LOSSES
from tests.numerics.samples_masks import MASKS
from tests.numerics.samples_nn import NN_SAMPLES
from tests.numerics.samples_scatter import SCATTER_AND_SPECIAL
from tests.numerics.samples_statistics import STATISTICS
from tests.support.rule_checks import Sample, replace_tensors, tensors_of

aten = torch.ops.aten
EVERY = [*ALL, *NN_SAMPLES, *LOSSES]
LAYOUT = Layout(DeviceMesh("cpu", [0]), (Replicate(),))
#: Composite ops, which have no meta kernel of their own; and those whose strides we define.
OWN_STRIDES = {"aten::scaled_dot_product_attention"}


def spec_of(tensor: torch.Tensor, *, transposed: bool = False) -> Spec:
    stride = tuple(tensor.stride())
    if transposed and tensor.ndim > 1:
        stride = tuple(torch.empty_like(tensor.transpose(0, -1).contiguous()).transpose(0, -1).stride())
    return intern_spec(tuple(tensor.shape), tensor.dtype, LAYOUT, stride)


def call_of(sample: Sample, *, transposed: bool = False) -> Call:
    whole = (sample.make(), sample.kwargs)
    specs = [spec_of(t, transposed=transposed) for t in tensors_of(whole)]
    args, kwargs = replace_tensors(whole, list(specs))
    return Call(op_of(sample.func), args, kwargs)


def compare(sample: Sample, *, transposed: bool = False) -> bool:
    """Whether our arithmetic answered; asserts that it equals what torch gives."""
    call = call_of(sample, transposed=transposed)
    function = shape_function(call)
    metas = function(call) if function is not None else None
    if metas is None:
        return False
    if call.op.writes:  # the result of an in-place op is its target, whatever the functional op would give
        return True
    whole = (sample.make(), sample.kwargs)
    laid_out = [
        torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype).copy_(tensor)
        for spec, tensor in zip(call.inputs, tensors_of(whole), strict=True)
    ]
    args, kwargs = replace_tensors(whole, list(laid_out))
    want = sample.func(*args, **kwargs)
    flat: list[Any] = [
        item
        for meta in metas
        if meta is not None
        for item in ([meta] if isinstance(meta, shapes.TensorMeta) else meta)
    ]
    flat_want = tensors_of(want if isinstance(want, tuple | list) else [want])
    assert len(flat) == len(flat_want)
    for mine, theirs in zip(flat, flat_want, strict=True):
        assert (mine.shape, mine.dtype) == (tuple(theirs.shape), theirs.dtype)
        assert mine.offset == theirs.storage_offset()
        if call.op.base in OWN_STRIDES:
            continue
        longer = [dim for dim, size in enumerate(mine.shape) if size != 1]
        assert [mine.stride[d] for d in longer] == [theirs.stride(d) for d in longer]
    return True


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "sample", [*ALL, *MORE, *LINALG, *STATISTICS], ids=lambda sample: str(sample).replace(" ", "_")
)
def test_equals_torch(sample: Sample, transposed: bool) -> None:
    compare(sample, transposed=transposed)


@pytest.mark.parametrize(
    "sample",
    [*NN_SAMPLES, *LOSSES, *SCATTER_AND_SPECIAL, *MASKS],
    ids=lambda sample: str(sample).replace(" ", "_"),
)
def test_equals_torch_on_row_major_inputs(sample: Sample) -> None:
    compare(sample)


OUT_SAMPLES = [*ALL, *MORE, *STATISTICS, *NN_SAMPLES, *LOSSES, *SCATTER_AND_SPECIAL]


@pytest.mark.parametrize("sample", OUT_SAMPLES, ids=lambda sample: str(sample).replace(" ", "_"))
def test_functions_answer_for_out_variants_too(sample: Sample) -> None:
    call = call_of(sample)
    packet = sample.func.overloadpacket
    for name in packet.overloads():
        op = op_of(getattr(packet, name))
        function = shape_function(Call(op, call.args, call.kwargs)) if functional_of(op) is call.op else None
        metas = None if function is None else function(call)
        if metas is not None and all(isinstance(meta, shapes.TensorMeta) for meta in metas):
            made = [intern_spec(meta.shape, meta.dtype, LAYOUT, meta.stride) for meta in metas]
            out = dict(zip(op.writes, made, strict=True))
            shapes.check_written(Call(op, call.args, call.kwargs | out))


@pytest.mark.parametrize("names", [shapes._functions, registered()], ids=["shapes", "rules"])
def test_in_place_ops_that_take_the_answer_of_a_namesake_have_its_parameters(names: Any) -> None:
    """``pow_.Scalar`` is no ``pow.Scalar``: its number is the exponent."""
    num_compared = 0
    for name in names:
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        ops = getattr(torch.ops, namespace)
        own, written = getattr(ops, packet, None), getattr(ops, packet + "_", None)
        if overload and own is not None and overload in getattr(written, "overloads", list)():
            functional, in_place = getattr(own, overload)._schema, getattr(written, overload)._schema
            given, taken = ([(a.name, str(a.type)) for a in s.arguments] for s in (functional, in_place))
            assert given == taken, name
            num_compared += 1
    assert num_compared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_training", [True, False])
def test_statistics_of_norms_have_the_dtype_of_a_cpu(dtype: torch.dtype, is_training: bool) -> None:
    image, row = torch.randn(2, 3, 4, dtype=dtype), torch.rand(3, dtype=dtype)
    batch = (image, row, row, row.clone(), row.clone(), is_training, 0.1, 1e-5)
    for sample in (
        Sample(aten.native_batch_norm.default, lambda: batch),
        Sample(aten.native_layer_norm.default, lambda: (image.mT.contiguous(), [3], row, row, 1e-5)),
    ):
        assert compare(sample)


@pytest.mark.parametrize("table", SHAPES, ids=lambda table: table.__name__.rpartition(".")[2])
def test_each_function_of_a_table_answers_for_a_sample_and_leaves_other_strides_to_torch(table: Any) -> None:
    samples = [*ALL, *MORE, *LINALG, *STATISTICS, *NN_SAMPLES, *LOSSES, *SCATTER_AND_SPECIAL, *MASKS]
    names = {name for name, function in shapes._functions.items() if function.__module__ == table.__name__}
    answered = set()
    for sample in samples:
        op = op_of(sample.func)
        if {op.name, op.base} & names:
            compare(sample, transposed=True)
            answered |= {op.name, op.base} if compare(sample) else set()
    assert names
    assert not names - answered


@pytest.mark.parametrize(
    ("func", "shapes_of_inputs", "constants"),
    [
        (aten.convolution.default, [(2, 4, 5), (6, 3, 2)], [None, [1], [0], [1], False, [0], 1]),
        (aten.convolution.default, [(2, 4, 5), (6, 4, 9)], [None, [1], [0], [1], False, [0], 1]),
        (aten.max_pool2d_with_indices.default, [(2, 3, 3)], [[4, 4]]),
        (aten.avg_pool2d.default, [(2, 6, 6)], [[2, 2], [2, 2], [3, 3]]),
        (aten.reflection_pad1d.default, [(2, 3)], [[3, 1]]),
        (aten.im2col.default, [(2, 3, 3)], [[4, 4], [1, 1], [0, 0], [1, 1]]),
        (aten.col2im.default, [(8, 5)], [[3, 3], [2, 2], [1, 1], [0, 0], [1, 1]]),
        (aten.pixel_shuffle.default, [(6, 2, 2)], [2]),
        (aten.glu.default, [(2, 5)], [-1]),
        (aten.stack.default, [(2, 5)], [4]),
        (aten.roll.default, [(2, 5)], [[1, 2], [0]]),
        (aten.addr.default, [(2, 5), (2,), (4,)], []),
    ],
)
def test_wrong_arguments_are_refused_as_torch_refuses_them(
    func: torch._ops.OpOverload, shapes_of_inputs: list[tuple[int, ...]], constants: list[Any]
) -> None:
    tensors: list[Any] = [torch.ones(shape) for shape in shapes_of_inputs]
    specs: list[Any] = [spec_of(tensor) for tensor in tensors]
    if func is aten.stack.default:
        tensors, specs = [tensors], [specs]
    with pytest.raises((RuntimeError, IndexError)):
        func(*tensors, *constants)
    with pytest.raises((RuntimeError, IndexError)):
        shapes.infer(Call(op_of(func), (*specs, *constants), {}))


COMMON = [
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.mm.default,
    aten.addmm.default,
    aten.linear.default,
    aten.view.default,
    aten.transpose.int,
    aten.t.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.cat.default,
    aten.embedding.default,
    aten._softmax.default,
    aten.native_layer_norm.default,
    aten.where.self,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.pow.Tensor_Scalar,
    aten.rsqrt.default,
    aten.silu.default,
    aten.gelu.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.scaled_dot_product_attention.default,
    aten.matmul.default,
    aten.bmm.default,
    aten.argmax.default,
]


@pytest.mark.parametrize("func", COMMON, ids=str)
def test_common_ops_do_not_need_the_meta_kernel(func: torch._ops.OpOverload) -> None:
    samples = [sample for sample in ALL if sample.func is func]
    assert samples, f"there is no sample of {func}"
    assert all(compare(sample) for sample in samples)


DTYPES = (torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize(
    "func", [aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.eq.Tensor, aten.pow.Tensor_Tensor]
)
def test_promotion(func: torch._ops.OpOverload) -> None:
    operands: list[Any] = [torch.ones(shape, dtype=dtype) for dtype in DTYPES for shape in ((), (2,))]
    operands += [True, 2, 2.5]
    num_compared = 0
    for left, right in itertools.product(operands[:14], operands):
        args = (spec_of(left), spec_of(right) if isinstance(right, torch.Tensor) else right)
        call = Call(op_of(func), args, {})
        try:
            want = func(left, right)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        (meta,) = shapes.infer(call)
        assert isinstance(meta, shapes.TensorMeta)
        assert meta.dtype is want.dtype, f"{left.dtype}{list(left.shape)} with {right}"
        num_compared += 1
    assert num_compared > 100


def test_elementwise_strides_follow_the_order_in_memory(rng: Any) -> None:
    """Random broadcasts of permuted tensors."""
    for _ in range(300):
        ndim = rng.randint(1, 4)
        shape = [rng.choice([1, 2, 3]) for _ in range(ndim)]
        tensors = []
        for _ in range(rng.choice([1, 2, 3])):
            order = rng.sample(range(ndim), ndim)
            sizes = [rng.choice([1, size]) for size in shape]
            whole = torch.empty([sizes[d] for d in order], device="meta")
            tensor = whole.permute([order.index(d) for d in range(ndim)])
            tensors.append(tensor if rng.random() < 0.8 else tensor.contiguous())
        names = {1: aten.exp.default, 2: aten.add.Tensor, 3: aten.addcmul.default}
        call = Call(op_of(names[len(tensors)]), tuple(spec_of(t) for t in tensors), {})
        real = [torch.empty_strided(t.shape, t.stride()) for t in tensors]
        want = names[len(tensors)](*real)
        (meta,) = shapes.infer(call)
        assert isinstance(meta, shapes.TensorMeta)
        assert meta.shape == tuple(want.shape)
        longer = [d for d, size in enumerate(want.shape) if size != 1]
        assert [meta.stride[d] for d in longer] == [want.stride(d) for d in longer], [
            (tuple(t.shape), t.stride()) for t in tensors
        ]


def test_views_have_the_strides_of_torch(rng: Any) -> None:
    """Where torch refuses a view, so does propagation, with torch's error."""
    num_refused = 0
    for _ in range(300):
        ndim = rng.randint(1, 4)
        shape = [rng.choice([1, 2, 3, 4]) for _ in range(ndim)]
        order = rng.sample(range(ndim), ndim)
        whole = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(ndim)])
        rest, size = whole.numel(), []
        while rest > 1:
            factor = rng.choice([n for n in range(1, rest + 1) if rest % n == 0])
            size.append(factor)
            rest //= factor
        call = Call(op_of(aten.view.default), (spec_of(whole), size), {})
        try:
            want = whole.view(size)
        except RuntimeError:
            num_refused += 1
            with pytest.raises(RuntimeError):
                shapes.infer(call)
            continue
        (meta,) = shapes.infer(call)
        assert isinstance(meta, shapes.TensorMeta)
        assert meta.shape == tuple(want.shape)
        longer = [d for d, n in enumerate(want.shape) if n != 1]
        assert [meta.stride[d] for d in longer] == [want.stride(d) for d in longer]
    assert num_refused


def test_joined_tensors_have_the_strides_of_torch(rng: Any) -> None:
    for _ in range(200):
        ndim = rng.randint(1, 5)
        shape = [rng.choice([1, 2, 3]) for _ in range(ndim)]
        dim = rng.randrange(ndim)
        tensors = []
        for _ in range(rng.choice([1, 2])):
            order = rng.sample(range(ndim), ndim)
            sizes = [rng.choice([1, 2]) if d == dim else n for d, n in enumerate(shape)]
            tensors.append(
                torch.empty([sizes[d] for d in order]).permute([order.index(d) for d in range(ndim)])
            )
        want = torch.cat(tensors, dim)
        (meta,) = shapes.infer(Call(op_of(aten.cat.default), ([spec_of(t) for t in tensors], dim), {}))
        assert isinstance(meta, shapes.TensorMeta)
        assert meta.shape == tuple(want.shape)
        longer = [d for d, n in enumerate(want.shape) if n != 1]
        assert [meta.stride[d] for d in longer] == [want.stride(d) for d in longer], [
            t.stride() for t in tensors
        ]
