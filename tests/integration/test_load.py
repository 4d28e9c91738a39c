"""``dtorch.load``: workers read what they hold; what they cannot see is sent; mistakes are named."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dtorch
import dtorch.checkpoint as checkpoint
from dtorch.parallel.weights import StoredTensor
from dtorch_runtime.errors import CaptureError, MeshError, PlacementError, SettingError

pytestmark = pytest.mark.usefixtures("cluster")
R, S0, S1 = dtorch.Replicate(), dtorch.Shard(0), dtorch.Shard(1)
WEIGHTS = {
    "matrix": torch.arange(70.0).view(10, 7),
    "half": torch.arange(12).view(3, 4).bfloat16(),
    "cube": torch.arange(24).view(2, 3, 4),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "wide": torch.arange(8.0 * 4096).view(8, 4096),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files with an index."""
    names = sorted(WEIGHTS)
    for number, part in enumerate((names[:3], names[3:])):
        save_file({name: WEIGHTS[name] for name in part}, tmp_path / f"part-{number}.safetensors")
    index = {name: f"part-{int(name not in names[:3])}.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of tensors that this process has read."""
    names: list[str] = []
    blocks = StoredTensor.blocks

    def noted(self: StoredTensor, *args: Any) -> Any:
        names.append(self.name)
        return blocks(self, *args)

    monkeypatch.setattr(StoredTensor, "blocks", noted)
    return names


def last_dim(name: str, shape: tuple[int, ...]) -> Any:
    return [S0, dtorch.Shard(len(shape) - 1)] if shape else None


@pytest.mark.parametrize("placements", [None, [R, R], {"matrix": [S1, S0], "cube": [R, S1]}, last_dim])
@pytest.mark.parametrize("read_by", ["workers", "client"])
def test_every_device_gets_its_piece(
    folder: Path, grid: dtorch.DeviceMesh, placements: Any, read_by: Any, sent: list[str]
) -> None:
    loaded = dtorch.load(folder, device_mesh=grid, placements=placements, read_by=read_by)
    assert set(loaded) == set(WEIGHTS)
    assert bool(sent) == (read_by == "client")
    for name, expected in WEIGHTS.items():
        assert loaded[name].dtype == expected.dtype
        assert torch.equal(loaded[name].to_torch(), expected), name
    if placements is last_dim:
        assert loaded["cube"].placements == (S0, dtorch.Shard(2))
    if isinstance(placements, dict):
        assert loaded["matrix"].placements == (S1, S0)
        assert loaded["wide"].placements == (R, R)


def test_one_placement_and_a_partial_sum(folder: Path, mesh: dtorch.DeviceMesh) -> None:
    file = folder / "part-1.safetensors"
    loaded = dtorch.load(file, device_mesh=mesh, placements={"wide": S1, "matrix": dtorch.Partial()})
    assert loaded["wide"].placements == (S1,)
    assert loaded["matrix"].placements == (dtorch.Partial(),)
    assert torch.equal(loaded["matrix"].to_torch(), WEIGHTS["matrix"])


def test_what_nodes_do_not_see_is_sent(
    folder: Path, mesh: dtorch.DeviceMesh, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    own = Path("/proc/self/cwd/part-1.safetensors")  # in an agent, this is a path of its own folder
    loaded = dtorch.load(own, device_mesh=mesh, placements={"wide": [S0]})
    assert set(sent) == {"matrix", "scalar", "wide"}
    assert torch.equal(loaded["wide"].to_torch(), WEIGHTS["wide"])
    with pytest.raises(SettingError, match=rf"node node0 \(host .*\) cannot read {own}: No such file"):
        dtorch.load(own, device_mesh=mesh, read_by="workers")


def test_what_happens_to_a_file_behind_the_look_is_told_with_the_node(
    folder: Path, mesh: dtorch.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtorch.parallel.upload._unseen", lambda *_: {})
    file = folder / "part-1.safetensors"
    header = WEIGHTS | {"wide": WEIGHTS["wide"][:4]}
    for change, says in (
        (lambda: save_file({name: header[name] for name in ("matrix", "wide")}, file), "bytes, and had"),
        (file.unlink, "No such file"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("dtorch.loading._Goals.__init__", _then(change))
            with pytest.raises(SettingError, match=rf"\(node node0\) could not read: {file}.*{says}"):
                dtorch.load(file, device_mesh=mesh)
    mesh_tensor = dtorch.ones(2, device_mesh=mesh)
    assert mesh_tensor.sum().item() == 2, "the session goes on"


def _then(change: Callable[[], Any]) -> Any:
    """``_Goals.__init__``, and a change of the files behind it: their headers are read by then."""
    from dtorch.loading import _Goals

    given = _Goals.__init__

    def init(self: Any, *args: Any) -> None:
        given(self, *args)
        change()

    return init


@pytest.fixture
def tp(cluster: dtorch.Cluster) -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


class Tied(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight


def test_a_model_is_loaded_as_it_is_placed(tmp_path: Path, tp: dtorch.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Tied()
    state = plain.state_dict()
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in state.items() if n != "head.weight"} | {"more": torch.ones(2)}, file)
    model = dtorch.parallelize(Tied().to(torch.bfloat16), tp, {"embed": [S1]})
    loaded = dtorch.load(tmp_path, like=model)
    assert loaded["embed.weight"].placements == (S1,)
    assert loaded["embed.weight"].dtype == torch.bfloat16
    assert loaded["head.weight"] is loaded["embed.weight"]
    model.load_state_dict(loaded)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.to_torch(), state[name].to(tensor.dtype)), name
    for like, says in (
        (nn.Linear(2, 2), r"the files lack weight, bias; they have embed\.weight"),
        (Tied(5), r"embed\.weight has shape \[6, 5\], and \[6, 4\] in "),
        (plain.state_dict() | {"norm.weight": torch.zeros(4).long()}, "dtype torch.int64, and torch.fl"),
        (3, "takes a model or a dict of tensors, got int"),
    ):
        with pytest.raises(SettingError, match=says):
            dtorch.load(tmp_path, like=like)  # type: ignore[arg-type]  # a mistake


def test_a_checkpoint_is_read_by_workers_and_checked(
    tmp_path: Path, tp: dtorch.DeviceMesh, sent: list[str]
) -> None:
    line = dtorch.init_device_mesh("cpu", (4,))
    model = dtorch.parallelize(Tied(), tp, {"embed": [S0]})
    big = dtorch.from_torch(torch.arange(1.2e6).view(1200, 1000), device_mesh=line, placements=[S0])
    checkpoint.save(tmp_path, {"model": model, "big": big, "step": 3})
    loaded = dtorch.load(tmp_path, device_mesh=tp, placements={"big": S1}, read_by="workers")
    assert loaded["step"] == 3
    assert torch.equal(loaded["big"].to_torch(), big.to_torch())
    back = dtorch.load(tmp_path, like=model)
    assert torch.equal(back["embed.weight"].to_torch(), model.embed.weight.to_torch())
    assert not sent
    file = max(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-7] ^= 4
    file.write_bytes(data)
    with pytest.raises(SettingError, match=rf"could not read: .*{file.name} is damaged"):
        dtorch.load(tmp_path, device_mesh=tp)


@pytest.fixture
def saved(tmp_path: Path, tp: dtorch.DeviceMesh) -> dict[str, Any]:
    """What a checkpoint holds: a model, an optimizer with state, and a tensor of five parts with checksums."""
    model = dtorch.parallelize(Tied(), tp, {"embed": [S0]})
    optimizer = torch.optim.Adam(model.parameters())
    model.embed.weight.sum().backward()
    optimizer.step()
    big = dtorch.from_torch(torch.arange(1.2e6).view(1200, 1000), device_mesh=tp)
    state = {"model": model, "optimizer": optimizer, "big": big, "step": 3}
    checkpoint.save(tmp_path, state)
    return state


def empty_like(saved: dict[str, Any], mesh: dtorch.DeviceMesh) -> dict[str, Any]:
    """The same with other values, cut in other ways."""
    model = dtorch.parallelize(Tied(), mesh, {"embed": [S1]})
    big = dtorch.zeros(1200, 1000, device_mesh=mesh, placements=[S1])
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "big": big, "step": 0}


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["step"] == theirs["step"]
    assert torch.equal(ours["big"].to_torch(), theirs["big"].to_torch())
    for name, tensor in ours["model"].state_dict().items():
        assert torch.equal(tensor.to_torch(), theirs["model"].state_dict()[name].to_torch()), name
    [moment, other] = [
        state["optimizer"].state[state["model"].embed.weight]["exp_avg"] for state in (ours, theirs)
    ]
    assert moment.placements == ours["model"].embed.weight.placements
    assert torch.equal(moment.to_torch(), other.to_torch())


def test_what_is_resumed_is_compared_and_read_by_workers(
    tmp_path: Path,
    tp: dtorch.DeviceMesh,
    saved: dict[str, Any],
    sent: list[str],
    monkeypatch: pytest.MonkeyPatch,
    rng: random.Random,
) -> None:
    compared: list[str] = []
    monkeypatch.setattr(StoredTensor, "verify", lambda self: compared.append(self.name))
    into = empty_like(saved, tp)
    compare(checkpoint.load(tmp_path, into), saved)
    assert not sent
    assert set(compared) == {"optimizer/state/0/step"}, "a number of this process"
    file = max(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    good, part = file.read_bytes(), 1 << 20
    assert len(good) > 4 * part
    for start in range(0, len(good), part):
        bad = bytearray(good)
        bad[rng.randrange(start, min(start + part, len(good)))] ^= 1
        file.write_bytes(bad)
        fresh = empty_like(saved, tp)
        with pytest.raises(SettingError, match=rf"could not read: .*{file.name} is damaged: bytes {start} "):
            checkpoint.load(tmp_path, fresh)
        assert not fresh["optimizer"].state
        assert not fresh["big"].any().item()


def test_what_is_resumed_is_sent_to_nodes_that_do_not_see_it(
    tmp_path: Path,
    tp: dtorch.DeviceMesh,
    saved: dict[str, Any],
    sent: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    into = empty_like(saved, tp)
    compare(checkpoint.load("/proc/self/cwd", into), saved)  # in an agent, this is a folder of its own
    assert "big" in sent
    file = max(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(SettingError, match=rf"^/proc/self/cwd/{file.name} is damaged"):
        checkpoint.load("/proc/self/cwd", into)


def test_files_that_change_once_they_were_compared_leave_values_that_can_be_used(
    tmp_path: Path, tp: dtorch.DeviceMesh, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtorch.checkpoint.loading.verify", lambda _: None)
    file = max(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    into = empty_like(saved, tp)
    with pytest.raises(SettingError, match=rf"could not read: .*{file.name} is damaged"):
        checkpoint.load(tmp_path, into)
    assert not into["big"].any().item()
    assert into["model"].embed.weight.isfinite().all().item()


def test_mistakes_are_named(folder: Path, mesh: dtorch.DeviceMesh) -> None:
    for kwargs, error, says in (
        ({"read_by": "me"}, SettingError, "takes one of 'auto', 'workers', 'client', got 'me'"),
        (
            {"placements": {"matrx": [R]}},
            SettingError,
            "names .'matrx'., which the files lack; they have cube",
        ),
        ({"placements": [S1]}, PlacementError, r"load\(\): scalar of shape \[\]: Shard"),
        ({"placements": [R, R]}, PlacementError, "has 2 entries for a mesh with 1 axes"),
        ({"device_mesh": 2}, MeshError, "device_mesh takes a DeviceMesh, got 2"),
        ({"mesh": mesh}, TypeError, "device_mesh="),
    ):
        with pytest.raises(error, match=says):
            dtorch.load(folder, **({"device_mesh": mesh} | kwargs))  # type: ignore[arg-type]  # mistakes
    with pytest.raises(SettingError, match="does not exist"):
        dtorch.load(folder / "nowhere")


def test_a_captured_call_reads_no_file(folder: Path, mesh: dtorch.DeviceMesh) -> None:
    @dtorch.capture
    def step() -> Any:
        return dtorch.load(folder, device_mesh=mesh)["matrix"].sum()

    with pytest.raises(CaptureError, match="a replay would read it again"):
        step()
