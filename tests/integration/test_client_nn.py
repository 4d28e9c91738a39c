"""Every module of ``torch.nn`` in its usual form, on whole tensors of the cluster: values and gradients are torch's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dtorch

_generator = torch.Generator().manual_seed(3)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def numbers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_generator)


ROWS, OTHER = real(4, 6), real(4, 6)
CLASSES, SIGNS, SHARES = numbers(6, 4), real(4).sign(), real(4, 6).softmax(1)
#: Images by the number of their spatial dims.
X = {1: real(2, 4, 8), 2: real(2, 4, 6, 6), 3: real(2, 4, 4, 4, 4)}
#: Random numbers of pooling, given so that both sides have the same.
_SAMPLES = real(2, 4, 3).sigmoid()
Make = Callable[[], nn.Module]
Case = tuple[str, Make, tuple[Any, ...]]


def of_each(names: str, x: torch.Tensor, *args: Any, **kwargs: Any) -> Iterator[Case]:
    """One case for each class, with the same arguments."""
    for name in names.split():
        yield name, lambda name=name: getattr(nn, name)(*args, **kwargs), (x,)  # type: ignore[misc]


def of_space(names: str, *args: Any, suffix: str = "", **kwargs: Any) -> Iterator[Case]:
    """``Conv`` means Conv1d, Conv2d and Conv3d."""
    for count, x in X.items():
        for name, make, given in of_each(" ".join(f"{n}{count}d" for n in names.split()), x, *args, **kwargs):
            yield name + suffix, make, given


class Unpool(nn.Module):
    """Pools, and puts the largest back."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{count}d")(2, return_indices=True)
        self.unpool = getattr(nn, f"MaxUnpool{count}d")(2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.unpool(*self.pool(x))


class Packed(nn.Module):
    """A recurrent layer on rows of different lengths."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layer = kind(8, 3, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, [4, 2], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


ACTIVATIONS = (
    *of_each(
        "ReLU ReLU6 SELU CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU "
        "SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Identity Flatten Softmax2d",
        X[2],
    ),
    *of_each("Softmax Softmin LogSoftmax", X[1], dim=1),
    *of_each("Threshold", X[1], 0.1, 2.0),
    *of_each("Unflatten", X[1], 1, (2, 2)),
)
SPATIAL = (
    *of_space("Conv", 4, 6, 3, padding=1),
    *of_space("Conv", 4, 6, 3, padding="same", groups=2, suffix=" in groups"),
    *of_space("Conv", 4, 4, 3, padding=1, padding_mode="circular", suffix=" circular"),
    *of_space("ConvTranspose", 4, 3, 3, stride=2, output_padding=1),
    *of_space("MaxPool AvgPool AdaptiveMaxPool AdaptiveAvgPool", 2),
    *of_space("LPPool", 2, 2),
    *of_space("BatchNorm", 4),
    *of_space("InstanceNorm", 4, affine=True, track_running_stats=True),
    *of_space("ReflectionPad ReplicationPad ZeroPad CircularPad", 1),
    *of_space("ConstantPad", 1, 2.0),
    *((f"MaxUnpool{count}d", lambda count=count: Unpool(count), (x,)) for count, x in X.items()),
    (
        "FractionalMaxPool2d",
        lambda: nn.FractionalMaxPool2d(2, 3, _random_samples=_SAMPLES[:, :, :2]),
        (X[2],),
    ),
    ("FractionalMaxPool3d", lambda: nn.FractionalMaxPool3d(2, 2, _random_samples=_SAMPLES), (X[3],)),
    *of_each("PixelShuffle PixelUnshuffle ChannelShuffle Unfold", X[2], 2),
    *of_each("Fold", real(2, 8, 4), (4, 4), 2, stride=2),
    *of_each("UpsamplingNearest2d UpsamplingBilinear2d", X[2], scale_factor=2),
    *(
        (f"Upsample {mode}", lambda mode=mode: nn.Upsample(scale_factor=2, mode=mode), (X[count],))
        for mode, count in (
            ("linear", 1),
            ("nearest-exact", 2),
            ("bicubic", 2),
            ("trilinear", 3),
            ("area", 3),
        )
    ),
    *of_each("LocalResponseNorm CrossMapLRN2d", X[2], 2),
    *of_each("GroupNorm", X[2], 2, 4),
)
LAYERS = (
    *of_each("Linear", X[1], 8, 5),
    ("Bilinear", lambda: nn.Bilinear(6, 6, 3), (ROWS, OTHER)),
    *of_each("LayerNorm RMSNorm", X[1], 8),
    *of_each("Embedding", numbers(9, 4, 3), 9, 5, padding_idx=1, max_norm=1.0),
    *(
        (f"EmbeddingBag {mode}", lambda mode=mode: nn.EmbeddingBag(9, 4, mode=mode), (numbers(9, 4, 3),))
        for mode in ("sum", "mean", "max")
    ),
    *of_each("RNN LSTM GRU", X[1], 8, 3, num_layers=2, bidirectional=True),
    *of_each("RNNCell LSTMCell GRUCell", ROWS, 6, 3),
    *(
        (f"{kind.__name__} packed", lambda kind=kind: Packed(kind), (X[1],))
        for kind in (nn.RNN, nn.LSTM, nn.GRU)
    ),
    ("LSTM projected", lambda: nn.LSTM(8, 5, proj_size=3), (X[1],)),
    ("MultiheadAttention", lambda: nn.MultiheadAttention(8, 2, batch_first=True), (X[1],) * 3),
    *of_each("TransformerEncoderLayer", X[1], 8, 2, 6, 0.0, batch_first=True),
    ("TransformerDecoderLayer", lambda: nn.TransformerDecoderLayer(8, 2, 6, 0.0), (X[1],) * 2),
    (
        "TransformerEncoder",
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 6, 0.0, batch_first=True), 1),
        (X[1],),
    ),
    (
        "TransformerDecoder",
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 6, 0.0), 1),
        (X[1],) * 2,
    ),
    ("Transformer", lambda: nn.Transformer(8, 2, 1, 1, 6, 0.0, batch_first=True), (X[1],) * 2),
)
LOSSES: tuple[Case, ...] = (
    *(
        (name, getattr(nn, name), (ROWS, OTHER))
        for name in (
            [
                "L1Loss",
                "MSELoss",
                "SmoothL1Loss",
                "HuberLoss",
                "PoissonNLLLoss",
                "CosineSimilarity",
                "PairwiseDistance",
            ]
        )
    ),
    ("BCELoss", nn.BCELoss, (SHARES, ROWS.sigmoid())),
    ("BCEWithLogitsLoss", nn.BCEWithLogitsLoss, (ROWS, SHARES)),
    ("KLDivLoss", lambda: nn.KLDivLoss(reduction="batchmean"), (ROWS, SHARES)),
    ("CrossEntropyLoss", lambda: nn.CrossEntropyLoss(SHARES[0], label_smoothing=0.1), (ROWS, CLASSES)),
    ("CrossEntropyLoss of shares", nn.CrossEntropyLoss, (ROWS, SHARES)),
    ("NLLLoss", nn.NLLLoss, (ROWS.log_softmax(1), CLASSES)),
    ("NLLLoss of images", nn.NLLLoss, (X[2].log_softmax(1), numbers(4, 2, 6, 6))),
    ("LinearCrossEntropyLoss", lambda: nn.LinearCrossEntropyLoss(6, 6), (ROWS, CLASSES)),
    ("GaussianNLLLoss", nn.GaussianNLLLoss, (ROWS, OTHER, SHARES)),
    ("MarginRankingLoss", nn.MarginRankingLoss, (ROWS[:, 0], OTHER[:, 0], SIGNS)),
    ("HingeEmbeddingLoss", nn.HingeEmbeddingLoss, (ROWS, numbers(2, 4, 6) * 2 - 1)),
    ("MultiLabelMarginLoss", nn.MultiLabelMarginLoss, (ROWS, torch.tensor([[1, 2, -1, 0, 0, 0]] * 4))),
    ("MultiLabelSoftMarginLoss", nn.MultiLabelSoftMarginLoss, (ROWS, numbers(2, 4, 6))),
    ("SoftMarginLoss", nn.SoftMarginLoss, (ROWS, numbers(2, 4, 6) * 2 - 1)),
    ("MultiMarginLoss", nn.MultiMarginLoss, (ROWS, CLASSES)),
    ("CosineEmbeddingLoss", nn.CosineEmbeddingLoss, (ROWS, OTHER, SIGNS.long())),
    ("TripletMarginLoss", nn.TripletMarginLoss, (ROWS, OTHER, SHARES)),
    ("TripletMarginWithDistanceLoss", nn.TripletMarginWithDistanceLoss, (ROWS, OTHER, SHARES)),
    (
        "CTCLoss",
        nn.CTCLoss,
        (real(7, 2, 5).log_softmax(2), numbers(4, 2, 3) + 1, torch.tensor([7, 6]), torch.tensor([3, 2])),
    ),
    ("AdaptiveLogSoftmaxWithLoss", lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 6, [2, 4], 2.0), (ROWS, CLASSES)),
)
CASES: tuple[Case, ...] = (*ACTIVATIONS, *SPATIAL, *LAYERS, *LOSSES)
#: Classes that are not among the cases, and why.
ELSEWHERE = {
    "Dropout": "their numbers are those of every mesh, not torch's: tests/numerics/test_random.py",
    "RReLU": "random as well",
    "Lazy": "they become their namesake at the first call",
    "Module Sequential ModuleList ModuleDict ParameterList ParameterDict Container": "hold modules",
    "DataParallel SyncBatchNorm": "need several devices of torch",
    "NLLLoss2d": "an old name of NLLLoss",
    "RNNBase RNNCellBase LinearCrossEntropyOptions": "are no modules of their own",
    "Buffer Parameter UninitializedBuffer UninitializedParameter": "are no modules",
}


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors in what a module returns."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, tuple | list) else []


def run(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], ...]:
    """What a module gives, the gradients of its inputs and parameters, and its buffers afterwards."""
    made = leaves(module(*args))
    score: Any = 0
    for leaf in made:
        if leaf.requires_grad:
            score = (
                leaf * torch.linspace(0.5, 1.5, leaf.shape[-1] if leaf.ndim else 1).to(leaf.device)
            ).sum() + score
    score.backward()
    gradients = [t.grad for t in (*args, *module.parameters()) if t.grad is not None]
    return made, gradients, list(module.buffers())


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].replace(" ", "_"))
def test_modules_equal_torch(cluster: dtorch.Cluster, case: Case) -> None:
    _, make, args = case
    torch.manual_seed(5)
    module = make()
    twin = copy.deepcopy(module).to("dtorch")
    ours, plain = (
        [t.detach().to(device).requires_grad_(t.is_floating_point() and i == 0) for i, t in enumerate(args)]
        for device in ("dtorch", "cpu")
    )
    got, want = run(twin, tuple(ours)), run(module, tuple(plain))
    for mine, theirs in zip(got, want, strict=True):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-5)


def test_every_module_has_a_case() -> None:
    """A module of a new torch must be looked at."""
    named = {name.split()[0] for name, _, _ in CASES}
    excused = [prefix for names in ELSEWHERE for prefix in names.split()]
    classes = [name for name in nn.modules.__all__ if not re.search("Dropout|^Lazy", name)]
    assert not set(classes) - named - set(excused)
