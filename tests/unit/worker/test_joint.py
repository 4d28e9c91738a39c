"""Captured calls that one thread runs for two devices: the same values, failures and effects as on two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtorch_runtime.ir.body import expand, parse_body
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Partial, Replicate
from dtorch_runtime.testing.wait import wait_until
from dtorch_runtime.wire.records import Slot
from dtorch_runtime.worker import joint, kernels
from dtorch_runtime.worker.costs import Way, Weight
from dtorch_runtime.worker.failures import SessionEnded
from dtorch_runtime.worker.joint import JointBody, JointMember, joint_mover
from dtorch_runtime.worker.redistribute import TransferPlanner
from dtorch_runtime.worker.watch import Watch
from tests.support.device_bench import CPU, NEG, template
from tests.support.device_pair import BODIES, BOTH, STREAM, Pair


@pytest.mark.parametrize("num_calls", [1, 2, 3])
@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("words", BODIES.values(), ids=BODIES)
def test_it_does_what_two_threads_do(words: list[int], is_watched: bool, num_calls: int) -> None:
    captured, single = Pair(words, watch=Watch() if is_watched else None), Pair(words)
    steps = parse_body(single.record, single.session.templates)
    for call in range(num_calls):
        stream = [*STREAM[:-1], 1000 + 10 * call]
        captured.run(stream)
        single.run(expand(single.record, steps, stream, 0)[0])
    inner = {
        value_id
        for values in single.session.devices.values()
        for value_id in values.blobs
        if value_id >= 1000
    }
    for values in single.session.devices.values():
        for value_id in inner:
            values.blobs.pop(value_id, None)
    assert captured.shown() == single.shown()
    assert captured.failures() == single.failures()


class Noted:
    """A kernel in place of neg: notes on which thread it ran."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[threading.Thread] = []
        name = f"dtorch::noted_neg_{id(self)}"  # of its own: what is found under a name is remembered
        pair.session.templates[NEG] = template(NEG, name, Slot(0))
        monkeypatch.setitem(kernels._own, name, kernels.Kernel(self))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.threads.append(threading.current_thread())
        return torch.neg(x)


@pytest.mark.parametrize("way", Way)
def test_after_the_first_call_it_runs_in_the_way_that_was_chosen(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[Weight]] = []

    def choose(weights: list[Weight], num_cores: int) -> Way:
        asked.append(weights)
        return way

    monkeypatch.setattr(joint, "choose", choose)
    pair = Pair(BODIES["values"])
    noted = Noted(pair, monkeypatch)
    pair.run(STREAM)
    assert len(noted.threads) == 4
    assert len(set(noted.threads)) == 2, "the first is weighed on each device"
    for _ in range(3):
        noted.threads.clear()
        pair.run(STREAM)
        assert len(noted.threads) == 4
        assert len(set(noted.threads)) == (2 if way is Way.APART else 1)
    assert len(asked) == 1, "chosen once"
    assert [(len(weight.kernels_us), weight.num_moves) for weight in asked[0]] == [(3, 0), (3, 0)]
    if way is Way.APART:
        pair.session.devices[0].run(5, STREAM)  # waits for nobody


class FakeBody:
    """Notes that it ran, and what it takes."""

    steps = ()

    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note

    def run(self, words: list[int], i: int) -> int:
        self._note()
        return i + 1

    def interrupted(self, error: Exception) -> None:
        return None


def member(body: JointBody, index: int, note: Callable[[], None]) -> JointMember:
    fake: Any = FakeBody(note)
    found = JointMember(body, index, fake, 1, lambda words, i: Weight([1.0], 1))
    found.run([0], 0)
    return found


def test_who_waits_too_long_goes_on_alone() -> None:
    ran: list[str] = []
    body = JointBody(2, 0.0, lambda: FakeBody(lambda: ran.append("joint")))  # type: ignore[arg-type, return-value]
    first, second = (member(body, index, lambda: ran.append("apart")) for index in (0, 1))
    assert first.run([0], 0) == 1
    assert second.run([0], 0) == 1
    assert ran == ["apart", "apart"]
    assert not body._calls


def test_the_end_of_the_session_wakes_who_waits() -> None:
    pair = Pair(BODIES["values"], timeout_s=600.0)
    pair.run(STREAM)
    thread = threading.Thread(target=pair.session.devices[0].run, args=(5, STREAM), daemon=True)
    thread.start()
    [body] = pair.session.joint.bodies.values()
    wait_until(lambda: any(call.waiters for call in body._calls.values()), "it to wait")
    pair.session.devices[1].end()
    thread.join(20.0)
    assert not thread.is_alive()
    assert not pair.reported
    with pytest.raises(SessionEnded):
        body.arrive(1, STREAM, 0)


def test_a_call_that_cannot_be_compiled_runs_op_by_op() -> None:
    def fail() -> FakeBody:
        raise ValueError("no")

    body = JointBody(1, 10.0, fail)  # type: ignore[arg-type]
    body.weighed(0, Weight([1.0], 1))
    call = body.arrive(0, [0], 0)
    assert call.stopped is not None
    assert call.stopped[0].step == 0
    assert call.stopped[0].raised is None


def test_what_other_agents_take_part_in_is_not_run_jointly() -> None:
    planner = TransferPlanner("n0", {0: CPU}, {0: "n0", 1: "n1"})
    whole, pieces = Layout(BOTH, (Partial(),)), Layout(BOTH, (Replicate(),))
    assert joint_mover(planner.plan((2,), torch.float32, whole, pieces), [0, 1]) is None


def test_counted_values_are_counted_on_their_own_threads() -> None:
    pair = Pair(BODIES["values"])
    for values in pair.session.devices.values():
        values.memory(0, "reset")
    pair.run(STREAM)
    assert not pair.session.joint.bodies
    for values in pair.session.devices.values():
        values.memory(0, "stop")
    pair.run(STREAM)
    assert pair.session.joint.bodies
