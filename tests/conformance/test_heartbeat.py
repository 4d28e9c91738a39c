"""Heartbeats over real sockets and processes: who is lost is told once, and a busy process is not lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtorch_runtime.errors import SecurityError, SettingError, TransportError
from dtorch_runtime.testing.wait import wait_until
from dtorch_runtime.transport.heartbeat import HeartbeatClient, HeartbeatServer
from dtorch_runtime.transport.security import CurveKeys, load_keys, new_session_key, write_keys
from tests.support.transports import ZMQ_KINDS, PrivateFolder

INTERVAL_S = 0.02
TIMEOUT_S = 0.3
CHILD_TIMEOUT_S = 0.6  # long against the pauses of a busy machine
SESSION_KEY = bytes(range(32))


@pytest.fixture
def folder() -> Iterator[Path]:
    with PrivateFolder() as path:
        yield path


class Net:
    """Opens heartbeat servers and clients of one kind, and closes them in the end."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.address = f"ipc://{folder}/beat.sock" if kind == "zeromq-ipc" else "tcp://127.0.0.1:*"
        self.server_keys: CurveKeys | None = None
        self.client_keys: CurveKeys | None = None
        if kind == "zeromq-tcp-curve":
            write_keys(folder)
            self.server_keys, self.client_keys = load_keys(folder, "server"), load_keys(folder, "client")
        self.lost: list[str] = []
        self._open: list[HeartbeatServer | HeartbeatClient] = []

    def serve(
        self, on_lost: Callable[[str], None] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> HeartbeatServer:
        server = HeartbeatServer(
            self.address,
            session_key=SESSION_KEY,
            interval_s=INTERVAL_S,
            timeout_s=timeout_s,
            on_lost=on_lost or self.lost.append,
            keys=self.server_keys,
        )
        self.address = server.endpoint
        self._open.append(server)
        return server

    def beat(self, name: str, *, session_key: bytes = SESSION_KEY) -> tuple[HeartbeatClient, threading.Event]:
        """A client, and the event that it sets when it loses the server."""
        lost = threading.Event()
        client = HeartbeatClient(
            self.address,
            name,
            session_key=session_key,
            interval_s=INTERVAL_S,
            timeout_s=TIMEOUT_S,
            on_lost=lost.set,
            keys=self.client_keys,
        )
        self._open.append(client)
        return client, lost

    def close(self) -> None:
        for end in self._open:
            end.close()


@pytest.fixture(params=ZMQ_KINDS)
def net(request: pytest.FixtureRequest, folder: Path) -> Iterator[Net]:
    made = Net(request.param, folder)
    yield made
    made.close()


@pytest.fixture
def ipc(folder: Path) -> Iterator[Net]:
    made = Net("zeromq-ipc", folder)
    yield made
    made.close()


def test_a_peer_that_stops_is_lost_once_and_those_that_beat_are_not(net: Net) -> None:
    server = net.serve()
    for name in ("stays", "stops"):
        server.watch(name)
    (stays, server_lost), (stops, _) = net.beat("stays"), net.beat("stops")
    wait_until(lambda: stays.num_answers > 1 and stops.num_answers > 1, "answers to both")
    stops.close()
    wait_until(lambda: net.lost, "the loss to be told")
    num_beats = server.num_beats
    wait_until(lambda: server.num_beats > num_beats + 3, "more beats")
    assert net.lost == ["stops"]
    assert not server_lost.is_set()
    assert server.num_malformed == 0
    assert stays.num_malformed == 0


def test_a_client_tells_the_loss_of_its_server_and_ends(net: Net) -> None:
    server = net.serve()
    client, lost = net.beat("client")
    wait_until(lambda: client.num_answers > 1, "answers")
    assert not lost.is_set()
    server.close()
    assert lost.wait(10.0)
    wait_until(
        lambda: all(thread.name != "dtorch-heartbeat-client" for thread in threading.enumerate()),
        "the client's thread to end",
    )


def test_a_server_started_anew_is_not_the_one_that_was_lost(ipc: Net) -> None:
    first = ipc.serve()
    client, lost = ipc.beat("client")
    wait_until(lambda: client.num_answers > 0, "an answer of the first server")
    first.close()
    wait_until(lambda: try_to_serve(ipc), "the address to be free")
    assert lost.wait(10.0)


def try_to_serve(net: Net) -> HeartbeatServer | None:
    try:
        return net.serve()
    except TransportError:
        return None  # the old socket is still being closed


def test_a_server_that_never_was_is_lost(ipc: Net) -> None:
    _, lost = ipc.beat("client")
    assert lost.wait(10.0)


def test_a_peer_that_never_beats_is_lost_unless_forgotten(ipc: Net) -> None:
    server = ipc.serve()
    server.watch("forgotten")
    server.watch("silent")
    server.forget("forgotten")
    wait_until(lambda: ipc.lost, "the loss to be told")
    assert ipc.lost == ["silent"]


def test_beats_made_with_another_session_key_are_ignored(net: Net) -> None:
    server = net.serve()
    server.watch("stranger")
    _, lost = net.beat("stranger", session_key=new_session_key())
    wait_until(lambda: net.lost, "the loss to be told")
    assert server.num_malformed > 0
    assert server.num_beats == 0
    assert lost.wait(10.0)


def test_a_client_with_wrong_curve_keys_stays_outside(folder: Path) -> None:
    net = Net("zeromq-tcp-curve", folder)
    server = net.serve()
    write_keys(folder / "other")
    stranger = load_keys(folder / "other", "client")
    net.client_keys = CurveKeys(
        public_key=stranger.public_key,
        secret_key=stranger.secret_key,
        session_key=SESSION_KEY,
        server_public_key=load_keys(folder, "server").public_key,
    )
    client, lost = net.beat("stranger")
    assert lost.wait(10.0)
    assert (server.num_beats, server.num_malformed, client.num_answers) == (0, 0, 0)
    net.close()


def test_a_failing_callback_does_not_end_the_watch(ipc: Net, caplog: pytest.LogCaptureFixture) -> None:
    told = []

    def fail(name: str) -> None:
        told.append(name)
        raise ValueError("the callback failed")

    server = ipc.serve(fail)
    server.watch("first")
    wait_until(lambda: told == ["first"], "the first loss")
    server.watch("second")
    wait_until(lambda: told == ["first", "second"], "the second loss")
    assert "the callback failed" in caplog.text


def test_the_callback_may_close_the_server(ipc: Net) -> None:
    closed = threading.Event()

    def close(_: str) -> None:
        server.close()
        closed.set()

    server = ipc.serve(close)
    server.watch("silent")
    assert closed.wait(10.0)
    server.close()
    server.close()


def test_bad_arguments_are_refused(ipc: Net) -> None:
    server = ipc.serve()
    for name in ("", "x" * 256):
        with pytest.raises(TransportError, match="1 to 255 bytes"):
            server.watch(name)
    times = {"interval_s": 1.0, "timeout_s": 1.0}
    with pytest.raises(SettingError, match="interval_s < timeout_s"):
        HeartbeatClient(ipc.address, "a", session_key=SESSION_KEY, on_lost=print, **times)
    with pytest.raises(SecurityError, match="session key"):
        HeartbeatClient(ipc.address, "a", session_key=b"", interval_s=1, timeout_s=3, on_lost=print)


# ------------------------------------------------------------------------------------------------------- processes

CHILD = f"""
import ctypes, sys
from dtorch_runtime.transport.heartbeat import HeartbeatClient
session_key = bytes(range(32))
client = HeartbeatClient(sys.argv[1], "child", session_key=session_key, interval_s={INTERVAL_S},
                         timeout_s={CHILD_TIMEOUT_S}, on_lost=lambda: print("lost", flush=True))
for line in sys.stdin:
    if line == "hold\\n":
        ctypes.PyDLL(None).usleep({round(2.5 * CHILD_TIMEOUT_S * 1e6)})  # PyDLL keeps the interpreter lock meanwhile
    print("done", flush=True)
"""


class Child:
    """A process that beats, and on demand holds its interpreter lock for longer than the timeout."""

    def __init__(self, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def do(self, what: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        with self.process:
            self.process.wait(10.0)


@pytest.fixture
def server_and_child(ipc: Net) -> Iterator[tuple[HeartbeatServer, Child]]:
    server = ipc.serve(timeout_s=CHILD_TIMEOUT_S)
    child = Child(ipc.address)
    wait_until(lambda: server.num_beats > 0, "the child's first beat", 20.0)
    server.watch("child")
    num_beats = server.num_beats
    wait_until(lambda: server.num_beats > num_beats + 1, "a beat of the watched child")
    yield server, child
    child.end()


def test_a_process_that_holds_its_interpreter_lock_is_not_lost(
    ipc: Net, server_and_child: tuple[HeartbeatServer, Child]
) -> None:
    server, child = server_and_child
    num_beats, started_s = server.num_beats, time.monotonic()
    assert child.do("hold") == "done"
    held_s = time.monotonic() - started_s
    # Far fewer than one an interval: the lock really was held, or this test would show nothing.
    assert server.num_beats - num_beats < held_s / INTERVAL_S / 2
    assert ipc.lost == []
    num_beats = server.num_beats
    wait_until(lambda: server.num_beats > num_beats, "the child to beat again")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_is_lost(
    ipc: Net, server_and_child: tuple[HeartbeatServer, Child], number: signal.Signals
) -> None:
    _, child = server_and_child
    child.process.send_signal(number)
    wait_until(lambda: ipc.lost, "the loss to be told", 10.0 * CHILD_TIMEOUT_S)
    assert ipc.lost == ["child"]
