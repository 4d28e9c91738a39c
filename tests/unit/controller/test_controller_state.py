"""The controller's decisions, one event at a time."""

from __future__ import annotations

from typing import Any

import pytest

from dtorch_runtime.controller.events import (
    ForgetBeats,
    ReceivedGarbage,
)
from dtorch_runtime.wire.messages import (
    ClientBye,
    Credit,
    DefineMesh,
    DefineTemplates,
    Done,
    Fetch,
    FetchFailed,
    Message,
    NodeBye,
    NodeDown,
    NodeJoined,
    OpFailed,
    Ops,
    Refused,
    SessionEnded,
    SessionOpened,
    Subgraph,
    Upload,
    ValueData,
    Welcome,
)
from tests.support.control import (
    ControllerRig,
    client_hello,
    failure,
    frame,
    free,
    mesh,
    node_hello,
    op,
    program,
    template,
    upload,
    value_data,
)


@pytest.fixture
def rig() -> ControllerRig:
    return ControllerRig()


class TestOps:
    def test_batch_for_one_set_of_nodes_is_sent_on_in_its_own_frame(self, rig: ControllerRig) -> None:
        nodes, client, session = program(rig)
        payload = frame(op(1, 5), op(1, 6), free(5))
        rig.receive(client, Ops(seq=1, graph_id=3), payload)
        for node in nodes:
            ((message, frames),) = rig.sent[node]
            assert message == Subgraph(session=session, seq=1)
            assert frames[0] is payload

    def test_each_node_gets_its_own_records_in_program_order(self, rig: ControllerRig) -> None:
        (first, second), client, _ = program(rig)
        records = [op(2, 10), op(1, 11), op(3, 12), op(2, 13), free(12), free(10, 11)]
        rig.ops(client, 1, *records)
        assert rig.frames(first, Subgraph) == [frame(records[0], records[1], records[3], records[5])]
        assert rig.frames(second, Subgraph) == [frame(records[1], records[2], records[4], records[5])]

    def test_credit_comes_when_the_last_node_is_done(self, rig: ControllerRig) -> None:
        (first, second), client, session = program(rig)
        rig.ops(client, 1, op(1, 5))
        rig.ops(client, 2, op(2, 6))
        rig.ops(client, 3, op(3, 7))
        rig.done(first, session, 2)
        assert not rig.all(client, Credit)
        rig.done(second, session, 1)
        assert rig.all(client, Credit) == [Credit(seq=2)]
        rig.done(second, session, 3)
        assert rig.all(client, Credit) == [Credit(seq=2), Credit(seq=3)]

    def test_done_twice_credits_once(self, rig: ControllerRig) -> None:
        (first, _), client, session = program(rig)
        rig.ops(client, 1, op(2, 5))
        rig.done(first, session, 1)
        rig.done(first, session, 1)
        assert rig.all(client, Credit) == [Credit(seq=1)]

    def test_message_that_touches_no_node_is_credited_in_order(self, rig: ControllerRig) -> None:
        (first, _), client, session = program(rig)
        rig.ops(client, 1)
        assert rig.all(client, Credit) == [Credit(seq=1)]
        rig.define(client, [mesh(8, [50])], [template(8, mesh_ids=[8])])  # a device that no node has
        rig.ops(client, 2, op(2, 5))
        rig.ops(client, 3, op(8, 6))
        assert rig.all(client, Credit) == [Credit(seq=1)]
        rig.done(first, session, 2)
        assert rig.all(client, Credit) == [Credit(seq=1), Credit(seq=3)]

    def test_value_is_ready_when_its_message_is_done_on_its_nodes(self, rig: ControllerRig) -> None:
        (first, second), client, session = program(rig)
        rig.ops(client, 1, op(1, 5))
        rig.ops(client, 2, op(2, 6))
        state = rig.state.sessions[session]
        rig.done(first, session, 2)
        assert (state.is_ready(5), state.is_ready(6), state.is_ready(7)) == (False, True, False)
        rig.done(second, session, 1)
        assert state.is_ready(5)
        rig.ops(client, 3, free(5, 6))
        assert not state.is_ready(5)
        assert not state.graph.values

    def test_upload_goes_to_the_nodes_of_its_devices(self, rig: ControllerRig) -> None:
        (first, second), client, session = program(rig)
        rig.receive(client, upload(1, 5, [1, 2, 3]), b"12345678")
        parts = [rig.only(node, Upload) for node in (first, second)]
        assert [(part.session, part.devices) for part in parts] == [(session, [1]), (session, [2, 3])]
        assert rig.frames(second, Upload) == [b"12345678"]
        rig.done(first, session, 1)
        rig.done(second, session, 1)
        assert rig.all(client, Credit) == [Credit(seq=1)]
        rig.ops(client, 2, free(5))
        assert rig.frames(first, Subgraph) == rig.frames(second, Subgraph) == [frame(free(5))]

    def test_definitions_reach_nodes_that_join_later(self, rig: ControllerRig) -> None:
        _, client, session = program(rig)
        late = rig.add_node("late")
        assert rig.only(late, SessionOpened).session == session
        assert [m.mesh.mesh_id for m in rig.all(late, DefineMesh)] == [1, 2, 3]
        assert [t.template_id for t in rig.only(late, DefineTemplates).templates] == [1, 2, 3]
        assert rig.only(client, NodeJoined).node.devices == [4, 5]
        rig.define(client, [mesh(9, [4])], [template(9, mesh_ids=[9])])
        rig.ops(client, 1, op(9, 5))
        assert rig.frames(late, Subgraph) == [frame(op(9, 5))]


class TestFetch:
    def test_goes_to_the_owner_and_its_chunks_come_back(self, rig: ControllerRig) -> None:
        (first, second), client, session = program(rig)
        rig.ops(client, 1, op(1, 5))
        rig.fetch(client, 7, 5, 3)
        assert rig.only(second, Fetch) == Fetch(session=session, request_id=7, value_id=5, device=3)
        assert not rig.all(first, Fetch)
        rig.receive(second, value_data(session, 7, 3, 0, 12), b"12345678")
        rig.receive(second, value_data(session, 7, 3, 8, 12), b"1234")
        assert rig.frames(client, ValueData) == [b"12345678", b"1234"]
        assert not rig.state.sessions[session].fetches

    def test_empty_value_is_one_empty_chunk(self, rig: ControllerRig) -> None:
        (first, _), client, session = program(rig)
        rig.ops(client, 1, op(1, 5))
        rig.fetch(client, 7, 5, 0)
        rig.receive(first, value_data(session, 7, 0, 0, 0), b"")
        assert rig.frames(client, ValueData) == [b""]
        assert not rig.state.sessions[session].fetches

    def test_failures_are_sent_on(self, rig: ControllerRig) -> None:
        (first, _), client, session = program(rig)
        rig.ops(client, 1, op(1, 5))
        rig.fetch(client, 7, 5, 0)
        rig.receive(first, OpFailed(session=session, failure=failure()))
        failed = FetchFailed(session=session, request_id=7, device=0, failure=failure())
        rig.receive(first, failed)
        assert rig.only(client, OpFailed).failure == failure()
        assert rig.only(client, FetchFailed) == failed

    @pytest.mark.parametrize(
        ("value_id", "device", "kind", "text"),
        [(5, 99, "node", "no node of the cluster has device 99"), (6, 0, "internal", "value 6")],
    )
    def test_of_what_is_not_there_fails_at_once(
        self, rig: ControllerRig, value_id: int, device: int, kind: str, text: str
    ) -> None:
        _, client, _ = program(rig)
        rig.ops(client, 1, op(1, 5))
        rig.fetch(client, 7, value_id, device)
        answer = rig.only(client, FetchFailed)
        assert (answer.request_id, answer.failure.kind) == (7, kind)
        assert text in answer.failure.message

    def test_answers_that_nobody_asked_for_are_dropped(self, rig: ControllerRig) -> None:
        (first, second), client, session = program(rig)
        rig.ops(client, 1, op(1, 5))
        rig.fetch(client, 7, 5, 0)
        rig.receive(second, value_data(session, 7, 0), b"12345678")  # not the owner
        rig.receive(first, value_data(session, 8, 0), b"12345678")
        rig.receive(first, value_data(session + 1, 7, 0), b"12345678")
        rig.receive(second, FetchFailed(session=session, request_id=7, device=0, failure=failure()))
        assert not rig.sent[client]
        rig.receive(first, value_data(session, 7, 0), b"12345678")
        rig.receive(first, value_data(session, 7, 0), b"12345678")
        assert rig.frames(client, ValueData) == [b"12345678"]

    def test_chunks_that_do_not_make_up_the_value_fail_the_fetch(self, rig: ControllerRig) -> None:
        (first, _), client, session = program(rig)
        rig.ops(client, 1, op(1, 5))
        rig.fetch(client, 7, 5, 0)
        rig.receive(first, value_data(session, 7, 0, 8, 16), b"12345678")
        assert rig.only(client, FetchFailed).failure.kind == "internal"
        assert not rig.all(client, ValueData)


class TestLosses:
    @pytest.mark.parametrize("how", ["socket", "beats", "bye"])
    def test_lost_node_fails_fetches_releases_credits_and_is_announced(
        self, rig: ControllerRig, how: str
    ) -> None:
        (first, second), client, session = program(rig)
        rig.ops(client, 1, op(1, 5))
        rig.fetch(client, 7, 5, 3)
        rig.fetch(client, 8, 5, 0)
        rig.done(first, session, 1)
        match how:
            case "socket":
                actions = rig.lose(second)
            case "beats":
                actions = rig.silence("node:node1")
                assert rig.only(second, Refused).reason == "silent"  # it may come back
            case _:
                actions = rig.receive(second, NodeBye(reason="maintenance"))
        assert rig.only(client, NodeDown).devices == rig.only(first, NodeDown).devices == [2, 3]
        answer = rig.only(client, FetchFailed)
        assert (answer.request_id, answer.device) == (7, 3)
        assert (answer.failure.kind, answer.failure.error_type, answer.failure.node) == (
            "node",
            "NodeLost",
            "node1",
        )
        assert rig.all(client, Credit) == [Credit(seq=1)]
        assert ForgetBeats(beat_name="node:node1") in actions
        assert list(rig.state.sessions[session].fetches) == [8]

    def test_ops_and_fetches_on_a_lost_node_end_and_the_rest_goes_on(self, rig: ControllerRig) -> None:
        (first, second), client, session = program(rig)
        rig.lose(second)
        rig.clear()
        rig.ops(client, 1, op(3, 5))  # only on the lost node
        assert rig.all(client, Credit) == [Credit(seq=1)]
        rig.ops(client, 2, op(1, 6))
        rig.receive(client, upload(3, 8, [2]), b"12345678")
        assert rig.frames(first, Subgraph) == [frame(op(1, 6))]
        rig.done(first, session, 2)
        assert rig.all(client, Credit)[-1] == Credit(seq=3)
        rig.fetch(client, 7, 5, 2)
        assert rig.only(client, FetchFailed).failure.kind == "node"
        assert not rig.sent[second]

    def test_node_that_comes_back_serves_new_sessions_only(self, rig: ControllerRig) -> None:
        (_, second), client, _ = program(rig)
        rig.lose(second)
        rig.clear()
        again = rig.add_node("node1")
        assert not rig.sent[client]
        assert not rig.all(again, SessionOpened)
        rig.ops(client, 1, op(3, 5))
        assert not rig.all(again, Subgraph)
        other = rig.add_client()
        assert [node.name for node in rig.only(other, Welcome).nodes] == ["node0", "node1"]
        rig.define(other, [mesh(1, [2, 3])], [template(1)])
        rig.ops(other, 1, op(1, 5))
        assert rig.frames(again, Subgraph) == [frame(op(1, 5))]

    @pytest.mark.parametrize("how", ["socket", "beats", "bye"])
    def test_lost_client_is_forgotten_everywhere(self, rig: ControllerRig, how: str) -> None:
        nodes, client, session = program(rig)
        rig.ops(client, 1, op(1, 5))
        rig.fetch(client, 7, 5, 3)
        match how:
            case "socket":
                rig.lose(client)
            case "beats":
                rig.silence(f"session:{session}")
                assert rig.only(client, Refused).reason == "silent"
            case _:
                rig.receive(client, ClientBye())
        for node in nodes:
            assert rig.only(node, SessionEnded).session == session
        assert not rig.state.sessions
        rig.clear()
        rig.receive(nodes[0], Done(session=session, seq=1))
        rig.receive(nodes[1], value_data(session, 7, 3), b"12345678")
        assert not rig.actions


class TestViolations:
    @pytest.mark.parametrize(
        ("message", "frames"),
        [
            (Ops(seq=1, graph_id=1), [frame(op(77, 5))]),
            (Ops(seq=1, graph_id=1), [frame(op(1, 5))[:-8]]),
            (Ops(seq=1, graph_id=1), [b"odd"]),
            (Ops(seq=1, graph_id=1), [frame([0, 5, 1])]),
            (Ops(seq=1, graph_id=1), [frame([0, -1])]),
            (Ops(seq=1, graph_id=1), [frame(op(1, -5))]),
            (Ops(seq=1, graph_id=1), []),
            (Ops(seq=1, graph_id=1), [b"", b""]),
            (Ops(seq=0, graph_id=1), [b""]),
            (upload(1, 5, [0], offset=4), [b"12345678"]),
            (upload(1, 5, [0], offset=-8), [b"12345678"]),
            (upload(1, 0, [0]), [b"12345678"]),
            (DefineMesh(mesh=mesh(1, [0])), []),
            (DefineMesh(mesh=mesh(9, [0, 0])), []),
            (DefineMesh(mesh=mesh(9, [])), []),
            (DefineTemplates(templates=[template(1, 3)]), []),
            (DefineTemplates(templates=[template(0)]), []),
            (DefineTemplates(templates=[template(9, mesh_ids=[42])]), []),
            (DefineTemplates(templates=[template(9, mesh_ids=[])]), []),
            (DefineTemplates(templates=[template(9, -1)]), []),
            (DefineTemplates(templates=[template(9, 1, mutates=[1])]), []),
            (client_hello(), []),
            (node_hello(), []),
            (Done(session=1, seq=1), []),
            (NodeBye(reason=""), []),
        ],
    )
    def test_client_is_refused_and_others_do_not_notice(
        self, rig: ControllerRig, message: Message, frames: list[Any]
    ) -> None:
        nodes, client, session = program(rig)
        other = rig.add_client()
        rig.receive(client, message, *frames)
        assert rig.only(client, Refused).reason
        assert session not in rig.state.sessions
        assert rig.only(nodes[0], SessionEnded).session == session
        rig.define(other, [mesh(1, [0])], [template(1)])
        rig.ops(other, 1, op(1, 5))
        rig.done(nodes[0], rig.session(other), 1)
        assert rig.all(other, Credit) == [Credit(seq=1)]

    def test_seq_does_not_fall(self, rig: ControllerRig) -> None:
        _, client, _ = program(rig)
        rig.ops(client, 2, op(1, 5))
        rig.ops(client, 2, op(1, 6))
        assert "came after" in rig.only(client, Refused).reason

    def test_second_fetch_with_the_same_number(self, rig: ControllerRig) -> None:
        _, client, _ = program(rig)
        rig.ops(client, 1, op(1, 5))
        rig.fetch(client, 7, 5, 0)
        rig.fetch(client, 7, 5, 1)
        assert "twice" in rig.only(client, Refused).reason

    @pytest.mark.parametrize(
        "message", [Done(session=1, seq=9), client_hello(), Ops(seq=1, graph_id=1), value_data(1, 7, 0)]
    )
    def test_node_is_refused_and_counts_as_lost(self, rig: ControllerRig, message: Message) -> None:
        (first, second), client, _ = program(rig)
        rig.receive(first, message)
        assert rig.only(first, Refused).reason
        assert rig.only(client, NodeDown).name == rig.only(second, NodeDown).name == "node0"

    @pytest.mark.parametrize(
        ("records", "text"),
        [
            ([op(4, 9, 10)], "uses value 9"),
            ([op(1, 9), op(1, 9)], "exists already"),
            ([op(1, 9), free(9), op(4, 9, 10)], "uses value 9"),
            ([free(9)], "uses value 9"),
            ([op(1, 9), free(9, 9)], "twice"),
        ],
    )
    def test_checked_stream(self, rig: ControllerRig, records: list[list[int]], text: str) -> None:
        _, client, _ = program(rig)
        rig.define(client, [], [template(4, 1)])
        rig.ops(client, 1, *records)
        assert text in rig.only(client, Refused).reason

    def test_garbage_ends_a_known_peer_and_is_ignored_from_a_stranger(self, rig: ControllerRig) -> None:
        (first, _), client, _ = program(rig)
        assert rig.handle(ReceivedGarbage(peer=99, reason="not a message")) == []
        rig.handle(ReceivedGarbage(peer=client, reason="not a message"))
        assert rig.only(client, Refused).reason == "not a message"
        rig.handle(ReceivedGarbage(peer=first, reason="not a message"))
        assert len(rig.state.membership) == 1

    def test_stranger_that_does_not_begin_with_a_hello(self, rig: ControllerRig) -> None:
        stranger = rig.new_peer()
        rig.receive(stranger, Ops(seq=1, graph_id=1), b"")
        assert "hello" in rig.only(stranger, Refused).reason
