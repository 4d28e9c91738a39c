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
        placed = dict(zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True))
        assert placed["ep"] == dtorch.Shard(0)
        # Each of 4 experts is whole on one of 2 x 2 devices.
        assert placed.get("tp") in (None, dtorch.Shard(0))
    assert_same(model, plain, ids)


def assert_same(model: Any, plain: Any, ids: torch.Tensor) -> None:
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


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("ep=2", {"num_experts_per_tok": 1}),  # rows travel
        ("ep=2 x tp=2", {"num_local_experts": 3}),  # too few for all devices: each has features of some
        pytest.param("dp=2 x ep=2", {"num_experts_per_tok": 1}, marks=pytest.mark.slow),
        pytest.param("ep=3", {"num_local_experts": 2, "num_experts_per_tok": 1}, marks=pytest.mark.slow),
        pytest.param("ep=2 x tp=2", {"num_experts_per_tok": 1}, marks=pytest.mark.slow),
    ],
)
def test_few_experts_and_one_for_each_token(mesh: str, fields: dict[str, int]) -> None:
    """With a batch of one row, which one device has."""
    made = FAMILIES["mixtral"]
    model = dtorch.parallelize(made.build(**fields), mesh_of(mesh))
    assert_same(model, made.build(**fields), made.batch(rows=1)["input_ids"])


@pytest.mark.usefixtures("cluster")
def test_the_batch_is_cut_along_the_axis_of_experts() -> None:
    """Everything else is done once for each row, not by all devices of the axis."""
    made = FAMILIES["mixtral"]
    model = dtorch.parallelize(made.build(), mesh_of("dp=2 x ep=2"))
    seen: list[Any] = []
    for name, module in model.named_modules():
        if name.endswith(("self_attn", "mlp", "mlp.experts")):
            module.register_forward_hook(
                lambda m, args, out: seen.append(out[0] if isinstance(out, tuple) else out)
            )
    with torch.no_grad():
        logits = model(made.batch(rows=4)["input_ids"].to("dtorch")).logits
    assert len(seen) == 6
    cut = [all(isinstance(p, dtorch.Shard) and p.dim == 0 for p in x.placements) for x in seen]
    assert all(cut)
    assert logits.shape[0] == 4


@pytest.mark.usefixtures("cluster")
def test_one_row_on_an_axis_that_cuts_the_batch() -> None:
    made = FAMILIES["mixtral"]
    model = dtorch.parallelize(made.build(), dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)))
    ids = made.batch(rows=1)["input_ids"]
    with torch.no_grad():
        logits = model(ids.to("dtorch")).logits.cpu()
        torch.testing.assert_close(logits, made.build()(ids).logits, rtol=0, atol=1e-4)


def test_an_axis_for_experts_is_refused_for_a_model_without_any() -> None:
    model = tiny_llama()
    with pytest.raises(MeshError, match="'ep'"):
        dtorch.parallelize(model, mesh_of("ep=2"))
    assert not any(isinstance(parameter, dtorch.Tensor) for parameter in model.parameters())
