"""The transports under one face, for the suites that run over all of them."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dtorch_runtime.testing.wait import wait_until_async
from dtorch_runtime.transport.base import ClientLink, LinkLimits, Message, ServerLink, ThreadLink
from dtorch_runtime.transport.memory import MemoryHub
from dtorch_runtime.transport.security import CurveKeys, load_keys, write_keys
from dtorch_runtime.transport.zeromq import ZmqClientLink, ZmqServerLink, ZmqThreadLink

CONNECT_TIMEOUT_S = 10.0

AnyLink = TypeVar("AnyLink", ServerLink, ClientLink, ThreadLink)


class Transport(ABC):
    """Opens links of one kind, and closes in the end what a test left open."""

    def __init__(self) -> None:
        self._links: list[ServerLink | ClientLink | ThreadLink] = []

    @abstractmethod
    def open_server(self, limits: LinkLimits | None) -> ServerLink: ...

    @abstractmethod
    async def open_client(self, limits: LinkLimits | None) -> ClientLink: ...

    @abstractmethod
    async def open_thread(self, limits: LinkLimits | None) -> ThreadLink: ...

    def serve(self, limits: LinkLimits | None = None) -> ServerLink:
        return self._keep(self.open_server(limits))

    async def connect(self, limits: LinkLimits | None = None) -> ClientLink:
        return self._keep(await self.open_client(limits))

    async def connect_thread(self, limits: LinkLimits | None = None) -> ThreadLink:
        return self._keep(await self.open_thread(limits))

    def _keep(self, link: AnyLink) -> AnyLink:
        self._links.append(link)
        return link

    async def close(self) -> None:
        for link in self._links:
            link.close()


class ZmqTransport(Transport):
    """Every server is bound to one address, so that only one may be open at a time."""

    def __init__(self, address: str, folder: Path, *, with_keys: bool) -> None:
        super().__init__()
        self.address = address
        self.server_keys: CurveKeys | None = None
        self.client_keys: CurveKeys | None = None
        if with_keys:
            write_keys(folder)
            self.server_keys = load_keys(folder, "server")
            self.client_keys = load_keys(folder, "client")

    def open_server(self, limits: LinkLimits | None) -> ServerLink:
        server = ZmqServerLink(self.address, keys=self.server_keys, limits=limits)
        self.address = server.endpoint
        return server

    async def open_client(self, limits: LinkLimits | None) -> ClientLink:
        return await ZmqClientLink.connect(
            self.address, keys=self.client_keys, limits=limits, timeout_s=CONNECT_TIMEOUT_S
        )

    async def open_thread(self, limits: LinkLimits | None) -> ThreadLink:
        return await asyncio.to_thread(
            ZmqThreadLink.connect,
            self.address,
            keys=self.client_keys,
            limits=limits,
            timeout_s=CONNECT_TIMEOUT_S,
        )


class MemoryTransport(Transport):
    def __init__(self) -> None:
        super().__init__()
        self.hub = MemoryHub()

    def open_server(self, limits: LinkLimits | None) -> ServerLink:
        return self.hub.serve(limits=limits)

    async def open_client(self, limits: LinkLimits | None) -> ClientLink:
        return await self.hub.connect(limits=limits, timeout_s=CONNECT_TIMEOUT_S)

    async def open_thread(self, limits: LinkLimits | None) -> ThreadLink:
        return await self.hub.connect_thread(limits=limits, timeout_s=CONNECT_TIMEOUT_S)

    async def close(self) -> None:
        await super().close()
        # Thread links close through the loop.
        await asyncio.sleep(0)


ZMQ_KINDS = ("zeromq-ipc", "zeromq-tcp", "zeromq-tcp-curve")
KINDS = (*ZMQ_KINDS, "memory")


def make_transport(kind: str, folder: Path) -> Transport:
    """A transport of ``kind``; ipc sockets and keys go to ``folder``, which has mode 0700."""
    if kind == "memory":
        return MemoryTransport()
    address = f"ipc://{folder}/server.sock" if kind == "zeromq-ipc" else "tcp://127.0.0.1:*"
    return ZmqTransport(address, folder, with_keys=kind == "zeromq-tcp-curve")


class PrivateFolder:
    """A folder of mode 0700 with a short path, as sockets need; removed at the end."""

    def __enter__(self) -> Path:
        self._path = Path(tempfile.mkdtemp(prefix="tr-"))
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path)


class Inbox:
    """Keeps what a link delivers, as ``(peer, frames)``; the peer is empty on a client's side."""

    def __init__(self) -> None:
        self.messages: list[tuple[bytes, Message]] = []

    def from_peer(self, peer: bytes, frames: Message) -> None:
        self.messages.append((peer, frames))

    def from_server(self, frames: Message) -> None:
        self.messages.append((b"", frames))

    @property
    def contents(self) -> list[list[bytes]]:
        return [[bytes(frame) for frame in frames] for _, frames in self.messages]

    async def wait_for(self, num_messages: int, timeout_s: float = 20.0) -> None:
        await wait_until_async(
            lambda: len(self.messages) >= num_messages,
            f"{num_messages} messages",
            timeout_s,
            state=lambda: f"{len(self.messages)} arrived",
        )


def echo(server: ServerLink) -> Callable[[bytes, Message], None]:
    """A callback for ``server.start`` that sends every message back."""

    def answer(peer: bytes, frames: Message) -> None:
        server.send(peer, frames)

    return answer
