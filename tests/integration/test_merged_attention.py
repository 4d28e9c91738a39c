"""Queries that every device has and keys that are cut by sequence; rows that are added to a dim that is cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Replicate, Shard
from dtorch.cut_rows import appended, written
from tests.support.clusters import cluster_of
from tests.support.leaks import LeakWatch

R = Replicate()
attention: Any = F.scaled_dot_product_attention

#: The mesh, and the placements of keys; queries are whole where those cut the sequence.
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], list[Any]]] = {
    "ring=3": ((3,), ("ring_cp",), [Shard(2)]),
    "ulysses=4": ((4,), ("ulysses_cp",), [Shard(2)]),
    "ring=2 x ulysses=2": ((2, 2), ("ring_cp", "ulysses_cp"), [Shard(2), Shard(2)]),
    "dp=2 x ring=2 x tp=2": ((2, 2, 2), ("dp", "ring_cp", "tp"), [Shard(0), Shard(2), Shard(1)]),
}
#: (query heads, key heads, queries, keys, causal, mask)
CASES: list[tuple[int, int, int, int, bool, str | None]] = [
    (4, 4, 1, 9, False, None),
    (4, 2, 1, 2, False, None),
    (4, 2, 3, 9, False, "bool"),
    (4, 2, 3, 7, True, None),
    (4, 4, 5, 7, False, "of heads"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster(leak_watch: LeakWatch) -> Iterator[None]:
    yield from cluster_of(leak_watch, num_nodes=2, devices_per_node=4)


def mesh_of(name: str) -> tuple[dtorch.DeviceMesh, list[Any], list[Any]]:
    """The mesh, the placements of keys, and those of queries."""
    shape, names, cut = MESHES[name]
    mesh = dtorch.DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape), mesh_dim_names=names)
    return mesh, cut, [R if p == Shard(2) else p for p in cut]


def inputs(heads: int, key_heads: int, queries: int, keys: int, kind: str | None) -> list[Any]:
    torch.manual_seed(0)
    shapes = ((heads, queries), (key_heads, keys), (key_heads, keys))
    mask = {
        None: None,
        "bool": torch.rand(2, 1, queries, keys) > 0.3,
        "of heads": torch.randn(1, heads, queries, keys),
    }[kind]
    return [*(torch.randn(2, h, n, 8) for h, n in shapes), mask]


def placed(x: Any, mesh: dtorch.DeviceMesh, placements: Sequence[Any]) -> Any:
    return None if x is None else dtorch.from_torch(x, mesh, list(placements))


@pytest.mark.parametrize("name", MESHES)
def test_values_and_gradients_are_those_of_one_device(name: str) -> None:
    mesh, cut, whole = mesh_of(name)
    for heads, key_heads, queries, keys, is_causal, kind in CASES:
        plain = inputs(heads, key_heads, queries, keys, kind)
        options = {"is_causal": is_causal, "enable_gqa": heads != key_heads}
        ours = [placed(x, mesh, p) for x, p in zip(plain, (whole, cut, cut, [R] * mesh.ndim), strict=True)]
        want = attention(*plain, **options)
        with torch.no_grad():
            got = attention(*ours, **options)
        assert got.placements == tuple(whole)
        torch.testing.assert_close(got.to_torch(), want, rtol=1e-5, atol=1e-5)
        for x in (*plain[:3], *ours[:3]):
            x.requires_grad_()
        attention(*plain, **options).square().sum().backward()
        attention(*ours, **options).square().sum().backward()
        for mine, theirs in zip(ours[:3], plain[:3], strict=True):
            torch.testing.assert_close(mine.grad.to_torch(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MESHES)
def test_queries_alone_that_are_cut_may_be_causal(name: str) -> None:
    mesh, cut, whole = mesh_of(name)
    query, key, value, _ = inputs(4, 2, 7, 7, None)
    ours = [placed(x, mesh, p) for x, p in ((query, cut), (key, whole), (value, whole))]
    got = attention(*ours, is_causal=True, enable_gqa=True)
    assert got.placements == tuple(cut)
    want = attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got.to_torch(), want, rtol=1e-5, atol=1e-5)


def test_rows_that_see_no_key_give_zeros_and_lower_precision_stays() -> None:
    mesh, cut, whole = mesh_of("ring=3")
    query, key, value, _ = inputs(4, 4, 2, 7, None)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1] = False
    low = [x.bfloat16() for x in (query, key, value)]
    ours = [placed(x, mesh, p) for x, p in zip(low, (whole, cut, cut), strict=True)]
    got = attention(*ours, placed(mask, mesh, [R]))
    assert got.dtype is torch.bfloat16
    found = got.to_torch()
    torch.testing.assert_close(
        found[:, :, :1], attention(query[:, :, :1], key, value).bfloat16(), rtol=0.03, atol=0.03
    )
    assert not found[:, :, 1].any()


def test_what_moves_does_not_grow_with_the_keys() -> None:
    """A device that brought the keys together would hold all of them."""
    mesh, cut, whole = mesh_of("ulysses=4")
    key = dtorch.zeros(1, 4, 4096, 32, device_mesh=mesh, placements=cut)
    query = dtorch.zeros(1, 4, 1, 32, device_mesh=mesh, placements=whole)
    with torch.no_grad():
        attention(query, key, key).to_torch()
        dtorch.reset_peak_memory_stats()
        before = dtorch.memory_stats()[0].peak_bytes or 0
        try:
            attention(query, key, key).to_torch()
            longer = appended(key, query, 2)
            longer.sum().item()
            peak = dtorch.memory_stats()[0].peak_bytes or 0
        finally:
            dtorch.reset_peak_memory_stats(measure=False)
    part = key.numel() * 4 // 4
    assert peak - before < 2 * part


@pytest.mark.parametrize("name", MESHES)
def test_rows_are_added_and_written_where_a_dim_is_cut(name: str) -> None:
    mesh, cut, whole = mesh_of(name)
    for length in range(1, 12):
        for count in (1, 2, 5):
            x, new = torch.randn(2, 2, length, 3), torch.randn(2, 2, count, 3)
            got = appended(placed(x, mesh, cut), placed(new, mesh, whole), 2)
            assert got.placements == tuple(cut)
            assert torch.equal(got.to_torch(), torch.cat([x, new], 2))
            index = torch.randperm(length)[:count]
            rows = new[:, :, : len(index)]
            target = placed(x, mesh, cut)
            written(target, placed(index, mesh, [R] * mesh.ndim), placed(rows, mesh, whole), 2)
            assert torch.equal(target.to_torch(), x.index_copy(2, index, rows))


def test_added_rows_have_gradients() -> None:
    mesh, cut, whole = mesh_of("ring=2 x ulysses=2")
    x = placed(torch.randn(2, 2, 7, 3), mesh, cut).requires_grad_()
    new = placed(torch.randn(2, 2, 1, 3), mesh, whole).requires_grad_()
    appended(x, new, 2).square().sum().backward()
    for ours in (x, new):
        torch.testing.assert_close(ours.grad.to_torch(), 2 * ours.detach().to_torch())
