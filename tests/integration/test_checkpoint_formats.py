"""Checkpoints of others: ``torch.distributed.checkpoint`` and plain safetensors, read and written."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import dtorch
import dtorch.checkpoint as checkpoint
from dtorch_runtime.errors import SettingError
from tests.support.fsdp_peer import Net, trained

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]
R, S0, S1 = dtorch.Replicate(), dtorch.Shard(0), dtorch.Shard(1)


def on_mesh(seed: int, **axes: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    mesh = dtorch.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = dtorch.parallelize(Net(), mesh, {"up": "colwise", "down": "rowwise"} if "tp" in axes else {})
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def equal(ours: Any, plain: Any) -> bool:
    return torch.equal(ours.to_torch(), plain)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_of_two_processes_comes_and_goes(tmp_path: Path) -> None:
    """FSDP2 and DTensor read what we wrote, train on, and write what we read."""
    model, optimizer = on_mesh(1, tp=2)
    losses = trained(model, optimizer, 2)
    extra = dtorch.from_torch(
        torch.arange(15.0).view(5, 3), device_mesh=model.up.weight.device_mesh, placements=[S0]
    )
    state = {"model": model, "optim": optimizer, "extra": extra, "step": 2, "note": ("a", [1.5, None])}
    checkpoint.save(tmp_path / "ours", state, format="dcp")
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.fsdp_peer", str(tmp_path / "ours"), str(tmp_path / "theirs")],
        cwd=Path(dtorch.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["files"] >= 2, "both have written"
    assert report["step"] == 2
    expected = trained(model, optimizer, 3)
    assert report["losses"] == pytest.approx(expected[:2], abs=1e-5)
    other, its_optimizer = on_mesh(3, dp=2)
    own = {"model": other, "optim": its_optimizer, "extra": torch.zeros(5, 3), "step": 0}
    loaded = checkpoint.load(tmp_path / "theirs", own)
    assert loaded["step"] == 4
    assert torch.equal(own["extra"], extra.to_torch() + 1)
    assert trained(other, its_optimizer, 1) == pytest.approx(expected[2:], abs=1e-5)
    assert losses[0] > expected[-1]


def test_what_we_write_is_read_by_plain_torch(tmp_path: Path) -> None:
    model, optimizer = on_mesh(1, tp=2)
    trained(model, optimizer, 1)
    state = {"model": model, "optim": optimizer, "step": 7, "tied": [model.up.weight, model.up.weight]}
    for _ in range(2):  # the second replaces the first
        checkpoint.save_async(tmp_path / "there", state, format="dcp").result(timeout=30)
    assert len(list((tmp_path / "there").iterdir())) == 5, "two devices, this process, numbers, metadata"
    dcp_to_torch_save(tmp_path / "there", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt")
    assert found["step"] == 7
    assert found["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert equal(optimizer.state[model.up.weight]["exp_avg"], found["optim"]["state"]["0"]["exp_avg"])
    assert equal(model.up.weight, found["tied"][1])
    target = {"model": Net().state_dict()}
    dcp.load(target, checkpoint_id=tmp_path / "there", no_dist=True)
    for name, tensor in model.state_dict().items():
        assert equal(tensor, target["model"][name]), name


def test_what_plain_torch_wrote_is_read_on_any_mesh(tmp_path: Path) -> None:
    torch.manual_seed(4)
    plain = Net()
    its_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    expected = trained(plain, its_optimizer, 2)
    state = {"model": plain.state_dict(), "optim": its_optimizer.state_dict(), "n": 5, "x": torch.ones(3)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    expected = trained(plain, its_optimizer, 2)
    model, optimizer = on_mesh(5, tp=2)
    loaded = checkpoint.load(tmp_path, {"model": model, "optim": optimizer, "n": 0})
    assert loaded["n"] == 5
    assert trained(model, optimizer, 2) == pytest.approx(expected, abs=1e-5)
    other, _ = on_mesh(6, tp=2)
    other.load_state_dict(dtorch.load(tmp_path, like=other))
    everything = checkpoint.load(tmp_path)
    assert equal(other.up.weight, everything["model"]["up.weight"])
    assert other.up.weight.placements == (S0,)
    assert everything["optim"]["param_groups"][0]["lr"] == 0.05
    assert torch.equal(everything["x"], state["x"])
    with pytest.raises(SettingError, match="holds pickles, which only this process reads"):
        dtorch.load(tmp_path, like=other, read_by="workers")


def test_torchs_own_functions_take_our_tensors(tmp_path: Path) -> None:
    model, _ = on_mesh(1, tp=2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    other, _ = on_mesh(2, dp=2)
    target = {"model": other.state_dict()}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in model.state_dict().items():
        assert equal(other.state_dict()[name], tensor.to_torch()), name


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("this has run",)


def test_a_pickle_that_does_more_than_hold_is_not_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dcp.save({"x": torch.ones(3), "n": {"a": 1}}, checkpoint_id=tmp_path, no_dist=True)
    index = tmp_path / ".metadata"
    good = index.read_bytes()
    found = pickle.loads(good)
    found.planner_data["x"] = Harmful()
    moved = pickle.loads(good)
    for place in moved.storage_data.values():
        place.relative_path = "../other"
    for data, says in (
        (pickle.dumps(found), "names builtins.print"),
        (pickle.dumps(Harmful()), "names builtins.print"),
        (pickle.dumps({"x": 1}), "is not metadata"),
        (pickle.dumps(moved), "files of the folder itself"),
        (good[:-20], "is damaged"),
        (b"", "is damaged"),
    ):
        index.write_bytes(data)
        with pytest.raises(SettingError, match=rf"{index}.*{says}"):
            checkpoint.load(tmp_path)
    index.write_bytes(good)
    [file] = tmp_path.glob("*.distcp")
    torch.save(Harmful(), file)
    with pytest.raises(SettingError, match=rf"{file} is damaged, or n.a in it is more than tensors"):
        checkpoint.load(tmp_path)
    file.unlink()
    with pytest.raises(SettingError, match=rf"{file}, a file of this checkpoint, cannot be read"):
        checkpoint.load(tmp_path)
    assert "this has run" not in capfd.readouterr().out


def test_plain_files_for_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = on_mesh(1, tp=2)
    folder, file = tmp_path / "folder", tmp_path / "one.safetensors"
    checkpoint.save(folder, model, format="safetensors")
    checkpoint.save(file, model, format="safetensors")
    plain = Net()
    for path in (folder / "model.safetensors", file):
        plain.load_state_dict(load_file(path))
        assert equal(model.up.weight, plain.up.weight.data)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    trained(model, optimizer, 1)
    monkeypatch.setattr("dtorch.checkpoint.plain._MAX_FILE_BYTES", 400)
    checkpoint.save_async(folder, model, format="safetensors").result(timeout=30)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = set(index["weight_map"].values())
    assert len(names) > 1
    assert {path.name for path in folder.iterdir()} == names | {"model.safetensors.index.json"}
    other, _ = on_mesh(2, dp=2)
    checkpoint.load(folder, other)
    for name, tensor in model.state_dict().items():
        assert equal(other.state_dict()[name], tensor.to_torch()), name
        assert torch.equal(load_file(folder / index["weight_map"][name])[name], tensor.to_torch())
    monkeypatch.undo()
    checkpoint.save(folder, {"a": {"b": torch.ones(2)}}, format="safetensors")
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert torch.equal(checkpoint.load(folder)["a.b"], torch.ones(2))


def test_mistakes_of_format_are_named(tmp_path: Path) -> None:
    for state, format, says in (
        ({"a": torch.ones(1)}, "pt", "takes one of 'dtorch', 'dcp', 'safetensors', got 'pt'"),
        ({"step": 3}, "safetensors", "step is a int, and these files hold named tensors"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "safetensors", "two tensors would have the name"),
        (torch.ones(1), "safetensors", "give a dict of tensors"),
        (torch.ones(1), "dcp", "takes a dict or a model, got Tensor"),
        ({"a": object()}, "dcp", "a is a object"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "dcp", "two values would have one name"),
    ):
        with pytest.raises(SettingError, match=says):
            checkpoint.save(tmp_path, state, format=format)  # type: ignore[arg-type]  # mistakes
    assert not list(tmp_path.iterdir())
    checkpoint.save(tmp_path, {"a": torch.ones(1)})
    with pytest.raises(SettingError, match="holds checkpoint.json, of format 'dtorch'"):
        checkpoint.save(tmp_path, {"a": torch.ones(1)}, format="dcp")
