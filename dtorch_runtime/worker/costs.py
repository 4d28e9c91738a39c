"""What a captured call is estimated to take in each of the ways in which an agent can run it (``joint``).

An estimate and not a stopwatch, so that a busy moment does not decide for all calls. It knows sizes and the kind of op,
and is wrong by a factor of two here and there; where that matters, the ways are about equally good.

A third way, all devices in one thread with kernels on all cores, was tried on a language model's decoding step and took
1.2 to 1.4 times as long as either.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Of one core of a busy 2-core Xeon (torch 2.13, float32). A kernel's start, and what it does in a microsecond.
_START_US = 3.0
_BYTES_A_US = 8_000
_PRODUCTS_A_US = 15_000
#: What a kernel loses where several threads want the interpreter lock, and a redistribution among threads.
_LOCK_US = 8.0
_MEETING_US = 80.0
#: A redistribution that is a plain sum or copy.
_COPYING_US = 8.0

_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_scaled_dot_product_attention"))


class Way(enum.Enum):
    """How a captured call runs."""

    APART = "each device on its thread"
    JOINT = "all devices in one thread"


@dataclass(frozen=True, slots=True)
class Weight:
    """What one device does in a call.

    Attributes:
        kernels_us: what each kernel computes for, beyond its start.
        num_moves: redistributions.
    """

    kernels_us: Sequence[float]
    num_moves: int


def kernel_us(op: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
    """Microseconds that a kernel takes on one core beyond its start.

    Args:
        op: ``namespace::name.overload``.
    """
    if not outputs or _is_view(inputs, outputs[0]):
        base, _, overload = op.partition(".")
        outputs = inputs[:1] if base.endswith("_") or overload in ("out", "grad_input") else ()
        if not outputs:
            return 0.0
    name = op.partition("::")[2].partition(".")[0]
    memory_us = sum(tensor.nbytes for tensor in (*inputs, *outputs)) / _BYTES_A_US
    if "convolution" in name and len(inputs) > 1:
        weight = inputs[1]
        return max(memory_us, outputs[0].numel() * weight[0].numel() / _PRODUCTS_A_US)
    if name in _PRODUCTS:
        factor = inputs[1 if name in ("addmm", "baddbmm") and len(inputs) > 2 else 0]
        depth = factor.shape[-1] if factor.ndim else 1
        return max(memory_us, outputs[0].numel() * depth / _PRODUCTS_A_US)
    return memory_us


def _is_view(inputs: Sequence[torch.Tensor], output: torch.Tensor) -> bool:
    storage = output.untyped_storage().data_ptr()
    return any(tensor.untyped_storage().data_ptr() == storage for tensor in inputs)


def joint_us(weights: Sequence[Weight]) -> float:
    """What a call takes for all devices in one thread.

    Args:
        weights: of each device.
    """
    return sum(map(_alone_us, weights)) + _COPYING_US * max(weight.num_moves for weight in weights)


def _alone_us(weight: Weight) -> float:
    return sum(weight.kernels_us) + _START_US * len(weight.kernels_us)


def choose(weights: Sequence[Weight], num_cores: int) -> Way:
    """The way that is estimated to be the faster.

    Args:
        weights: of each device.
        num_cores: of this agent.
    """
    alone_us = [*map(_alone_us, weights)]
    moves = [weight.num_moves for weight in weights]
    apart_us = max(
        max(us + _LOCK_US * len(weight.kernels_us) for us, weight in zip(alone_us, weights, strict=True)),
        sum(alone_us) / max(1, num_cores),
    )
    apart_us += _MEETING_US * max(moves)
    return Way.JOINT if joint_us(weights) <= apart_us else Way.APART
