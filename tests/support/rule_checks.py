"""Checks a call under every combination of placements against plain torch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from dtorch.rules.call import Call, op_of
from dtorch.rules.dsl import EquationRule
from dtorch.rules.equation import Signature, signatures
from dtorch.rules.tables import find_rule
from dtorch.spec import intern_spec
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, ReduceOp, Replicate, Shard
from tests.support.simulated_mesh import Sharded, gather, run, shard


@dataclass
class Sample:
    """A call: ``make`` gives fresh arguments."""

    func: torch._ops.OpOverload
    make: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    moves_bytes: bool = False
    #: Signatures that the table claims in general and that do not hold for these sizes.
    except_for: Callable[[Signature], bool] = lambda signature: False
    name: str = ""

    def __str__(self) -> str:
        return self.name or str(self.func)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in arguments, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_of(item)]
    return [t for item in value for t in tensors_of(item)] if isinstance(value, list | tuple) else []


def replace_tensors(value: Any, tensors: list[Any]) -> Any:
    """The same arguments with other things in the place of tensors; takes them from the front of the list."""
    if isinstance(value, torch.Tensor):
        return tensors.pop(0)
    if isinstance(value, dict):
        return {key: replace_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(replace_tensors(item, tensors) for item in value)
    return value


def choices(tensor: torch.Tensor) -> list[Placement]:
    """Placements of one tensor along one axis."""
    return [Replicate(), *map(Shard, range(tensor.ndim)), Partial("sum")]


def expected(sample: Sample) -> list[torch.Tensor]:
    """What plain torch gives, and the inputs afterwards (they may have been written to)."""
    args = sample.make()
    kwargs = {key: _copy(value) for key, value in sample.kwargs.items()}
    with torch.no_grad():
        result = sample.func(*args, **kwargs)
    return [*tensors_of(result), *tensors_of((args, kwargs))]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def actual(sample: Sample, mesh: DeviceMesh, placements: Sequence[Sequence[Placement]]) -> list[torch.Tensor]:
    """The same from pieces. Raises PlacementError."""
    whole = (sample.make(), {key: _copy(value) for key, value in sample.kwargs.items()})
    given = [shard(t, mesh, p) for t, p in zip(tensors_of(whole), placements, strict=True)]
    args, kwargs = replace_tensors(whole, list(given))
    result = run(sample.func, *args, moves_bytes=sample.moves_bytes, **kwargs)
    outputs = result if isinstance(result, list) else [result]
    return [gather(item) for item in [*outputs, *given] if isinstance(item, Sharded)]


def check(
    sample: Sample, mesh: DeviceMesh, placements: Sequence[Sequence[Placement]], want: list[torch.Tensor]
) -> None:
    """Equal to torch on these placements. Raises PlacementError where they are refused."""
    got = actual(sample, mesh, placements)
    assert len(got) == len(want), f"{len(got)} tensors, torch gives {len(want)}"
    for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(
            mine,
            theirs,
            rtol=1e-4,
            atol=1e-5,
            equal_nan=True,
            msg=lambda text, index=index: (
                f"tensor {index} with {[list(map(str, p)) for p in placements]}: {text}"
            ),
        )


def check_all(sample: Sample, mesh: DeviceMesh, limit: int = 300) -> list[tuple[Placement, ...]]:
    """Every combination of placements along the one axis of ``mesh``: equal to torch, or refused.

    Returns the combinations that were legal.
    """
    tensors = tensors_of((sample.make(), sample.kwargs))
    each = [choices(tensor) for tensor in tensors]
    if math.prod(map(len, each)) <= limit:
        combinations = list(itertools.product(*each))
    else:  # some, drawn without making all: a layer has a dozen weights
        rng = random.Random(0)
        whole = tuple(Replicate() for _ in each)
        combinations = [whole, *(tuple(map(rng.choice, each)) for _ in range(limit))]
    want = expected(sample)
    legal = []
    for combination in combinations:
        try:
            check(sample, mesh, [(placement,) for placement in combination], want)
        except PlacementError:
            continue
        legal.append(combination)
    return legal


def claimed(sample: Sample, mesh: DeviceMesh) -> list[tuple[Placement, ...]]:
    """The placements of the signatures that the rule's table claims for a sample along the one axis of ``mesh``.

    None where the rule has no equation. Left out are products of integers, whose terms cannot be made up, and the
    largest and least of complex numbers, which do not exist.
    """
    layout = Layout(mesh, (Replicate(),))
    whole = (sample.make(), sample.kwargs)
    tensors = tensors_of(whole)
    specs = [intern_spec(tuple(t.shape), t.dtype, layout, tuple(t.stride())) for t in tensors]
    args, kwargs = replace_tensors(whole, list(specs))
    call = Call(op_of(sample.func), args, kwargs)
    rule = find_rule(call.op)
    assert rule is not None, f"{call.op} has no rule"
    if not isinstance(rule, EquationRule):
        return []
    equation = rule.bind(call)
    assert equation is not None, f"{call.op}: the notation does not fit the sample"
    found = []
    for signature in signatures(equation):
        can_be_made = all(
            not (coded == "prod" and not (t.dtype.is_floating_point or t.dtype.is_complex))
            and not (coded in ("max", "min") and t.dtype.is_complex)
            for coded, t in zip(signature.inputs, tensors, strict=True)
        )
        if can_be_made and not sample.except_for(signature):
            found.append(tuple(placement_of(coded) for coded in signature.inputs))
    return found


def placement_of(coded: int | str | None) -> Placement:
    """The placement that a signature's code stands for."""
    if coded is None:
        return Replicate()
    return Shard(coded) if isinstance(coded, int) else Partial(cast(ReduceOp, coded))
