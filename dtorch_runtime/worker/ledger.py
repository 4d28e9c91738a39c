"""What values hold on a device: found on demand by a walk, or counted op by op where a limit or a peak asks for it.

Counted is the memory of values: what ops made, and nobody has freed. Memory that several values share counts once. Not
counted are the temporaries of kernels, buffers of exchanges and uploads under way, and what the allocator keeps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from dtorch_runtime.ir.stream import FREE, WidthsOf, walk
from dtorch_runtime.wire.records import DeviceMemoryRecord, LiveValueRecord, TemplateRecord
from dtorch_runtime.worker.blobs import Blob, Pending
from dtorch_runtime.worker.failures import OutOfMemoryError

#: The op that made a value, and its location id; an empty name where that is not known.
Origin: TypeAlias = tuple[str, int]
UNKNOWN: Origin = ("", 0)


class DeviceTotal:
    """The bytes that the ledgers of a device's sessions count, and their limit (0: none)."""

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0


class Ledger:
    """Counts what the values of one session hold on one device, those inside of captured calls among them.

    Used by the device's worker thread only.

    Args:
        total: shared with the device's other sessions.
        reclaim: releases what can be, before a limit refuses something.
    """

    def __init__(self, total: DeviceTotal, reclaim: Callable[[], None] = lambda: None) -> None:
        self._total = total
        self._reclaim = reclaim
        #: Storage -> [its bytes, how many of the values below share it].
        self._storages: dict[int, list[int]] = {}
        #: Value id -> its storage, and what made it; in the order in which they were made.
        self._values: dict[int, tuple[int, Origin]] = {}
        self.held_bytes = 0
        self.peak_bytes = 0
        #: Of the op that runs, and where its record stands: in which words, and at which index.
        self.origin = UNKNOWN
        self.words: Sequence[int] = ()
        self.start = 0

    @property
    def other_bytes(self) -> int:
        """What other sessions hold on the device."""
        return self._total.held_bytes - self.held_bytes

    def hold(self, value_id: int, blob: Any) -> None:
        """A value stands for ``blob`` from now on.

        Raises:
            OutOfMemoryError: with it, the device's values would hold more than they may. It is not counted then.
        """
        known = self._values.get(value_id)
        if type(blob) is Pending:  # its memory is counted from the start, under a number of its own
            self._hold(value_id, _number_of(blob), blob.made_bytes, known, blob.made_by)
            return
        if not isinstance(blob, torch.Tensor) or blob.layout is not torch.strided:
            if known is not None:
                self.release(value_id)
            return
        storage = blob.untyped_storage()
        # What was pending is there now.
        made_by = known[1] if known is not None and known[0] < 0 else self.origin
        self._hold(value_id, storage._cdata, storage.nbytes(), known, made_by)

    def _hold(
        self, value_id: int, key: int, num_bytes: int, known: tuple[int, Origin] | None, made_by: Origin
    ) -> None:
        if known is not None and known[0] != key:
            self.release(value_id)
            known = None
        found = self._storages.get(key)
        if found is None:
            self._grow(num_bytes)
            found = self._storages[key] = [num_bytes, 0]
        elif found[0] != num_bytes:
            self._grow(num_bytes - found[0])
            found[0] = num_bytes
        if known is None:
            found[1] += 1
            self._values[value_id] = (key, made_by)

    def hold_inner(self, value_id: int, blob: Any, origin: Origin) -> Any:
        """``hold`` of a value inside of a captured call; returns it."""
        self.origin = origin
        self.hold(value_id, blob)
        return blob

    def hold_results(self, value_ids: Iterable[int], blobs: Any, origin: Origin) -> Any:
        """``hold_inner`` of each of several values, those without an id aside; returns them."""
        for value_id, blob in zip(value_ids, blobs, strict=True):
            if value_id:
                self.hold_inner(value_id, blob, origin)
        return blobs

    def release(self, value_id: int) -> None:
        """A value is gone."""
        known = self._values.pop(value_id, None)
        if known is None:
            return
        found = self._storages[known[0]]
        found[1] -= 1
        if found[1] == 0:
            del self._storages[known[0]]
            self._grow(-found[0])

    def remeasure(self, blob: Any) -> None:
        """An op wrote to ``blob``, and may have given its memory another size.

        Raises:
            OutOfMemoryError: as ``hold``.
        """
        if isinstance(blob, torch.Tensor):
            storage = blob.untyped_storage()
            found = self._storages.get(storage._cdata)
            if found is not None and found[0] != storage.nbytes():
                self._grow(storage.nbytes() - found[0])
                found[0] = storage.nbytes()

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.held_bytes

    def clear(self) -> None:
        """Every value is gone."""
        self._total.held_bytes -= self.held_bytes
        self.held_bytes = 0
        self._storages.clear()
        self._values.clear()

    def _grow(self, num_bytes: int) -> None:
        total = self._total
        if num_bytes > 0 and 0 < total.limit_bytes < total.held_bytes + num_bytes:
            self._reclaim()
            if total.limit_bytes < total.held_bytes + num_bytes:
                raise OutOfMemoryError(num_bytes)
        total.held_bytes += num_bytes
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def groups(self) -> list[list[Any]]:
        """As ``groups_of``, of the values that are counted."""
        groups: dict[int, list[Any]] = {}
        storages = (
            self._storages.copy()
        )  # copies, because the communication worker may ask for its own failure
        for value_id, (key, origin) in self._values.copy().items():
            if key in storages:
                group = groups.setdefault(key, [storages[key][0], 0, value_id, origin])
                group[1] += 1
        return list(groups.values())

    def validate(self) -> None:
        """Check the invariants that the attributes state."""
        counts: dict[int, int] = {}
        for key, _ in self._values.values():
            counts[key] = counts.get(key, 0) + 1
        assert counts == {key: num_values for key, (_, num_values) in self._storages.items()}
        assert self.held_bytes == sum(num_bytes for num_bytes, _ in self._storages.values())
        assert 0 <= self.held_bytes <= self.peak_bytes
        assert self.other_bytes >= 0


class CountedBlobs(dict[int, Blob | Pending]):
    """Blobs that a ledger counts."""

    def __init__(self, ledger: Ledger, blobs: Mapping[int, Blob | Pending]) -> None:
        super().__init__()
        self._ledger = ledger
        for value_id, blob in blobs.items():
            self[value_id] = blob

    def __setitem__(self, value_id: int, blob: Blob | Pending) -> None:
        self._ledger.hold(value_id, blob)
        super().__setitem__(value_id, blob)

    def pop(self, value_id: int, default: Any = None) -> Any:
        """As of a dict, with None for what is not there. Values inside of captured calls are counted and not there."""
        self._ledger.release(value_id)
        return super().pop(value_id, default)

    def clear(self) -> None:
        self._ledger.clear()
        super().clear()


def _number_of(pending: Pending) -> int:
    """As the number of a storage, and never equal to one."""
    return -id(pending)


def groups_of(blobs: Mapping[int, Blob | Pending], origin_of: Callable[[int], Origin]) -> list[list[Any]]:
    """The values by the memory that they share: [its bytes, how many share it, the first one's id and origin]."""
    groups: dict[int, list[Any]] = {}
    for value_id, blob in list(
        blobs.items()
    ):  # a copy, because the communication worker may ask for its own failure
        if isinstance(blob, torch.Tensor):
            storage = blob.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes()
        elif type(blob) is Pending:
            key, num_bytes = _number_of(blob), blob.made_bytes
        else:
            continue
        group = groups.get(key)
        if group is None:
            groups[key] = [num_bytes, 1, value_id, origin_of(value_id)]
        else:
            group[1] += 1
    return list(groups.values())


def origins_of(words: Sequence[int], templates: Mapping[int, TemplateRecord]) -> dict[int, Origin]:
    """What made each value that these op records make."""
    found: dict[int, Origin] = {}
    for start, _ in walk(words, WidthsOf(templates)):
        if words[start] != FREE:
            record = templates[words[start]]
            first = start + 2 + record.num_inputs
            outputs = words[first : first + record.num_outputs]
            found.update(dict.fromkeys(outputs, (record.op, words[start + 1])))
    return found


def freed_unused(words: Sequence[int], templates: Mapping[int, TemplateRecord]) -> list[int]:
    """Values that these op records free and do not use before."""
    found: list[int] = []
    used: set[int] = set()
    for start, stop in walk(words, WidthsOf(templates)):
        if words[start] == FREE:
            found += (value_id for value_id in words[start + 2 : stop] if value_id not in used)
        else:
            used.update(words[start + 2 : start + 2 + templates[words[start]].num_inputs])
    return found


def memory_record(
    device: int, groups: list[list[Any]], peak_bytes: int, limit_bytes: int, num_largest: int
) -> DeviceMemoryRecord:
    """What a device tells of its values.

    Args:
        groups: as ``groups_of`` gives them.
        peak_bytes: -1 when it is not measured.
        num_largest: how many of them are told at most.
    """
    largest = heapq.nsmallest(max(0, num_largest), groups, key=lambda group: (-group[0], group[2]))
    return DeviceMemoryRecord(
        device,
        sum(group[0] for group in groups),
        peak_bytes,
        limit_bytes,
        sum(group[1] for group in groups),
        [
            LiveValueRecord(value_id, num_bytes, num_values, *origin)
            for num_bytes, num_values, value_id, origin in largest
        ],
    )
