"""What is run: entries of the operator database, their samples, and the placements of a sample's tensors."""

from __future__ import annotations

import copy
import itertools
import math
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy
import torch
import torch.testing._internal.common_methods_invocations as database
from torch.utils import _pytree as pytree

from dtorch_runtime.ir.placement import Placements, Replicate, Shard

T = TypeVar("T")

#: Sizes that two devices divide, nested twice as well.
_EVEN_SIZES = {"L": 24, "M": 12, "S": 4, "XS": 2}
_STOCK_S = 5
#: They have constants that fit the stock sizes: with others torch reads outside of a tensor, and gives what lies there.
_STOCK_ONLY = frozenset({"_segment_reduce.lengths", "_segment_reduce.offsets"})
#: Where the random numbers of samples begin, for each entry anew: an entry has the same samples in every run.
_SAMPLE_SEED = 20
#: The first samples of an entry are quick to make and varied enough for a glance at each.
_NUM_EARLY = 6
#: Of these gradients are compared, where a run has them.
GRADIENT_DTYPES = ("float32", "float64", "complex64", "complex128")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run measures."""

    mode: str = "strict"
    is_uneven: bool = False
    with_grad: bool = True
    #: Sizes of the mesh's axes.
    mesh_shape: tuple[int, ...] = (2,)
    #: Name of the dtype that samples are made of.
    dtype: str = "float32"
    #: Checks of each entry, drawn among all its samples and combinations; None for every one.
    checks_per_entry: int | None = None
    seed: int = 0

    @property
    def num_samples(self) -> int:
        """Samples of an entry at most."""
        return 8 if self.is_uneven else 12

    @property
    def num_combinations(self) -> int:
        """Combinations of a sample at most."""
        return 16 if self.is_uneven else 32

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that samples are made of."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@contextmanager
def even_sizes() -> Iterator[None]:
    """Other size constants in every module of the database."""
    modules = [database] + [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch.testing._internal.opinfo.") and getattr(module, "S", None) == _STOCK_S
    ]
    before = [
        (module, {name: getattr(module, name) for name in _EVEN_SIZES if hasattr(module, name)})
        for module in modules
    ]
    try:
        for module, names in before:
            for name in names:
                setattr(module, name, _EVEN_SIZES[name])
        yield
    finally:
        for module, names in before:
            for name, value in names.items():
                setattr(module, name, value)


def key_of(entry: Any) -> str:
    """The name of an entry, with its variant."""
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else str(entry.name)


def entries(run: Run) -> dict[str, Any]:
    """Every entry that takes the run's dtype, by name."""
    return _entries(run.torch_dtype)


@cache
def _entries(dtype: torch.dtype) -> dict[str, Any]:
    return {key_of(e): e for e in database.op_db if dtype in e.supported_dtypes("cpu")}


class Sample:
    """The arguments of one call, flattened. A sample makes fresh copies of its tensors for each call."""

    def __init__(self, leaves: Sequence[Any], spec: Any) -> None:
        self.leaves = leaves
        self._spec = spec
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    @property
    def is_usable(self) -> bool:
        """Whether it has tensors, all of a kind that can be distributed."""
        return bool(self.tensors) and all(
            t.layout is torch.strided
            and not (t.is_quantized or t.is_nested or t.is_neg() or t.is_conj() or t.device.type == "meta")
            for t in self.tensors
        )

    @property
    def has_generator(self) -> bool:
        """Whether a generator is among its arguments."""
        return any(isinstance(leaf, torch.Generator) for leaf in self.leaves)

    def without_grad(self) -> Sample:
        """The same without ``requires_grad``."""
        return self.with_leaves([x.detach() if isinstance(x, torch.Tensor) else x for x in self.leaves])

    def with_leaves(self, leaves: Sequence[Any]) -> Sample:
        """The same with other values in its places."""
        return Sample(leaves, self._spec)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments, with these tensors in place of the sample's."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) else _fresh_constant(x) for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def fresh_tensors(self) -> list[torch.Tensor]:
        """Copies of its tensors, leaves of autograd."""
        return [_fresh(t) for t in self.tensors]


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    made = copy.deepcopy(tensor.detach())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _fresh_constant(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()  # drawing from it must not change what the next call draws
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value


def samples(entry: Any, run: Run, limit: int | None = None) -> list[Sample]:
    """The first samples of an entry, the same in every run; fewer where making the next one fails at these sizes."""
    count = run.num_samples if limit is None else limit
    torch.default_generator.manual_seed(_SAMPLE_SEED)
    random.seed(_SAMPLE_SEED)
    numpy.random.seed(_SAMPLE_SEED)
    made: list[Sample] = []
    keeps_sizes = run.is_uneven or key_of(entry) in _STOCK_ONLY
    with warnings.catch_warnings(), nullcontext() if keeps_sizes else even_sizes():
        warnings.simplefilter("ignore")
        # Not through sample_inputs(), which looks at the whole stack for each sample to name the test it is in.
        found = iter(entry.sample_inputs_func(entry, "cpu", run.torch_dtype, run.dtype in GRADIENT_DTYPES))
        while len(made) < count:
            try:
                sample = next(found)
            except (StopIteration, RuntimeError, IndexError):
                break
            leaves, spec = pytree.tree_flatten(([sample.input, *sample.args], sample.kwargs))
            made.append(Sample(leaves, spec))
    return made


def choices(tensor: torch.Tensor, run: Run) -> list[Placements]:
    """Every placement of a tensor that a run allows, replicated first."""
    dims = [] if tensor.dtype is torch.bool else [d for d, size in enumerate(tensor.shape) if size > 1]
    axis_choices = [Replicate(), *map(Shard, dims)]
    return [
        placements
        for placements in itertools.product(axis_choices, repeat=len(run.mesh_shape))
        if run.is_uneven or all(tensor.shape[dim] % _cuts(placements, dim, run) == 0 for dim in dims)
    ]


def _cuts(placements: Placements, dim: int, run: Run) -> int:
    return math.prod(n for p, n in zip(placements, run.mesh_shape) if isinstance(p, Shard) and p.dim == dim)


def combinations(sample: Sample, run: Run) -> list[tuple[Placements, ...]]:
    """The combinations of a sample that are checked: all replicated, then a seeded draw in order."""
    options = [choices(t, run) for t in sample.tensors]
    count = math.prod(map(len, options))
    numbers: Sequence[int] = range(count)
    if count > run.num_combinations:
        rng = random.Random(run.seed)
        numbers = [0, *sorted(rng.sample(range(1, count), run.num_combinations - 1))]
    return [_nth(options, number) for number in numbers]


def drawn(found: Sequence[Sample], run: Run, entry: str) -> list[tuple[int, tuple[Placements, ...]]]:
    """``checks_per_entry`` different pairs of a sample's index and a combination; fewer where there are fewer."""
    assert run.checks_per_entry is not None
    rng = random.Random(f"{run.seed}:{entry}")
    options = [[choices(t, run) for t in sample.tensors] for sample in found]
    counts = [math.prod(map(len, each)) for each in options]
    pairs: dict[tuple[int, int], None] = {}
    if sum(counts) <= run.checks_per_entry:
        pairs = dict.fromkeys(
            (index, number) for index, count in enumerate(counts) for number in range(count)
        )
    while len(pairs) < min(run.checks_per_entry, sum(counts)):
        index = rng.randrange(len(found))
        pairs[index, rng.randrange(counts[index])] = None
    return [(index, _nth(options[index], number)) for index, number in sorted(pairs)]


def one_of(entry: Any, run: Run, name: str) -> Iterator[tuple[Sample, tuple[Placements, ...]]]:
    """Combinations of early samples, drawn for this entry; a first one that serves is enough."""
    rng = random.Random(f"{run.seed}:{name}")
    made = samples(entry, run, rng.randrange(1, _NUM_EARLY + 1))
    for sample in reversed(made):
        if sample.is_usable:
            yield sample, tuple(rng.choice(choices(t, run)) for t in sample.tensors)


def _nth(options: Sequence[Sequence[T]], number: int) -> tuple[T, ...]:
    """An element of the product of ``options``, whose last factor runs fastest."""
    chosen = []
    for option in reversed(options):
        number, place = divmod(number, len(option))
        chosen.append(option[place])
    return tuple(reversed(chosen))
