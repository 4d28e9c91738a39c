"""Calls for each rule, small enough to try every placement. Few sizes divide by 2 and by 3, so cuts are uneven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dtorch.experts  # noqa: F401  defines its ops
from dtorch.rules.equation import Signature
from tests.support.rule_checks import Sample

aten = torch.ops.aten
dtorch_ops = torch.ops.dtorch
_generator = torch.Generator().manual_seed(1)


def real(*shape: int) -> torch.Tensor:
    """Doubles, so that the order of sums does not matter."""
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def _rising(num_lists: int) -> list[list[torch.Tensor]]:
    """Lists of a matrix and a vector, as optimizers have them."""
    return [
        [
            torch.linspace(0.1, 1 + index, size, dtype=torch.float64).view(shape)
            for size, shape in ((12, (3, 4)), (5, (5,)))
        ]
        for index in range(num_lists)
    ]


def whole_numbers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_generator)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator) < 0.5


def _cuts(signature: Signature) -> bool:
    return signature.letter is not None


def call(func: Any, *args: Any, **kwargs: Any) -> Sample:
    """A sample with copies of these arguments for each run."""
    options = {name: kwargs.pop(name) for name in ("moves_bytes", "except_for", "name") if name in kwargs}
    return Sample(func, _fresh(args), kwargs, **options)


def _fresh(args: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone()
        return [copy(item) for item in value] if isinstance(value, list) else value

    return lambda: tuple(copy(arg) for arg in args)


MATMUL = [
    call(aten.mm.default, real(4, 5), real(5, 3)),
    call(aten.bmm.default, real(3, 4, 5), real(3, 5, 2)),
    call(aten.mv.default, real(4, 5), real(5)),
    call(aten.dot.default, real(5), real(5)),
    call(aten.addmm.default, real(3), real(4, 5), real(5, 3)),
    call(aten.addmm.default, real(4, 3), real(4, 5), real(5, 3), beta=0.5),
    call(aten.baddbmm.default, real(2, 4, 3), real(2, 4, 5), real(2, 5, 3)),
    call(aten.linear.default, real(2, 4, 5), real(3, 5)),
    call(aten.linear.default, real(2, 4, 5), real(3, 5), real(3), name="linear with bias"),
    call(aten.matmul.default, real(2, 4, 5), real(5, 3)),
    call(aten.matmul.default, real(3, 2, 4, 5), real(2, 5, 3)),
    call(aten.matmul.default, real(5), real(2, 5, 3)),
    call(aten.matmul.default, real(4, 5), real(5)),
]
POINTWISE = [
    call(aten.add.Tensor, mask(4, 5), mask(5)),
    call(aten.add.Tensor, real(4, 5), real(5)),
    call(aten.add.Tensor, real(4, 1, 5), real(3, 5), alpha=2),
    call(aten.add.Tensor, real(4, 5), 1.5, name="add of a number"),
    call(aten.add.Scalar, real(4, 5), 1.5),
    call(aten.sub.Tensor, real(4, 5), real(4, 5)),
    call(aten.rsub.Scalar, real(4, 5), 2.0),
    call(aten.mul.Tensor, real(4, 5), real(4, 1)),
    call(aten.mul.Tensor, real(4, 5), 2.0, name="mul by a number"),
    call(aten.div.Tensor, real(4, 5), real(4, 5) + 3),
    call(aten.div.Tensor_mode, real(4, 5), real(5) + 3, rounding_mode="floor"),
    call(aten.div.Tensor_mode, whole_numbers(9, 4, 5), whole_numbers(3, 5) + 1, rounding_mode="trunc"),
    call(aten.neg.default, real(4, 5)),
    call(aten.add_.Tensor, real(4, 5), real(5)),
    call(aten.mul_.Tensor, real(4, 5), real(4, 5)),
    call(aten.mul_.Tensor, real(4, 5), 3.0, name="mul_ by a number"),
    call(aten.addcmul.default, real(3, 4), real(3, 4), real(4)),
    call(aten.addcmul_.default, real(3, 4), real(3, 4), real(3, 4), value=0.5),
    call(aten.addcdiv_.default, real(3, 4), real(3, 4), real(3, 4) + 3, value=0.5),
    call(aten.lerp.Scalar, real(3, 4), real(3, 4), 0.3),
    call(aten.lerp_.Scalar, real(3, 4), real(3, 4), 0.3),
    call(aten.where.self, mask(4, 5), real(5), real(4, 1)),
    call(aten.masked_fill.Scalar, real(3, 4), mask(4), 0.0),
    call(aten.masked_fill.Scalar, real(3, 4), mask(3, 4), -1.0, name="masked_fill with -1"),
    call(aten.masked_fill_.Scalar, real(3, 4), mask(3, 1), 2.0),
    call(aten.copy_.default, real(4, 5), real(1, 5), moves_bytes=True),
    call(aten.clone.default, real(4, 5)),
    call(aten._to_copy.default, real(4, 5), dtype=torch.float32),
    call(aten._to_copy.default, real(4, 5), dtype=torch.int64, name="_to_copy to integers"),
    call(aten.fill_.Scalar, real(4, 5), 2.0),
    call(aten.zero_.default, real(4, 5)),
    *(
        call(func, real(4, 5))
        for func in (
            aten.relu.default,
            aten.silu.default,
            aten.gelu.default,
            aten.tanh.default,
            aten.sigmoid.default,
            aten.exp.default,
            aten.abs.default,
            aten.cos.default,
            aten.erf.default,
            aten.relu_.default,
            aten.isnan.default,
            aten.logical_not.default,
        )
    ),
    call(aten.rsqrt.default, real(4, 5).abs() + 1),
    call(aten.pow.Tensor_Scalar, real(4, 5), 2),
    call(aten.pow.Scalar, 2.0, real(4, 5)),
    call(aten.pow_.Scalar, real(4, 5), 2),
    call(aten.clamp.default, real(4, 5), -0.5, 0.5),
    call(aten.maximum.default, real(4, 5), real(5)),
    call(aten.eq.Tensor, whole_numbers(3, 4, 5), whole_numbers(3, 5)),
    call(aten.lt.Scalar, real(4, 5), 0.0),
    call(aten.logical_and.default, mask(4, 5), mask(5)),
    call(aten.bitwise_or.Tensor, mask(4, 5), mask(4, 5)),
    call(aten.gelu_backward.default, real(4, 5), real(4, 5)),
    call(aten.silu_backward.default, real(4, 5), real(4, 5)),
    call(aten.threshold_backward.default, real(4, 5), real(4, 5), 0),
    call(aten.tanh_backward.default, real(4, 5), real(4, 5)),
    call(aten.sigmoid_backward.default, real(4, 5), real(4, 5)),
]
VIEW = [
    call(aten.view.default, real(4, 6), [2, 2, 6]),
    call(aten.view.default, real(4, 6), [4, 3, -1]),
    call(aten.view.default, real(4, 6), [24]),
    call(aten.view.default, real(1, 3, 6), [3, 6]),
    call(aten.view.default, real(2, 3, 6), [-1, 6]),
    call(aten._unsafe_view.default, real(6, 4), [3, 2, 4]),
    call(aten.transpose.int, real(4, 3, 2), 0, -1),
    call(aten.t.default, real(4, 3)),
    call(aten.permute.default, real(4, 3, 2), [2, 0, 1]),
    call(aten.unsqueeze.default, real(4, 3), 1),
    call(aten.squeeze.default, real(2, 1, 3)),
    call(aten.squeeze.dim, real(2, 1, 3), 0),
    call(aten.squeeze.dim, real(2, 1, 3), 1),
    call(aten.squeeze.dims, real(2, 1, 3, 1), [1, 2]),
    call(aten.expand.default, real(4, 1), [3, 4, 5]),
    call(aten.select.int, real(4, 3), 1, -1),
    call(aten.slice.Tensor, real(4, 5), 0, 0, 100),
    call(aten.slice.Tensor, real(4, 5), 1, 1, 5, 2),
    call(aten.split.Tensor, real(4, 5), 2, 1),
    call(aten.split_with_sizes.default, real(4, 5), [1, 3], 0),
    call(aten.unbind.int, real(3, 4)),
    call(aten.cat.default, [real(2, 3), real(2, 3)], 1),
    call(aten.cat.default, [real(0), real(2, 3)], 1, name="cat with an empty vector"),
    call(aten.stack.default, [real(2, 3), real(2, 3)], 1),
    call(aten.flip.default, real(3, 4), [1]),
    call(aten.roll.default, real(3, 4), [1], [0]),
    call(aten.tril.default, real(2, 4, 4)),
    call(aten.unfold.default, real(3, 4), 1, 2, 1),
    call(aten.diagonal.default, real(3, 4, 4), 0, 1, 2),
    call(aten.repeat.default, real(2, 3), [2, 1, 2]),
    call(aten.constant_pad_nd.default, real(3, 4), [1, 0], 0.0),
    call(aten.slice_backward.default, real(4, 2), [4, 6], 1, 1, 3, 1),
    call(aten.slice_backward.default, real(4, 6), [4, 6], 1, 0, 6, 1, name="slice_backward of everything"),
    call(aten.select_backward.default, real(4), [4, 6], 1, 2),
]
REDUCE = [
    call(aten.sum.default, real(4, 5)),
    call(aten.sum.dim_IntList, real(4, 5), [0], True),
    call(aten.sum.default, mask(4, 5), name="sum of bools"),
    call(aten.mean.default, real(4, 5)),
    call(aten.mean.dim, real(4, 5), [-1], True),
    call(aten.prod.dim_int, real(4, 5), 0),
    call(aten.amax.default, real(4, 5), [0]),
    call(aten.amin.default, real(4, 5), [1], True),
    call(aten.amin.default, real(0, 4, 1), [2], name="amin of nothing"),
    call(aten.max.default, real(4, 5)),
    call(aten.any.default, mask(4, 5)),
    call(aten._is_any_true.default, mask(4, 5)),
    call(aten._is_all_true.default, mask(4, 5)),
    call(aten.all.dim, mask(4, 5), 1),
    call(aten.all.dim, whole_numbers(3, 4, 5) - 1, 1),
    call(aten.any.default, whole_numbers(3, 4, 5) - 1),
    call(aten.sum.dim_IntList, mask(4, 5), [1]),
    call(aten.max.dim, real(4, 5), 1),
    call(aten.argmax.default, real(4, 5), -1),
    call(aten.argmax.default, real(4, 5)),
    call(aten.var.correction, real(4, 5), [1]),
    call(aten.logsumexp.default, real(4, 5), [1]),
    call(aten.linalg_vector_norm.default, real(4, 5), 2, [1]),
    call(aten.linalg_vector_norm.default, real(4, 5), 1),
    call(aten.cumsum.default, real(4, 5), 1),
    call(aten.cumprod.default, real(4, 5), 0),
    call(aten._softmax.default, real(4, 5), -1, False),
    call(aten._safe_softmax.default, real(4, 5), -1),
    call(aten._log_softmax.default, real(4, 5), 0, False),
    call(aten._softmax_backward_data.default, real(4, 5), real(4, 5).softmax(-1), -1, torch.float64),
    call(aten._log_softmax_backward_data.default, real(4, 5), real(4, 5).log_softmax(-1), -1, torch.float64),
    call(aten.topk.default, real(4, 5), 2),
    call(aten.sort.default, real(4, 5)),
]
INDEX = [
    call(aten.embedding.default, real(7, 3), whole_numbers(7, 2, 4)),
    call(aten.embedding_dense_backward.default, real(2, 4, 3), whole_numbers(7, 2, 4), 7, -1, False),
    call(aten.gather.default, real(4, 5), 1, whole_numbers(5, 4, 2)),
    call(
        aten.gather.default,
        real(4, 5),
        1,
        whole_numbers(5, 2, 2),
        name="gather of fewer rows",
        except_for=_cuts,
    ),
    call(aten.scatter.src, real(4, 5), 1, whole_numbers(1, 4, 1) + 2, real(4, 1)),
    call(aten.scatter.value, real(4, 5), 1, whole_numbers(5, 4, 2), 3.0),
    call(aten.scatter_add.default, real(4, 5), 0, whole_numbers(4, 3, 5), real(3, 5)),
    call(aten.index_select.default, real(4, 5), 0, whole_numbers(4, 3)),
    call(aten.index_add.default, real(4, 5), 1, whole_numbers(5, 3), real(4, 3)),
    call(aten.index.Tensor, real(4, 5), [whole_numbers(4, 3)]),
    call(aten.index.Tensor, real(4, 5), [None, whole_numbers(5, 2, 3)]),
    call(aten.index.Tensor, real(4, 5, 3), [whole_numbers(4, 2, 1), None, whole_numbers(3, 2)]),
    call(aten.index_put.default, real(4, 5), [torch.tensor([2, 0])], real(2, 5)),
    call(
        aten.index_put.default,
        real(4, 5),
        [torch.tensor([2, 2])],
        real(2, 5),
        True,
        name="index_put that adds",
    ),
    call(aten.index_put_.default, real(4, 5), [None, torch.tensor([2, 0, 1])], real(3)),
]
NN = [
    call(aten.native_layer_norm.default, real(2, 3, 4), [4], real(4), real(4), 1e-5),
    call(
        aten.native_layer_norm.default,
        real(2, 3, 4),
        [3, 4],
        None,
        None,
        1e-5,
        name="layer_norm over two dims",
    ),
    call(
        aten.native_layer_norm_backward.default,
        real(3, 4),
        real(3, 4),
        [4],
        real(3, 1),
        real(3, 1).abs(),
        real(4),
        real(4),
        [True, True, True],
    ),
    call(aten._fused_rms_norm.default, real(3, 4), [4], real(4), 1e-5),
    *(
        call(
            aten.nll_loss_forward.default,
            real(5, 4).log_softmax(1),
            torch.tensor([0, 3, -100, 1, 2]),
            weight,
            reduction,
            -100,
            moves_bytes=reduction == 1,
            name=f"nll_loss reduction={reduction}{'' if weight is None else ' with weights'}",
        )
        for reduction in (0, 1, 2)
        for weight in (None, real(4).abs())
    ),
    *(
        call(
            aten.nll_loss_backward.default,
            real(5) if reduction == 0 else real(),
            real(5, 4),
            torch.tensor([0, 3, -100, 1, 2]),
            None,
            reduction,
            -100,
            torch.tensor(4.0, dtype=torch.float64),
            name=f"nll_loss_backward reduction={reduction}",
        )
        for reduction in (0, 1, 2)
    ),
    *(call(aten.mse_loss.default, real(4, 5), real(4, 5), reduction) for reduction in (0, 1, 2)),
    *(
        call(
            aten.mse_loss_backward.default,
            real(4, 5) if reduction == 0 else real(),
            real(4, 5),
            real(4, 5),
            reduction,
        )
        for reduction in (0, 1, 2)
    ),
    call(
        aten.convolution.default,
        real(2, 3, 5, 5),
        real(4, 3, 3, 3),
        real(4),
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        1,
    ),
    call(
        aten.convolution_backward.default,
        real(3, 4, 5, 5),
        real(3, 3, 5, 5),
        real(4, 3, 3, 3),
        [4],
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        1,
        [True, True, True],
    ),
    call(aten.max_pool2d_with_indices.default, real(3, 3, 4, 4), [2, 2], [2, 2]),
]
ATTENTION = [
    call(aten.scaled_dot_product_attention.default, real(2, 3, 4, 5), real(2, 3, 4, 5), real(2, 3, 4, 5)),
    call(
        aten.scaled_dot_product_attention.default,
        real(2, 3, 4, 5),
        real(2, 3, 4, 5),
        real(2, 3, 4, 5),
        None,
        0.0,
        True,
        name="causal attention",
    ),
    call(
        aten.scaled_dot_product_attention.default,
        real(2, 3, 4, 5),
        real(2, 3, 6, 5),
        real(2, 3, 6, 5),
        real(2, 1, 4, 6),
        name="attention with a mask",
    ),
    call(
        aten.scaled_dot_product_attention.default,
        real(1, 2, 4, 5),
        real(1, 2, 4, 5),
        real(1, 2, 4, 5),
        mask(4, 4) | torch.eye(4, dtype=torch.bool),
        name="attention with a mask without batch",
    ),
]
FOREACH = [
    call(aten._foreach_add_.List, [real(3, 4), real(5)], [real(3, 4), real(5)], alpha=0.5),
    call(aten._foreach_mul_.Scalar, [real(3, 4), real(5)], 0.9),
    call(aten._foreach_add_.Scalar, [real(3, 4), real(5)], 0.9),
    call(aten._foreach_mul_.Tensor, [real(3, 4), real(5)], real()),
    call(aten._foreach_sqrt.default, [real(3, 4).abs(), real(5).abs()]),
    call(aten._foreach_lerp_.Scalar, [real(3, 4)], [real(3, 4)], 0.1),
    call(aten._foreach_addcmul_.Scalar, [real(3, 4)], [real(3, 4)], [real(3, 4)], 0.5),
    call(aten._foreach_addcdiv_.ScalarList, [real(3, 4)], [real(3, 4)], [real(3, 4).abs() + 1], [0.5]),
    call(aten._foreach_div_.ScalarList, [real(3, 4), real(5)], [2.0, 3.0]),
    *(
        call(
            adam.default,
            *_rising(4),
            [],
            [torch.ones(()), torch.ones(())],
            lr=0.1,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        for adam in (aten._fused_adam_, aten._fused_adamw_)
    ),
    call(
        aten._fused_sgd_.default,
        *_rising(3),
        weight_decay=0.1,
        momentum=0.9,
        lr=0.1,
        dampening=0.0,
        nesterov=True,
        maximize=False,
        is_first_step=False,
    ),
    call(
        aten._fused_adagrad_.default,
        *_rising(3),
        [torch.ones(()), torch.ones(())],
        lr=0.1,
        lr_decay=0.1,
        weight_decay=0.1,
        eps=1e-8,
        maximize=False,
    ),
    call(aten._foreach_copy_.default, [real(3, 4)], [real(3, 4)]),
]
EXPERTS = [
    call(dtorch_ops.expert_linear.default, real(7, 4), real(5, 3, 4), whole_numbers(5, 7)),
    call(
        dtorch_ops.expert_linear_backward.default,
        real(7, 3),
        real(7, 4),
        whole_numbers(5, 7),
        real(5, 3, 4),
    ),
]
ALL = [*MATMUL, *POINTWISE, *VIEW, *REDUCE, *INDEX, *NN, *ATTENTION, *FOREACH, *EXPERTS]
