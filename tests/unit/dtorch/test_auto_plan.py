"""The cheapest placements for a call that no signature fits, with their bytes; brute force is the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dtorch.auto_plan import AutoPlan, converted_spec, plan_cheapest
from dtorch.op_plan import NewOutput
from dtorch.propagate import propagate
from dtorch.rules.call import Call, op_of
from dtorch.spec import Spec, intern_spec
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from dtorch_runtime.ir.transfer_cost import transfer_bytes

aten = torch.ops.aten
LINE = DeviceMesh("cpu", [0, 1])
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
R, P = Replicate(), Partial("sum")
S0, S1 = Shard(0), Shard(1)


def spec(*shape: int, at: Any = R, dtype: torch.dtype = torch.float32, stride: Any = None) -> Spec:
    placements: list[Placement] = list(at) if isinstance(at, list | tuple) else [at]
    mesh = LINE if len(placements) == 1 else GRID
    return intern_spec(shape, dtype, Layout(mesh, tuple(placements)), stride)


def cheapest(func: Any, *args: Any, **kwargs: Any) -> AutoPlan:
    """The plan of a call that is refused as it is."""
    with pytest.raises(PlacementError) as caught:
        propagate(func, args, kwargs)
    return plan_cheapest(func, args, kwargs, caught.value)


def placed(plan: AutoPlan) -> dict[int, tuple[Placement, ...]]:
    return {index: layout.placements for index, layout in plan.conversions}


CHOICES: list[tuple[str, Any, tuple[Any, ...], dict[int, Any], int]] = [
    # what, overload, arguments, conversions, bytes that the busiest of two devices receives (4 bytes an element)
    (
        "the whole factor is cut, which moves nothing",
        aten.mm.default,
        (spec(4, 6, at=S1), spec(6, 2)),
        {1: S0},
        0,
    ),
    ("the small one of two moves", aten.add.Tensor, (spec(4, 6, at=S0), spec(6, at=S0)), {1: R}, 12),
    ("all-to-all, not gather and cut", aten.add.Tensor, (spec(4, 6, at=S0), spec(4, 6, at=S1)), {1: S0}, 24),
    ("reduce-scatter, not all-reduce", aten.relu.default, (spec(4, 6, at=P),), {0: S0}, 48),
    ("a scan along the cut dim", aten.cumsum.default, (spec(4, 6, at=S0), 0), {0: S1}, 24),
    ("a scan with no other dim", aten.cumsum.default, (spec(8, at=S0), 0), {0: R}, 16),
    ("a view that needs another cut", aten.view.default, (spec(4, 6, at=S1), [24]), {0: S0}, 24),
    ("a part of a cut dim", aten.slice.Tensor, (spec(4, 6, at=S0), 0, 1, 3), {0: S1}, 24),
    ("units", aten.add.Tensor, (spec(6, at=S0), spec(6, at=Shard(0, 2))), {1: S0}, 4),
]


@pytest.mark.parametrize("case", CHOICES, ids=[case[0] for case in CHOICES])
def test_the_cheapest_choice(case: tuple[str, Any, tuple[Any, ...], dict[int, Placement], int]) -> None:
    _, func, args, conversions, num_bytes = case
    found = cheapest(func, *args)
    assert placed(found) == {index: (placement,) for index, placement in conversions.items()}
    assert found.cost_bytes == num_bytes
    assert found.written_back == ()


def test_equal_costs_prefer_sharded_results() -> None:
    found = cheapest(aten.mul.Tensor, spec(4, 4, at=P), spec(4, 4, at=P))
    (output,) = found.plan.outputs
    assert isinstance(output, NewOutput)
    assert isinstance(output.spec.layout.placements[0], Shard)


def test_a_written_target_stays_when_the_others_can_come() -> None:
    found = cheapest(aten.add_.Tensor, spec(4, 6, at=S0), spec(4, 6, at=S1))
    assert placed(found) == {1: (S0,)}
    assert found.written_back == ()


def test_a_written_target_that_must_move_comes_back() -> None:
    found = cheapest(aten.cumsum_.default, spec(4, 6, at=S0), 0)
    assert placed(found) == {0: (S1,)}
    assert found.written_back == (0,)
    assert found.cost_bytes == 2 * 24
    assert [(m.operand, m.source, m.target, m.num_bytes) for m in found.moves] == [
        ("self", (S0,), (S1,), 48),
        ("self (back)", (S1,), (S0,), 48),
    ]


def test_a_partial_target_comes_back_as_terms() -> None:
    found = cheapest(aten.add_.Scalar, spec(4, 6, at=P), 1)
    assert found.written_back == (0,)


def test_lists_are_converted_position_by_position() -> None:
    params = [spec(4, 6, at=S0), spec(8, at=R), spec(6, 6, at=S1)]
    grads = [spec(4, 6, at=S1), spec(8, at=S0), spec(6, 6, at=R)]
    found = cheapest(aten._foreach_add_.List, params, grads)
    assert [(m.operand, m.target) for m in found.moves] == [("other[0]", (S0,)), ("other[1]", (R,))]
    assert found.cost_bytes == 24 + 16
    assert found.written_back == ()


def test_axes_of_a_mesh_are_chosen_one_by_one() -> None:
    found = cheapest(aten.mm.default, spec(4, 6, at=[S0, S1]), spec(6, 4, at=[S0, R]))
    # Neighbours swap 2 x 3 pieces of the first factor; the second one is where it is needed then.
    assert placed(found) == {0: (S1, S0)}
    assert found.cost_bytes == 2 * 3 * 4


def test_what_does_not_help_raises_the_first_error() -> None:
    error = PlacementError("first")
    ran_out = spec(4, 6, at=S0)
    with pytest.raises(RuntimeError, match="shape"):
        plan_cheapest(aten.view.default, (ran_out, [5]), {}, error)


def test_torch_refuses_what_it_refuses_elsewhere() -> None:
    """A converted copy has memory for each element; the target has not."""
    expanded = spec(4, 6, at=S1, stride=(0, 1))
    with pytest.raises(RuntimeError, match="more than one element"):
        plan_cheapest(aten.add_.Tensor, (expanded, spec(4, 6, at=S0)), {}, PlacementError("first"))


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((4, 6), (6, 1), (6, 1)),
        ((4, 6), (1, 4), (1, 4)),
        ((2, 3, 4), (1, 8, 2), (1, 8, 2)),
        ((4, 6), (12, 2), (6, 1)),
    ],
    ids=str,
)
def test_a_converted_copy_keeps_the_order_of_dims_in_memory(shape: Any, stride: Any, expected: Any) -> None:
    converted = converted_spec(spec(*shape, at=S0, stride=stride), Layout(LINE, (R,)))
    assert converted.stride == expected


# ---- brute force ----


def _all_layouts(given: Spec) -> list[Layout]:
    options = [{p, R, *(Shard(dim) for dim in range(len(given.shape)))} for p in given.layout.placements]
    return [Layout(given.layout.mesh, placements) for placements in itertools.product(*options)]


def _brute_force_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """The least bytes of all ways to have each input as it is, whole, or sharded anyhow along each axis."""
    call = Call(op_of(func), args, {})
    best = None
    for layouts in itertools.product(*map(_all_layouts, call.inputs)):
        cost = 0
        for index, (given, layout) in enumerate(zip(call.inputs, layouts, strict=True)):
            if layout != given.layout:
                cost += transfer_bytes(given.shape, 4, given.layout, layout)
                if index in call.written:
                    cost += transfer_bytes(given.shape, 4, layout, given.layout)
        if best is not None and cost >= best:
            continue
        changed = call.with_inputs(
            [converted_spec(s, layout) for s, layout in zip(call.inputs, layouts, strict=True)]
        )
        try:
            propagate(func, changed.args, changed.kwargs)
        except PlacementError:
            continue
        best = cost
    assert best is not None
    return best


BRUTE: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.mm.default, (spec(4, 6, at=[S0, S1]), spec(6, 4, at=[S0, S1]))),
    (aten.mm.default, (spec(3, 5, at=[S1, S0]), spec(5, 7, at=[S1, R]))),
    (aten.add_.Tensor, (spec(5, 6, at=[S0, S0]), spec(5, 6, at=[S1, R]))),
    (aten.cumsum_.default, (spec(5, 6, at=[S0, R]), 0)),
    (aten.layer_norm.default, (spec(4, 6, at=S1), [6], spec(6, at=S0), spec(6))),
    (aten.addmm.default, (spec(4, at=S0), spec(2, 6, at=S1), spec(6, 4, at=S1))),
    (aten.gather.default, (spec(4, 6, at=S1), 1, spec(4, 3, at=S0, dtype=torch.int64))),
    (aten.view.default, (spec(4, 6, at=[S1, S0]), [2, 12])),
]


@pytest.mark.parametrize(
    ("func", "args"), BRUTE, ids=lambda value: "" if isinstance(value, tuple) else str(value)
)
def test_nothing_is_cheaper(func: Any, args: tuple[Any, ...]) -> None:
    assert cheapest(func, *args).cost_bytes <= _brute_force_bytes(func, args)
