"""Which part of a model is on which stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtorch.parallel.stages import plan_stages
from dtorch_runtime.errors import DTorchError, SettingError
from dtorch_runtime.ir.mesh import DeviceMesh

PP = DeviceMesh("cpu", [0, 1], mesh_dim_names=("pp",))
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("pp", "tp"))


class Decoder(nn.Module):
    def __init__(self, num_layers: int = 3, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(num_layers))
        self.norm = nn.LayerNorm(4)
        self.rotary = nn.Module()
        self.rotary.register_buffer("table", torch.zeros(2))
        self.drop = nn.Dropout()
        self.head = nn.Linear(4, 5, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


class Wrapper(nn.Module):
    """Two stacks inside of a base model, as encoders and decoders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleDict({"encoder": Decoder(2), "decoder": Decoder(2)})
        self.scale = nn.Parameter(torch.ones(1))


class AcrossStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.both = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.both["a"].weight = self.layers[0].weight
        self.both["b"].weight = self.layers[1].weight


@pytest.mark.parametrize(
    ("model", "units", "end"),
    [
        (
            Decoder(),
            {"embed": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "norm": 1, "rotary": 0, "head": 1},
            1,
        ),
        (
            Decoder(is_tied=True),
            {"embed": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "norm": 1, "rotary": 0, "head": 0},
            0,
        ),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), {"0": 0, "1": 0, "2": 1}, 1),
        (nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), {"0": 0, "1": 1}, 1),
    ],
    ids=["decoder", "tied head", "sequential", "list"],
)
def test_layers_are_shared_out_and_the_rest_stays_beside_them(
    model: nn.Module, units: dict[str, int], end: int
) -> None:
    stages = plan_stages(model, PP)
    assert dict(stages.units) == units
    assert stages.end == end


def test_stacks_follow_one_another_and_what_holds_them_is_on_the_first_stage() -> None:
    stages = plan_stages(Wrapper(), GRID)
    assert stages.meshes == tuple(GRID.unbind("pp"))
    assert stages.mesh_of("base.encoder.layers.1.0") == stages.meshes[0]
    assert stages.mesh_of("base.decoder.layers.0") == stages.meshes[1]
    assert stages.mesh_of("base.encoder.norm") == stages.meshes[0]
    assert stages.mesh_of("") == stages.mesh_of("base.decoder") == stages.meshes[0]


def test_a_mesh_without_stages_is_one_stage() -> None:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    stages = plan_stages(Decoder(), mesh)
    assert stages.meshes == (mesh,)
    assert stages.mesh_of("layers.2.0") == mesh


def test_stages_of_one_device_have_an_axis_with_a_name() -> None:
    assert [m.mesh_dim_names for m in plan_stages(Decoder(), PP).meshes] == [("pp",), ("pp",)]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Decoder(1), "1 layers are too few for 2 stages"),
        (nn.Bilinear(2, 2, 2), "Bilinear has no nn.ModuleList or nn.Sequential of layers"),
        (AcrossStages(), r"'both' shares weights with modules on the stages \[0, 1\]"),
    ],
)
def test_what_has_no_stages_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(SettingError, match=message) as refusal:
        plan_stages(model, PP)
    assert isinstance(refusal.value, DTorchError)
