"""Who gets in: wrong keys, missing keys, open addresses. Every failure says what to do, at the side that caused it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from dtorch_runtime.errors import ClusterTimeout, HandshakeError, SecurityError, TransportError
from dtorch_runtime.testing.wait import wait_until_async
from dtorch_runtime.transport.heartbeat import HeartbeatServer
from dtorch_runtime.transport.security import CurveKeys, load_keys, write_keys
from dtorch_runtime.transport.zeromq import ZmqClientLink, ZmqServerLink, ZmqThreadLink
from tests.support.transports import Inbox, PrivateFolder, echo

ANY_PORT = "tcp://127.0.0.1:*"


class Cluster:
    """Keys made together, and others made elsewhere."""

    def __init__(self, folder: Path) -> None:
        write_keys(folder / "ours", ["client", "second"])
        write_keys(folder / "theirs")
        self.server = load_keys(folder / "ours", "server")
        self.client = load_keys(folder / "ours", "client")
        self.second = load_keys(folder / "ours", "second")
        self.stranger = load_keys(folder / "theirs", "client")
        self.their_server = load_keys(folder / "theirs", "server")


@pytest.fixture
def folder() -> Iterator[Path]:
    with PrivateFolder() as path:
        yield path


@pytest.fixture
def cluster(folder: Path) -> Cluster:
    return Cluster(folder)


async def connect_both_ways(address: str, keys: CurveKeys | None, timeout_s: float) -> list[BaseException]:
    """What an asyncio link and a thread link raise when they connect; empty when both get in."""
    errors: list[BaseException] = []
    try:
        (await ZmqClientLink.connect(address, keys=keys, timeout_s=timeout_s)).close()
    except (SecurityError, HandshakeError, ClusterTimeout, TransportError) as error:
        errors.append(error)
    try:
        (await asyncio.to_thread(ZmqThreadLink.connect, address, keys=keys, timeout_s=timeout_s)).close()
    except (SecurityError, HandshakeError, ClusterTimeout, TransportError) as error:
        errors.append(error)
    return errors


@pytest.mark.parametrize("name", ["client", "second"])
async def test_allowed_clients_get_in(cluster: Cluster, name: str) -> None:
    server = ZmqServerLink(ANY_PORT, keys=cluster.server)
    assert await connect_both_ways(server.endpoint, getattr(cluster, name), 10.0) == []
    server.close()


def with_server_key(keys: CurveKeys, server_public_key: bytes | None) -> CurveKeys:
    return CurveKeys(
        public_key=keys.public_key,
        secret_key=keys.secret_key,
        session_key=keys.session_key,
        server_public_key=server_public_key,
    )


@pytest.mark.parametrize(
    "case, message",
    [
        ("a client that is not listed", "refused this client's key"),
        ("the key of another server", "Its key is probably not the one in this client's key file"),
        ("no keys against keys", "connects to .* without keys, the server runs with"),
        ("keys against no keys", "connects to .* with keys, the server runs without"),
    ],
)
async def test_keys_that_do_not_match_are_explained(cluster: Cluster, case: str, message: str) -> None:
    server_keys: CurveKeys | None = cluster.server
    client_keys: CurveKeys | None = cluster.client
    if case == "a client that is not listed":
        client_keys = with_server_key(cluster.stranger, cluster.server.public_key)
    elif case == "the key of another server":
        client_keys = with_server_key(cluster.client, cluster.their_server.public_key)
    elif case == "no keys against keys":
        client_keys = None
    else:
        server_keys = None
    server, inbox = ZmqServerLink(ANY_PORT, keys=server_keys), Inbox()
    server.start(inbox.from_peer)
    errors = await connect_both_ways(server.endpoint, client_keys, 10.0)
    assert len(errors) == 2
    for error in errors:
        with pytest.raises(SecurityError, match=message):
            raise error
    server.close()
    assert inbox.messages == []


async def test_a_stranger_that_does_not_wait_gets_no_message_in(cluster: Cluster) -> None:
    """Without the access control, a CURVE server takes any client key: this one sends without asking."""
    server, inbox = ZmqServerLink(ANY_PORT, keys=cluster.server), Inbox()
    server.start(inbox.from_peer)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    with_server_key(cluster.stranger, cluster.server.public_key).protect_client(stranger)
    stranger.linger = 0
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    stranger.connect(server.endpoint)
    stranger.send(b"let me in")
    assert await asyncio.to_thread(monitor.poll, 10_000), "the stranger was not refused"
    honest = await ZmqClientLink.connect(server.endpoint, keys=cluster.client, timeout_s=10.0)
    honest.send([b"hello"])
    await inbox.wait_for(1)
    assert inbox.contents == [[b"hello"]]
    honest.close()
    stranger.disable_monitor()
    monitor.close()
    stranger.close()
    context.term()
    server.close()


async def test_each_server_of_a_process_has_its_own_list(cluster: Cluster) -> None:
    first = ZmqServerLink(ANY_PORT, keys=cluster.server)
    second = ZmqServerLink(ANY_PORT, keys=cluster.client.among_clients())
    assert await connect_both_ways(second.endpoint, cluster.client.among_clients(), 10.0) == []
    assert await connect_both_ways(first.endpoint, cluster.client, 10.0) == []
    errors = await connect_both_ways(second.endpoint, cluster.client, 10.0)
    assert [type(error) for error in errors] == [SecurityError] * 2
    first.close()
    assert await connect_both_ways(second.endpoint, cluster.client.among_clients(), 10.0) == []
    second.close()


async def test_access_control_ends_with_the_last_server(cluster: Cluster) -> None:
    servers = [ZmqServerLink(ANY_PORT, keys=cluster.server) for _ in range(3)]
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("dtorch-access-control") == 1
    for server in servers:
        server.close()
    assert "dtorch-access-control" not in [thread.name for thread in threading.enumerate()]


async def test_servers_with_and_without_keys_live_side_by_side(cluster: Cluster, folder: Path) -> None:
    encrypted = ZmqServerLink(ANY_PORT, keys=cluster.server)
    plain, inbox = ZmqServerLink(f"ipc://{folder}/plain.sock"), Inbox()
    plain.start(echo(plain))
    client = await ZmqClientLink.connect(plain.endpoint, timeout_s=10.0)
    client.start(inbox.from_server)
    client.send([b"hello"])
    await inbox.wait_for(1)
    for link in (client, plain, encrypted):
        link.close()


@pytest.mark.parametrize(
    "address",
    [
        "tcp://*:*",
        "tcp://0.0.0.0:*",
        "tcp://192.0.2.1:5555",
        "tcp://[::]:*",
        "tcp://eth0:*",
        "tcp://head:5555",
    ],
)
def test_open_addresses_are_refused_without_keys(address: str) -> None:
    with pytest.raises(SecurityError, match="dtorch-launch keys"):
        ZmqServerLink(address)
    with pytest.raises(SecurityError, match="dtorch-launch keys"):
        HeartbeatServer(address, session_key=b"k", interval_s=1, timeout_s=3, on_lost=print)
    with pytest.raises(SecurityError, match="dtorch-launch keys"):
        ZmqThreadLink.connect(address, timeout_s=1.0)


async def test_an_open_address_is_bound_with_keys(cluster: Cluster) -> None:
    server = ZmqServerLink("tcp://0.0.0.0:*", keys=cluster.server)
    port = server.endpoint.rpartition(":")[2]
    assert await connect_both_ways(f"tcp://127.0.0.1:{port}", cluster.client, 10.0) == []
    server.close()


def test_keys_of_the_wrong_role_are_refused(cluster: Cluster) -> None:
    with pytest.raises(SecurityError, match="allow no client"):
        ZmqServerLink(ANY_PORT, keys=cluster.client)
    with pytest.raises(SecurityError, match="name no server"):
        ZmqThreadLink.connect("tcp://127.0.0.1:5555", keys=cluster.server, timeout_s=1.0)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o1777])
def test_an_ipc_folder_that_others_can_enter_is_refused(folder: Path, mode: int) -> None:
    (folder / "open").mkdir()
    os.chmod(folder / "open", mode)
    with pytest.raises(SecurityError, match="mode 0700"):
        ZmqServerLink(f"ipc://{folder}/open/server.sock")


async def test_a_missing_ipc_folder_is_made_for_the_user_alone(folder: Path) -> None:
    server = ZmqServerLink(f"ipc://{folder}/new/server.sock")
    assert (folder / "new").stat().st_mode & 0o777 == 0o700
    server.close()


async def test_nobody_at_the_address_is_explained_at_the_deadline(folder: Path) -> None:
    for error in await connect_both_ways(f"ipc://{folder}/nobody.sock", None, 0.05):
        with pytest.raises(ClusterTimeout, match="Nothing answers there"):
            raise error


async def test_something_else_at_the_address_is_explained(folder: Path) -> None:
    """A server of another protocol: it hangs up, or says what ZeroMQ does not understand."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    other = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    errors = await connect_both_ways(f"tcp://127.0.0.1:{port}", None, 2.0)
    assert len(errors) == 2
    for error in errors:
        with pytest.raises((HandshakeError, ClusterTimeout), match="DTorch"):
            raise error
    other.close()
    await other.wait_closed()


async def test_a_connection_attempt_can_be_cancelled(folder: Path) -> None:
    attempt = asyncio.create_task(ZmqClientLink.connect(f"ipc://{folder}/nobody.sock", timeout_s=60.0))
    await asyncio.sleep(0)
    attempt.cancel()
    await wait_until_async(attempt.done, "the attempt to end")
    assert attempt.cancelled()
