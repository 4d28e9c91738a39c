"""State dicts of global tensors: cut on load, gathered on save; one that does not fit changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dtorch
from dtorch_runtime.errors import StateDictError

pytestmark = pytest.mark.usefixtures("cluster")
S0, S1 = dtorch.Shard(0), dtorch.Shard(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def on_mesh() -> nn.Module:
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return dtorch.parallelize(Net(), mesh, {"first": "colwise", "last": "rowwise"})


def by_to() -> nn.Module:
    return Net().to("dtorch")


def in_pieces() -> nn.Module:
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = dtorch.parallelize(Net(), mesh, {})
    dtorch.parallel.zero(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    return model


def changed(state: dict[str, Any], **values: Any) -> dict[str, Any]:
    return state | {name.replace("__", "."): value for name, value in values.items()}


BAD: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (
        lambda s: changed(s, last__bias=torch.ones(3)),
        r"size mismatch for last.bias: shape \[3\] in .*\[2\] in the",
    ),
    (lambda s: changed(s, last__bias=torch.ones(2, 1)), "size mismatch for last.bias"),
    (
        lambda s: changed(s, count=torch.tensor(1.5)),
        "dtype mismatch for count: torch.float32 in .*torch.int64 in",
    ),
    (lambda s: changed(s, last__bias=torch.ones(2) + 1j), "dtype mismatch for last.bias: torch.complex64"),
    (lambda s: changed(s, last__bias=[1.0, 2.0]), "last.bias is a list"),
    (lambda s: changed(s, last__bias=torch.ones(2, device="meta")), "last.bias is on 'meta'"),
    (lambda s: changed(s, more=torch.ones(1)), 'Unexpected key.* "more"'),
    (lambda s: {n: t for n, t in s.items() if n != "last.bias"}, 'Missing key.* "last.bias"'),
]


@pytest.mark.parametrize("made", [on_mesh, by_to, in_pieces])
def test_what_does_not_fit_changes_nothing(made: Callable[[], nn.Module]) -> None:
    model = made()
    before = {name: tensor.to_torch() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    other = Net().state_dict()
    for change, says in BAD:
        with pytest.raises(StateDictError, match=says) as caught:
            model.load_state_dict(change(dict(other)))
        assert isinstance(caught.value, RuntimeError), "as torch raises"
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.to_torch(), before[name]), (says, name)
    model.load_state_dict(other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.to_torch(), other[name]), name


def test_what_torch_takes_is_taken() -> None:
    model: Any = on_mesh()
    torch.manual_seed(5)
    state = {
        name: tensor for name, tensor in Net().double().state_dict().items() if "num_batches" not in name
    }
    state["count"] = torch.tensor([7])
    model.load_state_dict(state)  # of another precision, and without what an older torch did not write
    assert model.count.item() == 7
    assert torch.equal(model.last.bias.to_torch(), state["last.bias"].float())
    found = model.load_state_dict({"last.bias": torch.ones(2), "more": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["more"]
    assert model.last.bias.tolist() == [1, 1]

    class Renaming(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            state_dict[prefix + "bias"] = state_dict.pop(prefix + "offset")
            super()._load_from_state_dict(state_dict, prefix, *args)

    own = Renaming(2, 2).to("dtorch")
    own.load_state_dict({"weight": torch.eye(2), "offset": torch.ones(2)})
    assert own.bias.tolist() == [1, 1]


def test_state_of_another_shape_is_refused_by_an_optimizer() -> None:
    plain = Net()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    plain(torch.randn(4, 3)).sum().backward()
    reference.step()
    model: Any = on_mesh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.2)
    state = copy.deepcopy(reference.state_dict())
    state["state"][2]["exp_avg"] = torch.ones(7)
    with pytest.raises(StateDictError, match=r"exp_avg of parameter 2 has shape \[7\], and that \[6\]"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert not optimizer.state
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.state[model.first.weight]["exp_avg"].placements == (S0,)
    back = torch.optim.AdamW(plain.parameters())
    back.load_state_dict(optimizer.state_dict())
    assert torch.equal(
        back.state[plain.norm.weight]["exp_avg"], reference.state[plain.norm.weight]["exp_avg"]
    )
