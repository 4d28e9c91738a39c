"""Mistakes with placements: the message has what was given, what is allowed, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtorch.propagate import propagate
from dtorch.spec import Spec, intern_spec
from dtorch_runtime.errors import InternalError, MeshError, PlacementError, UnsupportedError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
LINE, OTHER = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
R, P = Replicate(), Partial("sum")


def spec(
    *shape: int, at: Placement | list[Placement] = R, mesh: DeviceMesh = LINE, dtype: Any = torch.float32
) -> Spec:
    placements = at if isinstance(at, list) else [at]
    return intern_spec(shape, dtype, Layout(mesh, tuple(placements)))


MISTAKES: list[tuple[str, Callable[[], Any], str, str]] = [
    # what, call, reason, fix
    (
        "one factor cut along the contracted dim",
        lambda: propagate(aten.mm.default, (spec(4, 6, at=Shard(1)), spec(6, 2)), {}),
        "placed differently",
        "mat2.redistribute(placements=[dtorch.Shard(dim=0)])",
    ),
    (
        "factors cut along dims that do not meet",
        lambda: propagate(aten.mm.default, (spec(4, 6, at=Shard(0)), spec(6, 2, at=Shard(1))), {}),
        "self and mat2 are sharded on dims that do not correspond",
        "mat2.redistribute(placements=[dtorch.Replicate()])",
    ),
    (
        "units that cut at different places",
        lambda: propagate(aten.add.Tensor, (spec(6, at=Shard(0)), spec(6, at=Shard(0, unit=2))), {}),
        "cut at different places, [3, 6] and [4, 6]",
        "other.redistribute(placements=[dtorch.Shard(dim=0)])",
    ),
    (
        "a function of a partial sum",
        lambda: propagate(aten.relu.default, (spec(4, at=P),), {}),
        "self is Partial, and the op is not linear in it",
        "self.redistribute(placements=[dtorch.Shard(dim=0)])",
    ),
    (
        "a number added to a partial sum",
        lambda: propagate(aten.add.Tensor, (spec(4, at=P), 1.0), {}),
        "not linear",
        "self.redistribute(placements=[dtorch.Shard(dim=0)])",
    ),
    (
        "a product of partial sums",
        lambda: propagate(aten.mul.Tensor, (spec(4, at=P), spec(4, at=P)), {}),
        "not linear in these inputs together",
        "redistribute",
    ),
    (
        "a partial sum and a sharded tensor",
        lambda: propagate(aten.add.Tensor, (spec(4, at=P), spec(4, at=Shard(0))), {}),
        "self is Partial where other is sharded",
        "self.redistribute(placements=[dtorch.Shard(dim=0)])",
    ),
    (
        "softmax along a cut dim",
        lambda: propagate(aten._softmax.default, (spec(4, 6, at=Shard(1)), -1, False), {}),
        "needs dim 1 of self whole on every device",
        "self.redistribute(placements=[dtorch.Shard(dim=0)])",
    ),
    (
        "a slice along a cut dim",
        lambda: propagate(aten.slice.Tensor, (spec(4, 6, at=Shard(0)), 0, 1, 3), {}),
        "needs dim 0 of self whole",
        "self.redistribute(placements=[dtorch.Shard(dim=1)])",
    ),
    (
        "a write of a sharded tensor into a whole one",
        lambda: propagate(aten.add_.Tensor, (spec(4), spec(4, at=Shard(0))), {}),
        "placed differently",
        "other.redistribute(placements=[dtorch.Replicate()])",
    ),
    (
        "a write of a partial sum into a whole tensor",
        lambda: propagate(aten.mul_.Tensor, (spec(4), spec(4, at=P)), {}),
        "other is Partial",
        "other.redistribute(placements=[dtorch.Replicate()])",
    ),
    (
        "out= that is placed otherwise",
        lambda: propagate(aten.add.out, (spec(4, at=Shard(0)), spec(4, at=Shard(0))), {"out": spec(4)}),
        "it writes to out, which stays [R], but the result is [S(0)]",
        "out = out.redistribute(placements=[dtorch.Shard(dim=0)])",
    ),
    (
        "heads cut in the middle",
        lambda: propagate(aten.view.default, (spec(1, 5, 576, at=Shard(2)), [1, 5, 9, 64]), {}),
        "dim 2 is cut at 288, inside an element of dim 2 of the view",
        "self.redistribute(placements=[dtorch.Shard(dim=2, unit=64)])",
    ),
    (
        "a cut dim merged behind another",
        lambda: propagate(aten.view.default, (spec(4, 6, at=Shard(1)), [24]), {}),
        "merged behind dim 0",
        "self.redistribute(placements=[dtorch.Replicate()])",
    ),
    (
        "an op without a rule",
        lambda: propagate(aten.cartesian_prod.default, ([spec(4, at=Shard(0))],), {}),
        "no placement rule",
        "redistribute(placements=[dtorch.Replicate()])",
    ),
    (
        "one axis of two",
        lambda: propagate(
            aten.mm.default,
            (spec(4, 6, at=[Shard(0), Shard(1)], mesh=GRID), spec(6, 2, at=[R, R], mesh=GRID)),
            {},
        ),
        "(along mesh axis 1)",
        "mat2.redistribute(placements=[dtorch.Replicate(), dtorch.Shard(dim=0)])",
    ),
    (
        "lists of an optimizer",
        lambda: propagate(aten._foreach_add_.List, ([spec(4), spec(3)], [spec(4), spec(3, at=Shard(0))]), {}),
        "at position 1 of the lists",
        "other[1].redistribute(placements=[dtorch.Replicate()])",
    ),
]


@pytest.mark.parametrize(
    ("what", "call", "reason", "fix"), MISTAKES, ids=[m[0].replace(" ", "_") for m in MISTAKES]
)
def test_says_what_was_given_what_is_allowed_and_what_to_write(
    what: str, call: Callable[[], Any], reason: str, fix: str
) -> None:
    with pytest.raises(PlacementError) as raised:
        call()
    text = str(raised.value)
    assert reason in text
    assert re.search(r"given:\n    \w.*: float32\[.*on mesh", text), text
    assert re.search(r"allowed along each mesh axis \(inputs -> outputs\):\n    .*->", text), text
    assert fix in text.partition("write: ")[2], text


def test_different_meshes() -> None:
    with pytest.raises(MeshError, match=r"different meshes:(.|\n)*redistribute\(device_mesh="):
        propagate(aten.add.Tensor, (spec(4), spec(4, mesh=OTHER)), {})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: propagate(aten.t_.default, (spec(4, 3),), {}), "write x = x.t"),
        (lambda: propagate(aten.add.out, (spec(4), spec(4)), {"out": spec(3)}), "resize"),
        (lambda: propagate(aten.equal.default, (spec(4), spec(4)), {}), "cpu"),
        (
            lambda: propagate(
                aten.zeros.default, ([3],), {"layout": torch.sparse_coo}, default_layout=Layout(LINE, (R,))
            ),
            "strided",
        ),
    ],
)
def test_unsupported_uses_say_what_to_do(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        call()


@pytest.mark.parametrize(
    ("placement", "said"), [(P, "cannot make a tensor with placements"), (Shard(1), "no dim 1 to shard")]
)
def test_factories_refuse_layouts_that_do_not_fit(placement: Placement, said: str) -> None:
    with pytest.raises(PlacementError, match=said):
        propagate(aten.zeros.default, ([3],), {}, default_layout=Layout(LINE, (placement,)))


def test_a_factory_without_a_layout_is_our_bug() -> None:
    with pytest.raises(InternalError):
        propagate(aten.zeros.default, ([3],), {})


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: propagate(aten.mm.default, (spec(4, 5), spec(4, 5)), {}), RuntimeError),
        (lambda: propagate(aten.mm.default, (spec(4, 1), spec(5, 2)), {}), RuntimeError),
        (lambda: propagate(aten.bmm.default, (spec(1, 4, 5), spec(3, 5, 2)), {}), RuntimeError),
        (lambda: propagate(aten.linear.default, (spec(2, 4, 1), spec(3, 5)), {}), RuntimeError),
        (lambda: propagate(aten.matmul.default, (spec(2, 4, 1), spec(5, 3)), {}), RuntimeError),
        (lambda: propagate(aten.add.Tensor, (spec(4), spec(3)), {}), RuntimeError),
        (lambda: propagate(aten.add_.Tensor, (spec(1), spec(3)), {}), RuntimeError),
        (lambda: propagate(aten.view.default, (spec(4), [3]), {}), RuntimeError),
        (lambda: propagate(aten.transpose.int, (spec(4, 3), 0, 2), {}), IndexError),
        (lambda: propagate(aten.add_.Tensor, (spec(3, dtype=torch.int64), spec(3)), {}), RuntimeError),
        (lambda: propagate(aten.cat.default, ([spec(4, 3), spec(4)],), {}), RuntimeError),
    ],
)
def test_wrong_shapes_raise_what_torch_raises(call: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        call()
    assert not isinstance(raised.value, PlacementError)
