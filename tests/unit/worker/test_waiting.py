"""Threads that wait for mail: one listens for all, and hands on what it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from dtorch_runtime.testing.wait import wait_until
from dtorch_runtime.worker.collectives.waiting import Listening, Waiter


class Mail:
    """Letters that open waiters when they are collected."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._bell = threading.Semaphore(0)
        self.letters: list[Waiter] = []
        self.listeners: list[threading.Thread] = []

    def send(self, waiter: Waiter) -> None:
        self.letters.append(waiter)
        self.ring()

    def collect(self, num_rung: int = 0) -> None:
        with self._lock:
            while self.letters:
                self.letters.pop(0).open()

    def wait(self, deadline_s: float) -> bool:
        self.listeners.append(threading.current_thread())
        return self._bell.acquire(timeout=max(0.0, deadline_s - time.monotonic()))

    def ring(self) -> None:
        self._bell.release()


class Waiting:
    """Some threads, each with a waiter."""

    def __init__(self, num_threads: int, waiters: Sequence[Waiter] = (), timeout_s: float = 20.0) -> None:
        self.lock = threading.Lock()
        self.mail = Mail(self.lock)
        self.listening = Listening(self.lock)
        self.waiters = [*waiters] or [Waiter() for _ in range(num_threads)]
        self.threads = [
            threading.Thread(
                target=self.listening.wait, args=(waiter, self.mail, time.monotonic() + timeout_s)
            )
            for waiter in self.waiters
        ]
        for thread in self.threads:
            thread.start()
            wait_until(lambda: self.mail.listeners, "the first to listen, before the others come")
        wait_until(lambda: len(self.listening._others) == num_threads - 1, "the others to wait")

    def open(self, index: int) -> None:
        with self.lock:
            self.waiters[index].open()


def test_a_letter_for_the_listener_frees_it_and_the_next_one_listens() -> None:
    waiting = Waiting(3)
    waiting.mail.send(waiting.waiters[0])
    waiting.threads[0].join()
    wait_until(lambda: waiting.mail.listeners[-1] is waiting.threads[1], "the second to listen")
    waiting.mail.send(waiting.waiters[2])
    waiting.threads[2].join()
    assert waiting.mail.listeners[-1] is waiting.threads[1], "it was not the third one's to collect"
    waiting.mail.send(waiting.waiters[1])
    waiting.threads[1].join()
    assert not waiting.listening._has_listener


def test_what_comes_otherwise_wakes_the_listener_too() -> None:
    waiting = Waiting(2)
    waiting.open(0)
    waiting.threads[0].join()
    waiting.open(1)
    waiting.threads[1].join()


def test_who_was_freed_is_not_called_to_listen() -> None:
    waiting = Waiting(3)
    with waiting.lock:
        waiting.waiters[1].open()
        waiting.waiters[0].open()
    for index in (0, 1):
        waiting.threads[index].join()
    wait_until(lambda: waiting.mail.listeners[-1] is waiting.threads[2], "the third to listen")
    waiting.open(2)
    waiting.threads[2].join()


class FreedWhenCalled(Waiter):
    """Gets what it waits for from somebody else, between being called to listen and waking up."""

    __slots__ = ()

    def call(self) -> None:
        self.is_open = True
        super().call()


def test_who_was_called_to_listen_and_freed_before_it_did_calls_the_next_one() -> None:
    waiting = Waiting(3, [Waiter(), FreedWhenCalled(), Waiter()])
    waiting.open(0)
    for index in (0, 1):
        waiting.threads[index].join()
    wait_until(lambda: waiting.mail.listeners[-1] is waiting.threads[2], "the third to listen")
    waiting.mail.send(waiting.waiters[2])
    waiting.threads[2].join()
    assert not waiting.listening._has_listener


def test_a_letter_that_is_there_needs_no_bell() -> None:
    lock = threading.Lock()
    mail, waiter = Mail(lock), Waiter()
    mail.letters.append(waiter)
    Listening(lock).wait(waiter, mail, time.monotonic() + 20)
    assert waiter.is_open
    assert not mail.listeners


def test_a_deadline_ends_the_wait_of_the_listener_and_of_the_others() -> None:
    lock = threading.Lock()
    mail, listening = Mail(lock), Listening(lock)
    waiters = [Waiter(), Waiter()]
    threads = [
        threading.Thread(target=listening.wait, args=(waiter, mail, time.monotonic() + 0.02))
        for waiter in waiters
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(waiter.is_open for waiter in waiters)
    assert not listening._others
