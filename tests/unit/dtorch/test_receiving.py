"""Who reads the link: the session's thread, or a thread that waits for a value."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dtorch import receiving
from dtorch.receiving import Receiver
from dtorch_runtime.errors import TransportError
from dtorch_runtime.testing.wait import wait_until


class Link:
    """Delivers what the test puts in; notes who reads, and fails if two do at once."""

    endpoint = "memory://test"
    unsent_bytes = 0

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inbox: list[Any] = []
        self._is_woken = False
        self.reader: threading.Thread | None = None

    def receive(self, timeout_s: float) -> list[Any]:
        with self._changed:
            assert self.reader is None, "two threads read at once"
            self.reader = threading.current_thread()
            self._changed.wait_for(lambda: self._inbox or self._is_woken, timeout_s)
            self.reader, self._is_woken = None, False
            messages, self._inbox = self._inbox, []
            if None in messages:
                raise TransportError("the link is closed")
            return messages

    def wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def put(self, message: Any) -> None:
        with self._changed:
            self._inbox.append(message)
            self._changed.notify_all()


class Session:
    """A receiver with its thread; remembers what was read and by whom."""

    def __init__(self) -> None:
        self.link = Link()
        self.read: dict[Any, threading.Thread] = {}
        link: Any = self.link
        self.receiver = Receiver(link, self._take)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _take(self, messages: Any) -> None:
        self.read.update(dict.fromkeys(messages, threading.current_thread()))

    def _run(self) -> None:
        try:
            while True:
                self.receiver.serve(60.0)
        except TransportError:
            return

    def help_until_read(self, message: Any) -> None:
        self.receiver.help(lambda: message in self.read, 60.0)


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session()
    yield session
    session.receiver.need()
    session.link.put(None)
    session.thread.join(10)
    assert not session.thread.is_alive()


def test_the_thread_reads_when_nobody_waits(session: Session) -> None:
    session.link.put("a")
    wait_until(lambda: "a" in session.read, "the thread to read")
    assert session.read["a"] is session.thread


def test_who_waits_reads(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "HELP_S", 60.0)
    wait_until(lambda: session.link.reader is session.thread, "the thread to begin")
    helper = threading.Thread(target=session.help_until_read, args=("a",))
    helper.start()
    wait_until(lambda: session.link.reader is helper, "the helper to take over")
    session.link.put("b")
    session.link.put("a")
    helper.join(10)
    assert session.read == {"a": helper, "b": helper}
    session.receiver.need()
    wait_until(lambda: session.link.reader is session.thread, "the thread to go on")


def test_a_helper_steps_back_when_it_takes_long(session: Session) -> None:
    session.help_until_read("never")
    wait_until(lambda: session.link.reader is session.thread, "the thread to go on")


def test_the_thread_goes_on_by_itself_after_a_while(session: Session) -> None:
    session.link.put("a")
    session.help_until_read("a")
    wait_until(lambda: session.link.reader is session.thread, "the thread to go on")


def test_only_one_helps(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "HELP_S", 60.0)
    helper = threading.Thread(target=session.help_until_read, args=("a",))
    helper.start()
    wait_until(lambda: session.link.reader is helper, "the helper to take over")
    session.help_until_read("b")  # returns at once: its caller waits to be told
    session.receiver.need()
    session.link.put("a")
    helper.join(10)
    session.link.put("b")
    wait_until(lambda: "b" in session.read, "the thread to go on, as somebody needs it")
    assert session.read["b"] is session.thread


def test_a_closed_link_is_told_to_the_helper(session: Session) -> None:
    session.link.put(None)
    session.thread.join(10)
    session.link.put(None)
    with pytest.raises(TransportError, match="the link is closed"):
        session.help_until_read("a")


def test_an_interrupted_helper_gives_its_turn_back(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until(lambda: session.link.reader is session.thread, "the session's thread to read")
    wake = session.link.wake

    def interrupted_wake() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        wake()

    monkeypatch.setattr(session.link, "wake", interrupted_wake)
    with pytest.raises(KeyboardInterrupt):
        session.help_until_read("never")
    session.link.put("later")
    wait_until(lambda: "later" in session.read, "the session's thread to read on")
    assert session.read["later"] is session.thread


def test_a_helper_does_not_overtake_what_the_thread_handles() -> None:
    link: Any = Link()
    handled: list[str] = []
    entered, may_go_on = threading.Event(), threading.Event()

    def handle(messages: list[str]) -> None:
        if "first" in messages:
            entered.set()
            assert may_go_on.wait(5)
        handled.extend(messages)

    receiver = Receiver(link, handle)
    link.put("first")
    thread = threading.Thread(target=receiver.serve, args=(5,))
    thread.start()
    try:
        assert entered.wait(5)
        link.put("second")
        receiver.help(lambda: "second" in handled, 5)
        assert handled == []
    finally:
        may_go_on.set()
        thread.join()
    while "second" not in handled:
        receiver.help(lambda: "second" in handled, 5)
    assert handled == ["first", "second"]
