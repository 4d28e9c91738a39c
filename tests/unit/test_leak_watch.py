"""The leak check that runs after every test notices each kind of leak, by name, and nothing else."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest
import zmq

from tests.support.leaks import LeakWatch

Opener = Callable[[], AbstractContextManager[object]]


@contextmanager
def open_thread() -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten-thread")
    thread.start()
    yield
    stop.set()
    thread.join()


@contextmanager
def open_process() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", "input('forgotten-process')"], stdin=subprocess.PIPE
    ) as process:
        yield process.pid
        process.kill()


@contextmanager
def open_zmq_socket() -> Iterator[None]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind("inproc://forgotten-zmq")
        yield


@contextmanager
def open_socket() -> Iterator[None]:
    with closing(socket.create_server(("127.0.0.1", 0))):
        yield


@contextmanager
def open_segment(pid: int | None = None) -> Iterator[None]:
    path = Path("/dev/shm") / f"dtorch-{pid or os.getpid()}-forgotten-{uuid.uuid4().hex}"
    path.write_bytes(b"x")
    yield
    path.unlink()


@contextmanager
def open_socket_folder() -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"dtorch-forgotten-{uuid.uuid4().hex}"
    path.mkdir()
    yield
    path.rmdir()


@pytest.fixture
def watch(leak_watch: LeakWatch) -> LeakWatch:
    return leak_watch


@pytest.mark.parametrize(
    ("opened", "named"),
    [
        (open_thread, "forgotten-thread"),
        (open_process, "forgotten-process"),
        (open_zmq_socket, "ROUTER at b'inproc://forgotten-zmq'"),
        (open_socket, "socket:["),
        (open_segment, f"/dev/shm/dtorch-{os.getpid()}-forgotten-"),
        (open_socket_folder, "dtorch-forgotten-"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_each_kind_of_leak_is_named_until_it_is_closed(watch: LeakWatch, opened: Opener, named: str) -> None:
    before = watch.snapshot()
    with opened():
        leaks = watch.leaks_since(before, grace_s=0.0)
        assert any(named in line for line in leaks), leaks
    assert watch.leaks_since(before) == []


def test_what_a_shared_fixture_declares_may_stay() -> None:
    watch = LeakWatch()
    before = watch.snapshot()
    with open_thread():
        watch.declare_baseline(before)
        assert watch.leaks_since(before, grace_s=0.0) == []
        with open_segment():
            (leak,) = watch.leaks_since(before, grace_s=0.0)
            assert leak.startswith(f"file /dev/shm/dtorch-{os.getpid()}-forgotten-")


def test_what_is_declared_has_its_connections(watch: LeakWatch, tmp_path: Path) -> None:
    declared = watch.declared
    with closing(socket.socket(socket.AF_UNIX)) as server, zmq.Context() as context:
        before = watch.snapshot()
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(f"ipc://{tmp_path}/late")
            declaring = threading.Thread(target=watch.declare_baseline, args=(before,))
            declaring.start()
            server.bind(f"{tmp_path}/late")
            server.listen()
            declaring.join()
            assert select.select([server], [], [], 10.0)[0], "it has connected"
            assert watch.leaks_since(before, grace_s=0.0) == []
    watch.declared = declared


def test_segments_belong_to_the_process_that_they_are_named_after() -> None:
    watch = LeakWatch()
    before = watch.snapshot()
    cluster_is_declared = LeakWatch()
    none_yet = cluster_is_declared.snapshot()
    with open_process() as cluster:
        cluster_is_declared.declare_baseline(none_yet)
        with open_segment(pid=cluster):
            assert cluster_is_declared.leaks_since(none_yet, grace_s=0.0) == []
            assert watch.leaks_since(before, grace_s=0.0) != []
    with open_segment(pid=1):
        assert watch.leaks_since(before, grace_s=0.0) == [], "another run's, while its process lives"


def test_a_thread_that_is_about_to_end_is_waited_for() -> None:
    watch = LeakWatch()
    before = watch.snapshot()
    with open_thread():
        about_to_end = threading.Timer(0.01, lambda: None)
        with_thread = watch.snapshot()
        about_to_end.start()
        assert watch.leaks_since(with_thread) == []
    assert watch.leaks_since(before) == []


PROGRAM = """
import threading
def test_forgets():
    stop = threading.Event()
    threading.Thread(target=stop.wait, name="forgotten-thread", daemon=True).start()
"""


def test_a_test_that_leaks_fails(tmp_path: Path) -> None:
    program = tmp_path / "test_program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).parents[2]
    options = ["-p", "tests.conftest", "-c", str(root / "pyproject.toml"), "-q", "--leak-grace-s=0.01"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, program], capture_output=True, text=True, cwd=root
    )
    assert run.returncode == 1, run.stdout
    assert "the test left behind:\n  thread 'forgotten-thread' (daemon)" in run.stdout
