"""``redistribute`` on real clusters: between nodes, of every dtype, and under autograd."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import dtorch
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from dtorch_runtime.local import LocalCluster, start_local_cluster
from dtorch_runtime.settings import Settings
from tests.support.captured import NUM_CALLS, numbers, send
from tests.support.leaks import LeakWatch

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


# ---- between nodes ----


@pytest.fixture(scope="module")
def two_nodes(leak_watch: LeakWatch) -> Iterator[LocalCluster]:
    """Two nodes of three devices."""
    before = leak_watch.snapshot()
    local = start_local_cluster(2, 3, Settings(num_threads=1))
    local.wait_ready()
    leak_watch.declare_baseline(before)
    yield local
    local.stop()


@pytest.fixture
def connected(two_nodes: LocalCluster) -> Iterator[dtorch.Cluster]:
    with dtorch.connect(two_nodes.address, session_key=two_nodes.session_key) as cluster:
        yield cluster


#: Devices 0 to 2 are of one node, 3 to 5 of the other.
MESHES = [
    DeviceMesh("cpu", ids) for ids in ([0, 3], [4, 1, 2], [[0, 1, 2], [3, 4, 5]], [[5, 0], [1, 3]], [2])
]


def layouts(mesh: DeviceMesh, dtype: torch.dtype) -> list[tuple[Placement, ...]]:
    ops = ["sum", "prod"]
    ops += ["avg"] if dtype.is_floating_point or dtype.is_complex else []
    ops += [] if dtype.is_complex else ["max", "min"]
    choices = [R, S0, S1, Shard(0, unit=3), *(Partial(op) for op in ops)]
    return list(itertools.product(choices, repeat=mesh.ndim))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str
)
def test_a_walk_through_layouts_of_two_nodes(connected: dtorch.Cluster, dtype: torch.dtype) -> None:
    """A value goes from layout to layout, on meshes that lie on one node, on both, overlap and are apart."""
    rng = random.Random(str(dtype))
    for shape in ((5, 7), (1, 4), (0, 3), (64, 33)):
        value = torch.randint(0, 2, shape).to(dtype)
        x = dtorch.from_torch(value, device_mesh=MESHES[0], placements=[S0])
        for _ in range(8):
            mesh = rng.choice(MESHES)
            x = x.redistribute(mesh, rng.choice(layouts(mesh, dtype)))
            assert x.shape == shape
            assert x.dtype is dtype
        assert torch.equal(x.to_torch(), value)


def test_large_pieces_between_nodes(connected: dtorch.Cluster) -> None:
    """So large that the plans have steps that share the work."""
    value = torch.randint(-9, 10, (1000, 300)).float()
    grid, line = MESHES[2], MESHES[0]
    x = dtorch.from_torch(value, device_mesh=MESHES[4])
    for mesh, placements in (
        (grid, [R, R]),
        (grid, [P, R]),
        (line, [R]),
        (line, [P]),
        (grid, [P, S1]),
        (grid, [R, R]),
        (grid, [Partial("max"), P]),
        (grid, [S0, P]),
        (line, [S1]),
    ):
        x = x.redistribute(mesh, placements)
        assert torch.equal(x.to_torch(), value)


def test_transposed_and_expanded_pieces_between_nodes(connected: dtorch.Cluster) -> None:
    value = torch.arange(12.0).view(3, 4)
    x = dtorch.from_torch(value, device_mesh=MESHES[0], placements=[S1])
    assert torch.equal(x.t().redistribute(placements=[S1]).to_torch(), value.t())
    column = dtorch.from_torch(value[:, :1], device_mesh=MESHES[0], placements=[S0])
    assert torch.equal(column.expand(3, 4).redistribute(placements=[R]).to_torch(), value[:, :1].expand(3, 4))


# ---- under autograd ----


@pytest.mark.parametrize("target", [R, S0, S1, P, Partial("max")], ids=str)
@pytest.mark.parametrize("source", [R, S0, S1, P, Partial("avg")], ids=str)
def test_first_and_second_derivatives(mesh: DeviceMesh, source: Placement, target: Placement) -> None:
    value = torch.randn(3, 4, dtype=torch.float64)
    x = dtorch.from_torch(value, device_mesh=mesh, placements=[source]).requires_grad_()
    y: Any = x.redistribute(placements=[target])
    (gradient,) = torch.autograd.grad((y.redistribute(placements=[R]) ** 3).sum(), x, create_graph=True)
    assert gradient.placements == ((R,) if isinstance(source, Partial) else (source,))
    torch.testing.assert_close(gradient.detach().to_torch(), 3 * value**2)
    (second,) = torch.autograd.grad((gradient.redistribute(placements=[R]) ** 2).sum(), x)
    torch.testing.assert_close(second.to_torch(), 36 * value**3)


def test_gradients_come_back_to_their_mesh(mesh: DeviceMesh) -> None:
    x = dtorch.ones(4, device_mesh=mesh, placements=[S0], requires_grad=True)
    other = DeviceMesh("cpu", [[2, 3], [1, 0]])
    (x.redistribute(other, [S0, R]) * 3).redistribute(placements=[R, R]).sum().backward()
    gradient: Any = x.grad
    assert (gradient.device_mesh, gradient.placements) == (mesh, (S0,))
    assert gradient.tolist() == [3.0] * 4


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, from its forward_ad
def test_tangents_go_the_same_way(mesh: DeviceMesh) -> None:
    value = torch.randn(3, 4)
    x, tangent = (dtorch.from_torch(v, device_mesh=mesh, placements=[S0]) for v in (value, 2 * value))
    with forward_ad.dual_level():
        moved: Any = forward_ad.make_dual(x, tangent).redistribute(placements=[S1])  # type: ignore[attr-defined]
        found: Any = forward_ad.unpack_dual(moved).tangent
        assert found.placements == (S1,)
        assert torch.equal(found.to_torch(), 2 * value)


def test_to_the_same_layout_it_is_a_view(mesh: DeviceMesh) -> None:
    x = dtorch.zeros(4, device_mesh=mesh, placements=[S0])
    x.redistribute(placements=[S0]).add_(1)
    assert x.tolist() == [1.0] * 4
    leaf = dtorch.zeros(4, device_mesh=mesh, placements=[S0], requires_grad=True)
    with pytest.raises(RuntimeError, match="a view of a leaf"):
        leaf.redistribute(placements=[S0]).add_(1)
    x.redistribute(placements=[R]).add_(1)
    assert x.tolist() == [1.0] * 4


def test_a_view_that_the_auto_scope_made_is_moved_like_any_tensor(mesh: DeviceMesh) -> None:
    """Its result is a tensor of its own: a write to it is not seen by the base."""
    value = torch.arange(12.0).view(6, 2)
    x = dtorch.from_torch(value, device_mesh=mesh, placements=[S0])
    with dtorch.auto_redistribute():
        view: Any = x[:5]
        moved = view.redistribute(placements=[P])
        moved.mul_(2)
        assert torch.equal(moved.to_torch(), value[:5] * 2)
        assert torch.equal(x.to_torch(), value)


# ---- several at once ----


def moved_together(x: Any, w: Any) -> Any:
    terms = [x @ w, (x * 2) @ w, x.exp() @ w[:, :3]]
    rows = [x.relu(), w.abs()]
    wholes = [term.redistribute(placements=[R]) for term in terms]
    return *wholes, *(row.redistribute(placements=[R]) for row in rows)


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize(("devices", "num_joined"), [([0, 3], 5), ([1, 2], 0)])
def test_small_ones_of_a_captured_call_go_together_between_nodes(devices: list[int], num_joined: int) -> None:
    captured = dtorch.capture(moved_together)
    mesh = DeviceMesh("cpu", devices)
    x, w = send(numbers(5, 8), [S1], mesh), send(numbers(8, 6, seed=1), [S0], mesh)
    for _ in range(NUM_CALLS):
        for one, other in zip(captured(x, w), moved_together(x, w), strict=True):
            torch.testing.assert_close(one.to_torch(), other.to_torch(), rtol=0, atol=0)
    assert f"bucket joined {num_joined}" in dtorch.capture.explain(captured)
    results = captured(x, w)
    results[0].zero_()  # they share no memory
    assert results[1].abs().sum().item() > 0
