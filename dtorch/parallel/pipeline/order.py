"""The order in which one controller issues the steps of all ranks, and whether it computes the right thing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from dtorch.parallel.pipeline.simulate import simulate
from dtorch.parallel.pipeline.steps import Kind, Orders, Step, needs
from dtorch_runtime.errors import SettingError


def issue_order(orders: Orders) -> list[Step]:
    """All steps in one line, by the time at which each would start; the order of each rank is kept.

    Devices run what is theirs in the order of issue, so this is the whole of a schedule.

    Raises:
        SettingError: steps wait for one another.
    """
    return [span.step for span in simulate(orders).spans]


def check_order(order: Sequence[Step], num_stages: int, num_micro_batches: int) -> None:
    """Whether every stage does every micro-batch once, each step after what it needs.

    Where there is any backward step, each forward must have its backward: one ``backward``, or ``backward_input`` and
    ``backward_weight``.

    Raises:
        SettingError: it is not so; the message names the step.
    """
    done: set[Step] = set()
    for step in order:
        if not (0 <= step.stage < num_stages and 0 <= step.micro_batch < num_micro_batches):
            raise SettingError(
                f"{step} is no step of a pipeline of {num_stages} stages and {num_micro_batches} micro-batches"
            )
        if step in done:
            raise SettingError(
                f"{step} ({step.kind}) is twice in the order of a pipeline; each step comes once"
            )
        for choices in needs(step, num_stages):
            if done.isdisjoint(choices):
                raise SettingError(
                    f"{step} ({step.kind}) comes before {' or '.join(map(str, choices))}, which it needs; put it after"
                )
        done.add(step)
    _check_complete(done, num_stages, num_micro_batches)


def check_ranks(orders: Orders, num_ranks: int) -> None:
    """Whether there is one list a rank, with steps of that rank's stages only.

    Raises:
        SettingError: it is not so.
    """
    if len(orders) != num_ranks:
        raise SettingError(
            f"a schedule has one list of steps for each mesh: {num_ranks} meshes, {len(orders)} lists"
        )
    for rank, order in enumerate(orders):
        for step in order:
            if step.stage % num_ranks != rank:
                raise SettingError(
                    f"{step} is among the steps of rank {rank}; stage {step.stage} lies on rank "
                    f"{step.stage % num_ranks}: of {num_ranks} ranks, stage s lies on s % {num_ranks}"
                )


def _check_complete(done: set[Step], num_stages: int, num_micro_batches: int) -> None:
    trains = any(step.kind != "forward" for step in done)
    for stage, micro_batch in product(range(num_stages), range(num_micro_batches)):
        kinds = {kind for kind in _KINDS if Step(kind, stage, micro_batch) in done}
        wanted = _TRAINING if trains else [{"forward"}]
        if kinds not in wanted:
            has = _text(kinds) or "nothing"
            raise SettingError(
                f"micro-batch {micro_batch} has {has} at stage {stage}; it needs "
                f"{' or '.join(_text(each) for each in wanted)}"
            )


_KINDS: tuple[Kind, ...] = ("forward", "backward", "backward_input", "backward_weight")
_TRAINING: list[set[Kind]] = [{"forward", "backward"}, {"forward", "backward_input", "backward_weight"}]


def _text(kinds: Iterable[str]) -> str:
    return " + ".join(kind for kind in _KINDS if kind in set(kinds))
