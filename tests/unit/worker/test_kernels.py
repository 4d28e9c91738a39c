"""Names of ops to functions: torch's, the quick bindings that stand for them, and our own."""

from __future__ import annotations

import itertools

import pytest
import torch

from dtorch_runtime.worker import (
    fast_bindings,
    shard_kernels as _shard_kernels,  # noqa: F401  registers its kernels
)
from dtorch_runtime.worker.failures import InternalFailure
from dtorch_runtime.worker.kernels import find_kernel

T = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])
B = torch.tensor([[True, False, True], [False, False, True]])
ROWS = torch.tensor([1, 0])

#: Arguments for each operator that has a quick binding, beyond those that take one tensor.
_SAMPLES = {
    "aten::addmm.default": (torch.ones(2), T, T.t()),
    "aten::all.default": (B,),
    "aten::any.default": (B,),
    "aten::argmax.default": (T, 1, True),
    "aten::bitwise_and.Tensor": (B, ~B),
    "aten::bitwise_or.Tensor": (B, ~B),
    "aten::bmm.default": (T[None], T.t()[None]),
    "aten::cat.default": ([T, T], 1),
    "aten::clamp.default": (T, -1, 2),
    "aten::clamp_.default": (T, -1, 2),
    "aten::cumsum.default": (T, 1),
    "aten::embedding.default": (T, ROWS, -1, False, False),
    "aten::expand.default": (T, [2, 2, 3]),
    "aten::fill_.Scalar": (T, 3),
    "aten::index_select.default": (T, 1, ROWS),
    "aten::isfinite.default": (T,),
    "aten::bitwise_not.default": (B,),
    "aten::linear.default": (T, T, torch.ones(2)),
    "aten::softmax.int": (T, 1),
    "aten::matmul.default": (T, T.t()),
    "aten::logical_and.default": (B, ~B),
    "aten::logical_not.default": (B,),
    "aten::logical_or.default": (B, ~B),
    "aten::masked_fill.Scalar": (T, B, 7),
    "aten::masked_fill_.Scalar": (T, B, 7),
    "aten::mean.dim": (T, [1], True),
    "aten::mm.default": (T, T.t()),
    "aten::permute.default": (T, [1, 0]),
    "aten::mul_.Scalar": (T, 2),
    "aten::pow.Tensor_Scalar": (T, 2),
    "aten::pow_.Scalar": (T, 2),
    "aten::select.int": (T, 1, 2),
    "aten::split_with_sizes.default": (T, [1, 2], 1),
    "aten::squeeze.dim": (T[None], 0),
    "aten::stack.default": ([T, T], 1),
    "aten::sum.dim_IntList": (T, [0], True),
    "aten::transpose.int": (T, 0, 1),
    "aten::tril.default": (T, -1),
    "aten::triu.default": (T, 1),
    "aten::unsqueeze.default": (T, 1),
    "aten::view.default": (T, [3, 2]),
    "aten::view_as_real.default": (torch.complex(T, -T),),
    "aten::where.self": (B, T, -T),
}
_WITH_NUMBER = ("eq.Scalar", "ge.Scalar", "gt.Scalar", "le.Scalar", "lt.Scalar", "ne.Scalar")
_WITH_TENSOR = frozenset(
    "add add_ sub sub_ mul mul_ div div_ eq ge gt le lt ne maximum minimum copy_ pow.Tensor_Tensor".split()  # noqa: SIM905
)


def _sample(name: str) -> tuple[object, ...]:
    bare = name.removeprefix("aten::")
    if name in _SAMPLES:
        return _SAMPLES[name]
    if bare in _WITH_NUMBER:
        return (T, 1)
    if bare in _WITH_TENSOR or bare.partition(".")[0] in _WITH_TENSOR:
        return (T, T.abs() + 1)
    return (T,)


def _copied(args: tuple[object, ...]) -> list[object]:
    return [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]


@pytest.mark.parametrize("name", sorted(fast_bindings._bindings))
def test_a_quick_binding_means_the_same(name):
    operator, _, overload = name.removeprefix("aten::").partition(".")
    slow = getattr(getattr(torch.ops.aten, operator), overload)
    args = _sample(name)
    expected, got = slow(*_copied(args)), fast_bindings.fast_binding(slow)(*_copied(args))
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=0, atol=0)


def test_every_listed_operator_has_a_binding():
    listed = (fast_bindings._FUNCTIONS + fast_bindings._METHODS).split()
    assert {f"aten::{name}" for name in listed} <= set(fast_bindings._bindings)


@pytest.mark.parametrize("name", ["aten::add", "aten::neg", "aten::neg.default", "aten::add.Scalar"])
def test_operators_of_torch_are_found(name):
    assert callable(find_kernel(name).function)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aten::no_such_op", "has no operator aten::no_such_op"),
        ("aten::add.NoSuchOverload", "has no operator aten::add.NoSuchOverload"),
        ("dtorch::no_such_op", "embedding_shard"),
        ("add", "no kernel add"),
        ("nowhere::add", "has no operator nowhere::add"),
    ],
)
def test_an_unknown_op_says_so(name, message):
    with pytest.raises(InternalFailure, match=message):
        find_kernel(name)


@pytest.mark.parametrize("cuts", [[0, 3, 7], [0, 7, 7], [0, 2, 5, 7]])
def test_shards_of_a_vocabulary_add_up_to_the_embedding(cuts):
    weight = torch.randn(7, 4)
    indices = torch.tensor([[0, 6, 3], [2, 2, 5]])
    look_up = find_kernel("dtorch::embedding_shard").function
    parts = [look_up(weight[a:b], indices, a) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.stack(parts).sum(0), torch.embedding(weight, indices))
