"""``Worker``: a thread of one device, for its ops or for its transfers. It takes jobs from a queue, in order."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

import torch

from dtorch_runtime.wire.records import ThreadsRecord
from dtorch_runtime.worker.streams.base import Stream

Job: TypeAlias = Callable[[], None]

_log = logging.getLogger(__name__)


class ThreadShare:
    """How many intra-op threads each worker may use; falls when another device of the agent starts.

    torch's setting is one of the calling thread, so each worker applies it itself.

    Args:
        num_threads: a fixed number, or 0 to divide the cores.
        num_cores: cores of this agent.
    """

    def __init__(self, num_threads: int, num_cores: int) -> None:
        self._fixed = num_threads
        self._num_cores = num_cores
        self._num_workers = 0
        self.per_worker = num_threads or max(1, num_cores)

    def add_worker(self) -> None:
        """Another device starts."""
        self._num_workers += 1
        self._divide()

    def set_cores(self, num_cores: int) -> None:
        """Agents on the same machine have come or gone."""
        self._num_cores = num_cores
        self._divide()

    def record(self) -> ThreadsRecord:
        """How the cores are divided, for whoever asks."""
        return ThreadsRecord(self._num_cores, self._num_workers, self.per_worker, bool(self._fixed))

    def _divide(self) -> None:
        if not self._fixed:
            self.per_worker = max(1, self._num_cores // max(1, self._num_workers))


class Ticket:
    """Calls back when the last of several workers is done with a message."""

    def __init__(self, num_workers: int, when_done: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._num_left = num_workers
        self._when_done = when_done

    def done(self) -> None:
        """One of the workers is done."""
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self._when_done()


class Worker:
    """Runs the jobs of one device in the order in which they were submitted, on a thread of its own.

    Args:
        divides: whether the agent's other workers leave it some of their intra-op threads.
    """

    #: Where kernels of its jobs run; for jobs.
    stream: Stream

    def __init__(
        self, name: str, make_stream: Callable[[], Stream], share: ThreadShare, *, divides: bool = True
    ) -> None:
        self.name = name
        self._make_stream = make_stream
        self._share = share
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        #: Rising; the first by whoever submits, which is one thread, the second by the worker.
        self._num_submitted = 0
        self._num_finished = 0
        # A daemon: a kernel that never ends must not keep the process from ending.
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        if divides:
            share.add_worker()
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. It must not raise: what it does is nobody's to await."""
        self._num_submitted += 1
        self._jobs.put(job)

    @property
    def num_finished(self) -> int:
        """Rises with every job."""
        return self._num_finished

    @property
    def is_idle(self) -> bool:
        """Whether every job that was submitted is finished. For the thread that submits: for others it may change."""
        return self._num_submitted == self._num_finished

    def stop(self) -> None:
        """End behind the jobs that are queued."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        share, get = self._share, self._jobs.get
        num_threads = 0
        self.stream = self._make_stream()
        with torch.inference_mode(), self.stream.activate():
            while True:
                job = get()
                if job is None:
                    return
                if num_threads != share.per_worker:
                    num_threads = share.per_worker
                    torch.set_num_threads(num_threads)
                try:
                    job()
                except Exception:  # noqa: BLE001  the device's other jobs are not to die of it
                    _log.exception("a job of worker %s raised, which is a bug of DTorch", self.name)
                # The queue's wait would else keep the last job, and with it a session's tensors, alive.
                job = None
                self._num_finished += 1


class LazyWorker:
    """A worker that starts with its first job. Jobs come from one thread, and none after ``stop``."""

    def __init__(self, name: str, make: Callable[[], Worker]) -> None:
        self.name = name
        self._make = make
        self._worker: Worker | None = None

    @property
    def stream(self) -> Stream:
        """Where kernels of its jobs run; for jobs."""
        assert self._worker is not None, "only jobs ask, and they have started it"
        return self._worker.stream

    @property
    def num_finished(self) -> int:
        """Rises with every job."""
        return 0 if self._worker is None else self._worker.num_finished

    def submit(self, job: Job) -> None:
        """As of a worker."""
        if self._worker is None:
            self._worker = self._make()
        self._worker.submit(job)

    def stop(self) -> None:
        """End behind the jobs that are queued."""
        if self._worker is not None:
            self._worker.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; whether it has ended, or never was."""
        return self._worker is None or self._worker.join(timeout_s)
