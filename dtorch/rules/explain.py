"""The text of placement errors: what was given, what is allowed, what to write."""

from __future__ import annotations

from collections.abc import Sequence

from dtorch.rules.call import Call
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.placement import Placement

#: Signatures that a message lists before it says how many more there are.
MAX_SIGNATURES = 24


def given(call: Call) -> str:
    """The inputs of a call by parameter name, one line each."""
    return "\n".join(f"    {name}: {spec}" for name, spec in zip(input_names(call), call.inputs, strict=True))


def input_names(call: Call) -> list[str]:
    """How the schema names each input: ``self``, ``tensors[1]``."""
    names = [""] * len(call.inputs)
    for name, operand in call.operands.items():
        if isinstance(operand, int):
            names[operand] = name
        elif operand is not None:
            for position, index in enumerate(operand):
                if index is not None:
                    names[index] = f"{name}[{position}]"
    return names


def refused(call: Call, reason: str, signatures: Sequence[str], fix: str | None = None) -> PlacementError:
    """No signature fits: ``reason`` says which rule was broken, ``fix`` what to write."""
    listed = list(dict.fromkeys(signatures))
    lines = [f"    {line}" for line in listed[:MAX_SIGNATURES]]
    if len(listed) > MAX_SIGNATURES:
        lines.append(f"    and {len(listed) - MAX_SIGNATURES} more")
    allowed = "\n".join(lines) or "    every input Replicate()"
    return PlacementError(
        f"{call.op} cannot run on these placements: {reason}\n"
        f"  given:\n{given(call)}\n"
        f"  allowed along each mesh axis (inputs -> outputs):\n{allowed}\n"
        f"  write: {fix or replicate_fix(call)}"
    )


def no_rule(call: Call) -> PlacementError:
    """The op has no placement rule: it runs on whole inputs only."""
    names = input_names(call)
    signature = ", ".join(f"{name}: R" for name in names)
    return refused(
        call,
        "it has no placement rule, so it runs on whole inputs only",
        [f"{signature} -> R"],
        replicate_fix(call),
    )


def redistribute(name: str, placements: Sequence[Placement]) -> str:
    """The call that brings an input to these placements."""
    return f"{name}.redistribute(placements=[{', '.join(f'dtorch.{p!r}' for p in placements)}])"


def replicate_fix(call: Call) -> str:
    """Replicate each input that is not."""
    fixes = [
        f"{name}.redistribute(placements=[{', '.join(['dtorch.Replicate()'] * len(spec.layout.placements))}])"
        for name, spec in zip(input_names(call), call.inputs, strict=True)
        if not spec.layout.is_replicated
    ]
    return "; ".join(fixes)
