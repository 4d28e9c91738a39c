"""Mailboxes in shared memory: the bounded buffer, the bell, and what is left of a sender that was killed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtorch_runtime.errors import TransportError
from dtorch_runtime.testing.wait import wait_until
from dtorch_runtime.transport.mailbox import (
    BELL_BYTES,
    BOX_BYTES,
    Inbox,
    Mailroom,
    Outbox,
    map_bell,
    set_up_box,
)
from dtorch_runtime.transport.segments import Segment, SegmentPool, SegmentReader, unlink_segments_of

NUM_SLOTS = 15
KILLED_SENDER = """
import os, sys
from dtorch_runtime.transport.mailbox import *
from dtorch_runtime.transport.segments import *
segment = SegmentPool(1 << 20).lend(BOX_BYTES)
set_up_box(segment)
box = Outbox(segment, map_bell(SegmentReader().map(sys.argv[1])))
box.put(b"last", memoryview(b"words"))
print(segment.name, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    made = SegmentPool(1 << 24)
    yield made
    made.close()


class Post:
    """A mailroom that keeps what comes."""

    def __init__(self, pool: SegmentPool) -> None:
        self.came: list[tuple[bytes, bytes]] = []
        self.errors: list[Exception] = []
        self._pool = pool
        bell = lend(pool, BELL_BYTES)
        self.room = Mailroom(bell, self._take, self.errors.append)
        self._bell = map_bell(bell)

    def _take(self, header: memoryview, payload: memoryview) -> None:
        if bytes(header) == b"bad":
            raise ValueError("bad")
        self.came.append((bytes(header), bytes(payload)))

    def box(self, node: str) -> tuple[Outbox, Segment]:
        """A box that the node fills and the mailroom reads."""
        segment = lend(self._pool, BOX_BYTES)
        set_up_box(segment)
        self.room.add(node, segment)
        return Outbox(segment, self._bell), segment


def lend(pool: SegmentPool, num_bytes: int) -> Segment:
    segment = pool.lend(num_bytes)
    assert segment is not None
    return segment


@pytest.fixture
def post(pool: SegmentPool) -> Post:
    return Post(pool)


def test_messages_come_out_as_they_went_in_and_slots_are_used_again(post: Post) -> None:
    box, _ = post.box("a")
    sent = [(b"%d" % number, b"x" * number) for number in range(3 * NUM_SLOTS)]
    for header, payload in sent:
        assert box.put(header, memoryview(payload))
        post.room.collect()
    assert box.put(b"none", None)
    post.room.collect()
    assert post.came == [*sent, (b"none", b"")]


def test_a_full_box_and_a_long_message_are_refused_and_harm_nothing(post: Post) -> None:
    box, _ = post.box("a")
    assert not box.put(b"header", memoryview(bytes(64 * 1024)))
    assert [box.put(b"%d" % number, None) for number in range(NUM_SLOTS + 2)] == [True] * NUM_SLOTS + [
        False
    ] * 2
    post.room.collect()
    assert [header for header, _ in post.came] == [b"%d" % number for number in range(NUM_SLOTS)]
    assert box.put(b"again", None)


def test_a_message_that_is_refused_does_not_stop_those_behind_it(post: Post) -> None:
    box, segment = post.box("a")
    box.put(b"bad", None)
    box.put(b"broken", None)
    box.put(b"good", None)
    second_slot = 2 * 64 * 1024
    segment.memory[second_slot : second_slot + 8] = b"\xff" * 8
    post.room.collect()
    assert post.came == [(b"good", b"")]
    assert [type(error) for error in post.errors] == [ValueError, TransportError]


def test_the_bell_rings_for_each_message_and_for_none_that_was_collected_before(post: Post) -> None:
    box, _ = post.box("a")
    for _ in range(5):
        box.put(b"early", None)
        post.room.collect()
    assert not post.room.wait(time.monotonic())
    box.put(b"late", None)
    assert post.room.wait(time.monotonic() + 5)
    post.room.collect(1)
    assert len(post.came) == 6
    assert not post.room.wait(time.monotonic())


def test_one_who_waits_is_woken(post: Post) -> None:
    box, _ = post.box("a")
    heard: list[bool] = []
    listener = threading.Thread(target=lambda: heard.append(post.room.wait(time.monotonic() + 20)))
    listener.start()
    box.put(b"hello", None)
    listener.join()
    assert heard == [True]


def test_two_senders_do_not_mix(post: Post) -> None:
    boxes = {node: post.box(node)[0] for node in ("a", "b")}
    for number in range(10):
        for node, box in boxes.items():
            box.put(f"{node}{number}".encode(), None)
    post.room.collect()
    headers = [header.decode() for header, _ in post.came]
    for node in boxes:
        assert [header for header in headers if header[0] == node] == [f"{node}{i}" for i in range(10)]


def test_an_agent_has_one_box_until_it_is_gone(post: Post, pool: SegmentPool) -> None:
    box, _ = post.box("a")
    with pytest.raises(TransportError, match="has a mailbox here already"):
        post.box("a")
    box.put(b"lost with its sender", None)
    post.room.remove("a")
    post.room.collect()
    assert post.came == []
    post.box("a")


def test_what_is_too_short_for_a_box_or_a_bell_is_none(pool: SegmentPool) -> None:
    segment = lend(pool, 1 << 16)
    with pytest.raises(TransportError, match="a mailbox has"):
        Inbox(segment)
    with pytest.raises(TransportError, match="no room for a bell"):
        map_bell(Segment(segment.name, 8, segment.memory))


def test_a_message_of_a_killed_process_is_whole_and_nothing_else_is_left_of_it(post: Post) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_SENDER, post.room.bell_name],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    name = done.stdout.strip()
    post.room.add("killed", SegmentReader().map(name))
    assert post.room.wait(time.monotonic() + 5), "it has rung"
    post.room.collect(1)
    assert post.came == [(b"last", b"words")]
    unlink_segments_of(int(name.split("-")[1]))
    wait_until(lambda: not Path("/dev/shm", name).exists(), "its box to be removed")
