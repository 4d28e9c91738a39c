"""What a node agent may rely on, of the executor that computes and of the one that only pretends to."""

from __future__ import annotations

import itertools
import queue
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.node.executor import (
    Completed,
    Executor,
    ExecutorEvent,
    OpRaised,
    Replied,
    ReportEvent,
    ValueMissing,
    ValueReady,
)
from dtorch_runtime.settings import Settings
from dtorch_runtime.testing.null_executor import NullExecutor
from dtorch_runtime.wire.messages import Upload
from dtorch_runtime.wire.records import (
    Arg,
    AskClock,
    AskCounts,
    AskMemory,
    ClockReply,
    CountsReply,
    ListArg,
    MemoryReply,
    MeshRecord,
    Slot,
    StartTrace,
    StopTrace,
    TemplateRecord,
    TraceReply,
)

_WAIT_S = 10.0
#: An op that raises in every executor: torch's because there is no such dim, the null one because it is told to.
_RAISING = "aten::unsqueeze"
MAKE, COPY, RAISE, ADD, ELSEWHERE = 1, 2, 3, 4, 5


def _null(report: ReportEvent) -> Executor:
    return NullExecutor(report=report, node_name="n0", raising_ops=[_RAISING])


def _worker(report: ReportEvent) -> Executor:
    from dtorch_runtime.worker.executor import WorkerExecutor  # loads torch

    return WorkerExecutor(Settings(num_threads=1), "n0", "cpu", report)


class Driver:
    """An executor of the devices 0 and 1 of a cluster that has more, and its events."""

    def __init__(self, make: Callable[[ReportEvent], Executor]) -> None:
        self.events: queue.SimpleQueue[ExecutorEvent] = queue.SimpleQueue()
        self.executor = make(self.events.put)
        self.executor.start([0, 1], [])
        self.open(1)

    def open(self, session: int) -> None:
        self.executor.open_session(session)
        self.executor.define_mesh(session, MeshRecord(1, "cpu", [2], [0, 1]))
        self.executor.define_mesh(session, MeshRecord(2, "cpu", [1], [9]))
        self.executor.define_templates(
            session,
            [
                template(MAKE, "aten::ones", ListArg([3])),
                template(COPY, "aten::clone", Slot(0)),
                template(RAISE, _RAISING, Slot(0), 99),
                template(ADD, "aten::add.Tensor", Slot(0), Slot(1)),
                template(ELSEWHERE, "aten::ones", ListArg([3]), mesh_ids=[2]),
            ],
        )

    def upload(self, seq: int, value_id: int, text: bytes, part: slice = slice(None)) -> None:
        """A chunk of a value of bytes."""
        message = Upload(
            session=1,
            seq=seq,
            value_id=value_id,
            devices=[0, 1],
            dtype="uint8",
            shape=[len(text)],
            offset_bytes=part.start or 0,
            total_bytes=len(text),
        )
        data = bytearray(text[part])
        self.executor.upload(message, memoryview(data))
        data[:] = b"?" * len(data)  # a chunk is the executor's during the call only

    def fetch(self, value_id: int, device: int = 0, session: int = 1) -> ValueReady | ValueMissing:
        """What a fetch gives; what is reported before it is dropped."""
        self.executor.fetch(session, 5, value_id, device)
        return next(e for e in self.take_events() if isinstance(e, ValueReady | ValueMissing))

    def take_events(self) -> Iterator[ExecutorEvent]:
        while True:
            yield self.events.get(timeout=_WAIT_S)

    def until_completed(self, seq: int) -> list[ExecutorEvent]:
        """All events up to the completion of ``seq``."""
        seen = []
        for event in self.take_events():
            seen.append(event)
            if isinstance(event, Completed) and event.seq == seq:
                return seen
        raise AssertionError


def template(number: int, op: str, *args: Arg, mesh_ids: list[int] | None = None) -> TemplateRecord:
    num_inputs = sum(isinstance(arg, Slot) for arg in args)
    return TemplateRecord(number, op, list(args), {}, num_inputs, 1, 0, mesh_ids or [1])


@pytest.fixture(params=[_null, _worker], ids=["null", "worker"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    started = Driver(request.param)
    yield started
    started.executor.close(5.0)


def test_messages_complete_in_order(driver):
    driver.executor.run(1, 1, [MAKE, 0, 10])
    driver.upload(2, 11, b"abc")
    driver.executor.run(1, 3, [COPY, 0, 10, 12])
    driver.executor.run(1, 4, [])
    assert driver.until_completed(4) == [Completed(session=1, seq=seq) for seq in (1, 2, 3, 4)]


def test_ops_of_other_nodes_complete_at_once(driver):
    driver.executor.run(1, 1, [ELSEWHERE, 0, 10])
    assert driver.until_completed(1) == [Completed(session=1, seq=1)]


def test_work_completes_in_a_session_without_meshes(driver):
    driver.executor.open_session(2)
    driver.executor.run(2, 1, [])
    assert driver.until_completed(1) == [Completed(session=2, seq=1)]


def test_a_fetch_comes_after_the_work_before_it(driver):
    driver.executor.run(
        1, 1, [MAKE, 0, 10, *(word for i in range(200) for word in (COPY, 0, 10 + i, 11 + i))]
    )
    event = driver.fetch(210, device=1)
    assert isinstance(event, ValueReady)
    assert (event.session, event.request_id, event.device) == (1, 5, 1)
    assert event.data.nbytes


@pytest.mark.parametrize("cuts", [[0, 6], [0, 1, 3, 6], [0, 3, 6]])
def test_an_upload_in_chunks_is_one_value(driver, cuts):
    for seq, (start, stop) in enumerate(itertools.pairwise(cuts), 1):
        driver.upload(seq, 10, b"dtorch", slice(start, stop))
    for device in (0, 1):
        event = driver.fetch(10, device)
        assert isinstance(event, ValueReady)
        assert (event.dtype, event.shape, bytes(event.data)) == ("uint8", (6,), b"dtorch")


def test_an_upload_of_nothing_is_a_value(driver):
    driver.upload(1, 10, b"")
    event = driver.fetch(10)
    assert isinstance(event, ValueReady)
    assert (event.shape, event.data.nbytes) == ((0,), 0)


def test_a_failure_is_reported_once_and_before_its_message_completes(driver):
    driver.executor.run(1, 1, [MAKE, 0, 10, RAISE, 7, 10, 11, COPY, 8, 11, 12])
    failures = [e.failure for e in driver.until_completed(1) if isinstance(e, OpRaised)]
    assert [failure.kind for failure in failures] == ["op"]
    driver.executor.run(1, 2, [COPY, 9, 12, 13])
    assert driver.until_completed(2) == [Completed(session=1, seq=2)]


def test_what_depends_on_a_failure_has_the_same_failure(driver):
    driver.executor.run(1, 1, [MAKE, 0, 10, RAISE, 7, 10, 11, MAKE, 0, 20, ADD, 8, 20, 11, 12])
    (failure,) = [e.failure for e in driver.until_completed(1) if isinstance(e, OpRaised)]
    for value_id in (11, 12):
        for device in (0, 1):
            event = driver.fetch(value_id, device)
            assert isinstance(event, ValueMissing)
            assert (event.failure.failure_id, event.failure.location_id) == (
                failure.failure_id,
                failure.location_id,
            )
    assert isinstance(driver.fetch(20), ValueReady)


def test_a_value_that_does_not_exist_is_missing(driver):
    driver.executor.run(1, 1, [MAKE, 0, 10, FREE, 1, 10])
    for value_id, device in ((10, 0), (77, 0), (10, 9)):
        event = driver.fetch(value_id, device)
        assert isinstance(event, ValueMissing)
        assert event.failure.kind == "internal"
        assert event.device == device


def test_freeing_what_is_not_there_is_no_error(driver):
    driver.executor.run(1, 1, [FREE, 2, 50, 51])
    assert driver.until_completed(1) == [Completed(session=1, seq=1)]


def test_an_output_that_is_not_wanted_is_no_value(driver):
    driver.executor.run(1, 1, [MAKE, 0, 0])
    assert isinstance(driver.fetch(0), ValueMissing)


def test_sessions_know_nothing_of_one_another(driver):
    driver.open(2)
    driver.executor.run(1, 1, [MAKE, 0, 10])
    assert isinstance(driver.fetch(10, session=1), ValueReady)
    assert isinstance(driver.fetch(10, session=2), ValueMissing)


def test_after_its_end_a_session_is_silent_and_others_go_on(driver):
    driver.open(2)
    driver.executor.run(1, 1, [MAKE, 0, 10])
    driver.until_completed(1)
    driver.executor.end_session(1)
    driver.executor.run(2, 1, [MAKE, 0, 10])
    assert driver.until_completed(1) == [Completed(session=2, seq=1)]
    driver.open(1)
    assert isinstance(driver.fetch(10, session=1), ValueMissing)


def test_data_of_a_fetch_does_not_change_any_more(driver):
    driver.upload(1, 10, b"dtorch")
    event = driver.fetch(10)
    assert isinstance(event, ValueReady)
    driver.executor.define_templates(
        1, [TemplateRecord(50, "aten::fill_.Scalar", [Slot(0), 1], {}, 1, 0, 0, [1], [0])]
    )
    driver.executor.run(1, 2, [50, 0, 10])
    driver.until_completed(2)
    assert bytes(event.data) == b"dtorch"


def test_data_is_plain_bytes(driver):
    driver.executor.run(1, 1, [MAKE, 0, 10])
    event = driver.fetch(10)
    assert isinstance(event, ValueReady)
    data: Any = event.data
    assert (data.format, data.ndim, data.contiguous) == ("B", 1, True)
    array("B").frombytes(data)


def test_questions_are_answered_and_a_trace_ends_behind_the_work_before_it(driver):
    for request_id, question in enumerate((AskClock(), AskCounts(), StartTrace(10))):
        driver.executor.ask(1, request_id, question)
    driver.executor.run(1, 1, [MAKE, 0, 10])
    driver.executor.ask(1, 3, StopTrace())
    events = []
    for event in driver.take_events():
        events.append(event)
        if isinstance(event, Replied) and event.request_id == 3:
            break
    replies = {event.request_id: event.reply for event in events if isinstance(event, Replied)}
    assert [type(replies[i]) for i in range(4)] == [ClockReply, CountsReply, ClockReply, TraceReply]
    assert replies[1].sent_bytes == {}
    assert events.index(Completed(session=1, seq=1)) < len(events) - 1


def test_a_trace_of_a_session_without_devices_is_empty(driver):
    driver.executor.open_session(2)
    driver.executor.ask(2, 7, StopTrace())
    event = next(e for e in driver.take_events() if isinstance(e, Replied))
    assert event == Replied(session=2, request_id=7, reply=TraceReply([]))


def memory(driver: Driver, peak: str = "keep", num_largest: int = 10, session: int = 1) -> MemoryReply:
    """What the executor answers; what is reported before it is dropped."""
    driver.executor.ask(session, 9, AskMemory(num_largest=num_largest, peak=peak))
    reply = next(e.reply for e in driver.take_events() if isinstance(e, Replied) and e.request_id == 9)
    assert isinstance(reply, MemoryReply)
    return reply


def test_memory_is_that_behind_the_work_before_the_question(driver):
    driver.executor.run(1, 1, [MAKE, 0, 10, COPY, 0, 10, 11])
    driver.upload(2, 12, b"d" * 100)
    driver.executor.run(1, 3, [FREE, 1, 10])
    reply = memory(driver)
    assert [record.device for record in reply.devices] == [0, 1]
    for record in reply.devices:
        assert (record.num_values, record.peak_bytes, record.limit_bytes) == (2, -1, 0)
        assert [value.value_id for value in record.largest] == [12, 11]
        assert record.largest[0].num_bytes == 100
        assert record.current_bytes == 100 + record.largest[1].num_bytes
    assert [len(record.largest) for record in memory(driver, num_largest=1).devices] == [1, 1]


def test_a_peak_is_measured_from_when_it_is_asked_for(driver):
    driver.executor.run(1, 1, [MAKE, 0, 10, MAKE, 0, 11, FREE, 1, 11])
    (before, _) = memory(driver, "reset").devices
    assert before.peak_bytes == before.current_bytes > 0
    driver.executor.run(1, 2, [COPY, 0, 10, 12, COPY, 0, 10, 13, FREE, 2, 12, 13])
    for record in memory(driver).devices:
        assert (record.current_bytes, record.peak_bytes) == (before.current_bytes, 3 * before.current_bytes)
    assert [record.peak_bytes for record in memory(driver, "reset").devices] == [before.current_bytes] * 2
    assert [record.peak_bytes for record in memory(driver, "stop").devices] == [-1, -1]


def test_sessions_and_devices_without_values_hold_nothing(driver):
    driver.executor.run(1, 1, [MAKE, 0, 10])
    driver.executor.open_session(2)
    devices = memory(driver, session=2).devices
    assert [(record.device, record.current_bytes, record.num_values) for record in devices] == [
        (0, 0, 0),
        (1, 0, 0),
    ]


def test_a_failed_value_holds_nothing(driver):
    driver.executor.run(1, 1, [MAKE, 0, 10, RAISE, 7, 10, 11])
    assert [record.num_values for record in memory(driver).devices] == [1, 1]
