"""A session as the agent's loop sees it: its devices here, uploads that are under way, and what the loop runs itself.

The way from the loop to the workers' threads and back takes longer than a small captured call. When no device of the
session has anything to do, the loop runs such calls at once, where the devices would otherwise meet (``joint``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.worker.blobs import ChunkedTensor
from dtorch_runtime.worker.session import DeviceSession, Session
from dtorch_runtime.worker.thread import ThreadShare, Ticket, Worker
from dtorch_runtime.worker.tickets import run_batch

#: The longest that the loop computes, as estimated: meanwhile it hears nobody.
_LIMIT_US = 500.0


class OpenSession:
    """See the module.

    Args:
        share: says how many threads a kernel may use.
    """

    def __init__(self, number: int, meeting_timeout_s: float, share: ThreadShare) -> None:
        self.shared = Session(number, meeting_timeout_s)
        self._share = share
        #: Every device that may take part in an op. It only grows, so that seqs complete in order.
        self.devices: dict[int, tuple[Worker, DeviceSession]] = {}
        #: Spans of each lane while the client profiles, else None.
        self.max_spans: int | None = None
        #: By value and devices: each device may be sent a piece of its own.
        self.uploads: dict[tuple[int, tuple[int, ...]], ChunkedTensor] = {}

    def run(self, seq: int, words: list[int], when_done: Callable[[], None]) -> None:
        """Have a batch of records run, and call back when all devices are done with it; maybe at once."""
        is_idle = self._is_idle()
        start = self._run_idle(words) if is_idle else 0
        if is_idle and start == len(words):
            when_done()
            return
        words = words[start:] if start else words
        ticket = Ticket(len(self.devices), when_done)
        for worker, values in self.devices.values():
            worker.submit(partial(run_batch, values, seq, words, ticket))

    def _is_idle(self) -> bool:
        if self.max_spans is not None:  # a trace has lanes of workers, and none of the loop's kernels
            return False
        return all(worker.is_idle and values.is_idle for worker, values in self.devices.values())

    def _run_idle(self, words: list[int]) -> int:
        """Run the first records, as far as they are small captured calls; returns where the others start."""
        end = self._end_of_small(words)
        if not end:
            return 0
        threads = torch.get_num_threads()
        if threads != self._share.per_worker:
            torch.set_num_threads(self._share.per_worker)
        with torch.inference_mode():
            i = 0
            while i < end:
                if words[i] == FREE:
                    stop = i + 2 + words[i + 1]
                    for _, values in self.devices.values():
                        for value_id in words[i + 2 : stop]:
                            values.blobs.pop(value_id, None)
                    i = stop
                elif self.shared.joint.bodies[words[i]].run_idle(words, i):
                    i += self.shared.templates[words[i]].width
                else:
                    return i
        return i

    def _end_of_small(self, words: list[int]) -> int:
        """How far a batch consists of small captured calls, which the loop may run; 0 if that is not worth it."""
        i, us, num_words = 0, 0.0, len(words)
        bodies, templates = self.shared.joint.bodies, self.shared.templates
        while i < num_words:
            if words[i] == FREE:
                i += 2 + words[i + 1]
                continue
            body = bodies.get(words[i])
            call_us = None if body is None else body.ready_us()
            if call_us is None:
                return 0
            us += call_us
            if us > _LIMIT_US:
                return 0
            i += templates[words[i]].width
        return i
