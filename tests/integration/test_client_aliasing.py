"""Views, writes in place and changes of metadata on a real cluster leave what they leave in plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, PlacementError, Replicate, Shard
from tests.integration import object_programs as _object_programs  # noqa: F401  adds its programs
from tests.integration.aliasing_programs import PROGRAMS, Send

A = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 7 - 1.3

VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "view": lambda x: x.view(24),
    "view_split": lambda x: x.view(2, 2, 3, 2),
    "row": lambda x: x[1],
    "last_row": lambda x: x[-1],
    "column": lambda x: x[:, 2],
    "rows": lambda x: x[1:3],
    "columns": lambda x: x[:, ::2],
    "element": lambda x: x[2, 3],
    "t": lambda x: x.t(),
    "mT": lambda x: x.mT,
    "permute": lambda x: x.view(2, 2, 6).permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "narrow": lambda x: x.narrow(1, 1, 3),
    "split": lambda x: x.split([2, 4], 1)[1],
    "chunk": lambda x: x.chunk(2)[1],
    "unbind": lambda x: x.unbind(1)[0],
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "reshape": lambda x: x.reshape(8, 3),
    "diagonal": lambda x: x.diagonal(1),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "as_strided": lambda x: x.as_strided((2, 3), (6, 2), 1),
    "expand_one": lambda x: x.unsqueeze(0).expand(1, 4, 6),
    "view_dtype": lambda x: x.view(torch.int32).view(torch.float32),
    "view_as_complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2))),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "chain": lambda x: x[1:].t()[2:].unsqueeze(1)[:, :, 1],
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda v: v.add_(1),
    "neg_": lambda v: v.neg_(),
    "mul_own": lambda v: v.mul_(v),
    "copy_": lambda v: v.copy_(v + 3),
    "masked_fill_": lambda v: v.masked_fill_(v > 0, 5.0),
    "setitem": lambda v: v.__setitem__(..., 2.0),
    "out": lambda v: torch.exp(v, out=v),
    "foreach": lambda v: torch._foreach_add_([v], 1.0),
}


@pytest.mark.parametrize(
    "placements",
    [
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
        (Shard(1, 3), Shard(0)),
        (Shard(1), Shard(1)),
        (Partial(), Shard(0)),
    ],
    ids=str,
)
def test_writes_through_views_change_the_base(grid: DeviceMesh, placements: Any) -> None:
    """Every view with every write, on even and uneven pieces; what is refused changes nothing."""
    done = set()
    for what, make_view in VIEWS.items():
        for how, write in WRITES.items():
            x = dtorch.from_torch(A, device_mesh=grid, placements=placements)
            a = A.clone()
            before = make_view_or_none(make_view, x)
            if before is None:
                continue
            try:
                write(make_view(x))
            except PlacementError:
                assert torch.equal(x.to_torch(), a), f"{what}, {how}: refused, and changed"
                continue
            write(make_view(a))
            assert_close(x, a, f"{what}, {how}")
            assert x.placements == placements
            if how == "neg_":
                assert_close(before, make_view(a), f"the view made before, {what}, {how}")
                x.zero_()
                assert_close(before.detach(), make_view(a.zero_()), f"a write to the base, {what}, {how}")
            done.add(what)
    everywhere = {"itself", "t", "mT", "movedim", "unsqueeze", "squeeze", "detach", "data", "expand_one"}
    assert everywhere <= done
    if placements == (Replicate(), Replicate()):
        assert done == set(VIEWS)


def make_view_or_none(make_view: Callable[[Any], Any], x: Any) -> Any:
    try:
        return make_view(x)
    except PlacementError:
        return None


def assert_close(actual: Any, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        actual.to_torch(), expected, msg=lambda message: f"{what}: {message}", equal_nan=True
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program(mesh: DeviceMesh, program: Callable[[Send], Any]) -> None:
    """The same results, strides, offsets, versions and errors as plain PyTorch; sharded, or refused by placement."""
    expected = outcome(program, plain)
    with dtorch.Graph.default_graph().device_mesh_guard(mesh):
        for placement in (Replicate(), Shard(0)):
            actual = outcome(program, sender(mesh, placement))
            if placement != Replicate() and isinstance(actual, PlacementError):
                continue
            compare(actual, expected, str(placement))


def plain(tensor: torch.Tensor, requires_grad: bool = False) -> Any:
    return tensor.clone().requires_grad_(requires_grad)


plain.device = "cpu"  # type: ignore[attr-defined]  # programs that make tensors or move modules ask for it


def sender(mesh: DeviceMesh, placement: Any) -> Send:
    def send(tensor: torch.Tensor, requires_grad: bool = False) -> Any:
        fits = isinstance(placement, Shard) and tensor.dim() > placement.dim
        made = dtorch.from_torch(tensor, device_mesh=mesh, placements=[placement if fits else Replicate()])
        return made.requires_grad_(requires_grad)

    send.device = "dtorch"  # type: ignore[attr-defined]  # as above
    return send


def outcome(program: Callable[[Send], Any], send: Send) -> Any:
    """What a program returns, with all that can be seen of its tensors; or what it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            return facts(program(send))
        except Exception as error:  # noqa: BLE001  it is compared
            return error


def facts(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [facts(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    seen = {
        "shape": tuple(value.shape),
        "stride": value.stride(),
        "offset": value.storage_offset(),
        "dtype": value.dtype,
        "requires_grad": value.requires_grad,
        "is_leaf": value.is_leaf,
        "is_inference": value.is_inference(),
        "is_conj": value.is_conj(),
        "is_neg": value.is_neg(),
    }
    local = value.detach()
    return {**seen, "value": local.to_torch() if isinstance(local, dtorch.Tensor) else local}


def compare(actual: Any, expected: Any, where: str) -> None:
    if isinstance(expected, Exception):
        assert isinstance(actual, type(expected)), f"{where}: {actual!r} in place of {expected!r}"
        assert not isinstance(actual, dtorch.RemoteOpError), f"{where}: raised by a worker: {actual!r}"
        return
    assert not isinstance(actual, Exception), f"{where}: {actual!r}"
    if isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            compare(one, other, where)
    elif isinstance(expected, dict):
        value, want = actual.pop("value"), expected["value"]
        assert actual == {name: fact for name, fact in expected.items() if name != "value"}, where
        torch.testing.assert_close(value, want, msg=lambda message: f"{where}: {message}")
    else:
        assert actual == expected, where


@pytest.mark.parametrize(
    ("placements", "size", "regrouped"),
    [
        ([Shard(0), Replicate()], [24], [Shard(0, unit=6), Replicate()]),
        ([Shard(0), Shard(1)], [4, 6, 1], [Shard(0), Shard(1)]),
        ([Partial(), Shard(1)], [2, 2, 6], [Partial(), Shard(2)]),
    ],
    ids=str,
)
def test_resize_to_as_many_elements_is_a_view_of_pieces(
    grid: DeviceMesh, placements: list[Any], size: list[int], regrouped: list[Any]
) -> None:
    x = dtorch.from_torch(A, device_mesh=grid).redistribute(placements=placements)
    alias = x.view_as(x)
    assert x.resize_(size) is x
    assert (list(x.shape), list(x.placements)) == (size, regrouped)
    x.mul_(2)
    assert torch.equal(alias.to_torch(), A * 2)
    assert torch.equal(x.to_torch(), (A * 2).view(size))


def test_resize_that_moves_elements_is_refused(mesh: DeviceMesh) -> None:
    x = dtorch.from_torch(A, device_mesh=mesh, placements=[Shard(1)])
    with pytest.raises(PlacementError, match=r"resize_\(\) to \[24\] would move elements"):
        x.resize_(24)
    assert torch.equal(x.to_torch(), A)
