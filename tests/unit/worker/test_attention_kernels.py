"""Blocks of attention: however queries and keys are cut, and whatever kernel does a block, they add up to all of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dtorch_runtime.worker import attention_kernels

attention_block: Any = attention_kernels.attention_block
attention_block_backward: Any = attention_kernels.attention_block_backward
HEADS, KEY_HEADS, FEATURES = 4, 2, 3
SCALE = 1 / math.sqrt(FEATURES)


def whole(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=SCALE, enable_gqa=True
    )


def runs(length: int, cuts: list[int]) -> list[tuple[int, int]]:
    """(start, size) of the pieces between cuts; some may be empty."""
    places = sorted(min(cut, length) for cut in cuts)
    return [(a, b - a) for a, b in zip([0, *places], [*places, length], strict=True)]


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    num_queries, num_keys = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    torch.manual_seed(draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from(["none", "causal", "bool", "added", "of keys"]))
    batch = draw(st.sampled_from([(), (2,), (2, 3)]))
    visible = torch.rand(num_queries, num_keys) > 0.4
    masks = {
        "bool": visible,
        "added": torch.randn(HEADS, num_queries, num_keys).masked_fill(~visible, -math.inf),
        "of keys": torch.rand(1, 1, num_keys) > 0.4,
    }
    cuts = st.lists(st.integers(0, 6), max_size=2)
    return {
        "query": torch.randn(*batch, HEADS, num_queries, FEATURES, dtype=torch.float64),
        "key": torch.randn(*batch, KEY_HEADS, num_keys, FEATURES, dtype=torch.float64),
        "value": torch.randn(
            *batch, KEY_HEADS, num_keys, draw(st.sampled_from([FEATURES, 2])), dtype=torch.float64
        ),
        "mask": masks[kind].double() if kind == "added" else masks.get(kind),
        "is_causal": kind == "causal",
        "queries": runs(num_queries, draw(cuts)),
        "keys": runs(num_keys, draw(cuts)),
        "fused": draw(st.booleans()),
    }


@given(problem=problems())
@settings(max_examples=25)
def test_blocks_add_up(problem: dict[str, Any]) -> None:
    """Values and derivatives, with rows that see nothing, blocks that are hidden, and pieces without elements."""
    query, key, value = (problem[name].requires_grad_() for name in ("query", "key", "value"))
    mask, is_causal = problem["mask"], problem["is_causal"]
    is_added = mask is not None and mask.is_floating_point()
    of_mask = torch.zeros_like(mask) if is_added else None
    wanted = (query, key, value, *([mask.requires_grad_()] if is_added else []))
    want = whole(query, key, value, mask, is_causal)
    gradient = torch.randn_like(want)
    grads = torch.autograd.grad(want, wanted, gradient)
    mask = mask.detach() if is_added else mask
    out, lse = torch.zeros_like(want), torch.full(query.shape[:-1], -math.inf, dtype=torch.float64)
    found = [torch.zeros_like(x) for x in (query, key, value)]
    query, key, value = query.detach(), key.detach(), value.detach()
    has_flash = attention_kernels._has_flash
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention_kernels, "_has_flash", has_flash if problem["fused"] else lambda *tensors: False
        )
        for q_start, q_size in problem["queries"]:
            own = [x.narrow(-2, q_start, q_size) for x in (query, out, gradient, found[0])]
            sums = lse.narrow(-1, q_start, q_size)
            rows, of_rows = (
                x if x is None or x.shape[-2] == 1 else x.narrow(-2, q_start, q_size) for x in (mask, of_mask)
            )
            kept = own[1].clone(), sums.clone()
            for number, (k_start, k_size) in enumerate(problem["keys"]):
                block = [x.narrow(-2, k_start, k_size) for x in (key, value)]
                place = (q_start, k_start, 0, is_causal, SCALE)
                attention_block(*kept, own[0], *block, rows, None, *place, number == 0)
            own[1].copy_(kept[0])
            sums.copy_(kept[1])
            for k_start, k_size in problem["keys"]:
                block = [x.narrow(-2, k_start, k_size) for x in (key, value)]
                parts = [own[3].clone(), *(x.narrow(-2, k_start, k_size).clone() for x in found[1:])]
                place = (q_start, k_start, 0, is_causal, SCALE)
                attention_block_backward(of_rows, *parts, *kept, own[2], own[0], *block, rows, None, *place)
                own[3].copy_(parts[0])
                for x, part in zip(found[1:], parts[1:], strict=True):
                    x.narrow(-2, k_start, k_size).copy_(part)
    torch.testing.assert_close(out, want)
    for got, expected in zip([*found, *([of_mask] if is_added else [])], grads, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_late_run_of_queries_sees_by_its_offset() -> None:
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    for offset in (-4, -1, 0, 2, 9):
        out, lse = torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3), -math.inf)
        attention_block(out, lse, query, key, key, None, None, 0, 0, offset, True, 0.5, True)
        visible = torch.ones(3, 5, dtype=torch.bool).tril(offset)
        scores = (query @ key.mT * 0.5).masked_fill(~visible, -math.inf)
        torch.testing.assert_close(out, scores.softmax(-1).nan_to_num(0) @ key)
        torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_bfloat16_is_summed_in_float32() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 64, 8, dtype=torch.bfloat16) for _ in range(3))
    out, lse = torch.zeros(1, 2, 64, 8), torch.full((1, 2, 64), -math.inf)
    for start in range(0, 64, 8):
        block = [x[:, :, start : start + 8] for x in (key, value)]
        attention_block(out, lse, query, *block, None, None, 0, start, 0, False, 0.5, start == 0)
    want = (query.float() @ key.float().mT * 0.5).softmax(-1) @ value.float()
    torch.testing.assert_close(out, want, rtol=0.02, atol=0.005)
