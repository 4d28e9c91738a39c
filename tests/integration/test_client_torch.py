"""Programs that know only PyTorch: ``device="dtorch"``."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Shard


@pytest.fixture(autouse=True)
def on_mesh(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    with dtorch.Graph.default_graph().device_mesh_guard(mesh):
        yield mesh


MAKERS: list[Callable[[Any], torch.Tensor]] = [
    lambda d: torch.zeros(3, 2, device=d),
    lambda d: torch.ones(3, dtype=torch.int32, device=d),
    lambda d: torch.full((2,), 3, device=d),
    lambda d: torch.tensor([[1, 2.5]], device=d),
    lambda d: torch.tensor(3, device=d),
    lambda d: torch.as_tensor([1, 2], device=d),
    lambda d: torch.as_tensor(np.arange(3), device=d),
    lambda d: torch.arange(5, device=d),
    lambda d: torch.arange(1, 2, 0.5, device=d),
    lambda d: torch.linspace(0, 1, 4, device=d),
    lambda d: torch.eye(3, device=d),
    lambda d: torch.scalar_tensor(2.0, device=d),
    lambda d: torch.tril_indices(3, 3, device=d),
    lambda d: torch.ones(3).to(d),
    lambda d: torch.ones(3).to(d, torch.float16),
    lambda d: torch.zeros(2, device=d).new_tensor([1.0, 2.0]),
    lambda d: torch.zeros(2, device=d).new_zeros(3),
    lambda d: torch.zeros(2, device=d).new_full((2,), 3.0),
    lambda d: torch.ones_like(torch.empty(2, device=d)),
    lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(1.0),
    lambda d: torch.zeros(3, device=d).index_fill(0, torch.tensor([1], device=d), 2.0),
]


@pytest.mark.parametrize("make", MAKERS, ids=range(len(MAKERS)))
def test_tensors_are_made_on_the_mesh_of_the_graph(
    on_mesh: DeviceMesh, make: Callable[[Any], torch.Tensor]
) -> None:
    made, expected = make("dtorch"), make("cpu")
    assert isinstance(made, dtorch.Tensor)
    assert made.device_mesh == on_mesh
    torch.testing.assert_close(made.to_torch(), expected)
    assert made.stride() == expected.stride()


def test_random_tensors() -> None:
    torch.manual_seed(1)
    first = [
        torch.rand(3, device="dtorch"),
        torch.randn(3, device="dtorch"),
        torch.randperm(9, device="dtorch"),
    ]
    torch.manual_seed(1)
    again = [
        torch.rand(3, device="dtorch"),
        torch.randn(3, device="dtorch"),
        torch.randperm(9, device="dtorch"),
    ]
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(torch.rand(9, device="dtorch"), torch.rand(9, device="dtorch"))
    assert torch.randint(3, (100,), device="dtorch").max().item() == 2


def test_the_default_device(on_mesh: DeviceMesh) -> None:
    torch.set_default_device("dtorch")
    try:
        x = torch.zeros(3)
        layer = torch.nn.Linear(3, 4)
        y = layer(x + torch.tensor([1.0, 2.0, 3.0]))
        assert isinstance(y, dtorch.Tensor)
        value = y.cpu()
        assert "tensor([" in repr(x)
    finally:
        torch.set_default_device(None)
    expected = torch.nn.functional.linear(torch.tensor([1.0, 2.0, 3.0]), layer.weight.cpu(), layer.bias.cpu())
    torch.testing.assert_close(value, expected)


def test_modules_move_there_and_back() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    x = torch.randn(5, 3)
    remote = copy.deepcopy(plain).to("dtorch")
    assert all(
        isinstance(p, torch.nn.Parameter) and isinstance(p, dtorch.Tensor) for p in remote.parameters()
    )
    torch.testing.assert_close(remote(x.to("dtorch")).cpu(), plain(x))
    torch.testing.assert_close(remote[1].running_mean.cpu(), plain[1].running_mean)
    half = copy.deepcopy(remote).half()
    torch.testing.assert_close(half[0].weight.cpu(), plain[0].weight.half())
    back = remote.cpu()
    assert not isinstance(back[0].weight, dtorch.Tensor)
    torch.testing.assert_close(back[0].weight, plain[0].weight)


def test_state_dicts_cross() -> None:
    plain, remote = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4, device="dtorch")
    remote.load_state_dict(plain.state_dict())
    torch.testing.assert_close(remote.weight.cpu(), plain.weight)
    other = torch.nn.Linear(3, 4)
    other.load_state_dict(remote.state_dict())
    torch.testing.assert_close(other.weight, plain.weight)
    file = io.BytesIO()
    torch.save(remote.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded["weight"]) is torch.Tensor
    torch.testing.assert_close(loaded["weight"], plain.weight.detach())
    pickled = pickle.loads(pickle.dumps(remote.weight))
    assert type(pickled) is torch.nn.Parameter


def test_values_become_pythons_and_numpys() -> None:
    x = torch.tensor([1.5, 2.5], device="dtorch")
    assert x[0].item() == 1.5
    assert (float(x[1]), int(x[1])) == (2.5, 2)
    assert bool((x == x).all()) is True
    assert x.tolist() == [1.5, 2.5]
    assert [float(v) for v in x] == [1.5, 2.5]
    assert len(x) == 2
    assert 1.5 in x
    assert f"{x[0]:.3f}" == "1.500"
    assert np.asarray(x).tolist() == x.numpy().tolist() == [1.5, 2.5]
    assert np.asarray(x, dtype=np.int64).tolist() == [1, 2]
    assert [10, 20, 30][torch.tensor(1, device="dtorch")] == 20
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(x)
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        leaf.numpy()
    assert leaf.numpy(force=True).tolist() == [1.5, 2.5]


def test_printing(on_mesh: DeviceMesh) -> None:
    x = dtorch.tensor([[1.0, 2.0], [3.0, 4.0]], placements=[Shard(0)])
    assert repr(x) == (
        "tensor([[1., 2.],\n        [3., 4.]], shape=(2, 2), device_mesh=DeviceMesh('cpu', [0, 1]), "
        "placements=[Shard(dim=0)])"
    )
    assert f"{x=}".startswith("x=tensor([[1., 2.]")
    assert "requires_grad=True" in str(x.clone().requires_grad_())
    assert "grad_fn=<MulBackward0>" in str(x.clone().requires_grad_() * 2)
    assert repr(torch.nn.Parameter(x)).startswith("Parameter containing:\ntensor(")


def test_inference_mode() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Flatten(0)).eval()
    x = torch.randn(2, 3)
    expected = layer(x).detach()
    with torch.inference_mode():
        y = layer.to("dtorch")(x.to("dtorch"))
        assert bool(torch.isfinite(y).all())
        torch.testing.assert_close(y.cpu(), expected)


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN], ids=lambda c: c.__name__)
def test_recurrent_layers(layer: Any) -> None:
    plain = layer(3, 4, num_layers=2, bidirectional=True)
    remote = copy.deepcopy(plain).to("dtorch")
    x = torch.randn(5, 2, 3)
    expected, actual = plain(x)[0], remote(x.to("dtorch"))[0]
    torch.testing.assert_close(actual.cpu(), expected)
    expected.sum().backward()
    actual.sum().backward()
    for one, other in zip(plain.parameters(), remote.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad)


def test_comparisons() -> None:
    x = torch.tensor([1.0, 2.0], device="dtorch")
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)
    assert torch.allclose(x, x + 1e-9)
    assert not torch.allclose(x, x + 1)
    torch.testing.assert_close(x, x.clone())


def test_numbers_that_are_tensors_make_a_tensor() -> None:
    x: Any = torch.tensor([1.0, 2.0], device="dtorch")
    assert torch.tensor([x[0], 5.0]).tolist() == [1.0, 5.0]
    assert torch.arange(x[1]).tolist() == [0.0, 1.0]


def test_copies_and_what_cannot_be_shared() -> None:
    x = torch.tensor([1.0, 2.0], device="dtorch", requires_grad=True)
    same = copy.copy(x)
    assert isinstance(same, dtorch.Tensor)
    assert same.requires_grad
    same.data.add_(1)
    assert x.tolist() == [2.0, 3.0]
    with pytest.raises(dtorch.UnsupportedError, match=r"x\.cpu\(\)"):
        np.from_dlpack(x)


def test_functional_transforms() -> None:
    x = torch.randn(3)
    expected = torch.func.grad(lambda t: (t**3).sum())(x)
    actual = torch.func.grad(lambda t: (t**3).sum())(x.to("dtorch"))
    torch.testing.assert_close(actual.cpu(), expected)
