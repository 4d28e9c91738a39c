"""Philox blocks, where they go, and what distributions are made of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dtorch_runtime.worker import distributions as d
from dtorch_runtime.worker.philox import WORDS, encrypt, words
from dtorch_runtime.worker.positions import fill, part_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are small: more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


#: counter, key, result: kat_vectors of Random123 (philox 4x64, 10 rounds).
KNOWN_ANSWERS = [
    (
        [0, 0, 0, 0],
        [0, 0],
        [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B],
    ),
    (
        [0xFFFFFFFFFFFFFFFF] * 4,
        [0xFFFFFFFFFFFFFFFF] * 2,
        [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0],
    ),
    (
        [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
        [0x452821E638D01377, 0xBE5466CF34E90C6C],
        [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
    ),
]


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def test_known_answers_of_the_arithmetic() -> None:
    for counter, (first, second), expected in KNOWN_ANSWERS:
        a, b, c, d = (torch.tensor([signed(word)] * 3) for word in counter)
        for got, word in zip(encrypt((a, b, c, d), (first, second)), expected, strict=True):
            assert got.tolist() == [signed(word)] * 3


def test_known_answers_of_runs() -> None:
    (_, _, expected) = KNOWN_ANSWERS[0]
    assert words(0, 1, 0, CPU).view(torch.int64).tolist() == [signed(word) for word in expected]


@pytest.mark.parametrize("first", [0, 3, 1 << 40])
@pytest.mark.parametrize(("key", "draw"), [(0, 0), ((1 << 63) - 1, 0), (1 << 40, 7)])
def test_runs_and_blocks_here_and_there_are_the_same_stream(first: int, key: int, draw: int) -> None:
    """NumPy's generator and the arithmetic; short and long gaps, even and uneven."""
    one = words(first, 2000, key, CPU, draw).view(2000, WORDS)
    for starts, count in (
        ([0, 7, 9], 1),
        ([5], 31),
        ([0, 40, 80], 33),
        ([0, 900, 1800], 40),
        ([0, 50, 700], 40),
        ([0, 10, 20], 32),
    ):
        several = words(torch.tensor([first + start for start in starts]), count, key, CPU, draw)
        expected = torch.cat([one[start : start + count] for start in starts])
        assert torch.equal(several.view(-1, WORDS), expected)


def test_blocks_keys_and_draws_do_not_repeat() -> None:
    seen = [
        tuple(words(block, 1, key, CPU, draw).tolist())
        for block, key, draw in itertools.product((0, 1, 1 << 32), (0, 1, 1 << 32), (0, 1))
    ]
    assert len(set(seen)) == 18


# ------------------------------------------------------------------------------------------------- positions


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    shape = draw(st.lists(st.integers(1, 9), max_size=4))
    cuts = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
    return shape, [(low, high) for low, high in cuts]


@settings(max_examples=50, deadline=None)
@given(
    boxes(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]), st.booleans()
)
def test_a_box_holds_what_the_whole_holds_there(
    box: tuple[list[int], list[tuple[int, int]]], dtype: torch.dtype, reverse: bool
) -> None:
    shape, cuts = box
    numbers = d.normal(dtype.to_real())
    whole = torch.empty(shape, dtype=dtype)
    fill(whole, shape, [0] * len(shape), 5, numbers)
    order = list(range(len(shape)))[:: -1 if reverse else 1]
    piece = torch.empty_permuted([high - low for low, high in cuts], order, dtype=dtype)
    fill(piece, shape, [low for low, _ in cuts], 5, numbers)
    assert torch.equal(piece, whole[tuple(slice(low, high) for low, high in cuts)])


@settings(max_examples=50, deadline=None)
@given(boxes(), st.data())
def test_indices_of_a_box(box: tuple[list[int], list[tuple[int, int]]], data: st.DataObject) -> None:
    shape, cuts = box
    expected = torch.arange(math.prod(shape)).view(shape)[tuple(slice(a, b) for a, b in cuts)].reshape(-1)
    if len(expected):
        part = part_of(shape, [low for low, _ in cuts], [high - low for low, high in cuts])
        start = data.draw(st.integers(0, len(expected) - 1))
        stop = data.draw(st.integers(start + 1, len(expected)))
        assert torch.equal(part.indices(start, stop, CPU), expected[start:stop])


@pytest.mark.parametrize(("rows", "columns"), [(3, 150_000), (70_001, 3), (300, 1000), (1, 300_003)])
@pytest.mark.parametrize("numbers", [d.uniform(torch.float32), d.integers(-5, 1 << 40)])
def test_tensors_of_many_chunks(rows: int, columns: int, numbers: d.Distribution) -> None:
    dtype = torch.float32 if numbers.per_block == WORDS else torch.int64
    whole, piece = torch.empty(rows, columns, dtype=dtype), torch.empty(rows, columns - 1, dtype=dtype)
    fill(whole, [rows, columns], [0, 0], 5, numbers)
    fill(piece, [rows, columns], [0, 1], 5, numbers)
    assert torch.equal(piece, whole[:, 1:])
    repeats = whole.numel() - whole.unique().numel()
    size = 1 << 24 if dtype is torch.float32 else 1 << 40
    assert repeats < 1.2 * whole.numel() ** 2 / 2 / size + 5, "more than birthdays repeat"


# ------------------------------------------------------------------------------------------------- distributions

NUM = 20_000


def sample(numbers: d.Distribution, dtype: torch.dtype = torch.float64, key: int = 11) -> torch.Tensor:
    result = torch.empty(NUM, dtype=dtype)
    fill(result, [NUM], [0], key, numbers)
    return result


def distance(values: torch.Tensor, cdf: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Kolmogorov and Smirnov's, in units of its standard deviation; above 1.95 once in a thousand."""
    ordered = cdf(values.to(torch.float64).sort().values)
    steps = torch.arange(NUM + 1, dtype=torch.float64) / NUM
    furthest = torch.maximum((ordered - steps[:-1]).abs().max(), (ordered - steps[1:]).abs().max())
    return float(furthest) * math.sqrt(NUM)


def normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return torch.erfc(-x / math.sqrt(2)) / 2


CONTINUOUS: dict[
    str, tuple[Callable[[torch.dtype], d.Distribution], Callable[[torch.Tensor], torch.Tensor]]
] = {
    "uniform": (lambda t: d.uniform(t, -1.0, 3.0), lambda x: (x + 1) / 4),
    "normal": (lambda t: d.normal(t, 1.0, 2.0), lambda x: normal_cdf((x - 1) / 2)),
    "log_normal": (lambda t: d.log_normal(t, 1.0, 0.5), lambda x: normal_cdf((x.log() - 1) / 0.5)),
    "exponential": (lambda t: d.exponential(t, 2.0), lambda x: -torch.expm1(-2 * x)),
    "cauchy": (lambda t: d.cauchy(t, 1.0, 2.0), lambda x: 0.5 + ((x - 1) / 2).atan() / math.pi),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_distributions(name: str, dtype: torch.dtype) -> None:
    numbers, cdf = CONTINUOUS[name]
    values = sample(numbers(dtype), dtype)
    assert distance(values, cdf) < 1.95
    # Neighbours, and the two numbers that share a radius and an angle, do not depend on each other.
    ranks = values.argsort().argsort().to(torch.float64) / NUM - 0.5
    for lag in (1, 2, 3, 4):
        assert abs(float((ranks[lag:] * ranks[:-lag]).mean()) * 12) * math.sqrt(NUM) < 3.3
    assert distance(sample(numbers(dtype), dtype, key=12), cdf) < 1.95


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float64, 53), (torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)]
)
def test_uniform_numbers_have_all_bits_of_their_dtype_and_stay_below_one(
    dtype: torch.dtype, bits: int
) -> None:
    numbers = d.uniform(dtype)
    extremes = torch.tensor([0, -1, -(1 << 31), (1 << 31) - 1], dtype=torch.int32)
    if dtype is torch.float64:
        extremes = torch.tensor([-(1 << 63), (1 << 63) - 1]).view(torch.int32)
    made = numbers.of_words(extremes).to(dtype)
    assert made.min() == 0
    assert made.max() == 1 - 2.0**-bits
    scaled = sample(numbers, dtype).to(torch.float64) * 2.0**bits
    assert torch.equal(scaled, scaled.round())
    assert bool((scaled % 2 == 1).any())


@pytest.mark.parametrize("name", ["normal", "exponential", "log_normal", "cauchy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_words_give_finite_numbers(name: str, dtype: torch.dtype) -> None:
    words32 = torch.tensor([0, -1, -(1 << 31), (1 << 31) - 1, 1, 0, -1, 0], dtype=torch.int32)
    made = CONTINUOUS[name][0](dtype).of_words(words32)
    assert made.isfinite().all()
    if name == "exponential":
        assert (made > 0).all()


def test_tails_of_normal_numbers() -> None:
    smallest = torch.tensor([0, 0, 0, 0], dtype=torch.int32)
    assert float(d.normal(torch.float32).of_words(smallest).abs().max()) == pytest.approx(6.66, abs=0.01)


def test_integers_in_a_range() -> None:
    for low, count in ((-3, 7), (5, 1), (0, 1 << 16), (-(1 << 62), (1 << 63) - 1), (0, 100_000)):
        values = sample(d.integers(low, count), torch.int64)
        assert low <= int(values.min()) <= int(values.max()) < low + count
        middle = low + (count - 1) / 2
        spread = math.sqrt((count**2 - 1) / 12)
        mean = float((values.to(torch.float64) - middle).mean())
        assert abs(mean) <= 3.3 * spread / math.sqrt(NUM)
    counts = torch.bincount(sample(d.integers(0, 7), torch.int64), minlength=7)
    chi_squared = float(((counts - NUM / 7) ** 2 / (NUM / 7)).sum())
    assert chi_squared < 22.5


def test_all_64_bits() -> None:
    values = sample(d.integers(-(1 << 63), 1 << 64), torch.int64)
    for bit in range(64):
        share = float(((values >> bit) & 1).to(torch.float64).mean())
        assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(NUM)
    almost = d.integers(-(1 << 63), (1 << 64) - 5).of_words(torch.tensor([-1, -6, 5]).view(torch.int32))
    assert almost.tolist() == [(1 << 64) - 1 - ((1 << 64) - 5) - (1 << 63), (1 << 63) - 6, 5 - (1 << 63)]


@pytest.mark.parametrize("probability", [0.0, 1e-3, 0.3, 0.5, 1 - 1e-3, 1.0])
def test_bernoulli(probability: float) -> None:
    share = float(sample(d.bernoulli(probability)).mean())
    assert abs(share - probability) <= 4 * math.sqrt(probability * (1 - probability) / NUM)


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.99])
def test_geometric(probability: float) -> None:
    values = sample(d.geometric(torch.float32, probability))
    assert values.min() == 1
    spread = math.sqrt(1 - probability) / probability
    assert abs(float(values.mean()) - 1 / probability) < 4 * spread / math.sqrt(NUM)
