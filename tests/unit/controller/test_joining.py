"""Who may join a cluster, and what each is told of the others: the controller's decisions."""

from __future__ import annotations

import pytest

from dtorch_runtime.controller.events import (
    ForgetPeer,
    Stop,
    StopAsked,
    WatchBeats,
)
from dtorch_runtime.wire.messages import (
    PROTOCOL_VERSION,
    ClientBye,
    ClusterClosing,
    Message,
    NodeJoined,
    NodeWelcome,
    Refused,
    SessionOpened,
    Status,
    StatusRequest,
    StopCluster,
    Welcome,
)
from tests.support.control import (
    KEY,
    ControllerRig,
    client_hello,
    free,
    node_hello,
    op,
    program,
)


@pytest.fixture
def rig() -> ControllerRig:
    return ControllerRig()


class TestHandshake:
    def test_client_is_welcomed_with_the_nodes_and_nodes_learn_of_the_session(
        self, rig: ControllerRig
    ) -> None:
        node = rig.add_node("node0", 2)
        client = rig.add_client()
        welcome = rig.only(client, Welcome)
        assert [(n.name, n.devices) for n in welcome.nodes] == [("node0", [0, 1])]
        assert welcome.heartbeat_endpoint == "ipc:///beats"
        assert rig.only(node, SessionOpened).session == welcome.session
        watched = [action.beat_name for action in rig.actions if isinstance(action, WatchBeats)]
        assert watched == ["node:node0", f"session:{welcome.session}"]

    def test_nodes_get_contiguous_ids_in_order_and_learn_of_each_other(self, rig: ControllerRig) -> None:
        first, second = rig.add_node("a", 2), rig.add_node("b", 3)
        assert (rig.devices(first), rig.devices(second)) == ([0, 1], [2, 3, 4])
        assert rig.only(first, NodeJoined).node.devices == [2, 3, 4]
        assert [n.name for n in rig.only(second, NodeWelcome).nodes] == ["a"]

    @pytest.mark.parametrize(
        ("hello", "reason"),
        [
            (client_hello(version=99), "version"),
            (client_hello(session_key=b"wrong"), "session key"),
            (client_hello(session_key=b""), "session key"),
            (node_hello(session_key=b"wrong"), "session key"),
            (node_hello(num_devices=0), "1 to"),
            (node_hello(num_devices=-1), "1 to"),
            (node_hello(device_type="tpu"), "device_type"),
            (node_hello(name=""), "name"),
            (node_hello(name="a b"), "name"),
            (node_hello(name="taken"), "already there"),
            (StatusRequest(version=PROTOCOL_VERSION, session_key=b"wrong"), "session key"),
            (StopCluster(version=PROTOCOL_VERSION, session_key=b"wrong"), "session key"),
        ],
    )
    def test_stranger_is_refused_with_the_reason_and_changes_nothing(
        self, rig: ControllerRig, hello: Message, reason: str
    ) -> None:
        rig.add_node("taken")
        stranger = rig.new_peer()
        # The node that is there has another process id, so that this is no reconnection.
        changed = node_hello(name="taken", pid=77) if getattr(hello, "name", "") == "taken" else hello
        actions = rig.receive(stranger, changed)
        assert reason in rig.only(stranger, Refused).reason
        assert ForgetPeer(peer=stranger) in actions
        assert len(rig.state.membership) == 1
        assert not rig.state.sessions

    def test_node_that_connects_again_replaces_itself(self, rig: ControllerRig) -> None:
        old = rig.add_node("node0", 2, pid=5)
        new = rig.add_node("node0", 2, pid=5)
        assert rig.devices(new) == rig.devices(old) == [0, 1]
        assert [node.peer for node in rig.state.membership] == [new]

    def test_lost_node_that_comes_back_gets_its_ids_unless_the_count_differs(
        self, rig: ControllerRig
    ) -> None:
        first = rig.add_node("a", 2)
        rig.add_node("b", 1)
        rig.lose(first)
        again = rig.add_node("a", 2)
        assert rig.devices(again) == [0, 1]
        rig.lose(again)
        assert rig.devices(rig.add_node("a", 3)) == [3, 4, 5]

    def test_status_counts_ops_also_of_ended_sessions(self, rig: ControllerRig) -> None:
        _, client, session = program(rig)
        rig.ops(client, 1, op(1, 5), free(5))
        rig.now_s += 7
        asker = rig.new_peer()
        rig.receive(asker, StatusRequest(version=PROTOCOL_VERSION, session_key=KEY))
        status = rig.only(asker, Status)
        assert (status.num_ops, status.sessions, status.uptime_s) == (2, [session], 7)
        rig.receive(client, ClientBye())
        rig.receive(asker, StatusRequest(version=PROTOCOL_VERSION, session_key=KEY))
        status = rig.all(asker, Status)[-1]
        assert (status.num_ops, status.sessions) == (2, [])

    @pytest.mark.parametrize("by_request", [True, False])
    def test_stop_tells_everybody_and_lets_nobody_in(self, rig: ControllerRig, by_request: bool) -> None:
        nodes, client, _ = program(rig)
        asker = rig.new_peer()
        actions = (
            rig.receive(asker, StopCluster(version=PROTOCOL_VERSION, session_key=KEY))
            if by_request
            else rig.handle(StopAsked(reason="SIGTERM"))
        )
        for peer in [*nodes, client] + [asker] * by_request:
            rig.only(peer, ClusterClosing)
        assert [action for action in actions if isinstance(action, Stop)]
        late = rig.add_client()
        assert "closing" in rig.only(late, Refused).reason
