"""Between the global value and the pieces that devices hold."""

from __future__ import annotations

import itertools

import pytest
import torch

from dtorch.session import LocalPiece
from dtorch.spec import intern_spec
from dtorch.values import assemble, plan_gathering, tensor_of
from dtorch_runtime.errors import InternalError
from dtorch_runtime.ir.layout import Layout, device_box
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from dtorch_runtime.worker.blobs import memory_of, name_of

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def piece_of(tensor: torch.Tensor) -> LocalPiece:
    return LocalPiece(name_of(tensor.dtype), tuple(tensor.shape), bytes(memory_of(tensor.contiguous())))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)], ids=str)
def test_bytes_there_and_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(6) % 2)[: max(1, torch.Size(shape).numel())].to(dtype)
    tensor = tensor[: torch.Size(shape).numel()].reshape(shape)
    back = tensor_of(piece_of(tensor))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert memory_of(back).tobytes() == memory_of(tensor).tobytes()


@pytest.mark.parametrize("name", ["float31", "quint8", "Tensor"])
def test_a_dtype_that_dtorch_does_not_have(name: str) -> None:
    with pytest.raises(InternalError, match=name):
        tensor_of(LocalPiece(name, (1,), b"0000"))


PLACEMENTS: list[Placement] = [
    Replicate(),
    Shard(0),
    Shard(1),
    Shard(0, unit=2),
    Partial(),
    Partial("max"),
    Partial("avg"),
]


@pytest.mark.parametrize("pair", [*itertools.product(PLACEMENTS, PLACEMENTS)], ids=lambda p: f"{p[0]}-{p[1]}")
def test_pieces_of_every_layout_make_the_whole(pair: tuple[Placement, Placement]) -> None:
    mesh = DeviceMesh("cpu", [[5, 3], [1, 0], [4, 2]])
    layout = Layout(mesh, pair)
    spec = intern_spec((5, 3), torch.float64, layout)
    whole = torch.arange(15, dtype=torch.float64).reshape(5, 3) - 7
    gathering = plan_gathering(spec)
    pieces = {}
    for device in gathering.devices:
        coordinate = mesh.coordinate(device)
        assert coordinate is not None
        local = whole[tuple(slice(*side) for side in device_box(spec.shape, layout, device))].clone()
        pieces[device] = piece_of(_term(local, coordinate, pair, mesh))
    torch.testing.assert_close(assemble(spec, pieces), whole)


def _term(
    local: torch.Tensor, coordinate: tuple[int, ...], pair: tuple[Placement, ...], mesh: DeviceMesh
) -> torch.Tensor:
    """What a device at ``coordinate`` holds, so that the reduction over partial axes gives ``local``."""
    for axis, placement in enumerate(pair):
        if isinstance(placement, Partial):
            num, rank = mesh.shape[axis], coordinate[axis]
            match placement.op:
                case "sum":
                    local = local / num
                case "max":
                    local = local - rank
                case "avg":
                    local = local + (rank - (num - 1) / 2)
    return local


@pytest.mark.parametrize(
    ("placements", "num_asked"),
    [
        ([Replicate(), Replicate()], 1),
        ([Shard(0), Replicate()], 2),
        ([Shard(0), Shard(1)], 4),
        ([Partial(), Replicate()], 2),
        ([Partial(), Shard(0)], 4),
    ],
    ids=str,
)
def test_only_different_pieces_are_asked_for(placements: list[Placement], num_asked: int) -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    spec = intern_spec((4, 4), torch.float32, Layout(mesh, tuple(placements)))
    assert len(plan_gathering(spec).devices) == num_asked


def test_a_result_can_be_written_to() -> None:
    layout = Layout(DeviceMesh("cpu", [0]), (Replicate(),))
    spec = intern_spec((2,), torch.float32, layout)
    result = assemble(spec, {0: piece_of(torch.tensor([1.0, 2.0]))})
    result += 1
    assert result.tolist() == [2.0, 3.0]
