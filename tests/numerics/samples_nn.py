"""Calls of the ops of networks: activations, norms, convolutions, pooling, images, bags."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.rules.equation import Signature
from tests.numerics.more_samples import overload
from tests.numerics.samples import aten, call, real
from tests.support.rule_checks import Sample

_SPACE = {1: (5,), 2: (5, 4), 3: (5, 4, 5)}
_LARGE = {1: (10,), 2: (10, 8), 3: (10, 8, 10)}


def images(count: int, batch: int = 2, channels: int = 3) -> torch.Tensor:
    """[batch, channels, spatial dims]"""
    return real(batch, channels, *_SPACE[count])


ACTIVATIONS = [
    call(aten.log_sigmoid_forward.default, real(4, 5)),
    call(aten.log_sigmoid_backward.default, real(4, 5), real(4, 5), (-real(4, 5).abs()).exp()),
    call(aten._prelu_kernel.default, real(2, 3, 4), real(1, 3, 1)),
    call(aten._prelu_kernel_backward.default, real(2, 3, 4), real(2, 3, 4), real(1, 3, 1)),
    call(aten.rrelu_with_noise_backward.default, real(3, 4), real(3, 4), real(3, 4), 0.1, 0.3, False, False),
    call(aten.glu.default, real(3, 4, 5), 1),
    call(aten.glu_backward.default, real(3, 4), real(3, 8), -1),
]


# ------------------------------------------------------------------------------------------------- convolutions


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    name: str,
    *,
    transposed: bool = False,
    groups: int = 1,
    padding: int = 1,
    dilation: int = 1,
    stride: int = 1,
) -> list[Sample]:
    """A convolution and its derivatives, those of the bias too if it has one."""
    count = x.ndim - 2
    options = (
        [stride] * count,
        [padding] * count,
        [dilation] * count,
        transposed,
        [0] * count,
        groups,
    )
    gradient = torch.randn_like(aten.convolution.default(x, weight, bias, *options))
    sizes = None if bias is None else list(bias.shape)
    wanted = [True, True, bias is not None]
    return [
        call(aten.convolution.default, x, weight, bias, *options, name=f"convolution {name}"),
        call(
            aten.convolution_backward.default,
            gradient,
            x,
            weight,
            sizes,
            *options,
            wanted,
            name=f"convolution_backward {name}",
        ),
    ]


CONVOLUTIONS = [
    *_convolution(real(2, 3, 5), real(4, 3, 3), real(4), "1d"),
    *_convolution(real(3, 2, 4, 5), real(3, 2, 3, 3), None, "without bias", dilation=2, padding=2),
    *_convolution(real(2, 3, 3, 3, 3), real(3, 3, 2, 2, 2), real(3), "3d"),
    *_convolution(real(2, 3, 12, 12), real(3, 3, 2, 2), real(3), "of patches", padding=0, stride=2),
    *_convolution(
        real(2, 3, 6), real(3, 3, 2), real(3), "of patches, transposed", padding=0, stride=2, transposed=True
    ),
    *_convolution(real(2, 3, 5), real(3, 4, 3), real(4), "transposed", transposed=True),
    *_convolution(real(2, 12, 3), real(12, 2, 3), real(12), "in groups", groups=6),
    *_convolution(real(2, 6, 3), real(12, 1, 3), real(12), "depthwise", groups=6),
    *_convolution(real(2, 12, 3), real(12, 2, 3), None, "transposed in groups", groups=6, transposed=True),
    call(
        aten.convolution_backward.default,
        real(2, 4, 5),
        real(2, 3, 5),
        real(4, 3, 3),
        [4],
        [1],
        [1],
        [1],
        False,
        [0],
        1,
        [False, True, True],
        name="convolution_backward of weights",
    ),
]

# ------------------------------------------------------------------------------------------------- pooling


def _window(count: int, size: int = 2) -> list[int]:
    return [size] * count


def _pooling(count: int) -> list[Sample]:
    x = images(count)
    window, zeros, ones = _window(count), _window(count, 0), _window(count, 1)
    small = tuple(size // 2 for size in x.shape[2:])
    gradient = real(2, 3, *small)
    _, places = overload(f"max_pool{count}d_with_indices")(x, window)
    _, adaptive = overload(f"adaptive_max_pool{count}d")(x, window)
    samples = real(2, 3, count).sigmoid()
    _, random_places = overload(f"fractional_max_pool{count}d")(x, window, window, samples)
    unpooled = [list(x.shape[2:])] if count == 2 else [list(x.shape[2:]), window, zeros]
    pads = (window, window, zeros)
    tiles = {"except_for": _between_tiles}
    return [
        call(overload(f"avg_pool{count}d"), x, window, name=f"avg_pool{count}d of a batch", **tiles),
        call(overload(f"avg_pool{count}d"), x[0], window, name=f"avg_pool{count}d of one", **tiles),
        call(overload(f"avg_pool{count}d_backward"), gradient, x, *pads, False, True, None, **tiles),
        call(overload(f"_adaptive_avg_pool{count}d"), x, window, **tiles),
        call(overload(f"_adaptive_avg_pool{count}d_backward"), real(2, 3, *window), x, **tiles),
        call(overload(f"max_pool{count}d_with_indices"), x, window),
        call(
            overload(f"max_pool{count}d_with_indices_backward"),
            gradient,
            x,
            *pads,
            ones,
            False,
            places,
        ),
        call(overload(f"adaptive_max_pool{count}d"), x, window),
        call(overload(f"adaptive_max_pool{count}d_backward"), real(2, 3, *window), x, adaptive),
        call(overload(f"fractional_max_pool{count}d"), x, window, window, samples),
        call(
            overload(f"fractional_max_pool{count}d"),
            x[0],
            window,
            window,
            samples[:1],
            name=f"fractional_max_pool{count}d of one",
        ),
        call(
            overload(f"fractional_max_pool{count}d_backward"),
            real(2, 3, *window),
            x,
            window,
            window,
            random_places,
        ),
        call(overload(f"max_unpool{count}d"), gradient, places, *unpooled),
    ]


def _between_tiles(signature: Signature) -> bool:
    """Whether it cuts a dim of space, which sizes of samples let fall inside windows."""
    return signature.letter in ("p", "q", "r")


POOLING = [
    *_pooling(2),
    *_pooling(3),
    call(aten.avg_pool2d.default, real(2, 12, 5), [2, 2], [2, 1], name="avg_pool2d of tiles"),
    call(aten.avg_pool2d.default, real(2, 4, 6).mul(9).long(), [3, 1], [1, 1], name="avg_pool2d of integers"),
    call(
        aten.upsample_bilinear2d.default,
        real(1, 2, 4, 4).mul(40).add(99).byte(),
        [6, 7],
        False,
        name="bilinear of bytes",
    ),
    call(
        aten.avg_pool2d_backward.default,
        real(2, 6, 4),
        real(2, 12, 5),
        *([2, 2], [2, 1], [0, 0], False, True, None),
        name="avg_pool2d_backward of tiles",
    ),
    call(aten._adaptive_avg_pool2d.default, real(2, 12, 5), [6, 4], name="_adaptive_avg_pool2d of tiles"),
    call(
        aten._adaptive_avg_pool2d_backward.default,
        real(2, 6, 4),
        real(2, 12, 5),
        name="_adaptive_avg_pool2d_backward of tiles",
    ),
]

# ------------------------------------------------------------------------------------------------- images

_RESIZES = {
    1: (("upsample_nearest1d", ()), ("_upsample_nearest_exact1d", ()), ("upsample_linear1d", (False,))),
    2: (
        ("upsample_nearest2d", ()),
        ("_upsample_nearest_exact2d", ()),
        ("upsample_bilinear2d", (True,)),
        ("upsample_bicubic2d", (False,)),
        ("_upsample_bilinear2d_aa", (False,)),
        ("_upsample_bicubic2d_aa", (False,)),
    ),
    3: (("upsample_nearest3d", ()), ("_upsample_nearest_exact3d", ()), ("upsample_trilinear3d", (True,))),
}


def _resizing(count: int) -> list[Sample]:
    x, large = images(count), list(_LARGE[count])
    found = []
    for name, options in _RESIZES[count]:
        found.append(call(overload(name), x, large, *options))
        gradient = real(2, 3, *large)
        found.append(call(overload(f"{name}_backward"), gradient, large, list(x.shape), *options))
    return found


def _padding(count: int) -> list[Sample]:
    x, pads = images(count), [1, 2] * count
    padded = real(2, 3, *(size + 3 for size in x.shape[2:]))
    return [
        item
        for kind in ("reflection", "replication")
        for item in (
            call(overload(f"{kind}_pad{count}d"), x, pads),
            call(overload(f"{kind}_pad{count}d_backward"), padded, x, pads),
        )
    ]


IMAGES = [
    *(sample for count in (1, 2, 3) for sample in (*_resizing(count), *_padding(count))),
    call(aten.grid_sampler_2d.default, images(2), real(2, 3, 4, 2).tanh(), 0, 0, False),
    call(aten.grid_sampler_3d.default, images(3), real(2, 3, 2, 2, 3).tanh(), 0, 1, True),
    call(
        aten.grid_sampler_2d_backward.default,
        real(2, 3, 3, 4),
        images(2),
        real(2, 3, 4, 2).tanh(),
        0,
        0,
        False,
        [True, True],
    ),
    call(
        aten.grid_sampler_3d_backward.default,
        real(2, 3, 3, 2, 2),
        images(3),
        real(2, 3, 2, 2, 3).tanh(),
        0,
        0,
        False,
        [True, True],
    ),
    call(aten.affine_grid_generator.default, real(2, 2, 3), [2, 3, 4, 5], False),
    call(aten.affine_grid_generator.default, real(2, 3, 4), [2, 3, 2, 3, 2], True, name="affine_grid 3d"),
    call(aten.pixel_shuffle.default, real(2, 24, 6, 6), 2),
    call(aten.pixel_unshuffle.default, real(2, 6, 12, 12), 2),
    call(aten.channel_shuffle.default, real(3, 6, 2, 2), 3),
    call(aten.im2col.default, real(2, 6, 2, 3), [2, 2], [1, 1], [0, 0], [1, 1]),
    call(aten.col2im.default, real(2, 24, 2), [2, 3], [2, 2], [1, 1], [0, 0], [1, 1]),
]

# ------------------------------------------------------------------------------------------------- norms


def _batch_norms() -> list[Sample]:
    x, statistics = real(4, 5, 3), (real(5), real(5).abs())
    weights = (real(5), real(5))
    saved = (x.mean((0, 2)), x.var((0, 2)).rsqrt())
    nothing = torch.empty(0, dtype=torch.float64)
    mask = [True, True, True]
    return [
        *(
            call(aten.native_batch_norm.default, x, *weights, *stats, training, 0.1, 1e-5, name=name)
            for name, stats, training in (
                ("native_batch_norm in training", statistics, True),
                ("native_batch_norm without statistics", (None, None), True),
                ("native_batch_norm in evaluation", statistics, False),
            )
        ),
        call(
            aten.native_batch_norm.default, real(4, 5), *weights, *statistics, False, 0.1, 1e-5, name="rows"
        ),
        *(
            call(
                aten._native_batch_norm_legit.default,
                x,
                *weights,
                *statistics,
                training,
                0.1,
                1e-5,
                name=f"_native_batch_norm_legit {training}",
            )
            for training in (True, False)
        ),
        call(aten._native_batch_norm_legit.no_stats, x, *weights, True, 0.1, 1e-5),
        call(aten._native_batch_norm_legit_no_training.default, x, *weights, *statistics, 0.1, 1e-5),
        call(aten._batch_norm_with_update.default, x, *weights, *statistics, 0.1, 1e-5),
        call(aten._batch_norm_no_update.default, x, *weights, *statistics, 0.1, 1e-5),
        *(
            call(
                overload(name),
                real(4, 5, 3),
                x,
                weights[0],
                *statistics,
                *(saved if training else (nothing, nothing)),
                training,
                1e-5,
                mask,
                *((torch.empty(0, dtype=torch.uint8),) if name == "batch_norm_backward" else ()),
                name=f"{name} {training}",
            )
            for name in ("native_batch_norm_backward", "batch_norm_backward")
            for training in (True, False)
        ),
    ]


def _group_norms() -> list[Sample]:
    x, weights, groups = real(2, 12, 2), (real(12), real(12)), (2, 12, 2, 6)
    _, mean, rstd = aten.native_group_norm.default(x, *weights, *groups, 1e-5)
    return [
        call(aten.native_group_norm.default, x, *weights, *groups, 1e-5),
        call(aten.native_group_norm.default, x, None, None, *groups, 1e-5, name="group_norm without weights"),
        call(
            aten.native_group_norm_backward.default,
            real(2, 12, 2),
            x,
            mean,
            rstd,
            weights[0],
            *groups,
            [True, True, True],
        ),
    ]


NORMS = [
    *_batch_norms(),
    *_group_norms(),
]

# ------------------------------------------------------------------------------------------------- forms, bags

_INDICES = torch.tensor([1, 4, 3, 1, 0, 2])
_OFFSETS = torch.tensor([0, 2, 3])


def _bags() -> list[Sample]:
    weight, found = real(5, 4), []
    for mode in (0, 1, 2):
        rest: tuple[Any, ...] = (False, mode, False, real(6) if mode == 0 else None)
        _, *facts = aten._embedding_bag.default(weight, _INDICES, _OFFSETS, *rest)
        gradient = real(3, 4)
        for name in ("_embedding_bag", "_embedding_bag_forward_only"):
            found.append(call(overload(name), weight, _INDICES, _OFFSETS, *rest, name=f"{name} {mode}"))
        options = (5, False, mode)
        found += [
            call(
                aten._embedding_bag_backward.default,
                gradient,
                _INDICES,
                _OFFSETS,
                *facts,
                *options,
                False,
                rest[3],
                name=f"_embedding_bag_backward {mode}",
            ),
            call(
                aten._embedding_bag_dense_backward.default,
                gradient,
                _INDICES,
                *facts,
                *options,
                rest[3],
                name=f"_embedding_bag_dense_backward {mode}",
            ),
        ]
    facts_of_sum = aten._embedding_bag.default(weight, _INDICES, _OFFSETS)
    found.append(
        call(
            aten._embedding_bag_per_sample_weights_backward.default,
            real(3, 4),
            weight,
            _INDICES,
            _OFFSETS,
            facts_of_sum[1],
            0,
        )
    )
    return found


FORMS = [
    call(
        aten._trilinear.default,
        real(4, 3),
        real(2, 3, 5),
        real(4, 5),
        [1, 3],
        [0],
        [1, 2],
        [2, 3],
    ),
    *_bags(),
]


def _layers() -> list[Sample]:
    """A layer of an encoder and an attention as torch runs them in evaluation: [rows, places, features]."""
    x, features = real(4, 3, 4), 4
    attention = (real(12, 4), real(12), real(4, 4), real(4))
    rest = (real(4), real(4), real(4), real(4), real(5, 4), real(5), real(4, 5), real(4))
    padding = torch.zeros(4, 3, dtype=torch.bool)
    padding[1, 2] = True
    options = (features, 2)
    encoder = (x, *options, *attention, False, False, 1e-5, *rest)
    return [
        call(aten._transformer_encoder_layer_fwd.default, *encoder),
        call(
            aten._transformer_encoder_layer_fwd.default,
            *encoder,
            padding,
            1,
            name="encoder layer with padding",
        ),
        call(aten._native_multi_head_attention.default, x, x, x, *options, *attention),
        call(
            aten._native_multi_head_attention.default,
            *(x, x, x, *options, *attention, padding, True, False, 1),
            name="multi-head attention with padding",
        ),
    ]


NN_SAMPLES = [*ACTIVATIONS, *CONVOLUTIONS, *POOLING, *IMAGES, *NORMS, *FORMS, *_layers()]
