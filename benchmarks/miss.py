"""What a miss of the cache of calls costs: planning an op whose shapes are new.

Run: ``python -m benchmarks.miss``. Every sample of ``tests/numerics`` is planned on a mesh of two devices, its inputs
replicated, and sharded as its rule allows (strict mode); and where strict mode refuses, with inputs converted
(``auto_redistribute``). Before each plan, all that is kept about shapes is forgotten. Planning needs no cluster.
The figures of an op are its dearest sample's. Peer, for a few common ops in whole programs: PyTorch DTensor.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import dtorch
from benchmarks.gloo import on_gloo_ranks
from benchmarks.harness import Row, report
from dtorch import auto_plan, spec as spec_module
from dtorch.auto_plan import plan_cheapest
from dtorch.probe import refuse_dtypes
from dtorch.propagate import propagate
from dtorch.rules import dim_groups, equation
from dtorch.rules.call import Call, op_of
from dtorch.rules.explain import is_trial
from dtorch.spec import intern_spec
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir import transfer_cost
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Replicate
from tests.numerics.test_rules import EVERY
from tests.support.rule_checks import Sample, choices, claimed, replace_tensors, tensors_of

GOAL_US = 150
REPEATS = 15
NUM_WORST = 10
#: Combinations of placements that are tried for one that strict mode refuses.
_MAX_TRIED = 200
#: What remembers shapes.
_FORGETFUL = (
    equation.nested_cuts,
    dim_groups.dim_groups,
    auto_plan.moved_bytes,
    transfer_cost.transfer_bytes,
    transfer_cost._boxes_by_device,
)
_Combination = Sequence[Placement]
#: Plans a call: the overload, its arguments, its keyword arguments.
_Plan = Callable[[Any, tuple[Any, ...], dict[str, Any]], object]


def _forget() -> None:
    for remembers in _FORGETFUL:
        remembers.cache_clear()
    spec_module._interned.clear()


def _call(sample: Sample, mesh: DeviceMesh, combination: _Combination) -> tuple[Any, Any]:
    """Arguments and keyword arguments of a sample, as ``propagate`` takes them."""
    whole = (sample.make(), sample.kwargs)
    specs = [
        intern_spec(tuple(t.shape), t.dtype, Layout(mesh, (placement,)), tuple(t.stride()))
        for t, placement in zip(tensors_of(whole), combination, strict=True)
    ]
    args, kwargs = replace_tensors(whole, list(specs))
    return args, kwargs


def _cost_us(plan: _Plan, sample: Sample, mesh: DeviceMesh, combination: _Combination) -> float:
    """Microseconds of one plan."""
    costs = []
    for _ in range(REPEATS):
        _forget()
        args, kwargs = _call(sample, mesh, combination)
        start = time.perf_counter()
        plan(sample.func, args, kwargs)
        costs.append((time.perf_counter() - start) * 1e6)
    return statistics.median(costs)


def _whole(sample: Sample, mesh: DeviceMesh) -> Iterator[_Combination]:
    yield (Replicate(),) * len(tensors_of((sample.make(), sample.kwargs)))


def _sharded(sample: Sample, mesh: DeviceMesh) -> Iterator[_Combination]:
    """The first claimed combination that is not whole and is accepted; for a rule without claims, the first such."""
    tensors = tensors_of((sample.make(), sample.kwargs))
    every = itertools.islice(itertools.product(*map(choices, tensors)), _MAX_TRIED)
    for combination in claimed(sample, mesh) or every:
        if any(not isinstance(p, Replicate) for p in combination) and _accepts(sample, mesh, combination):
            yield combination
            return


def _refused(sample: Sample, mesh: DeviceMesh) -> Iterator[_Combination]:
    """The first combination that strict mode refuses, those with a shard before those with a partial sum."""
    tensors = tensors_of((sample.make(), sample.kwargs))
    for combination in itertools.islice(itertools.product(*map(choices, tensors)), _MAX_TRIED):
        if not _accepts(sample, mesh, combination):
            yield combination
            return


def _accepts(sample: Sample, mesh: DeviceMesh, combination: _Combination) -> bool:
    args, kwargs = _call(sample, mesh, combination)
    try:
        propagate(sample.func, args, kwargs)
    except PlacementError:
        return False
    return True


def _plan_strictly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """As ``entries`` does it: whether kernels take the dtypes is asked once an op, whatever the shapes."""
    plan = propagate(func, args, kwargs)
    refuse_dtypes(Call(op_of(func), args, kwargs), plan)


def _plan_converted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    token = is_trial.set(True)
    try:
        _plan_strictly(func, args, kwargs)
    except PlacementError as refused:
        plan_cheapest(func, args, kwargs, refused)
    finally:
        is_trial.reset(token)


_SETS: dict[str, tuple[_Plan, Callable[[Sample, DeviceMesh], Iterator[_Combination]]]] = {
    "replicated": (_plan_strictly, _whole),
    "sharded": (_plan_strictly, _sharded),
    "converted (auto)": (_plan_converted, _refused),
}


def costs_by_op(which: str) -> dict[str, float]:
    """Microseconds of a plan for each op, with one set of placements; the dearest first."""
    plan, placements = _SETS[which]
    mesh = DeviceMesh("cpu", [0, 1])
    costs: dict[str, float] = {}
    for sample in EVERY:
        for combination in placements(sample, mesh):
            name = op_of(sample.func).name
            costs[name] = max(costs.get(name, 0.0), _cost_us(plan, sample, mesh, combination))
    return dict(sorted(costs.items(), key=lambda item: -item[1]))


def _rows(which: str, costs: dict[str, float]) -> list[Row]:
    values = sorted(costs.values())
    num_under = sum(value <= GOAL_US for value in values)
    figures = {
        "median": statistics.median(values),
        "90th percentile": values[int(len(values) * 0.9)],
        "dearest": values[-1],
    }
    rows = [
        Row(f"{which}: {name} of {len(values)} ops", "us", value, {}, f"<= {GOAL_US}", value <= GOAL_US)
        for name, value in figures.items()
    ]
    rows.append(Row(f"{which}: ops within {GOAL_US} us", "%", 100 * num_under / len(values)))
    return rows + [
        Row(f"  {name}", "us", value) for name, value in itertools.islice(costs.items(), NUM_WORST)
    ]


# ---- beside DTensor ----

NUM_STEPS = 200
#: A call on a matrix of n rows and 16 columns.
PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "x + x": lambda x, w: x + x,
    "x @ w": lambda x, w: x @ w,
    "x.sum(1)": lambda x, w: x.sum(1),
    "x.softmax(1)": lambda x, w: x.softmax(1),
    "x.view(-1, 4, 4)": lambda x, w: x.view(-1, 4, 4),
}


def _first_calls_us(make: Callable[[int], Any], w: Any, run: Callable[[Any, Any], Any]) -> float:
    """Microseconds of a call whose shape is new, on rows that the mesh divides: the median of many."""
    run(make(2), w)
    costs = []
    for step in range(2, NUM_STEPS + 2):
        x = make(2 * step)
        start = time.perf_counter()
        run(x, w)
        costs.append((time.perf_counter() - start) * 1e6)
    return statistics.median(costs)


def dtorch_first_calls() -> dict[str, float]:
    """Each program, its op issued to a cluster."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    w = dtorch.ones((16, 16), device_mesh=mesh)

    def make(num_rows: int) -> Any:
        return dtorch.ones((num_rows, 16), device_mesh=mesh, placements=[dtorch.Shard(0)])

    return {name: _first_calls_us(make, w, run) for name, run in PROGRAMS.items()}


def dtensor_first_calls(rank: int) -> dict[str, float]:
    """Each program, its op run by one of two ranks."""
    from torch.distributed.tensor import Replicate as Whole, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    w = distribute_tensor(torch.ones(16, 16), mesh, [Whole()])

    def make(num_rows: int) -> Any:
        return distribute_tensor(torch.ones(num_rows, 16), mesh, [Shard(0)])

    with torch.no_grad():
        return {name: _first_calls_us(make, w, run) for name, run in PROGRAMS.items()}


def main() -> None:
    """Measure and report."""
    rows = [row for which in _SETS for row in _rows(which, costs_by_op(which))]
    with torch.no_grad():
        own = dtorch_first_calls()
    dtorch.shutdown()
    peer = on_gloo_ranks(partial(dtensor_first_calls))
    rows += [
        Row(
            f"first call of {name}",
            "us",
            own[name],
            {"DTensor": peer[name]},
            f"<= {GOAL_US}",
            own[name] <= GOAL_US,
        )
        for name in PROGRAMS
    ]
    report("miss", rows)


if __name__ == "__main__":
    main()
