"""Shapes of what ops of networks give on row-major inputs of one dtype; slow meta kernels answer for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch.rules.call import Call
from dtorch.shapes import Metas, ShapeFunction, TensorMeta, broadcast, is_contiguous
from dtorch.spec import Spec, contiguous_stride

_NONE = 0


def is_plain(call: Call) -> bool:
    """Whether all inputs are row-major, and those of floating point have one dtype."""
    dtypes = {spec.dtype for spec in call.inputs if spec.dtype.is_floating_point or spec.dtype.is_complex}
    return len(dtypes) == 1 and all(is_contiguous(spec.shape, spec.stride) for spec in call.inputs)


def row_major(shape: tuple[int, ...], like: Spec) -> TensorMeta:
    """A result of this shape with the dtype of an input."""
    return TensorMeta(shape, contiguous_stride(shape), like.dtype)


def likes(*names: str) -> ShapeFunction:
    """Results like these arguments, None for those that ``output_mask`` leaves out."""

    def metas(call: Call) -> Metas | None:
        wanted = call.get("output_mask") if call.has("output_mask") else [True] * len(names)
        like = [call.get(name) for name, is_wanted in zip(names, wanted, strict=True) if is_wanted]
        if not is_plain(call) or any(type(spec) is not Spec for spec in like):
            return None
        found = iter(like)
        return tuple(row_major((spec := next(found)).shape, spec) if w else None for w in wanted)

    return metas


def _are_pair(inputs: Sequence[Spec]) -> bool:
    first, second, *weights = inputs
    return first.shape == second.shape and all(
        broadcast([first.shape, weight.shape]) == first.shape for weight in weights
    )


def pair_loss(call: Call) -> Metas | None:
    """A loss of tensors of one shape, and of weights that are broadcast to it."""
    shape = call.inputs[0].shape
    if not is_plain(call) or not _are_pair(call.inputs):
        return None
    return (row_major(shape if call.get("reduction") == _NONE else (), call.inputs[0]),)


def pair_loss_backward(call: Call) -> Metas | None:
    """The derivative of a loss of tensors of one shape; a reduced loss has one gradient."""
    gradient, *pair = call.inputs
    shape = pair[0].shape
    if not is_plain(call) or not _are_pair(pair) or gradient.shape not in ((), shape):
        return None
    return (row_major(shape, pair[0]),)


def nll(call: Call) -> Metas | None:
    """Losses of rows by class, and the weight of all rows."""
    scores, target, weight = call.spec("self"), call.spec("target").shape, call.get("weight")
    classes = scores.shape[1:2]
    if not is_plain(call) or len(scores.shape) < 2 or target != (scores.shape[0], *scores.shape[2:]):
        return None
    if weight is not None and weight.shape != classes:
        return None
    return (row_major(target if call.get("reduction") == _NONE else (), scores), row_major((), scores))


def resized(call: Call) -> Metas | None:
    """Planes of ``output_size``, as many as there were."""
    spec, size = call.inputs[0], tuple(call.get("output_size"))
    if not is_plain(call) or len(spec.shape) != len(size) + 2 or 0 in spec.shape or not all(size):
        return None
    return (row_major((*spec.shape[:2], *size), spec),)


def sampled(call: Call) -> Metas | None:
    """Images of the size of a grid."""
    images, grid = call.inputs
    count = len(images.shape) - 2
    fits = len(grid.shape) == count + 2 and grid.shape[0] == images.shape[0] and grid.shape[-1] == count
    if not fits or not is_plain(call) or 0 in images.shape:
        return None
    return (row_major((*images.shape[:2], *grid.shape[1:-1]), images),)


def group_norm(call: Call) -> Metas | None:
    """The normalized, and a mean and a deviation of each group."""
    spec = call.spec("input")
    channels = spec.shape[1:2]
    if not is_plain(call) or any(given.shape != channels for given in call.inputs[1:]):
        return None
    batch, groups = call.get("N"), call.get("group")
    if channels != (call.get("C"),) or not groups or channels[0] % groups or 0 in spec.shape:
        return None
    statistics = row_major((batch, groups), spec)
    return (row_major(spec.shape, spec), statistics, statistics)


def batch_norm(call: Call, has_saved: bool) -> Metas | None:
    """The normalized, and a mean and a deviation of each channel, or none; and a reserve that stays empty."""
    spec = call.spec("input")
    channels = spec.shape[1:2]
    if not is_plain(call) or any(given.shape != channels for given in call.inputs[1:]) or len(spec.shape) < 2:
        return None
    saved = row_major(channels if has_saved else (0,), spec)
    reserve = (TensorMeta((0,), (1,), torch.uint8),) if len(call.op.returns) == 4 else ()
    return (row_major(spec.shape, spec), saved, saved, *reserve)
