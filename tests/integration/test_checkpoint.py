"""Checkpoints: back onto any mesh with the same numbers; damage and mistakes are named."""

from __future__ import annotations

import copy
import random
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

import dtorch
import dtorch.checkpoint as checkpoint
import dtorch.nn as dnn
from dtorch.checkpoint.files import Disk
from dtorch_runtime.errors import SettingError, UnsupportedError

R, S0, S1 = dtorch.Replicate(), dtorch.Shard(0), dtorch.Shard(1)
WIDTH, HIDDEN, CLASSES = 6, 10, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = dnn.ColumnParallelLinear(WIDTH, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.down = dnn.RowParallelLinearWithReplicateOutput(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.again = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(x))))


def mesh_of(**axes: int) -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def made(mesh: dtorch.DeviceMesh | None, seed: int) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = Net()
    if mesh is not None:
        dtorch.parallelize(model, mesh, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)


def train(model: Net, optimizer: torch.optim.Optimizer, scheduler: Any, num_steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(8, WIDTH, generator=generator)
    y = torch.randint(0, CLASSES, (8,), generator=generator)
    if isinstance(model.head.bias, dtorch.Tensor):
        mesh = model.head.bias.device_mesh
        on_dp = [S0 if name == "dp" else R for name in mesh.mesh_dim_names or ()]
        x, y = (dtorch.from_torch(t, device_mesh=mesh, placements=on_dp) for t in (x, y))
    losses = []
    for _ in range(num_steps):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def bundle(model: Any, optimizer: Any, scheduler: Any, step: int = 0) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": step}


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("stage", [None, 1, 3])
def test_training_resumes_on_another_mesh(stage: Any, tmp_path: Path) -> None:
    reference = made(None, 1)
    expected = train(*reference, 6)
    first = made(mesh_of(tp=2), 1)
    assert train(*first, 3) == pytest.approx(expected[:3], abs=1e-5)
    checkpoint.save(tmp_path / "there", bundle(*first, step=3))
    model, optimizer, scheduler = made(mesh_of(dp=2), 2)
    if stage is not None:
        dtorch.parallel.zero(model, optimizer, stage=stage)
    loaded = checkpoint.load(tmp_path / "there", bundle(model, optimizer, scheduler))
    assert loaded["step"] == 3
    assert loaded["model"] is model
    assert train(model, optimizer, scheduler, 3) == pytest.approx(expected[3:], abs=1e-5)
    assert model.again is model.head
    moment = optimizer.state[model.down.weight]["exp_avg"].placements
    assert moment == ((R,) if stage is None else (S0,))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("stage", [None, 2, 3])
def test_full_state_dicts_are_cut_on_load_and_gathered_on_save(stage: Any, tmp_path: Path) -> None:
    reference = made(None, 1)
    expected = train(*reference, 2)
    model, optimizer, scheduler = made(mesh_of(dp=2, tp=2), 2)
    if stage is not None:
        dtorch.parallel.zero(model, optimizer, stage=stage)
    model.load_state_dict(reference[0].state_dict())
    optimizer.load_state_dict(copy.deepcopy(reference[1].state_dict()))
    scheduler.load_state_dict(reference[2].state_dict())
    expected = train(*reference, 3)
    assert train(model, optimizer, scheduler, 3) == pytest.approx(expected, abs=1e-5)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "full.pt")
    states = torch.load(tmp_path / "full.pt")
    back = made(None, 3)
    back[0].load_state_dict(states[0])
    back[1].load_state_dict(states[1])
    back[2].load_state_dict(scheduler.state_dict())
    assert train(*back, 2) == pytest.approx(train(*reference, 2), abs=1e-5)


@pytest.mark.usefixtures("cluster")
def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    mesh = mesh_of(dp=2, tp=2)
    torch.manual_seed(0)
    plain = {
        "uneven": (torch.randn(5, 7), [S0, S1]),
        "nested": (torch.randn(7), [S0, S0]),
        "half": (torch.randn(3, 4).bfloat16(), [R, S1]),
        "none": (torch.zeros(0, 3), [S0, R]),
        "number": (torch.tensor(3.5), [R, R]),
        "bools": (torch.rand(4) > 0.5, [S0, R]),
        "long": (torch.arange(6).view(2, 3), [R, S1]),
    }
    ours = {k: dtorch.from_torch(t, device_mesh=mesh, placements=p) for k, (t, p) in plain.items()}
    ours["terms"] = dtorch.ones(3, 2, device_mesh=mesh, placements=[dtorch.Partial(), R])
    ours["turned"] = ours["uneven"].mT
    state = {7: ours, "tuple": (1, None, [2.5, "x", float("inf")]), "here": torch.arange(3)}
    checkpoint.save(tmp_path / "all", state)
    back = checkpoint.load(tmp_path / "all")
    assert back["tuple"] == state["tuple"]
    for key, tensor in ours.items():
        assert torch.equal(back[7][key], tensor.to_torch()), key
    line = mesh_of(x=4)
    other = {
        key: dtorch.zeros(
            *t.shape, dtype=t.dtype, device_mesh=line, placements=[dtorch.Shard(t.ndim - 1) if t.ndim else R]
        )
        for key, t in ours.items()
    }
    checkpoint.load(tmp_path / "all", {7: other})
    for key, tensor in ours.items():
        assert torch.equal(other[key].to_torch(), tensor.to_torch()), key


@pytest.mark.usefixtures("cluster")
def test_each_device_has_a_file_that_other_programs_read(tmp_path: Path) -> None:
    x = torch.arange(12.0).view(4, 3)
    cut = dtorch.from_torch(x, device_mesh=mesh_of(dp=2), placements=[S0])
    checkpoint.save(tmp_path, {"x": cut, "y": cut * 2})
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    halves = []
    for file in files:
        with safe_open(str(file), framework="pt") as handle:
            assert set(handle.keys()) == {"x", "y"}
            halves.append(handle.get_tensor("x"))
    assert torch.equal(torch.cat(halves), x)


class GatedDisk(Disk):
    """Creates no file before the gate is open."""

    gate: threading.Event

    def create(self, path: Path) -> BinaryIO:
        assert self.gate.wait(50), "the gate was not opened"
        return super().create(path)


@pytest.mark.usefixtures("cluster")
def test_what_is_saved_beside_the_program_is_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GatedDisk.gate = threading.Event()
    monkeypatch.setattr("dtorch.checkpoint.saving.Disk", GatedDisk)
    model, optimizer, scheduler = made(mesh_of(tp=2), 1)
    train(model, optimizer, scheduler, 1)
    expected = {key: value.to_torch() for key, value in model.state_dict().items()}
    moment = optimizer.state[model.head.weight]["exp_avg"].to_torch()
    futures = [
        checkpoint.save_async(tmp_path, bundle(model, optimizer, scheduler, step)) for step in range(3)
    ]
    losses = train(model, optimizer, scheduler, 2)
    assert len(losses) == 2, "training goes on"
    assert not any(future.done() for future in futures), "and nothing is written yet"
    assert not torch.equal(model.head.weight.to_torch(), expected["head.weight"])
    GatedDisk.gate.set()
    for future in futures:
        future.result(timeout=30)
    loaded = checkpoint.load(tmp_path)
    assert loaded["step"] == 2, "in their order"
    for key, value in expected.items():
        assert torch.equal(loaded["model"][key], value), key
    assert torch.equal(loaded["optimizer"]["state"][6]["exp_avg"], moment)
    assert loaded["scheduler"]["last_epoch"] == 1
    assert len(list(tmp_path.iterdir())) == 4, "the index, a file a device, and one for what is here"


def test_a_flipped_bit_at_any_place_is_refused_with_the_name_of_the_file(
    tmp_path: Path, rng: random.Random
) -> None:
    checkpoint.save(tmp_path, {"a": torch.arange(7.0), "b": [torch.ones(3).bfloat16(), 1, "x"]})
    paths = list(tmp_path.iterdir())
    assert len(paths) == 2
    for path in paths:
        good = path.read_bytes()
        for place in range(len(good)):
            _flip(path, good, place, rng)
            with pytest.raises(SettingError, match=path.name):
                checkpoint.load(tmp_path)
        path.write_bytes(good)
    assert checkpoint.load(tmp_path)["b"][2] == "x", "it is whole again"


def test_a_flipped_bit_in_a_large_file_is_refused(tmp_path: Path, rng: random.Random) -> None:
    checkpoint.save(tmp_path, {"a": torch.arange(600_000.0)})
    [path] = tmp_path.glob("*.safetensors")
    good = path.read_bytes()
    for _ in range(20):
        _flip(path, good, rng.randrange(len(good)), rng)
        with pytest.raises(SettingError, match=path.name):
            checkpoint.load(tmp_path)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("format", ["dtorch", "dcp"])
def test_a_damaged_checkpoint_leaves_everything_as_it_was(tmp_path: Path, format: Any) -> None:
    first = made(mesh_of(tp=2), 1)
    train(*first, 1)
    checkpoint.save(tmp_path, bundle(*first), format=format)
    model, optimizer, scheduler = made(mesh_of(dp=2), 2)
    before = {name: tensor.to_torch() for name, tensor in model.state_dict().items()}
    hurt = [path for path in tmp_path.iterdir() if path.suffix in (".safetensors", ".distcp")]
    for path in hurt:
        good = path.read_bytes()
        path.write_bytes(good[:-40] if format == "dcp" else good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(SettingError, match=path.name):
            checkpoint.load(tmp_path, bundle(model, optimizer, scheduler))
        path.write_bytes(good)
        assert not optimizer.state
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.to_torch(), before[name]), (path.name, name)
    checkpoint.load(tmp_path, bundle(model, optimizer, scheduler))
    assert torch.equal(model.head.weight.to_torch(), first[0].head.weight.to_torch())


def _flip(path: Path, good: bytes, place: int, rng: random.Random) -> None:
    data = bytearray(good)
    data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def test_other_damage_is_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": torch.ones(3)})
    [file] = tmp_path.glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(SettingError, match=rf"{file.name} is damaged: it has {len(data) - 1} bytes"):
        checkpoint.load(tmp_path)
    file.unlink()
    with pytest.raises(SettingError, match=rf"{file.name} cannot be read"):
        checkpoint.load(tmp_path)
    with pytest.raises(SettingError, match="holds no checkpoint"):
        checkpoint.load(tmp_path / "elsewhere")


@pytest.mark.usefixtures("cluster")
def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    model, optimizer, scheduler = made(mesh_of(tp=2), 1)
    checkpoint.save(tmp_path, bundle(model, optimizer, scheduler))
    other, other_optimizer, _ = made(mesh_of(tp=2), 2)
    before = other.head.weight.to_torch()
    small = torch.optim.SGD([other.head.weight], lr=0.1)
    for into, says in (
        (other, "is of another model: it lacks"),
        ({"model": other, "steps": 1}, "lacks .'steps'.; it has"),
        ({"model": nn.Linear(2, 2)}, "at model is of another model"),
        ({"model": other, "step": torch.ones(2)}, "at step has no tensor there"),
        (
            {"model": {**other.state_dict(), "head.bias": torch.ones(9)}},
            "head.bias has shape .5., and a tensor of .9.",
        ),
        ({"model": {"head.weight": other.head.weight, "up.bias": torch.ones(HIDDEN).double()}}, "model.to"),
        (
            {"model": {"head.weight": other.head.weight}, "optimizer": small},
            "at optimizer is of an optimizer",
        ),
        ({"model": {"head.weight": other.head.weight}, "step": [1]}, "something else than a list of 1"),
    ):
        with pytest.raises(SettingError, match=says):
            checkpoint.load(tmp_path, into)
    assert torch.equal(other.head.weight.to_torch(), before)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"step": 1})
    for state, error, says in (
        ({"a": {"b": object()}}, SettingError, "a/b is a object"),
        ({"a": {(1, 2): 3}}, SettingError, "a key of a is a tuple"),
        (
            {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}},
            SettingError,
            "two tensors would have the name 'a/b'",
        ),
        ({"z": torch.ones(1, dtype=torch.complex64)}, UnsupportedError, "view_as_real"),
    ):
        with pytest.raises(error, match=says):
            checkpoint.save(tmp_path, state)
    assert checkpoint.load(tmp_path) == {"step": 1}
    assert len(list(tmp_path.iterdir())) == 1
