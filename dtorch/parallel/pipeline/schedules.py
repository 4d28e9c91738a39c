"""The schedules by their names."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from dtorch.parallel.pipeline.gpipe import forward_only, gpipe
from dtorch.parallel.pipeline.interleaved import interleaved
from dtorch.parallel.pipeline.one_f_one_b import one_f_one_b
from dtorch.parallel.pipeline.order import check_order, check_ranks, issue_order
from dtorch.parallel.pipeline.steps import Orders, Step
from dtorch.parallel.pipeline.zero_bubble import zero_bubble
from dtorch_runtime.errors import SettingError

ScheduleName: TypeAlias = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "forward_only"]


def make_orders(name: ScheduleName, num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Orders:
    """What each rank does under a schedule, in order: one list of steps a rank.

    Args:
        name: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zero_bubble"``, or ``"forward_only"`` for inference.
        num_ranks: how many meshes the stages lie on.
        num_chunks: how many stages each of them has.

    Raises:
        SettingError: no such schedule, or numbers that it does not take.
    """
    for what, number in (
        ("num_ranks", num_ranks),
        ("num_micro_batches", num_micro_batches),
        ("num_chunks", num_chunks),
    ):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise SettingError(f"{what} takes a number, 1 or more, got {number!r}")
    if name not in get_args(ScheduleName):
        names = ", ".join(map(repr, get_args(ScheduleName)))
        raise SettingError(f"schedule= is one of {names}, or a list of steps a mesh; got {name!r}")
    if num_chunks > 1 and name in ("1f1b", "zero_bubble"):
        raise SettingError(
            f"schedule={name!r} has one stage a mesh, and there are {num_chunks}; write schedule='interleaved'"
        )
    if name == "1f1b":
        return one_f_one_b(num_ranks, num_micro_batches)
    if name == "zero_bubble":
        return zero_bubble(num_ranks, num_micro_batches)
    make = {"gpipe": gpipe, "interleaved": interleaved, "forward_only": forward_only}[name]
    return make(num_ranks, num_micro_batches, num_chunks)


def training_order(
    schedule: ScheduleName | Orders, num_ranks: int, num_micro_batches: int, num_chunks: int
) -> list[Step]:
    """The checked order of issue of a schedule, or of a caller's own lists of steps.

    Raises:
        SettingError: no such schedule, or steps that do not make up a training step.
    """
    if isinstance(schedule, str):
        orders = make_orders(schedule, num_ranks, num_micro_batches, num_chunks)
    else:
        orders = [list(order) for order in schedule]
        check_ranks(orders, num_ranks)
    order = issue_order(orders)
    check_order(order, num_ranks * num_chunks, num_micro_batches)
    if all(step.kind == "forward" for step in order):
        raise SettingError(
            f"schedule={schedule if isinstance(schedule, str) else 'of your own'} has no backward steps, and "
            f"step() trains; write schedule='1f1b', and infer() for inference, which needs no schedule"
        )
    return order
