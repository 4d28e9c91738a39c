"""``out=`` of ops whose pieces another kernel computes: the target has torch's result, wherever the inputs are cut."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from dtorch.op_plan import NewOutput, OpPlan
from dtorch.propagate import propagate
from dtorch.rules.call import op_of
from dtorch.rules.dsl import EquationRule
from dtorch.rules.out import functional_of
from dtorch.rules.tables import find_rule
from dtorch.spec import intern_spec
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement
from tests.numerics.test_rules import EVERY
from tests.support.rule_checks import Sample, check, claimed, expected, replace_tensors, tensors_of
from tests.support.simulated_mesh import gather, run, shard

#: More devices than most dims are long: uneven pieces, and some without elements.
MESH = DeviceMesh("cpu", list(range(5)))
#: What one op is checked on at most.
MAX_CHECKED = 4
#: Torch's own meta kernels of these cannot be called, so that nobody can tell what they return.
NO_META = {
    "aten::_adaptive_avg_pool3d_backward.out",
    "aten::_native_batch_norm_legit.no_stats_out",
    "aten::grid_sampler_2d.out",
    "aten::grid_sampler_3d.out",
    "aten::grid_sampler_3d_backward.out",
}


def variant_with_out(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload that gives the same through ``out=``."""
    packet = func._overloadpacket
    for name in packet.overloads():
        variant: torch._ops.OpOverload = getattr(packet, name)
        functional = functional_of(op_of(variant))
        if functional is not None and functional.func is func:
            return variant
    return None


def is_special(func: torch._ops.OpOverload) -> bool:
    """Whether another kernel may make the pieces, and the op can be called with ``out=``."""
    rule, variant = find_rule(op_of(func)), variant_with_out(func)
    if variant is None or op_of(variant).name in NO_META or find_rule(op_of(variant)) is not rule:
        return False
    is_extreme = op_of(func).base in ("aten::amax", "aten::amin")  # that of no elements does not exist
    return isinstance(rule, EquationRule) and (rule.specialize is not None or is_extreme)


def by_op() -> dict[str, list[Sample]]:
    """The samples of each op that is checked."""
    found = defaultdict(list)
    for sample in EVERY:
        if is_special(sample.func):
            found[op_of(sample.func).name].append(sample)
    return found


SAMPLES = by_op()


def planned(sample: Sample, placements: Sequence[Placement]) -> OpPlan:
    """The plan of the call without ``out=``."""
    whole = (sample.make(), dict(sample.kwargs))
    specs = [
        intern_spec(tuple(t.shape), t.dtype, Layout(MESH, (placement,)), tuple(t.stride()))
        for t, placement in zip(tensors_of(whole), placements, strict=True)
    ]
    args, kwargs = replace_tensors(whole, list(specs))
    return propagate(sample.func, args, kwargs)


def special_placements(sample: Sample) -> Iterator[tuple[tuple[Placement, ...], OpPlan]]:
    """Those for which another kernel makes the pieces of all results, with its plan."""
    num_results = len(op_of(sample.func).returns)
    for placements in claimed(sample, MESH):
        try:
            plan = planned(sample, placements)
        except PlacementError:
            continue
        made = [output for output in plan.outputs if isinstance(output, NewOutput)]
        if plan.op != op_of(sample.func).name and len(made) == num_results:
            yield placements, plan


def check_targets(sample: Sample, placements: Sequence[Placement], plan: OpPlan) -> None:
    """The call with ``out=`` fills its targets with what plain torch gives."""
    variant = variant_with_out(sample.func)
    assert variant is not None
    specs = [output.spec for output in plan.outputs if isinstance(output, NewOutput)]
    targets = [
        shard(torch.full(spec.shape, 77, dtype=spec.dtype), MESH, spec.layout.placements) for spec in specs
    ]
    whole = (sample.make(), dict(sample.kwargs))
    given = [shard(t, MESH, (p,)) for t, p in zip(tensors_of(whole), placements, strict=True)]
    args, kwargs = replace_tensors(whole, list(given))
    out: dict[Any, Any] = dict(zip(op_of(variant).returned_parameter, targets, strict=True))
    results = run(variant, *args, moves_bytes=sample.moves_bytes, **kwargs, **out)
    results = results if isinstance(results, list) else [results]
    assert all(result is target for result, target in zip(results, targets, strict=True))
    for mine, theirs in zip(targets, expected(sample), strict=False):
        torch.testing.assert_close(gather(mine), theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_targets_have_the_results(name: str) -> None:
    checks = itertools.chain.from_iterable(
        ((sample, *found) for found in itertools.islice(special_placements(sample), 2))
        for sample in SAMPLES[name]
    )
    for sample, placements, plan in itertools.islice(checks, MAX_CHECKED):
        check_targets(sample, placements, plan)


@pytest.mark.parametrize(
    "name",
    [
        "aten::mean.dim",
        "aten::mean.default",
        "aten::amax.default",
        "aten::embedding.default",
        "aten::mse_loss.default",
        "aten::nll_loss_forward.default",
        "aten::tril.default",
        "aten::trace.default",
        "aten::block_diag.default",
    ],
)
def test_there_are_such_placements(name: str) -> None:
    assert any(True for sample in SAMPLES[name] for _ in special_placements(sample))


def test_a_tensor_without_elements_is_not_a_piece_without_elements() -> None:
    """Batch norm has no saved statistics outside of training; its derivatives are not zero for that."""
    samples = [
        sample
        for sample in EVERY
        if op_of(sample.func).name == "aten::native_batch_norm_backward.default"
        and any(t.numel() == 0 for t in tensors_of((sample.make(), sample.kwargs)))
    ]
    num_checked = 0
    for sample in samples:
        want = expected(sample)
        for placements, plan in special_placements(sample):
            assert plan.op == "dtorch::unless_empty"
            check(sample, MESH, [(placement,) for placement in placements], want)
            num_checked += 1
    assert num_checked
