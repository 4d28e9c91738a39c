"""A client that runs a random program in the simulator, and knows what must come of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from dtorch.session import Answers, SessionState
from dtorch_runtime.wire.messages import (
    Answer,
    Ask,
    Asked,
    ClientBye,
    Credit,
    DefineMesh,
    DefineTemplates,
    Fetch,
    FetchFailed,
    NodeDown,
    NodeJoined,
    OpFailed,
    Ops,
    Refused,
    ToClient,
    ValueData,
    Welcome,
)
from dtorch_runtime.wire.records import AskMemory, FailureRecord, MemoryReply, MeshRecord
from tests.sim.simulator import RAISING_OP, SimClient, Simulator
from tests.support.control import client_hello, frame, free, mesh, op, template, upload

_MAX_OUTSTANDING = 4


@dataclass
class Value:
    """What is known of a value: the devices that hold a piece, and whether an op that it depends on raises."""

    value_id: int
    mesh: MeshRecord
    is_tainted: bool = False
    #: It came through an exchange: the null executor does not carry failures from one node to another.
    is_moved: bool = False
    data: bytes = b""


@dataclass
class Fetched:
    """What a fetch was answered with."""

    data: bytearray = field(default_factory=bytearray)
    failure: FailureRecord | None = None
    is_whole: bool = False


class ProgramClient(SimClient):
    """Issues ``num_actions`` random batches, uploads and fetches, with credits, then says goodbye when asked to."""

    def __init__(self, sim: Simulator, number: int, num_actions: int) -> None:
        super().__init__(sim, number)
        self.rng = sim.rng
        self.num_actions = num_actions
        self.max_outstanding = _MAX_OUTSTANDING
        #: Its first mesh has every device.
        self.is_wide = False
        self.session = 0
        self.seq = 0
        self.credited = 0
        self.nodes: dict[str, list[int]] = {}
        self.lost_nodes: set[str] = set()
        self.meshes: list[MeshRecord] = []
        self.values: dict[int, Value] = {}
        self._num_values = 0
        self.fetched: dict[int, Value] = {}
        self.answers: dict[int, Fetched] = {}
        self.num_failures_told = 0
        #: The client's own decisions about questions, and what they came to.
        self.state = SessionState((), max_ops=1, max_bytes=1)
        self.num_questions = 0
        self.answered: list[Answers] = []
        self.send(client_hello())

    @property
    def beat_name(self) -> str:
        return f"session:{self.session}"

    # ---- acting ----

    @property
    def can_act(self) -> bool:
        return bool(self.nodes) and self.num_actions > 0 and self.seq - self.credited < self.max_outstanding

    def act(self) -> None:
        self.num_actions -= 1
        if not self.meshes or self.rng.random() < 0.05:
            self._add_mesh()
            return
        kind = self.rng.choice(("ops", "ops", "upload", "fetch", "fetch", "ask"))
        if kind == "ops":
            self._issue_batch()
        elif kind == "upload":
            self._upload()
        elif kind == "ask":
            self._ask()
        elif self.values:
            self._fetch()

    def say_goodbye(self) -> None:
        self.send(ClientBye())

    def _add_mesh(self) -> None:
        """A mesh over some of the devices that there were ever, and the templates on it."""
        devices = sorted({device for ids in self.nodes.values() for device in ids})
        chosen = self.rng.sample(devices, self.rng.randrange(1, len(devices) + 1))
        if self.is_wide and not self.meshes:
            chosen = devices
        record = mesh(len(self.meshes) + 1, chosen)
        self.meshes.append(record)
        number = 100 * record.mesh_id
        here = [record.mesh_id]
        moves = [
            template(
                number + 10 + other.mesh_id, 1, 1, [other.mesh_id, record.mesh_id], "dtorch::redistribute"
            )
            for other in self.meshes[:-1]
        ]
        self.send(DefineMesh(mesh=record))
        self.send(
            DefineTemplates(
                templates=[
                    template(number, 0, 1, here),
                    template(number + 1, 2, 1, here),
                    template(number + 2, 1, 3, here),
                    template(number + 3, 0, 1, here, RAISING_OP),
                    *moves,
                ]
            )
        )

    def _issue_batch(self) -> None:
        records = [self._random_record() for _ in range(self.rng.randrange(1, 8))]
        self.seq += 1
        self.send(Ops(seq=self.seq, graph_id=1, num_ops=len(records)), [frame(*records)])

    def _random_record(self) -> list[int]:
        if len(self.values) > 6 and self.rng.random() < 0.5:
            ids = self.rng.sample(sorted(self.values), self.rng.randrange(1, 4))
            for value_id in ids:
                del self.values[value_id]
            return free(*ids)
        target = self.rng.choice(self.meshes)
        number = 100 * target.mesh_id
        here = [value for value in self.values.values() if value.mesh is target]
        earlier = [v for v in self.values.values() if v.mesh.mesh_id < target.mesh_id]
        kind = self.rng.random()
        if kind < 0.05:
            return op(number + 3, self._new_value(target, is_tainted=True).value_id)
        if kind < 0.3 and earlier:
            source = self.rng.choice(earlier)
            moved = self._new_value(target, is_tainted=source.is_tainted, is_moved=True)
            return op(number + 10 + source.mesh.mesh_id, source.value_id, moved.value_id)
        if kind < 0.6 and here:
            a, b = self.rng.choice(here), self.rng.choice(here)
            made = self._new_value(target, a.is_tainted or b.is_tainted, a.is_moved or b.is_moved)
            return op(number + 1, a.value_id, b.value_id, made.value_id)
        if kind < 0.75 and here:
            a = self.rng.choice(here)
            made = self._new_value(target, a.is_tainted, a.is_moved)
            other = self._new_value(target, a.is_tainted, a.is_moved)
            return op(number + 2, a.value_id, made.value_id, 0, other.value_id)
        return op(number, self._new_value(target).value_id)

    def _new_value(self, target: MeshRecord, is_tainted: bool = False, is_moved: bool = False) -> Value:
        self._num_values += 1
        data = array("q", [self._num_values]).tobytes()
        value = self.values[self._num_values] = Value(self._num_values, target, is_tainted, is_moved, data)
        return value

    def _upload(self) -> None:
        value = self._new_value(self.rng.choice(self.meshes))
        num_chunks = self.rng.randrange(1, 4)
        value.data = self.rng.randbytes(8 * num_chunks)
        for offset in range(0, len(value.data), 8):
            self.seq += 1
            chunk = upload(self.seq, value.value_id, value.mesh.devices, offset, len(value.data))
            self.send(chunk, [value.data[offset : offset + 8]])

    def _fetch(self) -> None:
        value = self.values[self.rng.choice(sorted(self.values))]
        request_id = len(self.fetched) + 1
        self.fetched[request_id] = value
        self.answers[request_id] = Fetched()
        device = self.rng.choice(value.mesh.devices)
        self.send(Fetch(request_id=request_id, value_id=value.value_id, device=device))

    def _ask(self) -> None:
        self.num_questions += 1
        peak = self.rng.choice(("keep", "reset", "stop"))
        question = AskMemory(num_largest=2, peak=peak)
        self.send(Ask(request_id=self.state.start_question(), question=question))

    # ---- what arrives ----

    def arrived(self, message: ToClient, frames: tuple[Any, ...]) -> None:
        if isinstance(message, Asked | Answer | NodeDown):
            self.answered += [action for action in self.state.handle(message) if isinstance(action, Answers)]
            self.state.validate()
        match message:
            case Welcome():
                self.session = message.session
                self.nodes = {node.name: node.devices for node in message.nodes}
            case NodeJoined():
                assert message.node.name not in self.lost_nodes, (
                    "a node came back to a session that had lost it"
                )
                self.nodes[message.node.name] = message.node.devices
            case NodeDown():
                self.lost_nodes.add(message.name)
            case Credit():
                assert self.credited < message.seq <= self.seq
                self.credited = message.seq
            case OpFailed():
                assert message.failure.kind == "op"
                self.num_failures_told += 1
            case ValueData():
                self._take_chunk(message, bytes(frames[0]))
            case FetchFailed():
                answer = self.answers[message.request_id]
                assert not answer.is_whole
                assert answer.failure is None
                answer.failure = message.failure
            case Refused():
                raise AssertionError(f"client {self.number} was refused: {message.reason}")

    def _take_chunk(self, message: ValueData, data: bytes) -> None:
        answer = self.answers[message.request_id]
        assert answer.failure is None
        assert not answer.is_whole
        assert message.offset_bytes == len(answer.data)
        answer.data += data
        answer.is_whole = len(answer.data) == message.total_bytes

    # ---- what must hold ----

    def check(self) -> None:
        """When everything is quiet: every fetch has its answer, the right one, and every credit has come back."""
        assert self.credited == self.seq, f"{self.seq - self.credited} messages were never credited"
        for request_id, answer in self.answers.items():
            value = self.fetched[request_id]
            failure = answer.failure
            if failure is None:
                assert answer.is_whole, f"fetch {request_id} was never answered"
                assert bytes(answer.data) == value.data
                assert value.is_moved or not value.is_tainted, (
                    "a value that depends on a failed op was delivered"
                )
            elif failure.kind == "node":
                assert failure.node in self.lost_nodes
            else:
                assert failure.kind == "op", failure
                assert value.is_tainted
        self._check_answers()

    def _check_answers(self) -> None:
        assert len(self.answered) == self.num_questions, "a question was never answered"
        for answers in self.answered:
            assert "" in answers.replies, "the controller did not answer"
            assert set(answers.lost) <= self.lost_nodes
            for name, reply in answers.replies.items():
                if name:
                    assert isinstance(reply, MemoryReply)
                    assert [record.device for record in reply.devices] == self.nodes[name]
