"""Controller and agent as they run, in one loop without sockets: what is said at one end is done at the other."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dtorch_runtime.controller.server import ControllerServer
from dtorch_runtime.node.agent import ExecutorFactory, NodeAgent
from dtorch_runtime.node.events import Leave
from dtorch_runtime.node.executor import Executor, ReportEvent
from dtorch_runtime.node.state import NodeConfig
from dtorch_runtime.settings import Settings
from dtorch_runtime.testing.null_executor import NullExecutor
from dtorch_runtime.testing.wait import wait_until_async
from dtorch_runtime.transport.direct import direct_links
from dtorch_runtime.transport.memory import MemoryHub
from dtorch_runtime.wire.codec import encode
from dtorch_runtime.wire.messages import (
    Answer,
    Ask,
    ClientBye,
    ClusterClosing,
    Credit,
    DefineMesh,
    DefineTemplates,
    Fetch,
    FetchFailed,
    NodeDown,
    OpFailed,
    Ops,
    Refused,
    ValueData,
    Welcome,
)
from dtorch_runtime.wire.records import AskClock, StartTrace, StopTrace, TraceReply
from tests.support.control import KEY, client_hello, frame, mesh, op, template
from tests.support.wire_client import LoopClient

_SETTINGS = Settings(check=True, start_timeout_s=10, stop_timeout_s=5)
MakeExecutor = Callable[[ReportEvent], Executor]


class Stage:
    """A controller with an agent each in the ways that there are: over a memory hub, or directly."""

    def __init__(self, make_executor: ExecutorFactory, is_direct: bool) -> None:
        self.hub = MemoryHub()
        server_end, agent_end = direct_links()
        self.server = ControllerServer(
            [self.hub.serve()],
            session_key=KEY,
            settings=_SETTINGS,
            local_links=[server_end] if is_direct else [],
        )
        self._agent_end = agent_end if is_direct else None
        self._make_executor = make_executor
        self.agents: list[asyncio.Task[Leave]] = []
        self.clients: list[LoopClient] = []
        self.agent: NodeAgent

    async def start(self) -> None:
        self.server.start_local()
        self.server.start()
        link = self._agent_end or await self.hub.connect(timeout_s=5)
        config = NodeConfig(
            name="node0",
            host="host",
            pid=1,
            device_type="cpu",
            num_devices=2,
            data_endpoint="",
            session_key=KEY,
            chunk_bytes=64,
            check=True,
        )
        self.agent = NodeAgent(config, link, self._make_executor, settings=_SETTINGS, has_heartbeats=False)
        self.agents.append(asyncio.create_task(self.agent.run()))
        assert await self.agent.wait_joined()

    async def client(self) -> LoopClient:
        client = LoopClient(await self.hub.connect(timeout_s=5))
        self.clients.append(client)
        client.send(client_hello())
        await client.wait_for(Welcome)
        client.send(DefineMesh(mesh=mesh(1, [0, 1])))
        client.send(DefineTemplates(templates=[template(1), template(2, op="test::raise")]))
        return client

    async def close(self) -> None:
        self.server.stop("the test ends")
        for task in self.agents:
            await asyncio.wait_for(task, 5)
        for client in self.clients:
            client.close()
        await self.server.close(0.1)


Stages = Callable[..., Any]


@pytest.fixture
async def stage() -> AsyncIterator[Stages]:
    """``await stage(make_executor, is_direct=...)`` gives a running one."""
    stages: list[Stage] = []

    async def make(make_executor: ExecutorFactory | None = None, *, is_direct: bool = False) -> Stage:
        def null_executor(report: ReportEvent) -> Executor:
            return NullExecutor(report=report, raising_ops=["test::raise"])

        stages.append(Stage(make_executor or null_executor, is_direct))
        await stages[-1].start()
        return stages[-1]

    yield make
    for made in stages:
        await made.close()


@pytest.mark.parametrize("is_direct", [True, False])
async def test_ops_run_and_values_failures_and_credits_come_back(stage: Stages, is_direct: bool) -> None:
    client = await (await stage(is_direct=is_direct)).client()
    client.send(Ops(seq=1, graph_id=1), frame(op(1, 5), op(2, 6)))
    client.send(Fetch(request_id=1, value_id=5, device=1))
    client.send(Fetch(request_id=2, value_id=6, device=0))
    message, frames = await client.wait_for(ValueData)
    assert (message.request_id, bytes(frames[0])) == (1, array("q", [5]).tobytes())
    failed, _ = await client.wait_for(FetchFailed)
    told, _ = await client.wait_for(OpFailed)
    assert failed.failure == told.failure
    assert (await client.wait_for(Credit))[0].seq == 1


@pytest.mark.parametrize("is_direct", [True, False])
async def test_work_waits_for_an_executor_that_is_still_being_made(stage: Stages, is_direct: bool) -> None:
    may_be_made = threading.Event()

    def slowly(report: ReportEvent) -> Executor:
        assert may_be_made.wait(10)
        return NullExecutor(report=report)

    client = await (await stage(slowly, is_direct=is_direct)).client()
    for seq in range(1, 20):
        client.send(Ops(seq=seq, graph_id=1), frame(op(1, seq)))
    client.send(Fetch(request_id=1, value_id=19, device=1))
    client.send(Fetch(request_id=2, value_id=77, device=1))
    # The controller answers by itself meanwhile: it knows of no value 77.
    await client.wait_for(FetchFailed)
    assert not client.received
    may_be_made.set()
    assert bytes((await client.wait_for(ValueData))[1][0]) == array("q", [19]).tobytes()


async def test_flood_of_one_session_lets_another_through(stage: Stages) -> None:
    executors: list[NullExecutor] = []

    def gated(report: ReportEvent) -> Executor:
        executors.append(NullExecutor(report=report, is_gated=True))
        return executors[0]

    made = await stage(gated)
    flood, small = await made.client(), await made.client()
    window = _SETTINGS.shared_window_ops
    for seq in range(1, 51):
        flood.send(Ops(seq=seq, graph_id=1, num_ops=window // 4), frame(op(1, seq)))
    flood.send(Fetch(request_id=1, value_id=50, device=0))
    await wait_until_async(lambda: made.server.state.turns.num_waiting(1) == 47, "the rest to wait")
    small.send(Ops(seq=1, graph_id=1, num_ops=1), frame(op(1, 5)))
    small.send(Fetch(request_id=1, value_id=5, device=0))
    await wait_until_async(
        lambda: executors[0].num_held == 4 + 2, "what there is room for, and all of the other"
    )
    executors[0].release(6)
    await small.wait_for(ValueData)
    assert (await small.wait_for(Credit))[0].seq == 1
    arriving = asyncio.create_task(flood.wait_for(ValueData))
    await wait_until_async(lambda: executors[0].release() or arriving.done(), "the rest to have its turn")
    assert bytes((await arriving)[1][0]) == array("q", [50]).tobytes()
    assert made.server.state.turns.is_empty


async def test_executor_that_cannot_be_made_ends_the_node(stage: Stages) -> None:
    has_joined = threading.Event()

    def never(report: ReportEvent) -> Executor:
        # Sooner, and the agent would have left before the stage is set.
        assert has_joined.wait(5)
        raise ImportError("no torch here")

    made = await stage(never)
    has_joined.set()
    leave = await asyncio.wait_for(made.agents[0], 5)
    assert leave.is_broken
    assert "no torch here" in leave.reason


async def test_executor_that_raises_ends_the_node_and_its_clients_know_why(stage: Stages) -> None:
    class Raising(NullExecutor):
        def run(self, session: int, seq: int, words: list[int]) -> None:
            raise ZeroDivisionError("a bug")

    made = await stage(lambda report: Raising(report=report))
    client = await made.client()
    client.send(Ops(seq=1, graph_id=1), frame(op(1, 5)))
    client.send(Fetch(request_id=1, value_id=5, device=0))
    down, _ = await client.wait_for(NodeDown)
    assert "a bug" in down.reason
    assert (await client.wait_for(FetchFailed))[0].failure.kind == "node"
    assert (await client.wait_for(Credit))[0].seq == 1
    assert (await made.agents[0]).is_broken


async def test_reports_from_many_threads_all_arrive(stage: Stages) -> None:
    class Threaded(NullExecutor):
        """Reports each message on a thread of its own."""

        def run(self, session: int, seq: int, words: list[int]) -> None:
            thread = threading.Thread(target=super().run, args=(session, seq, words))
            threads.append(thread)
            thread.start()

    threads: list[threading.Thread] = []
    client = await (await stage(lambda report: Threaded(report=report))).client()
    for seq in range(1, 101):
        client.send(Ops(seq=seq, graph_id=1), frame(op(1, seq)))
    credited = 0
    while credited < 100:
        credit, _ = await client.wait_for(Credit)
        assert credit.seq > credited
        credited = credit.seq
    for thread in threads:
        thread.join()


async def test_agent_that_leaves_says_so_and_closes_its_executor(stage: Stages) -> None:
    executors: list[NullExecutor] = []

    def make(report: ReportEvent) -> Executor:
        executors.append(NullExecutor(report=report))
        return executors[0]

    made = await stage(make)
    client = await made.client()
    client.send(Ops(seq=1, graph_id=1), frame(op(1, 5)))
    await client.wait_for(Credit)
    made.agent.stop("maintenance")
    down, _ = await client.wait_for(NodeDown)
    assert "maintenance" in down.reason
    leave = await asyncio.wait_for(made.agents[0], 5)
    assert not leave.is_broken
    assert executors[0].is_closed


async def test_executor_made_after_the_end_is_closed(stage: Stages) -> None:
    may_be_made = threading.Event()
    executors: list[NullExecutor] = []

    def slowly(report: ReportEvent) -> Executor:
        assert may_be_made.wait(10)
        executors.append(NullExecutor(report=report))
        return executors[0]

    made = await stage(slowly)
    made.agent.stop("at once")
    await asyncio.wait_for(made.agents[0], 5)
    may_be_made.set()
    await wait_until_async(lambda: executors and executors[0].is_closed, "the late executor to be closed")


async def test_client_that_is_gone_is_noticed_when_something_is_to_be_sent(stage: Stages) -> None:
    made = await stage()
    client = await made.client()
    client.send(Ops(seq=1, graph_id=1), frame(op(1, 5)))
    await client.wait_for(Credit)
    assert len(made.server.state.sessions) == 1
    client.close()
    made.agent.stop("so that there is news for the client")
    await wait_until_async(lambda: not made.server.state.sessions, "the session to be ended")


async def test_garbage_is_no_harm_to_others(stage: Stages) -> None:
    made = await stage()
    good = await made.client()
    stranger = LoopClient(await made.hub.connect(timeout_s=5))
    made.clients.append(stranger)
    for _ in range(50):
        stranger._link.send([b"\xff\x00garbage", b"more"])
    stranger.send(ClientBye())
    assert "hello" in (await stranger.wait_for(Refused))[0].reason
    stranger.send(ClientBye())  # not answered any more
    bad = await made.client()
    bad._link.send([encode(client_hello())[:-3]])
    assert "protocol" in (await bad.wait_for(Refused))[0].reason
    good.send(Ops(seq=1, graph_id=1), frame(op(1, 5)))
    await good.wait_for(Credit)
    assert made.server.num_garbage == 50
    assert not stranger.received


async def test_stop_is_told_to_all(stage: Stages) -> None:
    made = await stage()
    client = await made.client()
    made.server.stop("it is late")
    assert (await client.wait_for(ClusterClosing))[0].reason == "it is late"
    assert await made.server.wait_stopped() == "it is late"
    leave = await asyncio.wait_for(made.agents[0], 5)
    assert "it is late" in leave.reason
    assert not leave.is_controller_lost


async def answers(client: LoopClient) -> dict[str, Any]:
    """The replies of the controller and of the node, by name."""
    received = [(await client.wait_for(Answer))[0] for _ in range(2)]
    return {message.node: message.reply for message in received}


@pytest.mark.parametrize("is_direct", [True, False])
async def test_the_shells_are_traced_while_somebody_asks_for_it(stage: Stages, is_direct: bool) -> None:
    made = await stage(is_direct=is_direct)
    client, other = await made.client(), await made.client()
    client.send(Ask(request_id=1, question=AskClock()))
    before, after = (await answers(client)), asyncio.get_running_loop().time() * 1e9
    assert all(0 < reply.clock_ns <= after for reply in before.values())
    assert made.server._take == made.server._step
    client.send(Ask(request_id=2, question=StartTrace(100)))
    await answers(client)
    client.send(Ops(seq=1, graph_id=1), frame(op(1, 5)))
    await client.wait_for(Credit)
    other.send(Ops(seq=1, graph_id=1), frame(op(1, 5)))
    await other.wait_for(Credit)
    client.send(Ask(request_id=3, question=StopTrace()))
    replies = await answers(client)
    assert all(isinstance(reply, TraceReply) for reply in replies.values())
    (controller,), (node,) = replies[""].lanes, replies["node0"].lanes
    assert {"ops", "done", "work for another session"} <= set(controller.names)
    assert {"subgraph", "reports of workers", "work for another session"} <= set(node.names)
    assert made.server._take == made.server._step
    assert made.agent._take == made.agent._step


async def test_the_trace_of_a_client_that_is_gone_ends(stage: Stages) -> None:
    made = await stage()
    client, other = await made.client(), await made.client()
    client.send(Ask(request_id=1, question=StartTrace(100)))
    await answers(client)
    assert made.server._take != made.server._step
    client.send(ClientBye())
    await wait_until_async(lambda: len(made.server.state.sessions) == 1, "the session to end")
    other.send(Ops(seq=1, graph_id=1), frame(op(1, 5)))
    await other.wait_for(Credit)
    assert made.server._take == made.server._step
    assert made.agent._take == made.agent._step
