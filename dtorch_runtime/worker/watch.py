"""The race detector of an agent, while ``DTORCH_CHECK`` is on: what its streams do and await, told to ``races``."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dtorch_runtime.wire.records import TemplateRecord
from dtorch_runtime.worker.arguments import Runner
from dtorch_runtime.worker.blobs import Blobs, storage_of
from dtorch_runtime.worker.races import Access, Accesses, Clocks, DataRace, Point

#: Memory is looked through for what was freed when so many more have been seen than were there the last time.
_SWEEP_AFTER = 1024
_NO_OP = ("an op", 0)


class Watch:
    """What all streams of an agent know and did. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clocks = Clocks()
        self._accesses = Accesses(self._clocks)
        #: Of memory that was seen. A weak reference keeps its number from being used again, and not the memory.
        self._seen: dict[int, StorageWeakRef] = {}
        self._sweep_at = _SWEEP_AFTER
        self._now: dict[str, tuple[str, int]] = {}

    @property
    def num_seen(self) -> int:
        """How many memories are remembered, freed ones among them."""
        return len(self._seen)

    def record(self, stream: str) -> Point:
        """As ``Clocks.record``."""
        with self._lock:
            return self._clocks.record(stream)

    def wait_for(self, stream: str, point: Point) -> None:
        """As ``Clocks.wait_for``."""
        with self._lock:
            self._clocks.wait_for(stream, point)

    def ran(
        self, stream: str, op: str, location_id: int, reads: Iterable[object], writes: Iterable[object]
    ) -> None:
        """An op of a stream has used these; what is no tensor is no memory.

        Raises:
            DataRace: another stream uses the same, and nothing orders the two.
        """
        with self._lock:
            written = self._memories(writes)
            race = None
            for memories, is_write in ((self._memories(reads) - written, False), (written, True)):
                for memory in memories:
                    access = Access(stream, self._clocks.epoch(stream), op, location_id, is_write)
                    other = self._accesses.add(memory, access)
                    if other is not None:
                        race = race or DataRace(access, other)
        if race is not None:
            raise race

    def begins(self, stream: str, op: str, location_id: int) -> None:
        """The op that a stream runs now; for ``uses``."""
        with self._lock:
            self._now[stream] = (op, location_id)

    def uses(self, stream: str, reads: Iterable[object], writes: Iterable[object]) -> None:
        """As ``ran``, of the op that has begun: in the middle of it."""
        self.ran(stream, *self._now.get(stream, _NO_OP), reads, writes)

    def _memories(self, blobs: Iterable[object]) -> set[int]:
        found = set()
        for blob in blobs:
            if _has_memory(blob):
                number = storage_of(blob)
                if number not in self._seen:
                    self._seen[number] = StorageWeakRef(blob.untyped_storage())
                found.add(number)
        if len(self._seen) >= self._sweep_at:
            self._sweep()
        return found

    def _sweep(self) -> None:
        for number in [number for number, storage in self._seen.items() if storage.expired()]:
            self._accesses.forget(number)
            del self._seen[number]
        self._sweep_at = len(self._seen) + _SWEEP_AFTER


class StreamWatch:
    """What one stream tells a ``Watch``."""

    def __init__(self, watch: Watch, stream: str) -> None:
        self._watch = watch
        self._stream = stream

    def record(self) -> Point:
        """The point behind all that it did."""
        return self._watch.record(self._stream)

    def wait_for(self, point: Point) -> None:
        """What it does next comes after a point of another stream."""
        self._watch.wait_for(self._stream, point)

    def begins(self, op: str, location_id: int) -> None:
        """What it runs now."""
        self._watch.begins(self._stream, op, location_id)

    def ran(
        self,
        op: str,
        location_id: int,
        inputs: Sequence[object],
        outputs: Sequence[object] = (),
        mutates: Sequence[int] = (),
    ) -> None:
        """An op has run.

        Args:
            outputs: what it made; views of its inputs are not written to.
            mutates: indices of the inputs that it wrote to.

        Raises:
            DataRace: another stream uses the same memory, and nothing orders the two.
        """
        storages = {storage_of(blob) for blob in inputs if _has_memory(blob)}
        written = [inputs[index] for index in mutates]
        written += [blob for blob in outputs if _has_memory(blob) and storage_of(blob) not in storages]
        self._watch.ran(self._stream, op, location_id, inputs, written)


def _has_memory(blob: object) -> TypeGuard[torch.Tensor]:
    return isinstance(blob, torch.Tensor) and blob.layout is torch.strided and not blob.is_nested


def watched_runner(watch: StreamWatch, record: TemplateRecord, blobs: Blobs, runner: Runner) -> Runner:
    """A runner that tells what its op used."""
    op, mutates, first = record.op, record.mutates, 2 + record.num_inputs
    last = first + record.num_outputs

    def run(words: list[int], i: int) -> int:
        watch.begins(op, words[i + 1])
        stop = runner(words, i)
        inputs = [blobs.get(value_id) for value_id in words[i + 2 : i + first]]
        watch.ran(op, words[i + 1], inputs, [blobs.get(n) for n in words[i + first : i + last]], mutates)
        return stop

    return run
