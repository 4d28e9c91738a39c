"""Attention that is differentiated as one op: values and gradients of plain PyTorch, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dtorch

R, S0, S1 = dtorch.Replicate(), dtorch.Shard(0), dtorch.Shard(1)
BATCH, HEADS, LENGTH, FEATURES = 3, 4, 5, 6


def inputs(key_heads: int = HEADS, num_keys: int = LENGTH, dtype: Any = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(BATCH, HEADS, LENGTH, FEATURES), *[(BATCH, key_heads, num_keys, FEATURES)] * 2]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def sent(tensors: list[torch.Tensor], mesh: dtorch.DeviceMesh, placements: Any) -> list[Any]:
    return [dtorch.from_torch(x.detach(), mesh, placements).requires_grad_() for x in tensors]


def derived(tensors: list[Any], weights: Any, **options: Any) -> list[torch.Tensor]:
    """The result of attention, and the gradients."""
    out = F.scaled_dot_product_attention(*tensors, **options)
    return [x.detach().cpu() for x in (out, *torch.autograd.grad((out * weights).sum(), tensors))]


def derived_twice(tensors: list[Any]) -> list[torch.Tensor]:
    """The gradients of the squares of gradients."""
    out = F.scaled_dot_product_attention(*tensors, is_causal=True)
    gradients = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    return [x.cpu() for x in torch.autograd.grad(sum(x.square().sum() for x in gradients), tensors)]


@pytest.mark.parametrize("placements", [(R, R), (S0, R), (R, S1), (S0, S1), (S1, S1)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": 0.3},
        {"is_causal": True, "key_heads": 2, "enable_gqa": True},
        {"num_keys": 7},
    ],
    ids=str,
)
def test_values_and_gradients(placements: Any, options: dict[str, Any], grid: dtorch.DeviceMesh) -> None:
    options = dict(options)
    sizes = {name: options.pop(name) for name in ("key_heads", "num_keys") if name in options}
    if sizes.get("key_heads") and placements == (S1, S1):
        pytest.skip("two key heads are not cut into four: strict mode refuses it")
    plain = inputs(**sizes)
    weights = torch.randn(BATCH, HEADS, LENGTH, FEATURES, dtype=torch.float64)
    ours = sent(plain, grid, placements)
    found = derived(ours, dtorch.from_torch(weights, grid, placements), **options)
    torch.testing.assert_close(found, derived(plain, weights, **options))
    assert "dtorch::attention_backward" in dtorch.Graph.default_graph().dump()


def test_it_is_differentiated_twice(mesh: dtorch.DeviceMesh) -> None:
    plain = inputs()
    with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels have no second derivative
        expected = derived_twice(plain)
    torch.testing.assert_close(derived_twice(sent(plain, mesh, [R])), expected)


def test_a_gradient_that_is_a_partial_sum_is_not_reduced_for_it(mesh: dtorch.DeviceMesh) -> None:
    plain = inputs()
    features = torch.randn(FEATURES, 8, dtype=torch.float64)
    seen: list[Any] = []
    for tensors, columns in (
        (plain, features),
        (sent(plain, mesh, [R]), dtorch.from_torch(features, mesh, [dtorch.Shard(1)])),
    ):
        inner = [x * 1 for x in tensors]
        out = F.scaled_dot_product_attention(*inner, is_causal=True) @ columns
        seen.append(torch.autograd.grad(out.square().sum(), inner))
    for x, y in zip(seen[1], seen[0], strict=True):
        assert x.placements == (dtorch.Partial("sum"),)
        torch.testing.assert_close(x.to_torch(), y)


def test_calls_that_are_made_of_several_ops(mesh: dtorch.DeviceMesh) -> None:
    plain = inputs()
    ours = sent(plain, mesh, [S0])
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask = dtorch.from_torch(visible, mesh)
    found = F.scaled_dot_product_attention(*ours, attn_mask=mask)
    torch.testing.assert_close(
        found.detach().cpu(), F.scaled_dot_product_attention(*plain, attn_mask=visible).detach()
    )
    values = dtorch.from_torch(torch.randn(BATCH, HEADS, LENGTH, 2, dtype=torch.float64), mesh, [S0])
    assert F.scaled_dot_product_attention(ours[0], ours[1], values).shape[-1] == 2
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(ours[0], ours[1][..., :2], ours[2])


def test_lower_precision(mesh: dtorch.DeviceMesh) -> None:
    plain = inputs(dtype=torch.bfloat16)
    ours = sent(plain, mesh, [S1])
    for tensors in (plain, ours):
        F.scaled_dot_product_attention(*tensors, is_causal=True).sum().backward()
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x.grad.to_torch(), y.grad)
