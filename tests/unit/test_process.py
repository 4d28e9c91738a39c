"""What a process of a cluster derives from what it is told."""

from __future__ import annotations

import pytest

from dtorch_runtime.errors import SettingError
from dtorch_runtime.process import derived_data_endpoint, derived_heartbeat_endpoint


@pytest.mark.parametrize(
    ("endpoint", "heartbeats"),
    [
        ("ipc:///run/dtorch/controller", "ipc:///run/dtorch/controller-beats"),
        ("tcp://10.0.0.1:5555", "tcp://10.0.0.1:*"),
        ("tcp://0.0.0.0:5555", "tcp://0.0.0.0:*"),
        ("tcp://[::1]:5555", "tcp://[::1]:*"),
    ],
)
def test_heartbeats_are_bound_beside_the_socket(endpoint: str, heartbeats: str) -> None:
    assert derived_heartbeat_endpoint(endpoint) == heartbeats


def test_data_plane_lies_beside_an_ipc_socket_or_on_loopback() -> None:
    assert derived_data_endpoint("ipc:///run/dtorch/controller", "node1") == "ipc:///run/dtorch/data-node1"
    address, _, port = derived_data_endpoint("tcp://127.0.0.1:5555", "node1").rpartition(":")
    assert address == "tcp://127.0.0.1"
    assert 0 < int(port) < 65536


def test_node_of_another_machine_must_say_where_it_is_reached() -> None:
    with pytest.raises(SettingError, match=r"'node1' needs a data_endpoint.*tcp://10"):
        derived_data_endpoint("tcp://10.0.0.1:5555", "node1")
