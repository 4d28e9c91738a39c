"""Captured calls that one thread runs for two devices: the same values, failures and effects as on two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from dtorch_runtime.ir.body import expand, parse_body
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from dtorch_runtime.ir.records import layout_to_record
from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.testing.wait import wait_until
from dtorch_runtime.wire.records import BodyRecord, FailureRecord, Slot, TemplateRecord, TransferArg
from dtorch_runtime.worker import kernels
from dtorch_runtime.worker.blobs import Poison
from dtorch_runtime.worker.collectives.run_ahead import RunAhead
from dtorch_runtime.worker.collectives.threads import ThreadExchange
from dtorch_runtime.worker.failures import SessionEnded
from dtorch_runtime.worker.joint import JointBody, JointMember, Trial, joint_mover
from dtorch_runtime.worker.redistribute import Redistributor, TransferPlanner
from dtorch_runtime.worker.session import DeviceSession, Session
from tests.support.device_bench import ADD, ADD_IN_PLACE, BAD, CPU, ELSEWHERE, NEG, TEMPLATES, VIEW, template

REDUCE, SCATTER, GATHER, TO_ONE, FROM_ONE, COPY, BAD_ELSEWHERE, CAPTURED = range(20, 28)
#: Inputs 1 and 2 (values 10 and 11), outputs 3 and 4 (values 30 and 31), inner values from 5 (ids from 1000).
STREAM = [CAPTURED, 0, 10, 11, 30, 31, 1000]
BOTH, SECOND = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1])

BODIES = {
    "values": [NEG, 0, 1, 5, ADD, 0, 5, 2, 3, FREE, 1, 5, NEG, 0, 3, 4],
    "a write": [ADD_IN_PLACE, 0, 1, 2, NEG, 0, 1, 3, NEG, 0, 2, 4],
    "a write to what was reduced": [REDUCE, 0, 1, 5, ADD_IN_PLACE, 0, 5, 2, NEG, 0, 5, 3, REDUCE, 0, 5, 4],
    "a copy is a copy": [COPY, 0, 1, 3, ADD_IN_PLACE, 0, 3, 2, NEG, 0, 1, 4],
    "scatter and gather": [SCATTER, 0, 1, 5, NEG, 0, 5, 6, GATHER, 0, 6, 3, NEG, 0, 2, 4],
    "to one device and back": [TO_ONE, 0, 1, 5, ELSEWHERE, 0, 5, 6, FROM_ONE, 0, 6, 3, NEG, 0, 2, 4],
    "a failure": [NEG, 0, 1, 5, BAD, 7, 5, 3, REDUCE, 0, 1, 4],
    "a failure at first": [BAD, 7, 1, 3, NEG, 0, 1, 4],
    "a failure and what depends on it": [BAD, 7, 1, 5, REDUCE, 0, 5, 3, NEG, 0, 3, 4],
    "a failure of one device": [TO_ONE, 0, 1, 5, BAD_ELSEWHERE, 7, 5, 6, FROM_ONE, 0, 6, 3, REDUCE, 0, 2, 4],
    "a failure of one device after a write": [
        *(ADD_IN_PLACE, 0, 1, 2, TO_ONE, 0, 1, 5, BAD_ELSEWHERE, 7, 5, 6, ADD_IN_PLACE, 0, 1, 2),
        *(FROM_ONE, 0, 6, 3, NEG, 0, 1, 4),
    ],
    "a view of an inner value": [NEG, 0, 1, 5, VIEW, 0, 5, 3, BAD, 7, 5, 4],
}


class Pair:
    """A session on devices 0 and 1 of one agent, each with values 10 and 11. The captured call is ``words``."""

    def __init__(self, words: list[int], timeout_s: float = 10.0) -> None:
        self.reported: list[FailureRecord] = []
        self.session = Session(1, timeout_s)
        self.session.meshes = {1: BOTH, 2: SECOND}
        self.session.templates = {record.template_id: record for record in _templates(words)}
        run_ahead = RunAhead(1 << 20, timeout_s)
        self.exchange = ThreadExchange(timeout_s, run_ahead)
        planner = TransferPlanner("n0", {0: CPU, 1: CPU}, {0: "n0", 1: "n0"})
        redistributor = Redistributor(planner, self.exchange, None, run_ahead)
        for device in (0, 1):
            values = DeviceSession(self.session, device, CPU, "n0", redistributor, self._report)
            values.blobs[10] = torch.tensor([1.0, 2.0]) * (device + 1)
            values.blobs[11] = torch.tensor([3.0, 4.0]) * (device + 1)
            self.session.devices[device] = values

    def _report(self, session: int, failure: FailureRecord) -> None:
        self.reported.append(failure)

    @property
    def record(self) -> TemplateRecord:
        return self.session.templates[CAPTURED]

    def run(self, words: list[int]) -> None:
        """On both devices, each on a thread of its own."""
        together(*(lambda d=device: self.session.devices[d].run(5, words) for device in (0, 1)))

    def shown(self) -> list[dict[int, object]]:
        """By device, the values that are not inner ones."""
        return [
            {
                value_id: blob.failure.failure_id if isinstance(blob, Poison) else blob.tolist()
                for value_id, blob in sorted(values.blobs.items())
            }
            for values in self.session.devices.values()
        ]

    def failures(self) -> list[tuple[str, int]]:
        return sorted((failure.failure_id, failure.location_id) for failure in self.reported)


def together(*calls: Callable[[], None]) -> None:
    """Each on a thread; all must end."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive(), "a device waits for another"


def move(
    number: int, source: tuple[DeviceMesh, Placement], target: tuple[DeviceMesh, Placement]
) -> TemplateRecord:
    ids = {BOTH: 1, SECOND: 2}
    ends = [layout_to_record(Layout(mesh, (placement,)), ids[mesh]) for mesh, placement in (source, target)]
    # Each device's piece has two elements, unless they are pieces of one.
    shape = [4] if isinstance(target[1], Shard) or isinstance(source[1], Shard) else [2]
    return TemplateRecord(
        number,
        "dtorch::redistribute",
        [Slot(0), TransferArg(shape, "float32", *ends)],
        {},
        1,
        1,
        0,
        sorted({ids[source[0]], ids[target[0]]}),
    )


def _templates(words: list[int]) -> list[TemplateRecord]:
    num_inner = max((value for value in words if value in (5, 6)), default=4) - 4
    return [
        *TEMPLATES,
        move(REDUCE, (BOTH, Partial()), (BOTH, Replicate())),
        move(SCATTER, (BOTH, Shard(0)), (SECOND, Replicate())),
        move(GATHER, (SECOND, Replicate()), (BOTH, Shard(0))),
        move(TO_ONE, (BOTH, Partial()), (SECOND, Replicate())),
        move(FROM_ONE, (SECOND, Replicate()), (BOTH, Replicate())),
        move(COPY, (BOTH, Replicate()), (BOTH, Replicate())),
        template(BAD_ELSEWHERE, "aten::unsqueeze", Slot(0), 99, mesh=2),
        TemplateRecord(
            CAPTURED, "dtorch::captured", [], {}, 2, 2, 1, [1, 2], [0], body=BodyRecord(words, num_inner)
        ),
    ]


@pytest.mark.parametrize("num_calls", [1, 2, 3])
@pytest.mark.parametrize("words", BODIES.values(), ids=BODIES)
def test_it_does_what_two_threads_do(words: list[int], num_calls: int) -> None:
    joint, single = Pair(words), Pair(words)
    steps = parse_body(single.record, single.session.templates)
    for call in range(num_calls):
        stream = [*STREAM[:-1], 1000 + 10 * call]
        joint.run(stream)
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
    assert joint.shown() == single.shown()
    assert joint.failures() == single.failures()


def test_one_thread_runs_it_for_both() -> None:
    pair = Pair(BODIES["values"])
    ran_on = []
    neg = torch.neg

    def noted(x: torch.Tensor) -> torch.Tensor:
        ran_on.append(threading.current_thread())
        return neg(x)

    pair.session.templates[NEG] = template(NEG, "dtorch::noted_neg", Slot(0))
    kernels._own["dtorch::noted_neg"] = kernels.Kernel(noted)
    try:
        pair.run(STREAM)
        assert len(ran_on) == 4
        assert len(set(ran_on)) == 1
        pair.run(STREAM)  # the second call is the first of those that are timed apart
        assert len(set(ran_on[4:])) == 2
    finally:
        del kernels._own["dtorch::noted_neg"]


def test_what_was_faster_is_kept() -> None:
    for joint_ns, apart_ns in ((10, 20), (20, 10)):
        trial = Trial(num_timed=2)
        ways = []
        while not trial.is_decided:
            ways.append(trial.is_joint)
            trial.took(is_joint=ways[-1], duration_ns=joint_ns if ways[-1] else apart_ns)
        assert ways == [True, False, True, False]
        assert trial.is_joint == (joint_ns < apart_ns)
        trial.took(is_joint=True, duration_ns=1)
        assert trial.is_joint == (joint_ns < apart_ns), "decided once"


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


@pytest.mark.parametrize("joint_ns", [1, 100])
def test_devices_stop_meeting_when_apart_is_faster(joint_ns: int) -> None:
    now, counts, lock = [0], {"joint": 0, "apart": 0}, threading.Lock()

    def note(way: str, duration_ns: int) -> Callable[[], None]:
        def ran() -> None:
            with lock:
                counts[way] += 1
                now[0] += duration_ns

        return ran

    body = JointBody(2, 10.0, lambda: FakeBody(note("joint", joint_ns)), lambda: now[0])  # type: ignore[arg-type, return-value]
    members = [JointMember(body, index, FakeBody(note("apart", 10)), 1) for index in (0, 1)]  # type: ignore[arg-type]

    def calls(member: JointMember) -> None:
        for _ in range(20):
            assert member.run([0], 0) == 1

    together(*(lambda m=member: calls(m) for member in members))
    assert counts == ({"joint": 16, "apart": 8} if joint_ns == 1 else {"joint": 4, "apart": 32})
    assert not body._calls, "a call is kept"
    if joint_ns == 100:
        assert members[0].run([0], 0) == 1, "it still waits for the other"


def test_who_waits_too_long_goes_on_alone() -> None:
    ran: list[str] = []
    body = JointBody(2, 0.0, lambda: FakeBody(lambda: ran.append("joint")))  # type: ignore[arg-type, return-value]
    first, second = (
        JointMember(body, index, FakeBody(lambda: ran.append("apart")), 1)  # type: ignore[arg-type]
        for index in (0, 1)
    )
    assert first.run([0], 0) == 1
    assert second.run([0], 0) == 1
    assert ran == ["apart", "apart"]
    assert not body._calls


def test_the_end_of_the_session_wakes_who_waits() -> None:
    pair = Pair(BODIES["values"], timeout_s=600.0)
    thread = threading.Thread(target=pair.session.devices[0].run, args=(5, STREAM), daemon=True)
    thread.start()
    wait_until(lambda: bool(pair.session.joint._bodies), "the device to come to the call")
    [body] = pair.session.joint._bodies.values()
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
    assert not pair.session.joint._bodies
    for values in pair.session.devices.values():
        values.memory(0, "stop")
    pair.run(STREAM)
    assert pair.session.joint._bodies
