"""``torch.autocast("dtorch")``: which ops cast their inputs; the lists are those of torch's CUDA backend.

See https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
_KEYS = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, "AutocastPrivateUse1"))  # noqa: B009  not in the stubs

#: Run in the autocast dtype: matrix products and convolutions.
_LOWER_PRECISION = (
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.addbmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.addr.default,
    aten.chain_matmul.default,
    aten.linalg_multi_dot.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
    aten.conv_tbc.default,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    aten.prelu.default,
    aten.scaled_dot_product_attention.default,
)
#: Run in float32: large sums, and functions that are steep.
_FLOAT32 = (
    aten.exp.default,
    aten.expm1.default,
    aten.log.default,
    aten.log10.default,
    aten.log2.default,
    aten.log1p.default,
    aten.reciprocal.default,
    aten.rsqrt.default,
    aten.pow.Tensor_Scalar,
    aten.pow.Tensor_Tensor,
    aten.pow.Scalar,
    aten.softplus.default,
    aten.softmax.int,
    aten.log_softmax.int,
    aten.layer_norm.default,
    aten.group_norm.default,
    aten.norm.Scalar,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.prod.default,
    aten.prod.dim_int,
    aten.cumsum.default,
    aten.cumprod.default,
    aten.dist.default,
    aten.cdist.default,
    aten.renorm.default,
    aten.cosine_similarity.default,
    aten.cosine_embedding_loss.default,
    aten.hinge_embedding_loss.default,
    aten.kl_div.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.mse_loss.default,
    aten.nll_loss.default,
    aten.margin_ranking_loss.default,
    aten.triplet_margin_loss.default,
    aten.soft_margin_loss.default,
    aten.multi_margin_loss.default,
    aten.poisson_nll_loss.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.cross_entropy_loss.default,
)


def register(library: torch.library.Library) -> None:
    """Give the ops of the lists a kernel that casts; every other op passes through."""
    for func in _LOWER_PRECISION:
        library.impl(func, _casting(func, lambda: torch.get_autocast_dtype("dtorch")), "AutocastPrivateUse1")
    for func in _FLOAT32:
        library.impl(func, _casting(func, lambda: torch.float32), "AutocastPrivateUse1")


def _casting(func: Any, target: Callable[[], torch.dtype]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = target()
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return func(*_cast(args, dtype), **_cast(kwargs, dtype))

    return call


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        # Double precision was asked for on purpose; integers and masks are what they are.
        is_eligible = value.dtype in (torch.float16, torch.bfloat16, torch.float32)
        return value.to(dtype) if is_eligible and value.dtype is not dtype else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {name: _cast(item, dtype) for name, item in value.items()}
    return value
