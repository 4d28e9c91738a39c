"""Exchange among the worker threads of one agent, through the memory that they share.

Small pieces: whoever gives the last contribution builds the pieces of all receivers and wakes them, which costs one
wake-up. Large pieces: all receivers build at the same time, and stay until nobody reads from their memory.
Nobody polls: each wait is on a lock of its own, which the one who has what is awaited releases, or for the bell of the
mail between agents.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from dtorch_runtime.errors import ClusterTimeout
from dtorch_runtime.wire.records import FailureRecord
from dtorch_runtime.worker.assembly import Index, Recipe
from dtorch_runtime.worker.blobs import Blob, Poison
from dtorch_runtime.worker.collectives.base import (
    Group,
    GroupKey,
    Mail,
    ParcelKey,
    ParcelName,
    StepKey,
)
from dtorch_runtime.worker.collectives.run_ahead import MIN_BYTES, RunAhead
from dtorch_runtime.worker.collectives.waiting import Listening, Waiter
from dtorch_runtime.worker.collectives.watched import MeetingWatch
from dtorch_runtime.worker.failures import SessionEnded
from dtorch_runtime.worker.races import DataRace
from dtorch_runtime.worker.watch import Watch


@dataclass(eq=False, slots=True)
class _Meeting:
    """One group's exchange while it goes on."""

    group: Group
    num_missing: int
    num_readers: int
    parcels: dict[ParcelName, Blob] = field(default_factory=dict)
    #: Pieces that the last contributor built, or what that raised, until their receivers take them.
    results: dict[int, Blob | Exception] | None = None
    is_claimed: bool = False
    #: Of receivers that wait for contributions, and of contributors that wait for readers.
    waiters: list[Waiter] = field(default_factory=list)
    leavers: list[Waiter] = field(default_factory=list)
    error: Exception | None = None
    watch: MeetingWatch | None = None


class ThreadExchange:
    """``Exchange`` among threads. Safe to call from any thread.

    Args:
        watch: told what orders the threads and what they read of one another, while races are looked for.
    """

    def __init__(self, timeout_s: float, run_ahead: RunAhead, watch: Watch | None = None) -> None:
        self._watch = watch
        self._timeout_s = timeout_s
        self._run_ahead = run_ahead
        self._lock = threading.Lock()
        #: Where parcels of other agents also lie; set before the first exchange.
        self.mail: Mail | None = None
        self._listening = Listening(self._lock)
        self._meetings: dict[GroupKey, _Meeting] = {}
        #: Parcels that came before the devices that need them, and meetings that wait for parcels.
        self._inbox: dict[ParcelKey, Blob] = {}
        self._expected: dict[ParcelKey, _Meeting] = {}
        self._lost: dict[int, Poison] = {}
        self._ended: set[int] = set()

    def take_part(
        self, key: StepKey, group: Group, device: int, value: Blob | None, what: object
    ) -> Blob | None:
        if isinstance(value, torch.Tensor) and device in group.snapshots:
            value = self._snapshot(value, group.snapshots[device], device)
        if isinstance(value, torch.Tensor) and value.is_cuda:
            torch.cuda.current_stream(value.device).synchronize()
        full_key = GroupKey(*key, group.index)
        if group.is_parallel:
            return self._in_parallel(full_key, group, device, value, what)
        return self._by_the_last(full_key, group, device, value, what)

    def _snapshot(self, value: torch.Tensor, cut: Index, device: int) -> torch.Tensor:
        part = value if cut is None else value[cut]
        num_bytes = part.numel() * part.dtype.itemsize
        if num_bytes < MIN_BYTES:
            return part.clone()
        release = self._run_ahead.lend(device, num_bytes)
        copy = part.clone()
        weakref.finalize(copy, release).atexit = False
        return copy

    def _by_the_last(
        self, key: GroupKey, group: Group, device: int, value: Blob | None, what: object
    ) -> Blob | None:
        is_receiver = device in group.receivers
        waiter = None
        with self._lock:
            meeting = self._join(key, group, device, value)
            is_last = meeting.num_missing == 0 and not meeting.is_claimed
            if is_last:
                meeting.is_claimed = True
            elif not is_receiver:
                return None
            elif meeting.results is None:
                waiter = Waiter()
                meeting.waiters.append(waiter)
        if is_last:
            results = _build_watched(meeting) if meeting.watch is not None else _build_all(meeting)
            with self._lock:
                meeting.results = results
                _open_all(meeting.waiters)
        elif waiter is not None:
            self._wait(key, meeting, waiter, what)
        return self._take(key, meeting, device) if is_receiver else None

    def _in_parallel(
        self, key: GroupKey, group: Group, device: int, value: Blob | None, what: object
    ) -> Blob | None:
        waiter = leaver = None
        if self.mail is not None and group.remote:
            self.mail.collect()
        with self._lock:
            meeting = self._join(key, group, device, value)
            if meeting.num_missing == 0:
                _open_all(meeting.waiters)
            elif device in group.receivers:
                waiter = Waiter()
                meeting.waiters.append(waiter)
        if device not in group.receivers:
            return None
        if waiter is not None:
            self._wait(key, meeting, waiter, what)
        try:
            return _build_one(meeting, group.receivers[device])
        finally:
            with self._lock:
                if meeting.watch is not None:
                    meeting.watch.leave()
                meeting.num_readers -= 1
                if meeting.num_readers == 0:
                    _open_all(meeting.leavers)
                    self._meetings.pop(key, None)
                elif device in group.read_by_others:
                    leaver = Waiter()
                    meeting.leavers.append(leaver)
            if leaver is not None:
                self._wait(key, meeting, leaver, what)
            if meeting.watch is not None and device in group.read_by_others:
                meeting.watch.end()

    def _join(self, key: GroupKey, group: Group, device: int, value: Blob | None) -> _Meeting:
        if key.session in self._ended:
            raise SessionEnded
        meeting = self._meetings.get(key)
        if meeting is None:
            num_parcels = len(group.contributors) + len(group.remote)
            meeting = self._meetings[key] = _Meeting(group, num_parcels, len(group.receivers))
            meeting.watch = MeetingWatch(self._watch) if self._watch is not None else None
            self._expect_remote(key, meeting)
        if device in group.contributors:
            assert value is not None, f"device {device} contributes to {key} without a value"
            meeting.parcels[device, 0] = value
            meeting.num_missing -= 1
            if meeting.watch is not None:
                meeting.watch.come()
        return meeting

    def _expect_remote(self, key: GroupKey, meeting: _Meeting) -> None:
        for source, index in meeting.group.remote:
            parcel_key = ParcelKey(key.session, key.value_id, key.step, source, index)
            blob = self._inbox.pop(parcel_key, None)
            if blob is None:
                blob = self._lost.get(source)
            if blob is None:
                self._expected[parcel_key] = meeting
            else:
                meeting.parcels[source, index] = blob
                meeting.num_missing -= 1

    def _take(self, key: GroupKey, meeting: _Meeting, device: int) -> Blob:
        with self._lock:
            assert meeting.results is not None
            result = meeting.results.pop(device)
            if not meeting.results:
                self._meetings.pop(key, None)
        if meeting.watch is not None:
            meeting.watch.end()
        if isinstance(result, Exception):
            raise result
        return result

    def _wait(self, key: GroupKey, meeting: _Meeting, waiter: Waiter, what: object) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        if self.mail is not None and meeting.group.remote:
            self._listening.wait(waiter, self.mail, deadline_s)
        else:
            waiter.sleep(deadline_s)
        if not waiter.is_open:
            with self._lock:
                if not waiter.is_open and meeting.error is None:
                    missing = self._who_is_missing(meeting)
                    name = f"step {key.step} of {what} (value {key.value_id})"
                    self._fail(key, meeting, ClusterTimeout(f"{missing} in {name}", self._timeout_s))
        if meeting.error is not None:
            raise meeting.error

    def _who_is_missing(self, meeting: _Meeting) -> str:
        names = [(device, 0) for device in sorted(meeting.group.contributors)] + list(meeting.group.remote)
        missing = sorted({device for device, index in names if (device, index) not in meeting.parcels})
        if missing:
            return f"device {', '.join(map(str, missing))}"
        return f"{meeting.num_readers} of the devices {sorted(meeting.group.receivers)}"

    def _fail(self, key: GroupKey, meeting: _Meeting, error: Exception) -> None:
        meeting.error = error
        _open_all(meeting.waiters)
        _open_all(meeting.leavers)
        self._meetings.pop(key, None)
        for parcel_key in [k for k, waiting in self._expected.items() if waiting is meeting]:
            del self._expected[parcel_key]

    def begin(self, session: int) -> None:
        with self._lock:
            self._ended.discard(session)

    def deposit(self, key: ParcelKey, value: Blob) -> None:
        with self._lock:
            if key.session in self._ended:
                return
            meeting = self._expected.pop(key, None)
            if meeting is None:
                self._inbox[key] = value
            else:
                self._arrive(meeting, (key.device, key.number), value)

    def _arrive(self, meeting: _Meeting, name: ParcelName, value: Blob) -> None:
        meeting.parcels[name] = value
        meeting.num_missing -= 1
        if meeting.num_missing == 0:
            _open_all(meeting.waiters)

    def lose(self, node: str, devices: Sequence[int], reason: str) -> None:
        with self._lock:
            for device in devices:
                self._lost[device] = Poison(_lost_record(node, device, reason))
            for key in [key for key in self._expected if key.device in self._lost]:
                meeting = self._expected.pop(key)
                self._arrive(meeting, (key.device, key.number), self._lost[key.device])

    def abort(self, session: int) -> None:
        with self._lock:
            self._ended.add(session)
            for key in [key for key in self._meetings if key.session == session]:
                self._fail(key, self._meetings[key], SessionEnded())
            for parcel_key in [key for key in self._inbox if key.session == session]:
                del self._inbox[parcel_key]


def _build_all(meeting: _Meeting) -> dict[int, Blob | Exception]:
    results: dict[int, Blob | Exception] = {}
    receivers = meeting.group.receivers
    first_device, first = next(iter(receivers.items()))
    for device, recipe in receivers.items():
        built = results.get(first_device)
        if isinstance(built, torch.Tensor) and recipe.same_as(first):
            results[device] = _attempt(built.clone)
        else:
            results[device] = _attempt(partial(recipe.build, meeting.parcels))
    return results


def _build_watched(meeting: _Meeting) -> dict[int, Blob | Exception]:
    """The same, told to the race detector."""
    watch = meeting.watch
    assert watch is not None
    watch.begin()
    results = _build_all(meeting)
    needs = {name for recipe in meeting.group.receivers.values() for name in recipe.needs}
    try:
        watch.use([meeting.parcels[name] for name in needs], results.values())
    except DataRace as race:
        results = dict.fromkeys(results, race)
    watch.leave()
    return results


def _build_one(meeting: _Meeting, recipe: Recipe) -> Blob:
    """What one receiver builds for itself."""
    watch = meeting.watch
    if watch is None:
        return recipe.build(meeting.parcels)
    watch.begin()
    result = recipe.build(meeting.parcels)
    watch.use([meeting.parcels[name] for name in recipe.needs], (result,))
    return result


def _attempt(make: Callable[[], Blob]) -> Blob | Exception:
    try:
        return make()
    except Exception as error:  # noqa: BLE001  the receiver raises it, in its own thread
        return error


def _open_all(waiters: list[Waiter]) -> None:
    for waiter in waiters:
        waiter.open()
    waiters.clear()


def _lost_record(node: str, device: int, reason: str) -> FailureRecord:
    return FailureRecord(
        kind="node",
        failure_id=f"node:{node}",
        op="dtorch::redistribute",
        location_id=0,
        device=device,
        node=node,
        error_type="NodeLost",
        message=reason,
        traceback="",
    )
