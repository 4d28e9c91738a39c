"""What ``torch.func``, forward-mode derivatives, dispatch modes, tracing and ``torch.compile`` ask of a tensor.

Their wrappers are torch's own: an op reaches us when the outermost of them is done with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch.autograd import forward_ad
from torch.fx.experimental import proxy_tensor

from dtorch.dispatch import special
from dtorch.spec import Spec

aten = torch.ops.aten
#: Asked in front of every product, so they are looked up once.
_transforms_are_active = torch._C._are_functorch_transforms_active
_num_modes = torch._C._len_torch_dispatch_stack


def is_active() -> bool:
    """Whether the arguments of an op may be wrappers of ``torch.func``, or have tangents."""
    return _transforms_are_active() or forward_ad._current_level >= 0


def is_watched() -> bool:
    """Whether a dispatch mode (``FlopCounterMode``, ``make_fx``, one of the user's) wants to see every op."""
    return _num_modes() > 0


def leave_uncompiled(*functions: Callable[..., Any]) -> None:
    """Let ``torch.compile`` run these functions, and what they call, as they are.

    It breaks its graph at an op on our tensors, and would go on to compile what carries the op out.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, skip)


def let_trace(cls: type[torch.Tensor]) -> None:
    """Let ``make_fx`` record ops on tensors that it did not make itself; ``torch.func.linearize`` traces so.

    Of a type that it does not know it records nothing, and takes the result for a constant.
    """
    if cls not in proxy_tensor.HANDLED_TYPES:
        proxy_tensor.HANDLED_TYPES = (*proxy_tensor.HANDLED_TYPES, cls)  # type: ignore[assignment]  # a longer one


@special(aten.is_same_size.default)
def _is_same_size(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    first, second = args
    return first.shape == second.shape


@special(aten._has_same_storage_numel.default)
def _has_same_storage(
    cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int
) -> Any:
    """A tangent has the memory layout of its tensor."""
    first, second = (tensor._spec if type(tensor) is cls else tensor for tensor in args)
    return _num_reached(first) == _num_reached(second)


def _num_reached(tensor: Spec | torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    shape = tuple(tensor.shape)
    stride = tensor.stride if isinstance(tensor, Spec) else tensor.stride()
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
