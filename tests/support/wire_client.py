"""Clients that speak wire messages to a controller: one for threads and real processes, one for an event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from dtorch_runtime.errors import ClusterTimeout
from dtorch_runtime.ir.stream import pack
from dtorch_runtime.transport.base import ClientLink
from dtorch_runtime.transport.heartbeat import HeartbeatClient
from dtorch_runtime.transport.security import CurveKeys
from dtorch_runtime.transport.zeromq import ZmqThreadLink
from dtorch_runtime.wire.codec import decode_to_client, encode
from dtorch_runtime.wire.messages import (
    PROTOCOL_VERSION,
    ClientHello,
    DefineMesh,
    DefineTemplates,
    Fetch,
    Message,
    Ops,
    ToClient,
    ValueData,
    Welcome,
)
from tests.support.control import mesh, template

T = TypeVar("T", bound=Message)
_WAIT_S = 10.0
Packet = tuple[ToClient, tuple[Any, ...]]


class WireClient:
    """A session of a running cluster, for tests of the control plane. Use with ``with``."""

    def __init__(
        self,
        address: str,
        session_key: bytes,
        *,
        has_heartbeats: bool = True,
        interval_s: float = 0.2,
        keys: CurveKeys | None = None,
    ) -> None:
        self._link = ZmqThreadLink.connect(address, keys=keys, timeout_s=_WAIT_S)
        self._heartbeats: HeartbeatClient | None = None
        #: Everything that came and was not asked for yet.
        self.received: list[Packet] = []
        self.seq = 0
        self.requests = 0
        self.send(
            ClientHello(version=PROTOCOL_VERSION, session_key=session_key, host="test", pid=os.getpid())
        )
        self.welcome, _ = self.wait_for(Welcome)
        self.session = self.welcome.session
        if has_heartbeats:
            self._heartbeats = HeartbeatClient(
                self.welcome.heartbeat_endpoint,
                f"session:{self.session}",
                session_key=session_key,
                interval_s=interval_s,
                timeout_s=_WAIT_S,
                on_lost=lambda: None,
                keys=keys,
            )

    def __enter__(self) -> WireClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def devices(self) -> dict[str, list[int]]:
        """The devices of each node, as the welcome said."""
        return {node.name: node.devices for node in self.welcome.nodes}

    def send(self, message: Message, *frames: Any) -> None:
        self._link.send([encode(message), *frames])

    def send_raw(self, frames: list[bytes]) -> None:
        self._link.send(frames)

    def wait_for(
        self, kind: type[T], matches: Callable[[T], bool] = lambda message: True, timeout_s: float = _WAIT_S
    ) -> tuple[T, tuple[Any, ...]]:
        """The first message of this kind, which is taken out; others wait for their turn."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for index, (message, frames) in enumerate(self.received):
                if isinstance(message, kind) and matches(message):
                    del self.received[index]
                    return message, frames
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise ClusterTimeout(f"a {kind.__name__}", timeout_s, f"Came: {self.received}")
            for first, *rest in self._link.receive(remaining_s):
                self.received.append((decode_to_client(first), tuple(rest)))

    def define(self, devices: list[int]) -> None:
        """Mesh 1 over these devices, and template 1, which makes a value from nothing."""
        self.send(DefineMesh(mesh=mesh(1, devices)))
        self.send(DefineTemplates(templates=[template(1)]))

    def run(self, *records: list[int]) -> int:
        self.seq += 1
        self.send(Ops(seq=self.seq, graph_id=1), pack([word for record in records for word in record]))
        return self.seq

    def ask(self, value_id: int, device: int) -> int:
        self.requests += 1
        self.send(Fetch(request_id=self.requests, value_id=value_id, device=device))
        return self.requests

    def fetch(self, value_id: int, device: int) -> bytes:
        """The bytes of a value that is small enough for one chunk."""
        request_id = self.ask(value_id, device)
        _, frames = self.wait_for(ValueData, lambda message: message.request_id == request_id)
        return bytes(frames[0])

    def close(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.close()
        self._link.close(flush_s=1.0)


class LoopClient:
    """Messages over a ``ClientLink`` of the running loop."""

    def __init__(self, link: ClientLink) -> None:
        self._link = link
        self.received: list[Packet] = []
        self._arrived = asyncio.Event()
        link.start(self._on_message)

    def _on_message(self, frames: Any) -> None:
        self.received.append((decode_to_client(frames[0]), tuple(frames[1:])))
        self._arrived.set()

    def send(self, message: Message, *frames: Any) -> None:
        self._link.send([encode(message), *frames])

    def close(self) -> None:
        self._link.close()

    async def wait_for(self, kind: type[T], timeout_s: float = _WAIT_S) -> tuple[T, tuple[Any, ...]]:
        """The first message of this kind, which is taken out."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    for index, (message, frames) in enumerate(self.received):
                        if isinstance(message, kind):
                            del self.received[index]
                            return message, frames
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            raise ClusterTimeout(f"a {kind.__name__}", timeout_s, f"Came: {self.received}") from None
