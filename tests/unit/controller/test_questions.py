"""Questions of a client to the controller and the nodes, and their answers."""

from __future__ import annotations

from dtorch_runtime.controller.events import AnswerSelf
from dtorch_runtime.wire.messages import Answer, Ask, Asked, NodeDown, Refused
from dtorch_runtime.wire.records import AskClock, ClockReply
from tests.support.control import ControllerRig


def start() -> tuple[ControllerRig, list[int], int, int]:
    """Two nodes and a client: (rig, peers of the nodes, peer of the client, session)."""
    rig = ControllerRig()
    nodes = [rig.add_node(name) for name in ("node0", "node1")]
    client = rig.add_client()
    session = rig.session(client)
    rig.clear()
    return rig, nodes, client, session


def test_goes_to_every_node_and_to_the_controller_itself() -> None:
    rig, nodes, client, session = start()
    actions = rig.receive(client, Ask(request_id=7, question=AskClock()))
    assert rig.only(client, Asked) == Asked(request_id=7, nodes=["node0", "node1"])
    for node in nodes:
        assert rig.only(node, Ask) == Ask(session=session, request_id=7, question=AskClock())
    own = [action for action in actions if isinstance(action, AnswerSelf)]
    assert own == [AnswerSelf(peer=client, session=session, request_id=7, question=AskClock())]


def test_an_answer_is_sent_on_under_the_name_of_the_node_that_gave_it() -> None:
    rig, (first, _), client, session = start()
    rig.receive(client, Ask(request_id=7, question=AskClock()))
    rig.receive(first, Answer(session=session, request_id=7, node="node1", reply=ClockReply(5)))
    assert rig.only(client, Answer) == Answer(
        session=session, request_id=7, node="node0", reply=ClockReply(5)
    )


def test_answers_for_a_session_that_has_ended_are_dropped() -> None:
    rig, (first, _), client, session = start()
    rig.receive(client, Ask(request_id=7, question=AskClock()))
    rig.lose(client)
    rig.clear()
    rig.receive(first, Answer(session=session, request_id=7, reply=ClockReply(5)))
    assert not rig.all(client, Answer)
    assert not rig.all(first, Refused)


def test_the_loss_of_a_node_is_told_before_who_is_asked_next() -> None:
    rig, (first, second), client, _ = start()
    rig.lose(second)
    assert rig.only(client, NodeDown).name == "node1"
    rig.receive(client, Ask(request_id=8, question=AskClock()))
    assert rig.only(client, Asked).nodes == ["node0"]
    assert rig.all(first, Ask)
    assert not rig.all(second, Ask)


def test_a_node_that_joined_later_is_asked_too() -> None:
    rig, _, client, _ = start()
    third = rig.add_node("node2")
    rig.receive(client, Ask(request_id=8, question=AskClock()))
    assert rig.only(client, Asked).nodes == ["node0", "node1", "node2"]
    assert rig.all(third, Ask)
