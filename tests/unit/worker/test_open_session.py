"""Small captured calls that the agent's loop runs while no device has anything to do: the same as from the workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.testing.wait import wait_until
from dtorch_runtime.worker import joint, open_session
from dtorch_runtime.worker.costs import Way
from dtorch_runtime.worker.open_session import OpenSession
from dtorch_runtime.worker.streams.cpu import CpuStream
from dtorch_runtime.worker.thread import ThreadShare, Worker
from tests.support.device_bench import NEG
from tests.support.device_pair import BODIES, CAPTURED, STREAM, Pair


class Agent:
    """A pair's session as an agent's loop has it. This thread is the loop."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        share = ThreadShare(1, 1)
        self.session = OpenSession(1, 10.0, share)
        self.session.shared = pair.session
        for device, values in pair.session.devices.items():
            worker = Worker(f"device {device}", partial(CpuStream, 10.0), share)
            self.session.devices[device] = (worker, values)
        self.num_done = 0

    def run(self, words: list[int]) -> int:
        """Run a batch to its end; returns how many of the workers had a part in it."""
        workers = [worker for worker, _ in self.session.devices.values()]
        before = [worker.num_finished for worker in workers]
        done = threading.Event()
        self.session.run(5, words, done.set)
        wait_until(done.is_set, "the batch to end")
        wait_until(lambda: all(worker.is_idle for worker in workers), "the workers to have nothing to do")
        return sum(worker.num_finished != number for worker, number in zip(workers, before, strict=True))

    def close(self) -> None:
        for worker, _ in self.session.devices.values():
            worker.stop()
        for worker, _ in self.session.devices.values():
            assert worker.join(10.0)


@contextmanager
def agent(words: list[int]) -> Iterator[Agent]:
    """Of a session whose captured call is ``words``."""
    made = Agent(Pair(words))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def _choose_joint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "choose", lambda weights, num_cores: Way.JOINT)


def call(inner: int) -> list[int]:
    """A captured call whose inner values have ids from ``inner``."""
    return [*STREAM[:-1], inner]


@pytest.mark.parametrize("words", BODIES.values(), ids=BODIES)
def test_it_does_what_the_workers_do(words: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with agent(words) as loops, agent(words) as workers:
        for number in range(4):
            batch = [*call(1000 + 100 * number), FREE, 1, 31]
            monkeypatch.setattr(open_session, "_LIMIT_US", 0.0)
            assert workers.run(batch) == 2
            monkeypatch.setattr(open_session, "_LIMIT_US", 1e9)
            num_workers = loops.run(batch)
            assert num_workers == (2 if number < 2 or loops.pair.reported else 0)
            assert loops.pair.shown() == workers.pair.shown()
            assert loops.pair.failures() == workers.pair.failures()


@pytest.mark.parametrize("num_calls", [1, 3])
def test_small_calls_never_leave_the_loop(num_calls: int) -> None:
    with agent(BODIES["scatter and gather"]) as one:
        batch = [word for _ in range(num_calls) for word in (*call(1000), FREE, 2, 30, 31)]
        assert [one.run(call(1000)), one.run(call(1000))] == [2, 2], "weighed, and compiled"
        assert one.run(batch) == 0
        assert one.run(batch) == 0
        assert one.pair.shown() == [{10: [1.0, 2.0], 11: [3.0, 4.0]}, {10: [2.0, 4.0], 11: [6.0, 8.0]}]


def test_the_workers_go_on_where_a_call_failed() -> None:
    with agent(BODIES["a failure"]) as one:
        for _ in range(2):
            one.run(call(1000))
            one.pair.reported.clear()
        assert one.run([*call(1000), NEG, 0, 10, 50]) == 2
        assert [failure.location_id for failure in one.pair.reported] == [7, 7]
        assert one.pair.shown()[1][50] == [-2.0, -4.0]
        [body] = one.pair.session.joint.bodies.values()
        assert not body._calls
        assert one.run(call(1000)) == 2, "and again"


def test_a_call_is_left_to_the_workers_when(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agent(BODIES["values"]) as one:
        one.run(call(1000))
        one.run(call(1000))
        assert one.run(call(1000)) == 0
        with subtests.test("an op stands beside it"):
            assert one.run([*call(1000), NEG, 0, 10, 50]) == 2
        with subtests.test("somebody profiles"):
            one.session.max_spans = 10
            assert one.run(call(1000)) == 2
            one.session.max_spans = None
        with subtests.test("a worker has something to do"):
            gate, entered = threading.Event(), threading.Event()
            worker, _ = one.session.devices[0]
            worker.submit(lambda: (entered.set(), gate.wait(10.0))[0])
            assert entered.wait(10.0)
            done = threading.Event()
            one.session.run(5, call(1000), done.set)
            assert not done.is_set()
            gate.set()
            wait_until(done.is_set, "the batch to end")
        with subtests.test("it takes long"):
            monkeypatch.setattr(open_session, "_LIMIT_US", 1.0)
            assert one.run(call(1000)) == 2
        with subtests.test("it was not defined"):
            assert one.run([CAPTURED + 1000, 0]) == 2


def test_no_gradients_are_noted_and_the_loops_own_settings_stay() -> None:
    with agent(BODIES["values"]) as one:
        for _ in range(3):
            one.run(call(1000))
        assert not torch.is_inference_mode_enabled()
        assert all(values.blobs[30].is_inference() for values in one.pair.session.devices.values())
