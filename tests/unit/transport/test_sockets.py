"""Parts of the ZeroMQ links that need no connection."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from dtorch_runtime.errors import ClusterTimeout, TransportError
from dtorch_runtime.transport.base import LARGE_FRAME_BYTES, checked_frames
from dtorch_runtime.transport.sockets import UnsentLedger


def test_the_ledger_counts_until_the_view_is_dropped() -> None:
    ledger, buffer = UnsentLedger(), bytearray(1000)
    first, second = ledger.lend(buffer), ledger.lend(bytes(24))
    assert ledger.num_bytes == 1024
    del first
    assert ledger.num_bytes == 24
    with pytest.raises(ClusterTimeout, match=r"for the test\. 24 bytes are still unsent"):
        ledger.wait_below(0, 0.001, "the test")
    del second
    gc.collect()
    assert ledger.num_bytes == 0
    ledger.wait_below(0, 0.0, "nothing")


def test_a_thread_waits_for_the_ledger_to_fall() -> None:
    ledger = UnsentLedger()
    views = [ledger.lend(bytes(100)) for _ in range(3)]
    done = threading.Event()
    waiter = threading.Thread(target=lambda: (ledger.wait_below(150, 10.0, "the test"), done.set()))
    waiter.start()
    views.pop()
    assert not done.is_set()
    views.pop()
    waiter.join(10.0)
    assert done.is_set()


async def test_several_tasks_wait_for_the_ledger_to_fall() -> None:
    ledger = UnsentLedger()
    views = [ledger.lend(bytes(100)) for _ in range(2)]
    tasks = [asyncio.create_task(ledger.drain(limit, 10.0, "the test")) for limit in (100, 0)]
    await asyncio.sleep(0)
    # As pyzmq does: another thread drops the last reference.
    await asyncio.to_thread(views.pop)
    await tasks[0]
    assert not tasks[1].done()
    await asyncio.to_thread(views.pop)
    await tasks[1]
    kept = ledger.lend(b"x")
    with pytest.raises(ClusterTimeout, match="the test"):
        await ledger.drain(0, 0.001, "the test")
    del kept


def test_small_frames_are_copied_and_large_ones_are_not() -> None:
    small, large = bytearray(LARGE_FRAME_BYTES - 1), bytearray(LARGE_FRAME_BYTES)
    frames = checked_frames([b"bytes", memoryview(small), memoryview(large), memoryview(b"abcd").cast("I")])
    small[0] = large[0] = 7
    assert frames[1][0] == 0
    assert frames[2][0] == 7
    assert [len(frame) for frame in frames] == [5, LARGE_FRAME_BYTES - 1, LARGE_FRAME_BYTES, 4]


@pytest.mark.parametrize("frames", [[], ["text"], [None], [3], [memoryview(b"abcd")[::2]]])
def test_what_is_no_message_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(TransportError, match="frame"):
        checked_frames(frames)
