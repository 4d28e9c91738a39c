"""``parallelize`` on meshes that cut the experts of unmodified models: what plain PyTorch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtorch
from dtorch_runtime.errors import MeshError
from tests.support.tiny_llama import tiny_llama
from tests.support.tiny_models import FAMILIES

MESHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ep=2": ([0, 1], ("ep",)),
    "ep=3": ([0, 1, 2], ("ep",)),  # 4 experts, unevenly
    "dp=2 x ep=2": ([[0, 1], [2, 3]], ("dp", "ep")),
    "ep=2 x tp=2": ([[0, 1], [2, 3]], ("ep", "tp")),
    "pp=2 x ep=2": ([[0, 1], [2, 3]], ("pp", "ep")),
}
FAMILIES_WITH_EXPERTS = ("mixtral", "qwen2 moe", "qwen3 moe", "deepseek v3")
#: The other pairs are slow tests.
QUICK = (("mixtral", "ep=3"), ("qwen2 moe", "dp=2 x ep=2"))


def mesh_of(name: str) -> dtorch.DeviceMesh:
    devices, axes = MESHES[name]
    return dtorch.DeviceMesh("cpu", devices, mesh_dim_names=axes)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        pytest.param(family, mesh, marks=() if (family, mesh) in QUICK else pytest.mark.slow)
        for family in FAMILIES_WITH_EXPERTS
        for mesh in MESHES
    ],
)
def test_a_model_whose_experts_are_cut_is_the_model(family: str, mesh: str) -> None:
    made = FAMILIES[family]
    plain, ids = made.build(), made.batch(rows=2)["input_ids"]
    model = dtorch.parallelize(made.build(), mesh_of(mesh))
    experts = {name: p for name, p in model.named_parameters() if name.endswith("experts.down_proj")}
    assert experts
    for parameter in experts.values():
        names = parameter.device_mesh.mesh_dim_names
        assert dict(zip(names, parameter.placements, strict=True))["ep"] == dtorch.Shard(0)
    remote = ids.to("dtorch")
    with torch.no_grad():
        torch.testing.assert_close(model(remote).logits.cpu(), plain(ids).logits, rtol=0, atol=1e-4)
        options = {"max_new_tokens": 3, "do_sample": False}
        assert model.generate(remote, **options).tolist() == plain.generate(ids, **options).tolist()
    plain(input_ids=ids, labels=ids).loss.backward()
    model(input_ids=remote, labels=remote).loss.backward()
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(
                ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
            )


def test_an_axis_for_experts_is_refused_for_a_model_without_any() -> None:
    model = tiny_llama()
    with pytest.raises(MeshError, match="'ep'"):
        dtorch.parallelize(model, mesh_of("ep=2"))
    assert not any(isinstance(parameter, dtorch.Tensor) for parameter in model.parameters())
