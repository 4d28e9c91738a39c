"""Addresses: which are allowed, and which only this machine can reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtorch_runtime.errors import SecurityError, TransportError
from dtorch_runtime.transport.endpoint import Endpoint, make_ipc_folder, parse_endpoint, require_keys

PRIVATE = [
    "ipc:///run/dtorch/a.sock",
    "tcp://127.0.0.1:5555",
    "tcp://127.9.9.9:*",
    "tcp://localhost:1",
    "tcp://[::1]:5555",
    "tcp://[::ffff:127.0.0.1]:5555",
]
OPEN = [
    "tcp://*:*",
    "tcp://0.0.0.0:5555",
    "tcp://[::]:5555",
    "tcp://10.0.0.1:65535",
    "tcp://[fe80::1%eth0]:1",
    "tcp://[::ffff:10.0.0.1]:5555",
    "tcp://head:5555",
    "tcp://localhost.example.org:5555",
    "tcp://127.0.0.1.example.org:5555",
    "tcp://eth0:*",
    "tcp://0:5555",
    "tcp://2130706433:5555",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_need_no_keys(address: str) -> None:
    endpoint = parse_endpoint(address)
    assert endpoint.is_private
    require_keys(endpoint, has_keys=False, action="bind")


@pytest.mark.parametrize("address", OPEN)
def test_every_other_address_needs_keys(address: str) -> None:
    endpoint = parse_endpoint(address)
    assert not endpoint.is_private
    require_keys(endpoint, has_keys=True, action="bind")
    with pytest.raises(SecurityError, match=r"refused to bind .* without keys.*dtorch-launch keys"):
        require_keys(endpoint, has_keys=False, action="bind")


@pytest.mark.parametrize(
    "address, parsed",
    [
        ("ipc:///a/b.sock", {"scheme": "ipc", "path": "/a/b.sock"}),
        ("tcp://[::1]:55", {"scheme": "tcp", "host": "::1", "port": "55"}),
        ("tcp://head:*", {"scheme": "tcp", "host": "head", "port": "*"}),
    ],
)
def test_the_parts_of_an_address(address: str, parsed: dict[str, str]) -> None:
    assert parse_endpoint(address) == Endpoint(address, **parsed)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "head:5555",
        "tcp:/127.0.0.1:5555",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://:5555",
        "tcp://127.0.0.1:port",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:٣",
        "tcp://::1:5555",
        "tcp://10.0.0.1;127.0.0.1:5555",
        "inproc://name",
        "udp://127.0.0.1:5555",
        "ipc://relative.sock",
        "ipc://@abstract",
        "ipc://*",
        "ipc:///" + "x" * 107,
    ],
)
def test_other_addresses_are_refused_with_what_is_allowed(address: str) -> None:
    with pytest.raises(TransportError, match="address"):
        parse_endpoint(address)


def test_a_folder_for_ipc_sockets_is_the_users_alone() -> None:
    folder: Path = make_ipc_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
