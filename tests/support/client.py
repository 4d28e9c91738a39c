"""A client whose controller is the test: what it sends is decoded and kept, and the test says what comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dtorch import cluster
from dtorch.connection import Session
from dtorch_runtime.errors import TransportError
from dtorch_runtime.ir.stream import unpack, walk
from dtorch_runtime.settings import Settings
from dtorch_runtime.wire.codec import decode_to_controller, encode
from dtorch_runtime.wire.messages import Credit, DefineTemplates, Fetch, Message, Ops, ValueData, Welcome
from dtorch_runtime.wire.records import NodeRecord, TemplateRecord

NUM_DEVICES = 4


class ScriptedLink:
    """A ``ThreadLink`` that keeps what was sent, and delivers what the test gives it."""

    endpoint = "memory://test"
    unsent_bytes = 0

    def __init__(self) -> None:
        self.sent: list[tuple[Message, list[Any]]] = []
        self._inbox: list[list[Any]] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_woken = False
        self.num_wakes = 0

    def send(self, frames: Any, timeout_s: float = 60.0) -> None:
        with self._changed:
            if self._is_closed:
                raise TransportError("the link is closed")
            self.sent.append((decode_to_controller(frames[0]), list(frames[1:])))
            self._changed.notify_all()

    def receive(self, timeout_s: float) -> list[Any]:
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._is_closed or self._is_woken, timeout_s)
            self._is_woken = False
            if self._is_closed:
                raise TransportError("the link is closed")
            messages, self._inbox = self._inbox, []
            return messages

    def wake(self) -> None:
        with self._changed:
            self.num_wakes += 1
            self._is_woken = True
            self._changed.notify_all()

    def close(self, flush_s: float = 0.0) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def deliver(self, message: Message, *payload: bytes) -> None:
        with self._changed:
            self._inbox.append([encode(message), *payload])
            self._changed.notify_all()


class Controller:
    """What the test sees of a session, and what it lets come back."""

    def __init__(self, link: ScriptedLink, session: Session) -> None:
        self.link = link
        self.session = session

    def messages(self, kind: type[Any]) -> list[Any]:
        """The messages of one kind that were sent, in order."""
        return [message for message, _ in self.link.sent if isinstance(message, kind)]

    @property
    def templates(self) -> dict[int, TemplateRecord]:
        """Every template, by its number."""
        records = [record for message in self.messages(DefineTemplates) for record in message.templates]
        return {record.template_id: record for record in records}

    def records(self) -> list[list[int]]:
        """Every record of the op stream that was sent; FREE records begin with 0."""
        widths = {number: record.width for number, record in self.templates.items()}
        found = []
        for message, payload in self.link.sent:
            if isinstance(message, Ops):
                words = unpack(payload[0])
                found += [words[start:stop] for start, stop in walk(words, widths)]
        return found

    def ops(self) -> list[str]:
        """The names of the ops that were sent, in order."""
        return [self.templates[record[0]].op for record in self.records() if record[0]]

    def freed(self) -> set[int]:
        """The values that were freed."""
        return {value for record in self.records() if record[0] == 0 for value in record[2:]}

    def credit(self, seq: int) -> None:
        self.link.deliver(Credit(seq=seq))

    def answer(self, fetch: Fetch, data: bytes, dtype: str, shape: list[int]) -> None:
        """The whole piece that a fetch asked for."""
        message = ValueData(
            session=1,
            request_id=fetch.request_id,
            device=fetch.device,
            dtype=dtype,
            shape=shape,
            offset_bytes=0,
            total_bytes=len(data),
        )
        self.link.deliver(message, data)


class _Opened:
    def __init__(self, session: Session) -> None:
        self.session = session


@contextmanager
def scripted_session(**settings: Any) -> Iterator[Controller]:
    """A current session with four CPU devices on one node, whose controller is the test."""
    link = ScriptedLink()
    nodes = [NodeRecord("node0", "here", 1, "cpu", list(range(NUM_DEVICES)), "")]
    welcome = Welcome(session=1, nodes=nodes, heartbeat_endpoint="")
    session = Session(link, welcome, Settings(check=True, **settings), "memory://test")
    opened: Any = _Opened(session)
    cluster._push(opened)
    try:
        yield Controller(link, session)
    finally:
        cluster._remove(opened)
        session.close()
