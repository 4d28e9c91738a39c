"""Pointwise calls with new sizes are not planned again: what a plan says must not depend on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtorch
from dtorch import entries
from dtorch.op_plan import NewOutput
from dtorch.propagate import propagate
from dtorch.rules.call import op_of
from dtorch.rules.pointwise import is_pointwise
from dtorch.spec import contiguous_stride, intern_spec
from dtorch.viewed import fits_of
from dtorch_runtime.errors import DTorchError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from tests.numerics.test_rules import EVERY
from tests.support.client import Controller
from tests.support.rule_checks import Sample, replace_tensors, tensors_of

POINTWISE = [sample for sample in EVERY if is_pointwise(op_of(sample.func))]
SIZES = {
    1: [(1,), (2,), (5,), (300,)],
    2: [(1, 1), (2, 1), (1, 3), (3, 7), (64, 64)],
    3: [(1, 1, 1), (4, 1, 2), (1, 5, 1), (2, 3, 4)],
}


def without_sizes(sample: Sample, shape: tuple[int, ...], placement: Placement) -> Any:
    """The plan of a call on tensors of one spec, its result checked and left out."""
    whole = (sample.make(), dict(sample.kwargs))
    tensors = tensors_of(whole)
    layout = Layout(DeviceMesh("cpu", [0, 1, 2]), (placement,))
    spec = intern_spec(shape, tensors[0].dtype, layout)
    args, kwargs = replace_tensors(whole, [spec] * len(tensors))
    try:
        plan = propagate(sample.func, args, kwargs)
    except (DTorchError, RuntimeError, TypeError, NotImplementedError) as error:
        return type(error)
    [output] = plan.outputs
    assert isinstance(output, NewOutput)
    assert output.window is None
    assert output.spec.shape == shape
    assert output.spec.stride == contiguous_stride(shape)
    said = plan.op, plan.args, plan.kwargs, plan.layouts, plan.conversions, plan.returns
    return *said, output.spec.dtype, output.spec.layout, fits_of(plan, [spec] * len(tensors))


def test_there_are_samples() -> None:
    assert len({sample.func for sample in POINTWISE}) > 80


@pytest.mark.parametrize("sample", POINTWISE, ids=lambda sample: str(sample).replace(" ", "_"))
def test_a_plan_is_the_same_for_all_sizes(sample: Sample) -> None:
    for ndim, shapes in SIZES.items():
        for placement in (
            Replicate(),
            Shard(0),
            Shard(ndim - 1),
            Shard(0, unit=2),
            Partial("sum"),
            Partial("max"),
        ):
            first, *others = [without_sizes(sample, shape, placement) for shape in shapes]
            assert all(other == first for other in others), placement


def test_new_sizes_are_not_planned(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    halves = [dtorch.ones(n, 3, device_mesh=mesh, placements=[dtorch.Shard(0)]) for n in (2, 5, 1)]
    first = halves[0] + halves[0], halves[0] > 1.5, halves[0].neg()
    monkeypatch.setattr(entries, "propagate", None)
    for x in halves[1:]:
        total, mask, negative = x + x, x > 1.5, x.neg()
        assert total.shape == mask.shape == negative.shape == x.shape
        assert (total.dtype, mask.dtype) == (torch.float32, torch.bool)
        assert total.placements == mask.placements == first[0].placements
        assert total.is_contiguous()


@pytest.mark.parametrize(
    "other",
    [
        lambda mesh: dtorch.ones(5, 3, device_mesh=mesh, dtype=torch.float64),
        lambda mesh: dtorch.ones(5, 3, device_mesh=mesh, placements=[dtorch.Shard(1)]),
        lambda mesh: dtorch.ones(3, 5, device_mesh=mesh).t(),
        lambda mesh: dtorch.ones(0, 3, device_mesh=mesh),
        lambda mesh: dtorch.ones(3, device_mesh=mesh),
        lambda mesh: dtorch.ones(5, 3, device_mesh=mesh, dtype=torch.complex64).conj(),
    ],
    ids=["dtype", "placement", "strides", "empty", "ndim", "conj"],
)
def test_what_differs_in_more_than_sizes_is_planned(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, other: Any
) -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x, y = dtorch.ones(2, 3, device_mesh=mesh), other(mesh)
    x + x
    planned: list[Any] = []

    def noted(func: Any, *args: Any, **kwargs: Any) -> Any:
        planned.append(func)
        return propagate(func, *args, **kwargs)

    monkeypatch.setattr(entries, "propagate", noted)
    result = y + y
    assert planned[-1] is torch.ops.aten.add.Tensor  # after a clone that resolves a conjugate
    assert (result.dtype, result.placements, result.stride()) == (y.dtype, y.placements, y.stride())


def test_tensors_of_two_specs_are_planned(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    x, row = dtorch.ones(2, 3), dtorch.ones(1, 3)
    x + x
    monkeypatch.setattr(entries, "propagate", None)
    with pytest.raises(TypeError):
        x + row
