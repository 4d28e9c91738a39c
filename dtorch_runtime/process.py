"""A process of a cluster: ``python -m dtorch_runtime.process``.

It reads one line of JSON from its standard input, a ``ProcessConfig``, and keeps the input open as a lifeline: at its
end, because the parent has closed it or is dead, the process stops in order, and after ``Settings.stop_timeout_s`` it
exits anyhow. It writes one line of JSON to its standard output when it is ready, and logs to its standard error.

Sockets are bound before the executor is imported, which loads torch: the controller answers while that goes on.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from dtorch_runtime.controller.server import ControllerServer
from dtorch_runtime.errors import ClusterTimeout, DTorchError, HandshakeError, SettingError
from dtorch_runtime.node.agent import ExecutorFactory, NodeAgent
from dtorch_runtime.node.events import Leave
from dtorch_runtime.node.executor import Executor, ReportEvent
from dtorch_runtime.node.relay_links import RelayLinks
from dtorch_runtime.node.state import NodeConfig
from dtorch_runtime.settings import Settings
from dtorch_runtime.transport.base import ClientLink
from dtorch_runtime.transport.direct import direct_links
from dtorch_runtime.transport.endpoint import parse_endpoint
from dtorch_runtime.transport.security import CurveKeys, load_keys
from dtorch_runtime.transport.zeromq import ZmqClientLink, ZmqServerLink
from dtorch_runtime.worker.memory import keep_freed_memory

_logger = logging.getLogger("dtorch_runtime.process")

#: While workers run pure Python, an event loop of the same process waits this long for the interpreter.
_SWITCH_INTERVAL_S = 0.0005
_PARENT_CHECK_INTERVAL_S = 1.0
_REJOIN_PAUSE_S = 0.5


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process of a cluster is told.

    ``endpoint`` is the controller's: a controller binds it, an agent connects to it. Empty
    ``heartbeat_endpoint`` and ``data_endpoint`` are derived from it.
    """

    #: embedded: a controller and one agent in one process.
    role: Literal["controller", "agent", "embedded"]
    endpoint: str
    heartbeat_endpoint: str = ""
    #: Hexadecimal. Not needed with a key folder, which holds one.
    session_key: str = ""
    #: Holds server.json for a controller, client.json for an agent.
    key_folder: str | None = None
    node_name: str = "node0"
    num_devices: int = 1
    device_type: str = "cpu"
    #: Where other nodes reach this one's data plane.
    data_endpoint: str = ""
    settings: dict[str, Any] = {}
    #: module:name of what makes the executor.
    executor: str = "dtorch_runtime.worker.executor:WorkerExecutor"
    #: Removed at the end of the lifeline, in case that the parent is dead and cannot.
    folder: str | None = None


class Process:
    """One process of a cluster, in the running event loop."""

    def __init__(self, config: ProcessConfig, report_ready: Callable[[str], None]) -> None:
        self._config = config
        self._report_ready = report_ready
        self._settings = Settings(**config.settings)
        self._keys: CurveKeys | None = None
        if config.key_folder is not None:
            self._keys = load_keys(config.key_folder, "client" if config.role == "agent" else "server")
        self._session_key = (
            self._keys.session_key if self._keys is not None else bytes.fromhex(config.session_key)
        )
        if not self._session_key:
            raise SettingError("a process of a cluster needs a session_key, or a key_folder that holds one")
        self._stop_reason: str | None = None
        self._stop_asked = asyncio.Event()
        self._server: ControllerServer | None = None
        self._agent: NodeAgent | None = None

    def stop(self, reason: str) -> None:
        """End in order. Called from the loop."""
        if self._stop_reason is None:
            self._stop_reason = reason
            _logger.info("stopping: %s", reason)
            self._stop_asked.set()
            if self._server is not None:
                self._server.stop(reason)
            elif self._agent is not None:
                self._agent.stop(reason)

    async def run(self) -> None:
        """Run until somebody stops it.

        Raises:
            DTorchError: it cannot start, or the executor broke.
        """
        if self._config.role == "agent":
            await self._run_agent()
        else:
            await self._run_controller()

    # ---- controller, with or without an agent in the same loop ----

    async def _run_controller(self) -> None:
        config = self._config
        link = ZmqServerLink(config.endpoint, keys=self._keys)
        local_server_link, local_link = direct_links()
        self._server = server = ControllerServer(
            [link],
            session_key=self._session_key,
            settings=self._settings,
            local_links=[local_server_link],
            heartbeat_address=config.heartbeat_endpoint or derived_heartbeat_endpoint(link.endpoint),
            keys=self._keys,
        )
        agent_task: asyncio.Task[Leave] | None = None
        try:
            server.start_local()
            if config.role == "embedded":
                self._agent = agent = self._new_agent(local_link, has_heartbeats=False)
                agent_task = asyncio.create_task(self._run_local_agent(agent, server), name="local agent")
                await agent.wait_joined()
            server.start()
            if not server.stop_reason:
                self._report_ready(link.endpoint)
            await server.wait_stopped()
        finally:
            await server.close()
            if agent_task is not None:
                _raise_if_broken(await agent_task, self._stop_reason)

    async def _run_local_agent(self, agent: NodeAgent, server: ControllerServer) -> Leave:
        try:
            leave = await agent.run()
        finally:
            # Without its agent the process is of no use; the clients must learn of it.
            server.stop(agent.state.end_reason or "the agent in the controller's process broke")
        return leave

    # ---- agent ----

    async def _run_agent(self) -> None:
        has_joined = False
        while self._stop_reason is None:
            link = await self._connect()
            if link is None:
                return
            self._agent = agent = self._new_agent(link, has_heartbeats=True)
            running = asyncio.create_task(agent.run(), name="agent")
            if await agent.wait_joined() and not has_joined:
                has_joined = True
                self._report_ready(link.endpoint)
            leave = await running
            if leave.is_refused and not has_joined:
                raise HandshakeError(f"the controller at {link.endpoint} refused this node: {leave.reason}")
            if not leave.is_controller_lost and not leave.is_refused:
                _raise_if_broken(leave, self._stop_reason)
                return
            _logger.warning(
                "left the cluster: %s; waiting for the controller to let it in again", leave.reason
            )
            await agent.wait_released()
            await self._pause()

    async def _connect(self) -> ClientLink | None:
        """Wait for the controller for as long as it takes, saying so. None when asked to stop meanwhile."""
        timeout_s = self._settings.start_timeout_s
        while self._stop_reason is None:
            connecting = asyncio.ensure_future(
                ZmqClientLink.connect(self._config.endpoint, keys=self._keys, timeout_s=timeout_s)
            )
            stopping = asyncio.ensure_future(self._stop_asked.wait())
            await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not connecting.done():
                connecting.cancel()
                return None
            try:
                return connecting.result()
            except ClusterTimeout as error:
                _logger.warning("still waiting: %s", error)
        return None

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._stop_asked.wait(), _REJOIN_PAUSE_S)
        except TimeoutError:
            return

    def _new_agent(self, link: ClientLink, *, has_heartbeats: bool) -> NodeAgent:
        config = self._config
        data_endpoint = config.data_endpoint or derived_data_endpoint(config.endpoint, config.node_name)
        relay_links = self._relay_links(data_endpoint)
        node = NodeConfig(
            name=config.node_name,
            host=socket.gethostname(),
            pid=os.getpid(),
            device_type=config.device_type,
            num_devices=config.num_devices,
            data_endpoint=data_endpoint,
            session_key=self._session_key,
            chunk_bytes=self._settings.chunk_bytes,
            relay_endpoint=relay_links.endpoint,
            check=self._settings.check,
        )
        return NodeAgent(
            node,
            link,
            self._executor_factory(data_endpoint),
            settings=self._settings,
            has_heartbeats=has_heartbeats,
            keys=self._keys,
            relay_links=relay_links,
        )

    def _relay_links(self, data_endpoint: str) -> RelayLinks:
        keys = None if self._keys is None else self._keys.among_clients()
        timeout_s = self._settings.start_timeout_s

        def connect(address: str) -> Awaitable[ClientLink]:
            return ZmqClientLink.connect(address, keys=keys, timeout_s=timeout_s)

        server = ZmqServerLink(derived_relay_endpoint(data_endpoint), keys=keys)
        return RelayLinks(server, connect, self._settings.heartbeat_interval_s)

    def _executor_factory(self, data_endpoint: str) -> ExecutorFactory:
        config = self._config

        def make(report: ReportEvent) -> Executor:
            module, _, name = config.executor.partition(":")
            executor: Executor = getattr(importlib.import_module(module), name)(
                settings=self._settings,
                node_name=config.node_name,
                report=report,
                device_type=config.device_type,
                data_endpoint=data_endpoint,
                keys=self._keys,
                session_key=self._session_key,
            )
            return executor

        return make


def _raise_if_broken(leave: Leave, stop_reason: str | None) -> None:
    if stop_reason is None and leave.is_broken:
        raise DTorchError(leave.reason)


def derived_heartbeat_endpoint(endpoint: str) -> str:
    """Where heartbeats are bound when nothing else was said: beside the socket, or any port of the same host."""
    parsed = parse_endpoint(endpoint)
    if parsed.scheme == "ipc":
        return f"{endpoint}-beats"
    return f"tcp://{f'[{parsed.host}]' if parsed.is_ipv6 else parsed.host}:*"


def derived_data_endpoint(endpoint: str, node_name: str) -> str:
    """Where a node's data plane is bound when nothing else was said.

    Raises:
        SettingError: the controller is reached over tcp, so other machines may need this node's address.
    """
    parsed = parse_endpoint(endpoint)
    if parsed.scheme == "ipc":
        return f"{os.path.dirname(endpoint)}/data-{node_name}"
    if not parsed.is_private:
        raise SettingError(
            f"node {node_name!r} needs a data_endpoint, the address at which other machines reach it, because the "
            f"controller is at {endpoint}; for example tcp://10.0.0.2:7001"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def derived_relay_endpoint(data_endpoint: str) -> str:
    """Where an agent binds what relays use: beside its data plane, or any port of the same host."""
    parsed = parse_endpoint(data_endpoint)
    if parsed.scheme == "ipc":
        return f"{data_endpoint}-relay"
    return f"tcp://{f'[{parsed.host}]' if parsed.is_ipv6 else parsed.host}:*"


def _read_config() -> ProcessConfig:
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:
            break
        line += data
    try:
        return msgspec.json.decode(line, type=ProcessConfig)
    except msgspec.DecodeError as error:
        raise SettingError(
            f"standard input must begin with one line of JSON, a ProcessConfig: {error}"
        ) from None


def _watch_parent(stop: Callable[[str], None], stop_timeout_s: float, folder: str | None) -> None:
    """On its own thread: does not return, ends the process if the orderly way takes too long."""
    parent = os.getppid()
    while True:
        readable, _, _ = select.select([0], [], [], _PARENT_CHECK_INTERVAL_S)
        if (readable and not os.read(0, 4096)) or os.getppid() != parent:
            break
    stop("the process that started this one let go of it")
    threading.Event().wait(stop_timeout_s)
    _exit_now(1, folder)


def _take_stdout() -> Callable[[str], None]:
    """Keep the standard output for the ready line; whatever else prints goes to standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report_ready(endpoint: str) -> None:
        with output:
            output.write(json.dumps({"ready": True, "endpoint": endpoint, "pid": os.getpid()}) + "\n")

    return report_ready


async def _run(config: ProcessConfig, report_ready: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    process = Process(config, report_ready)
    loop.add_signal_handler(signal.SIGTERM, process.stop, "SIGTERM")

    def stop(reason: str) -> None:
        try:
            loop.call_soon_threadsafe(process.stop, reason)
        except RuntimeError:
            _logger.debug("the loop had closed already")

    threading.Thread(
        target=_watch_parent,
        args=(stop, Settings(**config.settings).stop_timeout_s, config.folder),
        name="dtorch-watch-parent",
        daemon=True,
    ).start()
    await process.run()


def main() -> tuple[int, str | None]:
    """Run as a process of a cluster. Returns the exit status (0 when it was asked to end, else 1) and the folder
    to remove."""
    # Ctrl-C in a terminal reaches the whole group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    report_ready = _take_stdout()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    folder = None
    try:
        config = _read_config()
        folder = config.folder
        if Settings(**config.settings).keep_memory:
            keep_freed_memory()
        asyncio.run(_run(config, report_ready))
    except DTorchError as error:
        _logger.error("%s: %s", type(error).__name__, error)
        return 1, folder
    except Exception:
        _logger.exception("a bug of DTorch")
        return 1, folder
    return 0, folder


def _exit(status: int, folder: str | None) -> None:
    """End without taking the interpreter apart: with torch in it that takes half a second, for nothing."""
    atexit._run_exitfuncs()
    sys.stderr.flush()
    _exit_now(status, folder)


def _exit_now(status: int, folder: str | None) -> None:
    # Last of all: a data plane that is still being made would bind a socket in it, and so make it again.
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)


if __name__ == "__main__":
    _exit(*main())
