"""The node agent's decisions, one event at a time."""

from __future__ import annotations

from typing import Any

import pytest

from dtorch_runtime.node.events import (
    Action,
    AddMesh,
    AddTemplates,
    CloseAsked,
    Connected,
    ConnectionLost,
    EndSession,
    ExecutorBroke,
    Joined,
    Leave,
    OpenSession,
    PeerNodeJoined,
    PeerNodeLost,
    Received,
    Reported,
    RunOps,
    Send,
    StartFetch,
    TakeQuestion,
    TakeUpload,
)
from dtorch_runtime.node.executor import (
    Completed,
    ExecutorEvent,
    OpRaised,
    Replied,
    ValueMissing,
    ValueReady,
)
from dtorch_runtime.node.state import NodeConfig, NodeState
from dtorch_runtime.wire.messages import (
    Answer,
    Ask,
    ClusterClosing,
    DefineMesh,
    DefineTemplates,
    Done,
    Fetch,
    FetchFailed,
    Message,
    NodeBye,
    NodeDown,
    NodeHello,
    NodeJoined,
    NodeWelcome,
    OpFailed,
    Refused,
    SessionEnded,
    SessionOpened,
    Subgraph,
    ValueData,
)
from dtorch_runtime.wire.records import CountsReply, NodeRecord, StopTrace
from tests.support.control import KEY, failure, mesh, template, upload

CHUNK_BYTES = 16
OTHER = NodeRecord("other", "host", 3, "cpu", [2, 3], "ipc:///other")


class Rig:
    def __init__(self, *, joined: bool = True) -> None:
        self.state = NodeState(
            NodeConfig(
                name="node0",
                host="host",
                pid=9,
                device_type="cpu",
                num_devices=2,
                data_endpoint="ipc:///data",
                session_key=KEY,
                chunk_bytes=CHUNK_BYTES,
                check=True,
            )
        )
        if joined:
            self.receive(NodeWelcome(devices=[0, 1], nodes=[], heartbeat_endpoint="ipc:///beats"))

    def receive(self, message: Message, *frames: Any) -> list[Action]:
        return self.state.handle(Received(message=message, frames=frames))  # type: ignore[arg-type]

    def report(self, *events: ExecutorEvent) -> list[Message]:
        actions = self.state.handle(Reported(events=events))
        return [action.message for action in actions if isinstance(action, Send)]


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.receive(SessionOpened(session=1))
    return rig


def ready(request_id: int, data: bytes, session: int = 1) -> ValueReady:
    return ValueReady(
        session=session,
        request_id=request_id,
        device=0,
        dtype="uint8",
        shape=(len(data),),
        data=memoryview(data),
    )


def done(seq: int, session: int = 1) -> Completed:
    return Completed(session=session, seq=seq)


def fetch(request_id: int) -> Fetch:
    return Fetch(session=1, request_id=request_id, value_id=5, device=0)


def test_hello_and_welcome() -> None:
    rig = Rig(joined=False)
    (send,) = rig.state.handle(Connected())
    assert isinstance(send, Send)
    assert isinstance(send.message, NodeHello)
    assert (send.message.name, send.message.num_devices, send.message.pid) == ("node0", 2, 9)
    assert not rig.state.is_joined
    (joined,) = rig.receive(NodeWelcome(devices=[4, 5], nodes=[OTHER], heartbeat_endpoint="ipc:///beats"))
    assert joined == Joined(devices=(4, 5), nodes=(OTHER,), heartbeat_endpoint="ipc:///beats")
    assert rig.state.is_joined


@pytest.mark.parametrize(
    ("message", "frames", "action"),
    [
        (SessionOpened(session=2), [], OpenSession(session=2)),
        (SessionEnded(session=1), [], EndSession(session=1)),
        (DefineMesh(session=1, mesh=mesh(1, [0])), [], AddMesh(session=1, record=mesh(1, [0]))),
        (
            DefineTemplates(session=1, templates=[template(1)]),
            [],
            AddTemplates(session=1, records=(template(1),)),
        ),
        (Subgraph(session=1, seq=3), [b"ops"], RunOps(session=1, seq=3, frame=b"ops")),
        (fetch(7), [], StartFetch(session=1, request_id=7, value_id=5, device=0)),
        (
            Ask(session=1, request_id=7, question=StopTrace()),
            [],
            TakeQuestion(session=1, request_id=7, question=StopTrace()),
        ),
        (NodeJoined(node=OTHER), [], PeerNodeJoined(node=OTHER)),
        (
            NodeDown(name="other", devices=[2, 3], reason="gone"),
            [],
            PeerNodeLost(name="other", devices=(2, 3), reason="gone"),
        ),
    ],
)
def test_each_message_is_one_call_of_the_executor(
    rig: Rig, message: Message, frames: list[bytes], action: Action
) -> None:
    assert rig.receive(message, *frames) == [action]


def test_upload_is_handed_over_with_its_frame(rig: Rig) -> None:
    message = upload(1, 5, [0])
    assert message.session == 0
    message = type(message)(
        **{name: getattr(message, name) for name in message.__struct_fields__} | {"session": 1}
    )
    assert rig.receive(message, b"12345678") == [TakeUpload(message=message, frame=b"12345678")]


def test_done_tells_up_to_where_nothing_is_missing(rig: Rig) -> None:
    for seq in (2, 3, 7, 9):
        rig.receive(Subgraph(session=1, seq=seq), b"")
    assert rig.report(done(3)) == []
    assert rig.report(done(9)) == []
    assert rig.report(done(2)) == [Done(session=1, seq=3)]
    assert rig.report(done(7)) == [Done(session=1, seq=9)]
    assert rig.state.num_outstanding == 0


@pytest.mark.parametrize(
    ("num_messages", "told"),
    [(1, [1]), (2, [1, 2]), (4, [2, 3, 4]), (12, [6, 9, 11, 12]), (100, [32, 64, 82, 91, 96, 98, 99, 100])],
)
def test_done_is_told_when_as_much_is_done_as_there_is_left(
    rig: Rig, num_messages: int, told: list[int]
) -> None:
    """And always of the last message: nobody else would make the controller hear of it."""
    for seq in range(1, num_messages + 1):
        rig.receive(Subgraph(session=1, seq=seq), b"")
    sent = [message for seq in range(1, num_messages + 1) for message in rig.report(done(seq))]
    assert sent == [Done(session=1, seq=seq) for seq in told]


def test_one_done_for_a_batch_of_reports_and_failures_before_it(rig: Rig) -> None:
    rig.receive(SessionOpened(session=2))
    for seq in (1, 2, 3):
        rig.receive(Subgraph(session=1, seq=seq), b"")
    rig.receive(Subgraph(session=2, seq=1), b"")
    sent = rig.report(done(1), OpRaised(session=1, failure=failure()), done(1, session=2), done(2), done(3))
    assert sent == [
        OpFailed(session=1, failure=failure()),
        Done(session=1, seq=3),
        Done(session=2, seq=1),
    ]


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES])
def test_value_leaves_in_chunks_without_a_copy(rig: Rig, num_bytes: int) -> None:
    rig.receive(fetch(7))
    data = bytes(range(num_bytes))
    sends = rig.state.handle(Reported(events=[ready(7, data)]))
    assert all(isinstance(send, Send) and isinstance(send.message, ValueData) for send in sends)
    frames = [send.frames[0] for send in sends if isinstance(send, Send)]
    assert b"".join(frames) == data
    assert all(frame.obj is data for frame in frames if num_bytes)
    assert max(len(frame) for frame in frames) <= CHUNK_BYTES
    offsets = [send.message.offset_bytes for send in sends if isinstance(send, Send)]  # type: ignore[attr-defined]
    assert offsets == list(range(0, max(num_bytes, 1), CHUNK_BYTES))
    assert rig.state.num_outstanding == 0


def test_missing_value(rig: Rig) -> None:
    rig.receive(fetch(7))
    missing = ValueMissing(session=1, request_id=7, device=0, failure=failure())
    assert rig.report(missing) == [FetchFailed(session=1, request_id=7, device=0, failure=failure())]
    assert rig.report(missing) == []


def test_answers_are_sent_on(rig: Rig) -> None:
    reply = CountsReply({"other": 5})
    answers = rig.report(Replied(session=1, request_id=7, reply=reply))
    assert answers == [Answer(session=1, request_id=7, reply=reply)]
    assert rig.report(Replied(session=2, request_id=7, reply=reply)) == []


def test_reports_of_an_ended_session_are_dropped(rig: Rig) -> None:
    rig.receive(Subgraph(session=1, seq=1), b"")
    rig.receive(fetch(7))
    rig.receive(SessionEnded(session=1))
    assert rig.report(done(1), ready(7, b"x"), OpRaised(session=1, failure=failure())) == []
    assert rig.state.num_outstanding == 0
    assert rig.receive(SessionEnded(session=1)) == []


@pytest.mark.parametrize(
    ("message", "frames"),
    [
        (Subgraph(session=9, seq=1), [b""]),
        (Subgraph(session=1, seq=1), []),
        (Subgraph(session=1, seq=0), [b""]),
        (SessionOpened(session=1), []),
        (fetch(7), [b"unexpected"]),
        (NodeWelcome(devices=[0], nodes=[], heartbeat_endpoint=""), []),
    ],
)
def test_controller_that_breaks_the_protocol_is_left(rig: Rig, message: Message, frames: list[bytes]) -> None:
    bye, leave = rig.receive(message, *frames)
    assert isinstance(bye, Send)
    assert isinstance(bye.message, NodeBye)
    assert isinstance(leave, Leave)
    assert leave.is_controller_lost
    assert rig.receive(SessionOpened(session=5)) == []


def test_nothing_comes_before_the_welcome() -> None:
    *_, leave = Rig(joined=False).receive(SessionOpened(session=1))
    assert isinstance(leave, Leave)


@pytest.mark.parametrize(
    ("event", "says_bye", "flags"),
    [
        (ConnectionLost(reason="r"), False, "is_controller_lost"),
        (Received(message=Refused(reason="r")), False, "is_refused"),
        (Received(message=ClusterClosing(reason="r")), False, ""),
        (CloseAsked(reason="r"), True, ""),
        (ExecutorBroke(reason="r"), True, "is_broken"),
    ],
)
def test_ends(rig: Rig, event: Any, says_bye: bool, flags: str) -> None:
    rig.receive(Subgraph(session=1, seq=1), b"")
    *before, leave = rig.state.handle(event)
    assert [type(send.message) for send in before if isinstance(send, Send)] == [NodeBye] * says_bye
    assert isinstance(leave, Leave)
    assert "r" in leave.reason
    set_flags = [f for f in ("is_controller_lost", "is_refused", "is_broken") if getattr(leave, f)]
    assert set_flags == ([flags] if flags else [])
    assert rig.state.handle(event) == []
    assert rig.state.num_outstanding == 0
