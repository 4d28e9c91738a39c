"""What a search for a plan has found, and its explanation."""

from __future__ import annotations

from dataclasses import dataclass

from dtorch.parallel.costs import Cost
from dtorch.parallel.report import size_text
from dtorch.parallel.tp_plan import Plan


@dataclass(frozen=True, slots=True)
class Verdict:
    """Blocks that are alike: how many are cut, and what cutting one adds to a step's seconds and a device's bytes."""

    name: str
    num_cut: int
    num_blocks: int
    seconds_by_cut: float
    bytes_by_cut: int


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has found, and what it was measured against.

    Attributes:
        plan: the styles, as ``parallelize(plan=)`` takes them.
        zero_stage: of ``dtorch.parallel.zero``, without which the training step does not fit; 0 where it does.
        chosen, auto, replicated: costs of a step by the plan found, by that of ``"auto"``, and with all weights whole.
        verdicts: the choice for each kind of block.
        limit_bytes: what a device may hold.
    """

    plan: Plan
    zero_stage: int
    chosen: Cost
    auto: Cost
    replicated: Cost
    verdicts: tuple[Verdict, ...]
    limit_bytes: int | None

    def lines(self) -> tuple[str, ...]:
        """The explanation."""
        zero = ""
        if self.zero_stage:
            zero = f", with ZeRO stage {self.zero_stage}: write {zero_call(self.zero_stage)}"
        limit = "" if self.limit_bytes is None else f" of {size_text(self.limit_bytes)} allowed"
        return (
            "the plan was searched for: seconds of a step and bytes of a device, by measured or given costs",
            f"  chosen: {_cost_text(self.chosen)}{limit}{zero}",
            f'  "auto": {_cost_text(self.auto)}{self._over(self.auto)}',
            f"  all replicated: {_cost_text(self.replicated)}{self._over(self.replicated)}",
            *(f"  {_verdict_text(verdict)}" for verdict in self.verdicts),
        )

    def _over(self, cost: Cost) -> str:
        is_over = self.limit_bytes is not None and cost.memory_bytes > self.limit_bytes
        return ", does not fit" if is_over else ""


def zero_call(stage: int) -> str:
    """What to write for a stage of ZeRO."""
    return f"dtorch.parallel.zero(model, optimizer, stage={stage})"


def _cost_text(cost: Cost) -> str:
    return (
        f"{_time_text(cost.seconds)} ({_time_text(cost.compute_s)} compute, "
        f"{_time_text(cost.communication_s)} communication), {size_text(cost.memory_bytes)}"
    )


def _verdict_text(verdict: Verdict) -> str:
    what = "cut" if verdict.num_cut == verdict.num_blocks else "whole"
    if 0 < verdict.num_cut < verdict.num_blocks:
        what = f"{verdict.num_cut} of {verdict.num_blocks} cut"
    time = f"{_time_text(abs(verdict.seconds_by_cut))} {'more' if verdict.seconds_by_cut > 0 else 'less'}"
    memory = f"{size_text(abs(verdict.bytes_by_cut))} {'more' if verdict.bytes_by_cut > 0 else 'less'}"
    return f"{verdict.name}: {what}; a cut takes {time} and {memory} each"


def _time_text(seconds: float) -> str:
    """``1.2 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
