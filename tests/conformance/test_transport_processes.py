"""The ZeroMQ links where processes end or fork."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtorch_runtime.testing.wait import wait_until_async
from dtorch_runtime.transport.zeromq import ZmqClientLink, ZmqServerLink
from tests.support.transports import Inbox, PrivateFolder


@pytest.fixture
def folder() -> Iterator[Path]:
    with PrivateFolder() as path:
        yield path


async def run(program: str, endpoint: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", "import sys\n" + program, endpoint],
        capture_output=True,
        text=True,
        timeout=30.0,
    )


SAY_GOODBYE = """
from dtorch_runtime.transport.zeromq import ZmqThreadLink
link = ZmqThreadLink.connect(sys.argv[1], timeout_s=10.0)
for number in range(100):
    link.send([b"%d" % number, bytes(100_000)])
link.close(flush_s=10.0)
"""


async def test_what_was_flushed_arrives_although_the_process_ends_at_once(folder: Path) -> None:
    server, inbox = ZmqServerLink(f"ipc://{folder}/server.sock"), Inbox()
    server.start(inbox.from_peer)
    result = await run(SAY_GOODBYE, server.endpoint)
    assert (result.returncode, result.stderr) == (0, "")
    await inbox.wait_for(100)
    assert [frames[0] for frames in inbox.contents] == [b"%d" % number for number in range(100)]
    server.close()


LEAVE_OPEN = """
from dtorch_runtime.transport.heartbeat import HeartbeatClient
from dtorch_runtime.transport.zeromq import ZmqThreadLink
link = ZmqThreadLink.connect(sys.argv[1], timeout_s=10.0)
beats = HeartbeatClient("ipc:///nowhere/x.sock", "me", session_key=b"k", interval_s=1, timeout_s=9, on_lost=print)
link.send([b"last words"])
"""


async def test_a_process_that_closes_nothing_still_ends(folder: Path) -> None:
    server, inbox = ZmqServerLink(f"ipc://{folder}/server.sock"), Inbox()
    server.start(inbox.from_peer)
    result = await run(LEAVE_OPEN, server.endpoint)
    assert result.returncode == 0, result.stderr
    server.close()


FORK = """
import os
from dtorch_runtime.errors import ForkError
from dtorch_runtime.transport.zeromq import ZmqThreadLink
link = ZmqThreadLink.connect(sys.argv[1], timeout_s=10.0)
child = os.fork()
if child == 0:
    try:
        ZmqThreadLink.connect(sys.argv[1], timeout_s=10.0)
    except ForkError as error:
        os._exit(7 if "spawn" in str(error) else 8)
    os._exit(9)
_, status = os.waitpid(child, 0)
link.send([b"the parent goes on"])
link.close(flush_s=10.0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


async def test_a_forked_child_is_told_and_the_parent_goes_on(folder: Path) -> None:
    server, inbox = ZmqServerLink(f"ipc://{folder}/server.sock"), Inbox()
    server.start(inbox.from_peer)
    result = await run(FORK, server.endpoint)
    assert result.returncode == 7, result.stderr
    await inbox.wait_for(1)
    assert inbox.contents == [[b"the parent goes on"]]
    server.close()


BIND_AND_DIE = """
import asyncio, os
from dtorch_runtime.transport.zeromq import ZmqServerLink
async def main():
    ZmqServerLink(sys.argv[1])
    os._exit(0)
asyncio.run(main())
"""


async def test_the_address_of_a_process_that_died_can_be_bound_again(folder: Path) -> None:
    address = f"ipc://{folder}/server.sock"
    assert (await run(BIND_AND_DIE, address)).returncode == 0
    assert (folder / "server.sock").exists()
    server, inbox = ZmqServerLink(address), Inbox()
    server.start(inbox.from_peer)
    client = await ZmqClientLink.connect(address, timeout_s=10.0)
    client.send([b"hello"])
    await wait_until_async(lambda: inbox.contents == [[b"hello"]], "the message")
    client.close()
    server.close()
