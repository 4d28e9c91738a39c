"""Attention over devices that each have a part of the sequence: the values and gradients of one device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

import dtorch
from dtorch import DeviceMesh, PlacementError, Replicate, Settings, Shard, ring_attention
from dtorch_runtime.local import LocalCluster, start_local_cluster
from tests.support.captured import replays
from tests.support.leaks import LeakWatch

attention: Any = F.scaled_dot_product_attention
R = Replicate()


@pytest.fixture(scope="module")
def processes(leak_watch: LeakWatch) -> Iterator[LocalCluster]:
    """Eight devices on two nodes."""
    before = leak_watch.snapshot()
    local = start_local_cluster(2, 4, Settings(num_threads=1))
    local.wait_ready()
    leak_watch.declare_baseline(before)
    yield local
    local.stop()


@pytest.fixture(autouse=True)
def eight_devices(processes: LocalCluster) -> Iterator[dtorch.Cluster]:
    with dtorch.connect(processes.address, session_key=processes.session_key) as cluster:
        yield cluster


@pytest.fixture(params=["small", "large"])
def ring_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What large sequences have: both ends of them on a device, and blocks that go round in parts."""
    if request.param == "large":
        monkeypatch.setattr(ring_attention, "_MIN_BALANCED", 1)
        monkeypatch.setattr(ring_attention, "_PART_BYTES", 1)
    clear_plans()
    yield request.param
    clear_plans()


def clear_plans() -> None:
    ring_attention._runs.cache_clear()
    ring_attention._parts.cache_clear()


def mesh_of(shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(*shape), mesh_dim_names=tuple(names))


def placed(x: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
    return dtorch.from_torch(x.detach(), mesh, list(placements))


def inputs(
    heads: int, key_heads: int, queries: int, keys: int, batch: int = 2, features: int = 8
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((heads, queries), (key_heads, keys), (key_heads, keys))
    return [torch.randn(batch, h, n, features) for h, n in shapes]


def test_a_mask_alone_may_want_a_gradient() -> None:
    """With a row for all queries, and a column for all keys."""
    mesh = mesh_of([2, 3], ["dp", "ring_cp"])
    tensors = inputs(4, 2, 7, 7)
    for shape in ((1, 1, 1, 7), (2, 1, 7, 1), (4, 7, 7), (1,)):
        plain = torch.randn(shape, requires_grad=True)
        on_mesh = placed(plain, mesh, [R, R]).requires_grad_()
        ours = [placed(x, mesh, [Shard(0), Shard(2)]) for x in tensors]
        attention(*tensors, plain, enable_gqa=True).square().sum().backward()
        attention(*ours, on_mesh, enable_gqa=True).square().sum().backward()
        assert on_mesh.grad is not None
        assert plain.grad is not None
        # What is added to all scores of a query changes nothing: such a derivative is a sum of what cancels out.
        torch.testing.assert_close(on_mesh.grad.to_torch(), plain.grad, rtol=1e-4, atol=1e-4)


def mask_of(kind: str | None, batch: int, heads: int, queries: int, keys: int) -> torch.Tensor | None:
    if kind is None:
        return None
    shapes = {
        "bool": (queries, keys),
        "added": (batch, 1, queries, keys),
        "of heads": (1, heads, queries, keys),
        "of keys": (batch, 1, 1, keys),
    }
    made = torch.randn(shapes[kind])
    return made > -0.5 if kind in ("bool", "of keys") else made


def close(got: Any, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.detach().to_torch(), want.detach(), rtol=1e-5, atol=1e-5)


def check(
    mesh: DeviceMesh, placements: Sequence[Any], tensors: Sequence[torch.Tensor], mask: Any, **options: Any
) -> None:
    """Without and with gradients, also of an added mask, against torch."""
    plain = [x.clone().requires_grad_() for x in tensors]
    is_added = mask is not None and mask.is_floating_point()
    plain_mask = mask.clone().requires_grad_() if is_added else mask
    want = attention(*plain, plain_mask, **options)
    gradient = torch.randn_like(want)
    want.backward(gradient)
    ours = [placed(x, mesh, placements).requires_grad_() for x in tensors]
    on_mesh = None if mask is None else placed(mask, mesh, [R] * mesh.ndim).requires_grad_(is_added)
    with torch.no_grad():
        close(attention(*ours, on_mesh, **options), want)
    got = attention(*ours, on_mesh, **options)
    assert got.placements == ours[0].placements
    close(got, want)
    got.backward(placed(gradient, mesh, placements))
    masks = ([on_mesh], [plain_mask]) if is_added else ([], [])
    for mine, theirs in zip([*ours, *masks[0]], [*plain, *masks[1]], strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        close(mine.grad, theirs.grad)


#: (query heads, key heads, queries, keys, causal, mask)
CASES: list[tuple[int, int, int, int, bool, str | None]] = [
    (4, 4, 8, 8, False, None),
    (4, 4, 8, 8, True, None),
    (4, 2, 7, 7, True, None),
    (4, 1, 16, 16, True, None),
    (6, 3, 5, 9, True, None),
    (4, 2, 9, 2, True, None),
    (4, 4, 7, 5, False, "bool"),
    (4, 1, 8, 8, False, "added"),
    (6, 2, 5, 9, False, "of heads"),
    (4, 4, 6, 6, False, "of keys"),
]


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        *(("ring_cp", n) for n in (1, 2, 3, 4)),
        *(("ulysses_cp", n) for n in (1, 2, 3, 4)),
        ("ulysess_cp", 2),
    ],
)
def test_an_axis(name: str, num_devices: int) -> None:
    mesh = mesh_of([num_devices], [name])
    for heads, key_heads, queries, keys, is_causal, kind in CASES:
        tensors = inputs(heads, key_heads, queries, keys)
        mask = mask_of(kind, 2, heads, queries, keys)
        check(mesh, [Shard(2)], tensors, mask, is_causal=is_causal, enable_gqa=heads != key_heads)


@pytest.mark.parametrize("num_devices", [2, 4, 6])
def test_kinds_of_rings(ring_kind: str, num_devices: int) -> None:
    mesh = mesh_of([num_devices], ["ring_cp"])
    for heads, key_heads, length, is_causal in ((4, 4, 12, True), (4, 2, 24, True), (6, 3, 13, False)):
        tensors = inputs(heads, key_heads, length, length)
        check(mesh, [Shard(2)], tensors, None, is_causal=is_causal, enable_gqa=heads != key_heads)


@pytest.mark.parametrize(
    ("shape", "names", "placements"),
    [
        ((2, 2), ("ulysses_cp", "ring_cp"), (Shard(2), Shard(2))),
        ((3, 2), ("ring_cp", "ulysses_cp"), (Shard(2), Shard(2))),
        ((2, 3), ("dp", "ring_cp"), (Shard(0), Shard(2))),
        ((2, 3), ("ring_cp", "dp"), (Shard(2), R)),
        ((2, 2, 2), ("dp", "ulysses_cp", "ring_cp"), (Shard(0), Shard(2), Shard(2))),
    ],
    ids=str,
)
def test_axes_together(ring_kind: str, shape: Any, names: Any, placements: Any) -> None:
    mesh = mesh_of(shape, names)
    for heads, key_heads, length, kind in (
        (4, 2, 8, None),
        (4, 4, 9, None),
        (4, 1, 9, "added"),
        (4, 2, 7, "of heads"),
    ):
        tensors, mask = inputs(heads, key_heads, length, length), mask_of(kind, 2, heads, length, length)
        check(mesh, placements, tensors, mask, is_causal=kind is None, enable_gqa=heads != key_heads)


def test_an_axis_of_one_device_cuts_no_heads() -> None:
    mesh = mesh_of((4, 1), ("tp", "ulysses_cp"))
    check(mesh, [Shard(1), Shard(2)], inputs(2, 2, 8, 8), None, is_causal=True)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (8, 2), (6, 3)])
def test_heads_that_are_cut_already(heads: int, key_heads: int) -> None:
    """Over tp too; six heads are 3 + 1 + 1 + 1 groups and less."""
    mesh = mesh_of((2, 2, 2), ("tp", "ulysses_cp", "ring_cp"))
    query, key, value = inputs(heads, key_heads, 9, 9)
    want = attention(query, key, value, is_causal=True, enable_gqa=True)
    cut = [Shard(1, heads // key_heads), Shard(2), Shard(2)]
    ours = [
        placed(query, mesh, cut),
        *(placed(x, mesh, [Shard(1), Shard(2), Shard(2)]) for x in (key, value)),
    ]
    got = attention(*ours, is_causal=True, enable_gqa=True)
    assert got.placements == tuple(cut)
    close(got, want)


@given(data=st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape(data: st.DataObject) -> None:
    draw = data.draw
    name, num_devices = draw(st.sampled_from(["ring_cp", "ulysses_cp"])), draw(st.integers(1, 4))
    key_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = key_heads * group
    if name == "ulysses_cp":
        num_devices = min(num_devices, heads)
    queries, keys = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["causal", None, "bool", "added", "of heads", "of keys"]))
    mask = None if kind == "causal" else mask_of(kind, 1, heads, queries, keys)
    check(
        mesh_of([num_devices], [name]),
        [Shard(2)],
        inputs(heads, key_heads, queries, keys, batch=1, features=draw(st.integers(1, 5))),
        mask,
        is_causal=kind == "causal",
        enable_gqa=group > 1,
    )


@pytest.mark.parametrize("shape", [(7, 8), (4, 7, 8), (2, 3, 4, 7, 8)], ids=str)
def test_other_numbers_of_dims(shape: tuple[int, ...]) -> None:
    tensors = [torch.randn(shape) for _ in range(3)]
    mesh = mesh_of([3], ["ring_cp"])
    check(mesh, [Shard(len(shape) - 2)], tensors, torch.rand(7, 7) > 0.4)


# ---- a model ----


class Block(nn.Module):
    """A transformer's block as anybody writes it."""

    def __init__(self, width: int = 16, num_heads: int = 4) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.num_heads = num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        q, k, v = (
            layer(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.other_norm(x))))


@pytest.mark.parametrize(
    ("ring_kind", "captured"), [("small", False), ("large", True)], indirect=["ring_kind"]
)
def test_a_transformer_trains_as_on_one_device(ring_kind: str, captured: bool) -> None:
    torch.manual_seed(0)
    mesh = mesh_of((2, 2, 2), ("dp", "ulysses_cp", "ring_cp"))
    plain = nn.Sequential(Block(), Block())
    with dtorch.Graph.default_graph().device_mesh_guard(mesh):
        ours = copy.deepcopy(plain).to("dtorch")
    for parameter in ours.parameters():  # each device has a term of its gradient
        parameter.register_hook(lambda gradient: gradient.redistribute(placements=[R, R, R]))
    x, target = torch.randn(2, 8, 16), torch.randn(2, 8, 16)
    cut = [Shard(0), Shard(1), Shard(1)]
    x_cut, target_cut = placed(x, mesh, cut), placed(target, mesh, cut)

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, ours)]
    our_step = dtorch.capture(step) if captured else step
    for _ in range(4):
        want = step(plain, optimizers[0], x, target)
        close(our_step(ours, optimizers[1], x_cut, target_cut), want)
    if captured:
        assert replays(our_step) >= 2


def test_without_gradients_in_lower_precision_and_with_a_mask_that_has_no_mesh() -> None:
    mesh = mesh_of([3], ["ring_cp"])
    tensors = inputs(4, 4, 7, 7)
    want = attention(*tensors, is_causal=True)
    ours = [placed(x, mesh, [Shard(2)]) for x in tensors]
    with torch.inference_mode():
        close(attention(*(placed(x, mesh, [Shard(2)]) for x in tensors), is_causal=True), want)
    visible = torch.ones(7, 7, dtype=torch.bool, device="dtorch").tril()
    close(attention(*ours, visible), want)
    with torch.autocast("dtorch", dtype=torch.bfloat16):
        low = attention(*(x.requires_grad_() for x in ours), is_causal=True)
    assert low.dtype is torch.bfloat16
    torch.testing.assert_close(low.detach().to_torch().float(), want, rtol=0.03, atol=0.03)


def dropped(shape: Sequence[int], names: Sequence[str], placements: Sequence[Any], kind: str) -> list[Any]:
    """The results of two calls with a dropout, and the gradients of the first."""
    mesh, (heads, length) = mesh_of(shape, names), (4, 8)
    tensors, mask = inputs(heads, 2, length, length), mask_of(kind or None, 2, heads, length, length)
    dtorch.manual_seed(3)
    ours = [placed(x, mesh, placements).requires_grad_() for x in tensors]
    on_mesh = None if mask is None else placed(mask, mesh, [R] * mesh.ndim)
    options = {"dropout_p": 0.4, "is_causal": mask is None, "enable_gqa": True}
    out = attention(*ours, on_mesh, **options)
    out.backward(placed(torch.ones(2, heads, length, 8), mesh, placements))
    with torch.no_grad():
        again = attention(*ours, on_mesh, **options)
    return [x.detach().to_torch() for x in (out, again, *(x.grad for x in ours))]


@pytest.mark.parametrize("kind", ["", "of heads"], ids=["causal", "mask"])
def test_a_dropout_draws_the_numbers_of_one_device(ring_kind: str, kind: str) -> None:
    """There it is what torch makes of it."""
    want = dropped([1], ["tp"], [R], kind)
    assert not torch.equal(want[0], want[1]), "each call draws its own"
    for shape, names, placements in (
        ([2], ["ulysses_cp"], [Shard(2)]),
        ([4], ["ring_cp"], [Shard(2)]),
        ([3], ["ring_cp"], [Shard(2)]),
        ([2, 2, 2], ["dp", "ring_cp", "tp"], [Shard(0), Shard(2), Shard(1)]),
        ([2, 2], ["ring_cp", "ulysses_cp"], [Shard(2), Shard(2)]),
    ):
        found = dropped(shape, names, placements, kind)
        for ours, theirs in zip(found, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=str((shape, names)))


def test_a_replayed_dropout_draws_new_numbers_forward_and_the_same_backward() -> None:
    mesh = mesh_of([2], ["ring_cp"])
    value = placed(torch.eye(8).expand(1, 1, 8, 8), mesh, [Shard(2)])  # what comes out are the weights
    query, key = (placed(torch.zeros(1, 1, 8, 8), mesh, [Shard(2)]) for _ in range(2))

    @dtorch.capture
    def step(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = value.detach().requires_grad_()
        out = attention(query, key, value, dropout_p=0.5)
        (gradient,) = torch.autograd.grad(out.sum(), value)
        return out.detach(), gradient

    seen = []
    for _ in range(4):
        out, gradient = (x.to_torch() for x in step(value))
        torch.testing.assert_close(
            gradient[0, 0, :, 0], out[0, 0].sum(0)
        )  # each key's weights, of all queries
        seen.append(out)
    assert replays(step) >= 2
    assert not any(torch.equal(a, b) for a, b in zip(seen, seen[1:], strict=False))


# ---- memory ----


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("num_devices", "is_balanced"), [(2, False), (4, False), (4, True)])
def test_a_device_holds_its_part_and_little_more(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, is_balanced: bool, trains: bool
) -> None:
    monkeypatch.setattr(ring_attention, "_MIN_BALANCED", 1 if is_balanced else 10**9)
    clear_plans()

    def peak(num: int) -> int:
        mesh = mesh_of([num], ["ring_cp"])
        tensors = [
            dtorch.zeros(1, 8, 1024, 64, device_mesh=mesh, placements=[Shard(2)]).requires_grad_(trains)
            for _ in range(3)
        ]
        gradient = dtorch.zeros(1, 8, 1024, 64, device_mesh=mesh, placements=[Shard(2)]) if trains else None
        dtorch.reset_peak_memory_stats()
        out = attention(*tensors, is_causal=True)
        if trains:
            out.backward(gradient)
        return max(dtorch.memory_stats()[device].peak_bytes or 0 for device in range(num))

    try:
        assert peak(num_devices) <= 1.3 / num_devices * peak(1)
    finally:
        dtorch.reset_peak_memory_stats(measure=False)
        clear_plans()


# ---- mistakes ----


def mistakes() -> dict[str, tuple[Callable[[], Any], type[Exception], str]]:
    ring, ulysses = mesh_of([3], ["ring_cp"]), mesh_of([6], ["ulysses_cp"])
    x = torch.randn(2, 4, 6, 8)
    cut, whole = placed(x, ring, [Shard(2)]), placed(x, ring, [R])
    mask = torch.zeros(6, 6)
    many = placed(x, ulysses, [Shard(2)])
    by_batch = placed(x, ring, [Shard(0)])
    return {
        "keys are whole": (
            lambda: attention(cut, whole, cut),
            PlacementError,
            r"key = key.redistribute_by_dict\({'ring_cp': Shard\(2\)}\)",
        ),
        "values are whole": (
            lambda: attention(whole, cut, whole),
            PlacementError,
            "value = value.redistribute",
        ),
        "queries are cut elsewhere": (
            lambda: attention(by_batch, cut, cut),
            PlacementError,
            r"got query S\(0\), key",
        ),
        "too few heads": (lambda: attention(many, many, many), PlacementError, "4 cannot be cut into 6"),
        "no heads": (
            lambda: attention(*[placed(torch.randn(6, 8), ulysses, [Shard(0)])] * 3),
            PlacementError,
            "1 cannot be cut",
        ),
        "a mask cut by keys": (
            lambda: attention(cut, cut, cut, placed(mask, ring, [Shard(1)])),
            PlacementError,
            r"whole there or cut by queries, got S\(1\)",
        ),
        "a mask and causal": (
            lambda: attention(cut, cut, cut, placed(mask, ring, [R]), is_causal=True),
            RuntimeError,
            "Explicit attn_mask should not be set",
        ),
        "dropout": (
            lambda: attention(cut, cut, cut, dropout_p=1.5),
            RuntimeError,
            "between 0 and 1, but got 1.5",
        ),
        "terms": (
            lambda: attention(
                *[(placed(x, mesh_of((2, 2), ("tp", "ring_cp")), [R, Shard(2)])) for _ in range(2)],
                torch.nn.functional.linear(
                    placed(x, mesh_of((2, 2), ("tp", "ring_cp")), [Shard(3), Shard(2)]),
                    placed(torch.eye(8), mesh_of((2, 2), ("tp", "ring_cp")), [Shard(1), R]),
                ),
            ),
            PlacementError,
            r"without Partial\(\)",
        ),
    }


@pytest.mark.parametrize(
    "name",
    [
        "keys are whole",
        "values are whole",
        "queries are cut elsewhere",
        "too few heads",
        "no heads",
        "a mask cut by keys",
        "a mask and causal",
        "dropout",
        "terms",
    ],
)
def test_mistakes(name: str) -> None:
    call, kind, text = mistakes()[name]
    with pytest.raises(kind, match=text):
        call()


def test_queries_alone_may_be_cut_and_scopes_bring_the_others() -> None:
    mesh = mesh_of([3], ["ring_cp"])
    x = torch.randn(2, 4, 6, 8)
    cut, whole = placed(x, mesh, [Shard(2)]), placed(x, mesh, [R])
    close(attention(cut, whole, whole), attention(x, x, x))
    with dtorch.auto_redistribute():
        close(attention(whole, cut, cut, is_causal=True), attention(x, x, x, is_causal=True))
        view = cut.view(2, 4, 48).view(2, 4, 6, 8)
        close(attention(view, view, view, is_causal=True), attention(x, x, x, is_causal=True))


@pytest.mark.parametrize("names", [None, ("sequence",)])
def test_other_axes_do_nothing_by_themselves(names: tuple[str, ...] | None) -> None:
    x = placed(torch.randn(2, 4, 6, 8), DeviceMesh("cpu", [0, 1], mesh_dim_names=names), [Shard(2)])
    with pytest.raises(PlacementError, match="cannot run on these placements"):
        attention(x, x, x)
