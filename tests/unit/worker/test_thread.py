"""The thread of one device: order, the cores it may use, and jobs that break."""

from __future__ import annotations

import logging
import queue
import threading

import pytest
import torch

from dtorch_runtime.settings import Settings
from dtorch_runtime.wire.records import MeshRecord, NodeRecord, ThreadsRecord
from dtorch_runtime.worker import executor
from dtorch_runtime.worker.executor import WorkerExecutor
from dtorch_runtime.worker.streams.cpu import CpuStream
from dtorch_runtime.worker.thread import ThreadShare, Worker

_WAIT_S = 10.0


def make_worker(share: ThreadShare) -> Worker:
    return Worker("dtorch-test-0", lambda: CpuStream(1.0), share)


def ask(worker: Worker, question) -> object:
    """What a job finds out on the worker's thread."""
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    worker.submit(lambda: answers.put(question()))
    return answers.get(timeout=_WAIT_S)


@pytest.mark.parametrize(
    ("fixed", "num_cores", "num_workers", "expected"),
    [(0, 8, 1, 8), (0, 8, 3, 2), (0, 2, 5, 1), (3, 8, 5, 3)],
)
def test_cores_are_divided_among_workers(fixed, num_cores, num_workers, expected):
    share = ThreadShare(fixed, num_cores)
    for _ in range(num_workers):
        share.add_worker()
    assert share.per_worker == expected
    assert share.record() == ThreadsRecord(num_cores, num_workers, expected, bool(fixed))


def test_each_worker_uses_its_share_and_follows_when_another_starts():
    share = ThreadShare(0, 6)
    first = make_worker(share)
    assert ask(first, torch.get_num_threads) == 6
    second = make_worker(share)
    assert [ask(worker, torch.get_num_threads) for worker in (first, second)] == [3, 3]
    share.set_cores(2)
    assert ask(first, torch.get_num_threads) == 1
    for worker in (first, second):
        worker.stop()
        assert worker.join(_WAIT_S)


def test_agents_of_one_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(executor, "_num_cores", lambda: 8)
    made = WorkerExecutor(Settings(), "n0", "cpu", lambda _: None, host="here")
    try:
        made.start(
            [0, 1],
            [NodeRecord("n1", "here", 1, "cpu", [2], ""), NodeRecord("n2", "there", 1, "cpu", [3], "")],
        )
        made.open_session(1)
        made.define_mesh(1, MeshRecord(1, "cpu", [2], [0, 1]))
        worker = made._workers[0]
        assert ask(worker, torch.get_num_threads) == 2
        made.node_lost("n1", [2], "gone")
        assert ask(worker, torch.get_num_threads) == 4
        made.node_lost("n2", [3], "gone")
        assert ask(worker, torch.get_num_threads) == 4
    finally:
        made.close(5.0)


def test_a_job_that_breaks_does_not_end_the_thread(caplog):
    worker = make_worker(ThreadShare(1, 1))

    def break_down() -> None:
        raise RuntimeError("broken")

    with caplog.at_level(logging.ERROR):
        worker.submit(break_down)
        assert ask(worker, threading.current_thread).name == "dtorch-test-0"
    assert "a bug of DTorch" in caplog.text
    worker.stop()
    assert worker.join(_WAIT_S)


def test_jobs_run_in_inference_mode_and_in_order():
    worker = make_worker(ThreadShare(1, 1))
    seen: list[int] = []
    for number in range(100):
        worker.submit(lambda number=number: seen.append(number))
    assert ask(worker, torch.is_inference_mode_enabled) is True
    assert seen == list(range(100))
    worker.stop()
    assert worker.join(_WAIT_S)


def test_a_worker_inside_a_kernel_does_not_join():
    worker = make_worker(ThreadShare(1, 1))
    gate = threading.Event()
    worker.submit(lambda: gate.wait(_WAIT_S))
    worker.stop()
    assert not worker.join(0.0)
    gate.set()
    assert worker.join(_WAIT_S)
