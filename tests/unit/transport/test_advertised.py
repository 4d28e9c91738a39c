"""Where a peer reaches an address bound to every interface."""

from __future__ import annotations

import pytest

from dtorch_runtime.transport.advertised import as_seen_from


@pytest.mark.parametrize(
    ("advertised", "controller", "seen"),
    [
        ("tcp://0.0.0.0:5556", "tcp://10.0.0.1:5555", "tcp://10.0.0.1:5556"),
        ("tcp://*:5556", "tcp://head:5555", "tcp://head:5556"),
        ("tcp://[::]:5556", "tcp://[fe80::1]:5555", "tcp://[fe80::1]:5556"),
        ("tcp://10.0.0.7:5556", "tcp://10.0.0.1:5555", "tcp://10.0.0.7:5556"),
        ("ipc:///run/beats", "ipc:///run/controller", "ipc:///run/beats"),
    ],
)
def test_host_is_taken_from_the_address_that_reaches_the_controller(
    advertised: str, controller: str, seen: str
) -> None:
    assert as_seen_from(advertised, controller) == seen
