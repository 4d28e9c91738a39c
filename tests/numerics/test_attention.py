"""Attention with heads cut unevenly, in groups, with masks and empty pieces; and the chain around it."""

from __future__ import annotations

import pytest
import torch

from dtorch_runtime.errors import PlacementError, UnsupportedError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from tests.support.simulated_mesh import Sharded, gather, run, shard

aten = torch.ops.aten
attention = aten.scaled_dot_product_attention.default
TWO, THREE, FIVE = (DeviceMesh("cpu", list(range(n))) for n in (2, 3, 5))


@pytest.mark.parametrize("mesh", [TWO, THREE, FIVE], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_groups_of_heads(mesh: DeviceMesh, is_causal: bool) -> None:
    """9 query heads share 3 key/value heads; on five devices two have no head at all."""
    query, key, value = torch.randn(2, 9, 4, 8), torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8)
    want = attention(query, key, value, None, 0.0, is_causal, enable_gqa=True)
    q = shard(query, mesh, [Shard(1, unit=3)])
    k, v = (shard(t, mesh, [Shard(1)]) for t in (key, value))
    got = run(attention, q, k, v, None, 0.0, is_causal, enable_gqa=True)
    assert got.layout.placements == (Shard(1, unit=3),)
    torch.testing.assert_close(gather(got), want)


def test_cuts_inside_a_group_are_refused_with_the_unit_to_use() -> None:
    q = shard(torch.randn(2, 9, 4, 8), TWO, [Shard(1)])
    k, v = (shard(torch.randn(2, 3, 4, 8), TWO, [Shard(1)]) for _ in range(2))
    with pytest.raises(PlacementError, match="cut at different places"):
        run(attention, q, k, v, None, 0.0, False, enable_gqa=True)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("mask_shape", [(4, 6), (1, 1, 4, 6), (2, 1, 4, 6), (2, 4, 4, 6)])
def test_whole_masks_are_cut_where_they_are_not_broadcast(
    placement: Placement, mask_shape: tuple[int, ...]
) -> None:
    query, key, value = torch.randn(2, 4, 4, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    mask = torch.randn(mask_shape)
    got = run(
        attention,
        *(shard(t, THREE, [placement]) for t in (query, key, value)),
        shard(mask, THREE, [Replicate()]),
    )
    torch.testing.assert_close(gather(got), attention(query, key, value, mask))


def test_batch_and_heads_on_two_axes() -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    query, key, value = (torch.randn(3, 4, 5, 8) for _ in range(3))
    got = run(attention, *(shard(t, mesh, [Shard(0), Shard(1)]) for t in (query, key, value)))
    torch.testing.assert_close(gather(got), attention(query, key, value))


def test_dropout_inside_attention_says_what_to_write() -> None:
    q = shard(torch.randn(1, 2, 3, 4), TWO, [Replicate()])
    with pytest.raises(UnsupportedError, match="softmax"):
        run(attention, q, q, q, None, 0.5)


def heads(x: Sharded, weight: Sharded, features: int) -> Sharded:
    """[batch, length, hidden] -> [batch, heads, length, features]."""
    projected = run(aten.linear.default, x, weight)
    batch, length, _ = projected.spec.shape
    split = run(aten.view.default, projected, [batch, length, -1, features])
    return run(aten.transpose.int, split, 1, 2)


@pytest.mark.parametrize("mesh", [TWO, THREE], ids=str)
def test_a_block_of_a_language_model(mesh: DeviceMesh) -> None:
    """Column-parallel projections, heads repeated as Hugging Face does it, row-parallel output: one partial sum."""
    hidden, features, num_heads, num_groups = 24, 4, 6, 3
    x = torch.randn(2, 5, hidden)
    w_q, w_o = torch.randn(num_heads * features, hidden), torch.randn(hidden, num_heads * features)
    w_k, w_v = (torch.randn(num_groups * features, hidden) for _ in range(2))

    def block(x: Sharded, w_q: Sharded, w_k: Sharded, w_v: Sharded, w_o: Sharded) -> Sharded:
        q, k, v = (heads(x, w, features) for w in (w_q, w_k, w_v))
        k, v = (repeat(t) for t in (k, v))
        out = run(attention, q, k, v, None, 0.0, True)
        out = run(aten.transpose.int, out, 1, 2)
        out = run(aten.clone.default, out, memory_format=torch.contiguous_format)
        return run(aten.linear.default, run(aten.view.default, out, [2, 5, -1]), w_o)

    def repeat(t: Sharded) -> Sharded:
        batch, groups, length, size = t.spec.shape
        times = num_heads // num_groups
        t = run(aten.expand.default, run(aten.unsqueeze.default, t, 2), [batch, groups, times, length, size])
        t = run(aten.clone.default, t, memory_format=torch.contiguous_format)
        return run(aten._unsafe_view.default, t, [batch, groups * times, length, size])

    one = DeviceMesh("cpu", [0])
    want = block(*(shard(t, one, [Replicate()]) for t in (x, w_q, w_k, w_v, w_o)))
    unit = features * num_heads // num_groups
    got = block(
        shard(x, mesh, [Replicate()]),
        shard(w_q, mesh, [Shard(0, unit=unit)]),
        shard(w_k, mesh, [Shard(0, unit=features)]),
        shard(w_v, mesh, [Shard(0, unit=features)]),
        shard(w_o, mesh, [Shard(1, unit=unit)]),
    )
    assert got.layout.placements == (Partial("sum"),)
    torch.testing.assert_close(gather(got), gather(want), rtol=1e-4, atol=1e-4)
