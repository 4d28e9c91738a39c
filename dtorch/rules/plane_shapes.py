"""Shapes of what convolutions, pools, pads and other ops on planes give on row-major inputs of one dtype.

A function gives None where arguments are unusual or wrong: a meta kernel then answers, or refuses them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dtorch.rules.call import Call
from dtorch.rules.dsl import full_names
from dtorch.rules.nn_shapes import is_plain, likes, row_major
from dtorch.rules.tiles import per_dim
from dtorch.shapes import Metas, TensorMeta, register_shape
from dtorch.spec import Spec, contiguous_stride


def _is_usual(call: Call, count: int) -> bool:
    """Whether inputs are plain, and the first is one image, or several, of ``count`` spatial dims, none empty.

    Strides of dims of size 1 count too: kernels tell channels-last images by them.
    """
    shape = call.inputs[0].shape
    return (
        len(shape) in (count + 1, count + 2)
        and 0 not in shape
        and is_plain(call)
        and all(spec.stride == contiguous_stride(spec.shape) for spec in call.inputs)
    )


def _count(call: Call) -> int:
    """Spatial dims, as the name says: ``max_pool2d`` has 2."""
    return next(count for count in (1, 2, 3) if f"{count}d" in call.op.base)


def _with_planes(call: Call, planes: Sequence[int]) -> Metas:
    """Planes of another size, as many as there were; and the place of each element, where the op returns it."""
    spec = call.inputs[0]
    result = row_major((*spec.shape[: len(spec.shape) - len(planes)], *planes), spec)
    return (result,) if len(call.op.returns) == 1 else (result, result._replace(dtype=torch.int64))


def _options(call: Call, count: int, *names: str) -> list[list[int]] | None:
    """Lists of options with an entry a dim; None when one has another length."""
    found = []
    for name in names:
        value = call.get(name)
        value = [value] if isinstance(value, int) else value
        if len(value) not in (1, count):
            return None
        found.append(per_dim(value, count))
    return found


# ------------------------------------------------------------------------------------------------- convolutions


def convolution(call: Call) -> Metas | None:
    """Of a batch of images."""
    spec, weight, bias = call.inputs[0], call.inputs[1], call.get("bias")
    count = len(weight.shape) - 2
    if count < 1 or not _is_usual(call, count) or len(spec.shape) != count + 2 or 0 in weight.shape:
        return None
    options = _options(call, count, "stride", "padding", "dilation", "output_padding")
    groups, is_transposed = call.get("groups"), call.get("transposed")
    if options is None or groups < 1:
        return None
    into = weight.shape[0] if is_transposed else weight.shape[1] * groups
    channels = weight.shape[1] * groups if is_transposed else weight.shape[0]
    if spec.shape[1] != into or into % groups or channels % groups:
        return None
    if bias is not None and bias.shape != (channels,):
        return None
    planes = []
    for size, window, stride, padding, dilation, extra in zip(
        spec.shape[2:], weight.shape[2:], *options, strict=True
    ):
        if stride < 1 or padding < 0 or dilation < 1 or not 0 <= extra < max(stride, dilation):
            return None
        reach = dilation * (window - 1) + 1
        if is_transposed:
            planes.append((size - 1) * stride - 2 * padding + reach + extra)
        else:
            planes.append((size + 2 * padding - reach) // stride + 1)
    return (row_major((spec.shape[0], channels, *planes), spec),) if min(planes) > 0 else None


def convolution_backward(call: Call) -> Metas | None:
    """Gradients of the image, the weight and the bias."""
    gradient, image, weight = call.inputs
    if not _is_usual(call, len(weight.shape) - 2) or gradient.shape[0] != image.shape[0]:
        return None
    bias = tuple(call.get("bias_sizes") or gradient.shape[1:2])
    shapes = (image.shape, weight.shape, bias)
    wanted = call.get("output_mask")
    return tuple(
        row_major(shape, image) if is_wanted else None
        for shape, is_wanted in zip(shapes, wanted, strict=True)
    )


register_shape(full_names("convolution"), convolution)
register_shape(full_names("convolution_backward"), convolution_backward)


# ------------------------------------------------------------------------------------------------- pools


def _num_windows(size: int, window: int, stride: int, padding: int, dilation: int, over: bool) -> int:
    """As ``pooling_output_shape`` (ATen/native/Pool.h); 0 when torch refuses the options."""
    if window < 1 or stride < 1 or dilation < 1 or not 0 <= padding <= window // 2:
        return 0
    reach = size + 2 * padding - dilation * (window - 1) - 1
    count = (reach + (stride - 1 if over else 0)) // stride + 1
    if over and (count - 1) * stride >= size + padding:
        count -= 1
    return count


def pool(call: Call) -> Metas | None:
    """Windows that slide."""
    count = _count(call)
    spec = call.inputs[0]
    if not _is_usual(call, count):
        return None
    names = ["kernel_size", "stride" if call.get("stride") else "kernel_size", "padding"]
    options = _options(call, count, *names, *(["dilation"] if call.has("dilation") else []))
    if options is None or (call.has("divisor_override") and call.get("divisor_override") == 0):
        return None
    windows, strides, paddings = options[:3]
    dilations = options[3] if len(options) == 4 else [1] * count
    over = bool(call.get("ceil_mode"))
    planes = [
        _num_windows(*each, over)
        for each in zip(spec.shape[-count:], windows, strides, paddings, dilations, strict=True)
    ]
    return _with_planes(call, planes) if min(planes) > 0 else None


def adaptive_pool(call: Call) -> Metas | None:
    """As many windows as asked for."""
    planes = call.get("output_size")
    if not _is_usual(call, _count(call)) or len(planes) != _count(call) or min(planes) < 1:
        return None
    return _with_planes(call, planes)


def unpool(call: Call) -> Metas | None:
    """The largest of each window, back where they were."""
    spec, places = call.inputs
    planes, count = call.get("output_size"), _count(call)
    if not _is_usual(call, count) or places.shape != spec.shape or places.dtype is not torch.int64:
        return None
    if len(planes) != count or min(planes) < 1 or (count == 3 and min(call.get("stride")) < 1):
        return None
    return _with_planes(call, planes)


register_shape(
    full_names("avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices"),
    pool,
)
register_shape(
    full_names("_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d"),
    adaptive_pool,
)
register_shape(full_names("max_unpool2d max_unpool3d"), unpool)


def like_self(call: Call) -> Metas | None:
    """A gradient like what was pooled or padded."""
    return likes("self")(call) if _is_usual(call, _count(call)) else None


register_shape(
    full_names(
        "avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward "
        "adaptive_max_pool2d_backward adaptive_max_pool3d_backward _adaptive_avg_pool2d_backward "
        "_adaptive_avg_pool3d_backward fractional_max_pool2d_backward "
        "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward "
        "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward"
    ),
    like_self,
)


# ------------------------------------------------------------------------------------------------- images


def pad(call: Call) -> Metas | None:
    """Wider on both sides; the amounts are those of the last dim first."""
    count, padding = _count(call), call.get("padding")
    planes = call.inputs[0].shape[-count:]
    if not _is_usual(call, count) or len(padding) != 2 * count or min(padding) < 0:
        return None
    sides = list(zip(padding[::2], padding[1::2], strict=True))[::-1]
    if "reflection" in call.op.base and any(max(s) >= n for s, n in zip(sides, planes, strict=True)):
        return None
    return _with_planes(call, [n + sum(s) for n, s in zip(planes, sides, strict=True)])


def of_input_size(call: Call) -> Metas | None:
    """A gradient of the size that was resized."""
    size = tuple(call.get("input_size"))
    gradient = call.inputs[0]
    fits = len(size) == len(gradient.shape) and size[:2] == gradient.shape[:2]
    if not fits or gradient.shape[2:] != tuple(call.get("output_size")):
        return None
    return (row_major(size, gradient),) if _is_usual(call, len(size) - 2) and min(size) > 0 else None


def like_image_and_grid(call: Call) -> Metas | None:
    """Gradients of a sampled image and of the grid."""
    return likes("input", "grid")(call) if _is_usual(call, _count(call)) else None


def affine_grid(call: Call) -> Metas | None:
    """A grid for each matrix."""
    (theta,), size = call.inputs, tuple(call.get("size"))
    count = len(size) - 2
    if (
        count not in (2, 3)
        or theta.shape != (size[0], count, count + 1)
        or min(size) < 1
        or not is_plain(call)
    ):
        return None
    return (row_major((size[0], *size[2:], count), theta),)


def _windows(call: Call, planes: Sequence[int]) -> tuple[int, int] | None:
    """Elements in a window, and how many windows there are; None when torch refuses the options."""
    options = _options(call, 2, "kernel_size", "dilation", "padding", "stride")
    if options is None or min(*options[0], *options[1], *options[3]) < 1 or min(options[2]) < 0:
        return None
    num_windows = 1
    for size, window, dilation, padding, stride in zip(planes, *options, strict=True):
        num_windows *= max(0, (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1)
    return (math.prod(options[0]), num_windows) if num_windows else None


def im2col(call: Call) -> Metas | None:
    """Windows as columns."""
    spec = call.inputs[0]
    windows = _windows(call, spec.shape[-2:]) if _is_usual(call, 2) else None
    if windows is None:
        return None
    size, num_windows = windows
    return (row_major((*spec.shape[:-3], spec.shape[-3] * size, num_windows), spec),)


def col2im(call: Call) -> Metas | None:
    """Columns added up to images."""
    spec, planes = call.inputs[0], tuple(call.get("output_size"))
    if len(planes) != 2 or min(planes) < 1 or not _is_usual(call, 1):
        return None
    windows = _windows(call, planes)
    if windows is None or spec.shape[-2] % windows[0] or spec.shape[-1] != windows[1]:
        return None
    return (row_major((*spec.shape[:-2], spec.shape[-2] // windows[0], *planes), spec),)


def shuffled_pixels(call: Call) -> Metas | None:
    """Channels become pixels, or pixels channels."""
    spec, is_up = call.inputs[0], call.has("upscale_factor")
    factor: int = call.get("upscale_factor" if is_up else "downscale_factor")
    if len(spec.shape) < 3 or 0 in spec.shape or not is_plain(call) or factor < 1:
        return None
    *batch, channels, rows, columns = spec.shape
    if is_up and channels % factor**2 == 0:
        return (row_major((*batch, channels // factor**2, rows * factor, columns * factor), spec),)
    if not is_up and rows % factor == 0 == columns % factor:
        return (row_major((*batch, channels * factor**2, rows // factor, columns // factor), spec),)
    return None


for _dims in (1, 2, 3):
    register_shape(full_names(f"reflection_pad{_dims}d replication_pad{_dims}d"), pad)
register_shape(
    full_names(
        "upsample_nearest1d_backward _upsample_nearest_exact1d_backward upsample_linear1d_backward "
        "upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward "
        "upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward "
        "upsample_nearest3d_backward _upsample_nearest_exact3d_backward upsample_trilinear3d_backward"
    ),
    of_input_size,
)
register_shape(full_names("grid_sampler_2d_backward grid_sampler_3d_backward"), like_image_and_grid)
register_shape(full_names("affine_grid_generator"), affine_grid)
register_shape(full_names("im2col"), im2col)
register_shape(full_names("col2im"), col2im)
register_shape(full_names("pixel_shuffle pixel_unshuffle"), shuffled_pixels)


# ------------------------------------------------------------------------------------------------- other gradients


def of_input_sizes(call: Call) -> Metas | None:
    """Zeros of the size of what was cut, with the gradient in its place."""
    sizes: Any = call.get("input_sizes")
    gradient: Spec = call.inputs[0]
    return (
        (TensorMeta(tuple(sizes), contiguous_stride(sizes), gradient.dtype),)
        if min(sizes, default=0) > 0
        else None
    )


register_shape(full_names("slice_backward select_backward unfold_backward"), of_input_sizes)
