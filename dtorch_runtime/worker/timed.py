"""Runners that note what each op takes, while somebody profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import Any, Protocol

import torch

from dtorch_runtime.ir.body import expand, parse_body
from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.tape import WAIT, Tape
from dtorch_runtime.wire.records import TemplateRecord
from dtorch_runtime.worker.arguments import Runner
from dtorch_runtime.worker.blobs import Blobs
from dtorch_runtime.worker.kernels import REDISTRIBUTE
from dtorch_runtime.worker.transfers import Transfers


class Marks(Protocol):
    """Ranges in the trace of a tool that watches the process: ``torch.cuda.nvtx``, whose ranges Nsight shows."""

    def range_push(self, msg: str) -> Any:
        """A range begins in this thread."""

    def range_pop(self) -> Any:
        """The last one ends."""


def find_marks() -> Marks | None:
    """Where ranges go; None without CUDA. Untested on a GPU."""
    return torch.cuda.nvtx if torch.cuda.is_available() else None


class Timer:
    """Makes the timed runners of one session on one device.

    Args:
        plain: the runners that do the work, by template.
        run_all: runs records, those inside of a captured call.
        drop_inner: drops what a captured call has left, by the ids of its values.
        transfers: those that are carried out beside ops, and noted there.
    """

    def __init__(
        self,
        tape: Tape,
        templates: Mapping[int, TemplateRecord],
        plain: Mapping[int, Runner],
        run_all: Callable[[list[int], int], None],
        drop_inner: Callable[[TemplateRecord, list[int]], None],
        blobs: Blobs,
        transfers: Transfers | None,
    ) -> None:
        self._tape = tape
        self._templates = templates
        self._plain = plain
        self._run_all = run_all
        self._drop_inner = drop_inner
        self._blobs = blobs
        self._transfers = transfers
        self._marks = find_marks()

    def runner(self, template_id: int) -> Runner:
        """Does what the plain one does, and notes how long it took, and how long its inputs were waited for."""
        plain, add, blobs, transfers = self._plain, self._tape.add, self._blobs, self._transfers
        if template_id == FREE:
            return plain[FREE]
        record = self._templates.get(template_id)
        if record is not None and record.body is not None:
            return self._body(record)
        # A redistribution waits where it is carried out.
        stop_inputs = 2 if record is None or record.op == REDISTRIBUTE else 2 + record.num_inputs

        def run(words: list[int], i: int) -> int:
            start_ns, before = monotonic_ns(), 0
            if transfers is not None:
                before = transfers.num_started
                if transfers.resolve(blobs, words[i + 2 : i + stop_inputs]):
                    add(WAIT, words[i + 1], start_ns)
                    start_ns = monotonic_ns()
            try:
                stop = plain[template_id](words, i)
            except BaseException:
                add(template_id, words[i + 1], start_ns, 1)
                raise
            if transfers is None or before == transfers.num_started:
                add(template_id, words[i + 1], start_ns)
            return stop

        return run if record is None or self._marks is None else _marked(self._marks, record.op, run)

    def _body(self, record: TemplateRecord) -> Runner:
        """A captured call op by op, so that each is seen."""
        steps = parse_body(record, self._templates)

        def run(words: list[int], i: int) -> int:
            start_ns = monotonic_ns()
            expanded, _, ids = expand(record, steps, words, i)
            self._run_all(expanded, 0)
            self._drop_inner(record, ids)
            self._tape.add(record.template_id, words[i + 1], start_ns)
            return i + record.width

        return run


def _marked(marks: Marks, op: str, run: Runner) -> Runner:
    def marked(words: list[int], i: int) -> int:
        marks.range_push(op)
        try:
            return run(words, i)
        finally:
            marks.range_pop()

    return marked
