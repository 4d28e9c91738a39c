"""What a redistribution is asked for, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtorch
from dtorch_runtime.ir.placement import Partial, Replicate, Shard
from dtorch_runtime.wire.records import TransferArg
from tests.support.client import Controller

MESH = dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))


@pytest.fixture
def x(controller: Controller) -> dtorch.Tensor:
    return dtorch.ones(4, 6, device_mesh=MESH, placements=[Shard(0), Replicate()])


def test_it_is_one_op_with_a_transfer(controller: Controller, x: dtorch.Tensor) -> None:
    y = x.redistribute(placements=[Replicate(), Shard(-1)])
    assert y.placements == (Replicate(), Shard(1))
    x.graph.flush()
    [template] = [r for r in controller.templates.values() if r.op == "dtorch::redistribute"]
    [transfer] = [arg for arg in template.args if isinstance(arg, TransferArg)]
    assert transfer.shape == [4, 6]
    assert [p.kind for p in transfer.source.placements] == ["S", "R"]
    assert [p.kind for p in transfer.target.placements] == ["R", "S"]


def test_to_the_same_layout_it_is_another_name(controller: Controller, x: dtorch.Tensor) -> None:
    y = x.redistribute_like(x)
    assert y is not x
    assert y._handle is x._handle


def test_between_meshes_both_take_part(controller: Controller, x: dtorch.Tensor) -> None:
    other = dtorch.DeviceMesh("cpu", [1])
    assert x.redistribute(other, [Replicate()]).device_mesh == other
    x.graph.flush()
    [template] = [r for r in controller.templates.values() if r.op == "dtorch::redistribute"]
    assert len(template.mesh_ids) == 2


@pytest.mark.parametrize(
    ("named", "default", "expected"),
    [
        ({"tp": Shard(1)}, "keep", (Shard(0), Shard(1))),
        ({"tp": Shard(1)}, "replicate", (Replicate(), Shard(1))),
        ({"dp": Partial(), "tp": Shard(0)}, "error", (Partial(), Shard(0))),
        ({}, "keep", (Shard(0), Replicate())),
        ({1: Shard(1)}, "keep", (Shard(0), Shard(1))),
        ({-2: Partial(), "tp": Shard(0)}, "error", (Partial(), Shard(0))),
    ],
    ids=str,
)
def test_by_axis_name(x: dtorch.Tensor, named: Any, default: Any, expected: Any) -> None:
    assert x.redistribute_by_dict(named, default=default).placements == expected


def test_kept_placements_go_by_name_to_another_mesh(x: dtorch.Tensor) -> None:
    turned = dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("tp", "dp"))
    assert x.redistribute_by_dict({}, turned).placements == (Replicate(), Shard(0))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"placements": [Shard(0)]}, dtorch.PlacementError, "1 entries for a mesh with 2 axes"),
        ({"placements": Shard(0)}, dtorch.PlacementError, r"write \[Shard\(dim=0\)\]"),
        ({"placements": [Shard(2), Replicate()]}, dtorch.PlacementError, "does not fit a tensor of 2 dims"),
        ({"device_mesh": dtorch.DeviceMesh("cpu", [0])}, dtorch.PlacementError, "needs placements"),
        ({"device_mesh": [0, 1]}, dtorch.MeshError, "takes a DeviceMesh"),
        ({"device_mesh": dtorch.DeviceMesh("cpu", [[0, 7]])}, dtorch.MeshError, "names device 7"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_does_not_fit_is_refused(
    x: dtorch.Tensor, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        x.redistribute(**arguments)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [(torch.int64, "avg"), (torch.bool, "avg"), (torch.complex64, "max"), (torch.complex64, "min")],
    ids=str,
)
def test_terms_that_the_dtype_cannot_have_are_refused(
    controller: Controller, dtype: torch.dtype, op: Any
) -> None:
    whole = dtorch.ones(4, dtype=dtype, device_mesh=MESH)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        dtorch.PlacementError, match=rf"Partial\('{op}'\) does not hold a tensor of {name}.*write"
    ):
        whole.redistribute(placements=[Partial(op), Replicate()])
    with pytest.raises(dtorch.PlacementError, match="does not hold"):
        dtorch.ones(4, dtype=dtype, device_mesh=MESH, placements=[Partial(op), Replicate()])


@pytest.mark.parametrize(
    ("named", "mesh", "default", "error", "message"),
    [
        ({"pp": Shard(0)}, None, "keep", dtorch.MeshError, "no axis named 'pp'"),
        ({"tp": Shard(0)}, None, "error", dtorch.PlacementError, "no placement for axis 'dp'"),
        ({"tp": Shard(0)}, None, "guess", dtorch.PlacementError, "'keep', 'replicate' or 'error'"),
        ({}, dtorch.DeviceMesh("cpu", [0, 1]), "keep", dtorch.PlacementError, "cannot keep a placement"),
    ],
    ids=str,
)
def test_names_that_do_not_fit_are_refused(
    x: dtorch.Tensor, named: Any, mesh: Any, default: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        x.redistribute_by_dict(named, mesh, default)


def test_the_gradient_comes_back_as_the_input_is_held(controller: Controller) -> None:
    x = dtorch.ones(4, 6, device_mesh=MESH, placements=[Shard(0), Replicate()], requires_grad=True)
    x.redistribute(placements=[Replicate(), Shard(1)]).sum().redistribute(
        placements=[Replicate()] * 2
    ).backward()
    gradient: Any = x.grad
    assert gradient.placements == (Shard(0), Replicate())


def test_the_gradient_of_partial_terms_is_whole(controller: Controller) -> None:
    x = dtorch.ones(4, device_mesh=MESH, placements=[Partial(), Shard(0)], requires_grad=True)
    x.redistribute(placements=[Replicate(), Replicate()]).sum().backward()
    gradient: Any = x.grad
    assert gradient.placements == (Replicate(), Shard(0))
