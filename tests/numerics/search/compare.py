"""What trying finds against what the rules claim, for one call."""

from __future__ import annotations

from dataclasses import dataclass

from dtorch.propagate import propagate
from dtorch.rules.call import op_of
from dtorch.rules.tables import find_rule
from dtorch.spec import intern_spec
from dtorch_runtime.errors import DTorchError, PlacementError, UnsupportedError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement
from dtorch_runtime.ir.transfer import plan_redistribute
from tests.numerics.search.signatures import Found, combinations, find_signatures
from tests.support.rule_checks import Sample, check, expected, replace_tensors, tensors_of


@dataclass(frozen=True, slots=True)
class Verdict:
    """``missing`` holds and is refused; ``false`` is accepted and does not hold."""

    has_rule: bool
    missing: tuple[Found, ...]
    false: tuple[str, ...]


def compare(sample: Sample, mesh: DeviceMesh | None = None) -> Verdict:
    """Compare the rules with what trying finds, along one axis."""
    mesh = mesh or DeviceMesh("cpu", [0, 1, 2])
    op = op_of(sample.func)
    if op.is_random or op.is_dynamic or "empty" in op.base:
        return Verdict(True, (), ())  # no two calls agree, or no shape is known before
    found = find_signatures(sample)
    missing = tuple(f for f in found if not accepts(sample, mesh, f.inputs))
    return Verdict(find_rule(op) is not None, missing, tuple(_false_claims(sample, mesh)))


def accepts(sample: Sample, mesh: DeviceMesh, inputs: tuple[Placement, ...]) -> bool:
    """Whether the rules take these placements without communication."""
    whole = (sample.make(), sample.kwargs)
    tensors = tensors_of(whole)
    specs = [
        intern_spec(tuple(t.shape), t.dtype, Layout(mesh, (p,)), tuple(t.stride()))
        for t, p in zip(tensors, inputs, strict=True)
    ]
    args, kwargs = replace_tensors(whole, list(specs))
    try:
        plan = propagate(sample.func, args, kwargs)
    except (PlacementError, UnsupportedError):
        return False
    return all(
        step.is_local
        for index, layout in plan.conversions
        for step in plan_redistribute(
            specs[index].shape, specs[index].layout, layout, itemsize_bytes=specs[index].dtype.itemsize
        )
    )


def _false_claims(sample: Sample, mesh: DeviceMesh) -> list[str]:
    want = expected(sample)
    false = []
    for inputs in combinations(tensors_of((sample.make(), sample.kwargs))):
        if not accepts(sample, mesh, inputs):
            continue
        try:
            check(sample, mesh, [(p,) for p in inputs], want)
        except (AssertionError, RuntimeError, IndexError, DTorchError) as error:
            false.append(
                f"{', '.join(map(str, inputs))}: {type(error).__name__}: {str(error).splitlines()[0]}"
            )
    return false
