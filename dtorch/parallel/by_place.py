"""Layers that treat each place by itself, and make one dim of batch and sequence for it.

Where the sequence is cut that dim has no placement, since a piece of it is not one run. Here such layers are found, and
leave the sequence cut. Shapes are global.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from dtorch.attention import sequence_axes
from dtorch.parallel.experts import is_experts
from dtorch.parallel.facts import is_conv1d
from dtorch.parallel.hooks import map_tensors
from dtorch.tensors import Tensor
from dtorch_runtime.ir.placement import Placement, Shard


def keep_places(model: nn.Module) -> None:
    """Let the layers of a model that merge batch and sequence work where the sequence is cut.

    Linear layers of GPT-2 multiply without merging. What is around a mixture of experts gets rows of the batch instead,
    by an all-to-all, and gives its part of the sequence back.
    """
    for module in model.modules():
        if is_conv1d(module):
            # A copy of the module has it too.
            object.__setattr__(module, "forward", types.MethodType(_conv1d, module))
        elif any(is_experts(child) for child in module.children()):
            module.register_forward_pre_hook(_to_rows, with_kwargs=True)
            module.register_forward_hook(_to_places)


def _conv1d(self: Any, x: torch.Tensor) -> torch.Tensor:
    """[..., in] to [..., out]; the weight is [in, out]."""
    result: torch.Tensor = torch.matmul(x, self.weight) + self.bias
    return result


def _to_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def moved(x: torch.Tensor) -> torch.Tensor:
        return _with(x, Shard(1), Shard(0)) if _has_places(x) else x

    return map_tensors(moved, args), map_tensors(moved, kwargs)


def _to_places(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return map_tensors(lambda x: _with(x, Shard(0), Shard(1)) if _has_places(x) else x, output)


def _has_places(x: Any) -> bool:
    """Whether it is [batch, sequence, features], of several rows."""
    return isinstance(x, Tensor) and x.ndim == 3 and x.shape[0] > 1


def _with(x: Any, old: Placement, new: Placement) -> Any:
    """A tensor with another placement on the axes of the sequence that have the old one."""
    axes = [x.device_mesh.axis(name) for name in sequence_axes(x.device_mesh)]
    placements = [new if axis in axes and p == old else p for axis, p in enumerate(x.placements)]
    return x.redistribute(placements=placements)
