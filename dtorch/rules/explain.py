"""The text of placement errors: what was given, what is allowed, what to write."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from dtorch.rules.call import Call
from dtorch.rules.equation import Code, Equation, Mismatch, Signature, code, signatures
from dtorch.spec import Spec
from dtorch_runtime.errors import PlacementError
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard

#: Whether placements are tried out: a refusal is then no more than that, and the last one is asked again for its text.
is_trial: ContextVar[bool] = ContextVar("dtorch_is_trial", default=False)
#: Signatures that a message lists before it says how many more there are.
MAX_SIGNATURES = 24


def given(call: Call, only: Sequence[int] | None = None) -> str:
    """The inputs of a call by parameter name, one line each."""
    names = input_names(call)
    chosen = range(len(names)) if only is None else only
    return "\n".join(f"    {names[i]}: {call.inputs[i]}" for i in chosen)


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


def refused(
    call: Call,
    reason: str,
    signatures: Sequence[str],
    fix: str | None = None,
    only: Sequence[int] | None = None,
) -> PlacementError:
    """No signature fits: ``reason`` says what was broken, ``fix`` what to write, ``only`` which inputs to show."""
    if is_trial.get():
        return PlacementError(reason)
    listed = list(dict.fromkeys(signatures))
    lines = [f"    {line}" for line in listed[:MAX_SIGNATURES]]
    if len(listed) > MAX_SIGNATURES:
        lines.append(f"    and {len(listed) - MAX_SIGNATURES} more")
    allowed = "\n".join(lines) or "    every input Replicate()"
    return PlacementError(
        f"{call.op} cannot run on these placements: {reason}\n"
        f"  given:\n{given(call, only)}\n"
        f"  allowed along each mesh axis (inputs -> outputs):\n{allowed}\n"
        f"  write: {fix or replicate_fix(call, only)}\n"
        f"  or, to have data moved where needed: with dtorch.auto_redistribute():"
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


def replicate_fix(call: Call, only: Sequence[int] | None = None) -> str:
    """Replicate each input that is not."""
    names = input_names(call)
    chosen = range(len(names)) if only is None else only
    return "; ".join(
        redistribute(names[i], [Replicate()] * len(call.inputs[i].layout.placements))
        for i in chosen
        if not call.inputs[i].layout.is_replicated
    )


def show(call: Call, signature: Signature) -> str:
    """One signature: ``self: S(0), mat2: R -> S(0)``."""
    return show_codes(input_names(call), signature)


def show_codes(names: Sequence[str], signature: Signature) -> str:
    """One signature of inputs with these names."""
    inputs = ", ".join(
        f"{name}: {_show(c)}" for name, c in zip(names, signature.inputs, strict=True) if name != "out"
    )
    return f"{inputs} -> {', '.join(map(_show, signature.outputs)) or inputs}"


def _show(coded: Code) -> str:
    return str(_placement(coded))


def _placement(coded: Code) -> Placement:
    if coded is None:
        return Replicate()
    return Shard(coded) if isinstance(coded, int) else Partial(coded)


def mismatch(call: Call, equation: Equation, found: Mismatch) -> PlacementError:
    """The error for inputs that no signature fits."""
    if is_trial.get():
        return PlacementError(found.reason)
    names = input_names(call)
    reason = found.reason.format(*names)
    if call.inputs[0].layout.mesh.ndim > 1:
        reason += f" (along mesh axis {found.axis})"
    legal = signatures(equation)
    if found.recut is not None:
        index, placements = found.recut
        fix: str | None = redistribute(names[index], placements)
    else:
        fix = cheapest_fix(call, equation, found.axis)
    return refused(call, reason, [show(call, s) for s in legal], fix)


def cheapest_fix(call: Call, equation: Equation, axis: int) -> str | None:
    """The redistributions that reach the nearest signature along one axis, by an estimate of bytes moved."""
    return fix_of(input_names(call), call.inputs, equation, axis)


def fix_of(names: Sequence[str], inputs: Sequence[Spec], equation: Equation, axis: int) -> str | None:
    """``cheapest_fix`` for these inputs of a call."""
    num_ranks = inputs[0].layout.mesh.shape[axis]
    given = [code(spec.layout.placements[axis]) for spec in inputs]
    best: tuple[float, int, Signature] | None = None
    for signature in signatures(equation):
        if any(given[i] != signature.inputs[i] for i in equation.fixed if equation.inputs[i] is not None):
            continue
        pairs = list(zip(given, signature.inputs, strict=True))
        moved = sum(
            _cost(have, want, num_ranks) * spec.num_bytes
            for (have, want), spec in zip(pairs, inputs, strict=True)
        )
        changes = sum(have != want for have, want in pairs)
        if changes and (best is None or (moved, changes) < best[:2]):
            best = (moved, changes, signature)
    if best is None:
        return None
    fixes = []
    for name, spec, have, want in zip(names, inputs, given, best[2].inputs, strict=True):
        if have != want:
            placements = list(spec.layout.placements)
            placements[axis] = _placement(want)
            fixes.append(redistribute(name, placements))
    return "; ".join(fixes)


def _cost(have: Code, want: Code, num_ranks: int) -> float:
    """Bytes that each rank receives, as a part of the whole tensor."""
    if have == want or have is None:
        return 0.0
    share = (num_ranks - 1) / num_ranks
    if isinstance(have, str):
        return 2 * share if want is None else share
    return share if want is None else share / num_ranks if isinstance(want, int) else 2 * share
