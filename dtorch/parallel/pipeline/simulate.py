"""A pipeline in abstract time: when each rank would do its steps, how long it would idle, and what it would hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dtorch.parallel.pipeline.steps import Kind, Orders, Step, needs
from dtorch_runtime.errors import SettingError

#: A backward pass takes twice the time of a forward pass; the gradients of inputs and of weights half of that each.
COSTS: Final[Mapping[Kind, float]] = {
    "forward": 1.0,
    "backward": 2.0,
    "backward_input": 1.0,
    "backward_weight": 1.0,
}


@dataclass(frozen=True, slots=True)
class Span:
    """When a step runs."""

    step: Step
    rank: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What ``simulate`` gives; ``print()`` draws it.

    Attributes:
        spans: by start, then by rank.
        length: from the first start to the last end.
        bubble_ratio: the part of the time of all ranks in which they idle.
        peak_live: by rank, the most micro-batches that wait for the rest of their backward at once, each counted for
            each of the rank's stages.
    """

    spans: tuple[Span, ...]
    length: float
    bubble_ratio: float
    peak_live: tuple[int, ...]

    def __str__(self) -> str:
        """A line for each rank; letter and micro-batch of a step where it runs, one column a unit of time."""
        width = 1 + max((len(f"{span.step.letter}{span.step.micro_batch}") for span in self.spans), default=1)
        lines = [[" " * width] * round(self.length) for _ in self.peak_live]
        for span in self.spans:
            cells = range(round(span.start), round(span.end))
            text = f"{span.step.letter}{span.step.micro_batch}"
            for cell in cells:
                lines[span.rank][cell] = (text if cell == cells.start else "-" * (width - 1)).ljust(width)
        return "\n".join("".join(line).rstrip() for line in lines)


def simulate(orders: Orders, *, costs: Mapping[Kind, float] = COSTS, transfer: float = 0.0) -> Timeline:
    """Run each rank's steps in the order given, each as soon as the rank is free and what it needs has arrived.

    Args:
        orders: one list of steps a rank.
        costs: the time of a step of each kind.
        transfer: the time from the end of a step until another rank has its result.

    Raises:
        SettingError: steps wait for one another, or for one that is not there.
    """
    num_stages = 1 + max((step.stage for order in orders for step in order), default=-1)
    ends: dict[Step, tuple[float, int]] = {}
    spans: list[Span] = []
    positions = [0] * len(orders)
    free = [0.0] * len(orders)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                step = order[positions[rank]]
                ready = _ready(step, rank, num_stages, ends, transfer)
                if ready is None:
                    break
                start = max(free[rank], ready)
                free[rank] = start + costs[step.kind]
                ends[step] = free[rank], rank
                spans.append(Span(step, rank, start, free[rank]))
                positions[rank] += 1
                is_moving = True
    stuck = [order[at] for order, at in zip(orders, positions, strict=True) if at < len(order)]
    if stuck:
        raise SettingError(_stuck_text(stuck, num_stages, ends))
    length = max(free, default=0.0)
    busy = sum(span.end - span.start for span in spans)
    return Timeline(
        spans=tuple(sorted(spans, key=lambda span: (span.start, span.rank))),
        length=length,
        bubble_ratio=1 - busy / (length * len(orders)) if length else 0.0,
        peak_live=tuple(map(_peak_live, orders)),
    )


def _ready(
    step: Step, rank: int, num_stages: int, ends: Mapping[Step, tuple[float, int]], transfer: float
) -> float | None:
    """When all that ``step`` needs is there; None when some of it has no time yet."""
    ready = 0.0
    for choices in needs(step, num_stages):
        done = next((ends[choice] for choice in choices if choice in ends), None)
        if done is None:
            return None
        end, where = done
        ready = max(ready, end + (transfer if where != rank else 0.0))
    return ready


def _stuck_text(stuck: list[Step], num_stages: int, ends: Mapping[Step, object]) -> str:
    lacks = [
        f"{step} ({step.kind} of micro-batch {step.micro_batch} at stage {step.stage}) waits for "
        + " and ".join(
            " or ".join(map(str, choices))
            for choices in needs(step, num_stages)
            if not any(choice in ends for choice in choices)
        )
        for step in stuck
    ]
    return (
        "these orders of a pipeline never end: "
        + "; ".join(lacks)
        + ". Every step must come after what it needs"
    )


def _peak_live(order: list[Step]) -> int:
    live: set[tuple[int, int]] = set()
    peak = 0
    for step in order:
        if step.kind == "forward":
            live.add((step.stage, step.micro_batch))
            peak = max(peak, len(live))
        elif step.kind != "backward_input":
            live.discard((step.stage, step.micro_batch))
    return peak
