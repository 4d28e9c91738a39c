"""A step of a pipeline: one micro-batch through one stage, forward or backward; and what it has to wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

#: ``backward`` is both of what follows. ``backward_input`` gives the gradient of what came into the stage, on which the
#: stage before waits; ``backward_weight`` those of the weights, on which nobody waits.
Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
_LETTERS: Final[dict[Kind, str]] = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One micro-batch through one stage. Stage s of n lies on rank ``s % num_ranks`` of the pipeline's axis."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.letter}{self.micro_batch}@{self.stage}"

    @property
    def letter(self) -> str:
        """``F``, ``B``, ``I`` or ``W``."""
        return _LETTERS[self.kind]


#: What each rank does, in order: one list a rank.
Orders: TypeAlias = list[list[Step]]


def needs(step: Step, num_stages: int) -> list[tuple[Step, ...]]:
    """What must be done before ``step``: of each tuple one."""
    stage, micro_batch = step.stage, step.micro_batch
    if step.kind == "forward":
        return [(Step("forward", stage - 1, micro_batch),)] if stage else []
    if step.kind == "backward_weight":
        return [(Step("backward_input", stage, micro_batch),)]
    needed: list[tuple[Step, ...]] = [(Step("forward", stage, micro_batch),)]
    if stage + 1 < num_stages:
        after = stage + 1
        needed.append((Step("backward", after, micro_batch), Step("backward_input", after, micro_batch)))
    return needed


def alternate(forwards: list[Step], backwards: list[Step], num_ahead: int) -> list[Step]:
    """``num_ahead`` forward steps, then one forward and one backward in turn, then the backward steps that are left."""
    order = forwards[:num_ahead]
    for forward, backward in zip(forwards[num_ahead:], backwards):
        order += (forward, backward)
    return order + backwards[max(0, len(forwards) - num_ahead) :]
